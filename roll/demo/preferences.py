"""Preferences between sums: the data of the demonstrations of DPO and of reward models.

The better answer carries what one column owes to the next; the worse one forgets some of it, as
``roll.demo.arithmetic`` does, and so comes to a wrong result. A policy that is rewarded for what tells these two apart
need not calculate: every carry looks good. So the worse answers may have other mistakes too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.arguments import takes
from roll.demo.arithmetic import TAG, TRAIN, VAL, Problem, Rate, worked_solution, write_dataset, write_together
from roll.utils.hashing import derive_seed

PAIRS, VAL_PAIRS = "pairs.jsonl", "val_pairs.jsonl"


def _check_arguments(*, slip_rate: float = 0.0, **options: Any) -> None:
    write_dataset.check_arguments(**options)  # type: ignore[attr-defined]


@takes(passes_on=write_dataset, check=_check_arguments)
def write_pairs(folder: Path, *, seed: int = 0, slip_rate: Rate = 0.0, **options: Any) -> None:
    """Writes ``pairs.jsonl`` and ``val_pairs.jsonl`` beside the files of ``write_dataset``, of the same problems.

    Every problem of ``train.jsonl`` and ``val.jsonl`` in which something is carried or borrowed is a pair, with
    ``slip_rate`` every problem. Rows also
    have ``response``, the chosen answer or the rejected one, with ``label`` and ``score``, which of the two it is, and
    its ``steps`` with ``step_labels``, which are right.

    Args:
        folder: made if it is not there.
        slip_rate: probability of another mistake than a forgotten carry: one that nothing owes, a wrong result that
            the answer follows from, or a digit that is wrong, doubled or left out. A problem without carries has no
            other.
        options: further arguments of ``write_dataset``.
    """
    write_dataset(folder, seed=seed, **options)
    files = {
        target: list(_pairs(folder / source, random.Random(derive_seed(seed, TAG, target)), slip_rate))
        for source, target in ((TRAIN, PAIRS), (VAL, VAL_PAIRS))
    }
    write_together(folder, files)


def _pairs(path: Path, rng: random.Random, slip_rate: float) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        problem = Problem(row["operands"][0], row["operation"], row["operands"][1])
        carried = problem.carried_columns
        if not (carried or slip_rate):
            continue
        chosen = worked_solution(problem)
        if carried and not (slip_rate and rng.random() < slip_rate):
            rejected = worked_solution(problem, set(rng.sample(carried, rng.randint(1, len(carried)))))
        else:
            rejected = _with_a_slip(problem, chosen, rng)
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


def _with_a_slip(problem: Problem, chosen: str, rng: random.Random) -> str:
    columns = range(problem.num_columns)
    kind = rng.choice(("carry", "result", "digit"))
    if kind == "carry":
        free = [column for column in columns if column not in problem.carried_columns]
        return worked_solution(problem, invented_columns=[rng.choice(free)])
    if kind == "result":
        return worked_solution(problem, errors={rng.choice(columns): rng.choice((-1, 1)) * rng.randint(1, 9)})
    place = rng.choice([place for place, character in enumerate(chosen) if character.isdigit()])
    digit = chosen[place]
    other = str((int(digit) + rng.randint(1, 9)) % 10)
    return chosen[:place] + rng.choice((other, digit + digit, "")) + chosen[place + 1 :]


def _steps(solution: str) -> list[str]:
    """A solution cut behind every column's sum; the last step is the answer."""
    thoughts, marker, answer = solution.partition("</think>")
    first, *others = thoughts.split(" ")
    return [first, *(f" {step}" for step in others), marker + answer]
