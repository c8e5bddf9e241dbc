"""Writes tables into ``docs/``: what the parity tests measure, on this machine, now, and what their ranks enter.

    python scripts/generate_strategy_docs.py [--only "round trips"]

SGLang's rows need its environment: `make test-sglang` makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from roll.configs.preference import PreferenceLoss, RewardLoss

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TESTS = ROOT / "tests" / "parity"
SGLANG_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
MEASURES = ("logprobs", "loss", "grad_norm", "weights", "neighbour")


def main() -> int:
    tables = {
        "layouts": ("strategies.md", "test_parity.py", "layout", layout_table),
        "round trips": ("strategies.md", "test_round_trip.py", "round trip", round_trip_table),
        "collectives": ("running_on_gpus.md", "test_parity.py", "layout", collectives_table),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(tables), help="one table; default: all")
    only = parser.parse_args().only
    wanted = {name: table for name, table in tables.items() if only in (None, name)}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.jsonl"
        environment = os.environ | {"ROLL_PARITY_FIGURES": str(figures), "OMP_NUM_THREADS": "1"}
        if SGLANG_PYTHON.exists():
            environment.setdefault("ROLL_SGLANG_PYTHON", str(SGLANG_PYTHON))
        tests = sorted({str(TESTS / file) for _, file, _, _ in wanted.values()})
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "not gpu", *tests], env=environment, cwd=ROOT
        ).returncode
        rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    for name, (page, _, kind, table) in wanted.items():
        replace(DOCS / page, name, table([row for row in rows if row["kind"] == kind]))
    return code


def replace(page: Path, name: str, table: str) -> None:
    """Replaces the table between its two marks."""
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    if not after:
        raise ValueError(f"{page}: no {start} … {end} in it")
    page.write_text(f"{before}{start}\n{table}\n{end}{after}", encoding="utf-8")


def layout_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| Strategy | Layout | Processes | Model | Options | Log-probs | Loss | Gradient norm | Weights | Neighbour |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["strategy"], row["model_args"].get("dtype", ""), row["world_size"])):
        shown = [f"`{row['strategy']}`", row["name"], str(row["world_size"]), row["model"], options(row)]
        lines.append(" | ".join(["", *shown, *(f"{row[name]:.1e}" for name in MEASURES), ""]).strip())
    return "\n".join(lines)


def collectives_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| Strategy | Layout | Processes | Groups | Collectives | Messages |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["strategy"], row["world_size"])):
        if row["world_size"] > 1:
            shown = [f"`{row['strategy']}`", row["name"]]
            shown += [f"{row[name]:,}" for name in ("world_size", "groups", "collectives", "messages")]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def options(row: Mapping[str, Any]) -> str:
    """What the layout sets, in short."""
    given = flat(row["strategy_config"]) | row["model_args"] | row["worker"]
    if row["task"].startswith("routed"):
        given["router_replay.mode"] = "R2"
    elif row["task"] == "kept":
        given["replay_kept_sets"] = 12
    elif row["task"] not in ("policy", "grouped"):
        keys = {"preference_loss": get_args(PreferenceLoss), "reward_loss": get_args(RewardLoss)}
        key = next((key for key, names in keys.items() if row["task"] in names), "kd_objective")
        given[key] = row["task"]
    if lora := row["lora"]:
        given |= {"lora_target": ",".join(lora["targets"]), "lora_rank": lora["rank"]}
    return ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in given.items()) or "–"


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def round_trip_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| Trainer | Generator | Largest difference of a log-prob |", "|---|---|---|"]
    lines += [f"| `{row['trainer']}` | `{row['generator']}` | {row['logprobs']:.1e} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
