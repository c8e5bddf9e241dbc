"""Preferences between sums: the data of the DPO demonstration.

The better answer carries what one column owes to the next; the worse one forgets some of it, as the teacher of
``roll.demo.arithmetic`` does, and so comes to a wrong result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.demo.arithmetic import TAG, TRAIN, VAL, Problem, worked_solution, write_dataset, write_together
from roll.utils.seeding import derive_seed

PAIRS, VAL_PAIRS = "pairs.jsonl", "val_pairs.jsonl"


def write_pairs(folder: Path, *, seed: int = 0, **options: Any) -> None:
    """Writes ``pairs.jsonl`` and ``val_pairs.jsonl`` beside the files of ``write_dataset``, of the same problems.

    Every problem of ``train.jsonl`` and ``val.jsonl`` in which something is carried or borrowed is a pair. Rows also
    have ``response``, the chosen answer or the rejected one, with ``label`` and ``score``, which of the two it is, and
    its ``steps`` with ``step_labels``, which are right.

    Args:
        folder: made if it is not there.
        seed: draws the problems and the mistakes.
        options: further arguments of ``write_dataset``.
    """
    write_dataset(folder, seed=seed, **options)
    files = {
        target: list(_pairs(folder / source, random.Random(derive_seed(seed, TAG, target))))
        for source, target in ((TRAIN, PAIRS), (VAL, VAL_PAIRS))
    }
    write_together(folder, files)


def _pairs(path: Path, rng: random.Random) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        problem = Problem(row["operands"][0], row["operation"], row["operands"][1])
        carried = problem.carried_columns
        if not carried:
            continue
        forgotten = set(rng.sample(carried, rng.randint(1, len(carried))))
        chosen, rejected = worked_solution(problem), worked_solution(problem, forgotten)
        label = rng.random() < 0.5
        response = chosen if label else rejected
        steps, right = _steps(response), _steps(chosen)
        wrong_from = next((n for n, (a, b) in enumerate(zip(steps, right, strict=True)) if a != b), len(steps))
        yield row | {
            "chosen": chosen,
            "rejected": rejected,
            "response": response,
            "label": label,
            "score": float(label),
            "steps": steps,
            "step_labels": [n < wrong_from for n in range(len(steps))],
        }


def _steps(solution: str) -> list[str]:
    """A solution cut behind every column's sum; the last step is the answer."""
    thoughts, marker, answer = solution.partition("</think>")
    first, *others = thoughts.split(" ")
    return [first, *(f" {step}" for step in others), marker + answer]
