"""Writes ``roll/models/packing.json``: the model families whose sequences can share a row, and what was measured.

    PYTHONPATH=. python scripts/generate_packing.py [family ...]

Each family that Transformers knows as a causal language model is built tiny and random, in the variants that entries of
its configuration allow, and its packed rows are compared with the model's own forward pass on one sequence at a time.
Takes ten minutes for all families; those that are named are measured again and the others kept.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import torch
import transformers
from generate_strategy_docs import DOCS, replace

from roll.models.measured import FILE
from tests.support.families import FAMILIES, measured


def main() -> int:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or FAMILIES
    current: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if len(sys.argv) > 1 else {}
    families, others = current.get("families", {}), current.get("others", {})
    for family in chosen:
        families.pop(family, None)
        others.pop(family, None)
        entry, problem = measured(family)
        if entry is None:
            others[family] = problem
        else:
            families[family] = entry
        write({"transformers": transformers.__version__, "families": families, "others": others})
        sys.stdout.write(f"{family}: {problem or entry}\n")
        sys.stdout.flush()
    replace(DOCS / "strategies.md", "packing", table(families, others))
    return 0


def table(families: dict[str, Any], others: dict[str, str]) -> str:
    """What the documentation shows of the file."""
    wrong = {name: reason.rpartition(" ")[2].rstrip(")") for name, reason in others.items() if "off by" in reason}
    unknown = [name for name in others if name not in wrong]
    rows = {
        "correct when packed": [f"`{name}`" for name in sorted(families)],
        "wrong, by this many nats": [f"`{name}` {wrong[name]}" for name in sorted(wrong)],
        "not measured": [f"`{name}`" for name in sorted(unknown)],
    }
    lines = ["| `model_type` | |", "|---|---|", *(f"| {what} | {', '.join(each)} |" for what, each in rows.items())]
    return "\n".join(lines)


def write(content: dict[str, Any]) -> None:
    """One line for each family."""

    def lines(entries: dict[str, Any]) -> str:
        return ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entries[name], sort_keys=True)}" for name in sorted(entries)
        )

    head = f' "transformers": {json.dumps(content["transformers"])}'
    parts = [f' "{name}": {{\n{lines(content[name])}\n }}' for name in ("families", "others")]
    FILE.write_text("{\n" + ",\n".join([head, *parts]) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
