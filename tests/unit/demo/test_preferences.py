"""Pairs of sums: the chosen answer is right, the rejected one has the mistakes that were asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roll.demo.arithmetic import Problem, worked_solution
from roll.demo.preferences import write_pairs


def pairs(folder: Path, slip_rate: float) -> list[tuple[Problem, dict]]:
    write_pairs(
        folder, slip_rate=slip_rate, min_operand=10, max_operand=99, num_train=900, num_val=90, num_demonstrations=10
    )
    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(Problem(row["operands"][0], row["operation"], row["operands"][1]), row) for row in rows]


@pytest.mark.parametrize("slip_rate", [0.0, 0.8])
def test_the_chosen_answer_is_right_and_the_steps_are_labelled_up_to_the_first_mistake(
    tmp_path: Path, slip_rate: float
) -> None:
    for problem, row in pairs(tmp_path, slip_rate):
        assert row["chosen"] == worked_solution(problem) != row["rejected"]
        assert row["response"] == (row["chosen"] if row["label"] else row["rejected"]) == "".join(row["steps"])
        assert row["step_labels"] == sorted(row["step_labels"], reverse=True)
        assert all(row["step_labels"]) == row["label"]


def test_without_slips_carries_are_forgotten_and_nothing_else(tmp_path: Path) -> None:
    found = pairs(tmp_path, 0.0)
    assert 300 < len(found) < 600 and all(problem.carried_columns for problem, _ in found)
    assert all(row["rejected"] == worked_solution(problem, problem.carried_columns) for problem, row in found)


def test_slips_are_of_every_kind_and_in_problems_without_carries_too(tmp_path: Path) -> None:
    found = pairs(tmp_path, 0.8)
    assert len(found) == 900
    kinds = {"forgotten": 0, "carry": 0, "answer follows": 0, "answer alone": 0}
    for problem, row in found:
        rejected, (thoughts, _) = row["rejected"], row["chosen"].split("</think>")
        carries = re.findall(r"[+-](\d)=", rejected)
        owed = ["1" if column in problem.carried_columns else "0" for column in range(2)]
        kinds["forgotten"] += rejected == worked_solution(problem, problem.carried_columns)
        kinds["carry"] += any(used > due for used, due in zip(carries, owed, strict=False))
        kinds["answer alone"] += rejected.startswith(thoughts)
        kinds["answer follows"] += rejected != row["chosen"] and rejected in {
            worked_solution(problem, errors={column: error}) for column in (0, 1) for error in range(-9, 10)
        }
    assert all(count > 40 for count in kinds.values()), kinds
