"""Keys of ``rewards`` in a file of YAML, each of which changes what a user's own code does with the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.__main__ import main
from roll.rewards import VERIFIERS
from roll.utils.registry import PLUGINS
from tests.unit.pipeline.commands.conftest import Write, read

Scores = Callable[..., list[dict[str, Any]]]

MINE = """
import asyncio, time

from roll.rewards import RuleVerifier, VERIFIERS, Verdict


def plain(data_source, solution_str, ground_truth, extra_info, unit=1.0):
    while solution_str == "slow":
        time.sleep(1)
    score = unit * len(solution_str)
    return {"score": score, "level": extra_info["level"], "why": f"{data_source} is {len(solution_str)} long"}


def of_lists(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": len(text), "together": len(solution_strs)} for text in solution_strs]


async def awaited(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(9 if solution_str == "slow" else 0.05)
    return len(solution_str) / 2


class Backwards(RuleVerifier):
    def check(self, sample):
        right = sample.response[::-1] == sample.ground_truth
        return Verdict(float(right), right, sample.response[::-1])


VERIFIERS.register("from_mine", f"{__file__}:Backwards")
"""


@pytest.fixture
def scores(rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scores:
    """``scores(verifiers, *answers, rewards keys, top=…)`` are those of ``roll score`` with a file that says so."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(VERIFIERS, "_entries", dict(VERIFIERS._entries))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.chdir(tmp_path)

    def score(verifiers: str, *answers: str, keys: str = "", top: str = "", code: int = 0) -> list[dict[str, Any]]:
        Path("run.yaml").write_text(f"{top}\nrewards:\n  a: {{tag_included: [a], {keys} verifiers: {verifiers}}}\n")
        asked = [{"tag": "a", "level": 2, "solution": "ba", "answers": list(answers)}]
        command = ["score", rows("answers.jsonl", asked), "--config", "./run.yaml", "-o", "scores.jsonl"]
        assert main(command) == code
        return read("scores.jsonl")[0]["scores"]

    return score


def test_a_function_in_a_file_with_arguments_a_score_that_is_enough_and_more_to_tell(scores: Scores) -> None:
    own = "[{name: custom, args: {path: 'mine.py:plain'}}]"
    (found,) = scores(own, "ab")
    assert (found["score"], found["correct"]) == (2.0, True)
    more = "[{name: custom, weight: 3, args: {path: 'mine.py:plain', kwargs: {unit: 0.25}, success_score: 0.6}}]"
    (found,) = scores(more, "ab")
    assert (found["score"], found["correct"]) == (3 * 0.25 * 2, False)
    (found,) = scores("[{name: custom, args: {path: 'mine.py:plain'}}]", "ab")
    assert found["parts"] == {"custom/score": 2.0, "custom/level": 2.0}
    assert found["notes"] == {"custom/why": "a is 2 long"}


@pytest.mark.parametrize(("size", "together"), [(2, {1.0, 2.0}), (3, {3.0})])
def test_a_function_of_lists(scores: Scores, size: int, together: set[float]) -> None:
    keys = f"{{path: 'mine.py:of_lists', batch: true, batch_size: {size}, batch_wait: 0.3}}"
    found = scores(f"[{{name: custom, args: {keys}}}]", "a", "ab", "abc")
    assert [each["score"] for each in found] == [1.0, 2.0, 3.0]
    assert {each["parts"]["custom/together"] for each in found} == together


def test_functions_that_take_too_long_fail_or_have_the_score_for_it(scores: Scores) -> None:
    awaited = "[{name: custom, args: {path: 'mine.py:awaited'}}]"
    limits = "timeout: 0.3, retries: 0,"
    good, late = scores(awaited, "ab", "slow", keys=limits, code=1)
    assert good["score"] == 1.0 and "longer than 0.3 s" in late["error"]
    good, late = scores(awaited, "ab", "slow", keys=f"{limits} timeout_score: -0.5,")
    assert (good["score"], late["score"], late["correct"]) == (1.0, -0.5, False)
    keys = "timeout: 0.3, retries: 0, timeout_score: -0.5,"
    good, late = scores("[{name: custom, args: {path: 'mine.py:plain'}}]", "ab", "slow", keys=keys)
    assert (good["score"], late["score"], late["parts"]["custom/timeout"]) == (2.0, -0.5, 1.0)


@pytest.mark.parametrize(("name", "top"), [("mine.py:Backwards", ""), ("from_mine", "plugins: [mine.py]")])
def test_a_class_in_a_file_and_a_name_of_a_plugin(scores: Scores, name: str, top: str) -> None:
    right, wrong = scores(f"[{{name: '{name}'}}]", "ab", "ba", top=top)
    assert (right["score"], right["answer"], wrong["score"]) == (1.0, "ba", 0.0)


@pytest.mark.parametrize(("decides", "correct"), [("null", [True, True]), ("true", [False, True])])
def test_who_decides(scores: Scores, decides: str, correct: list[bool]) -> None:
    own = "{name: custom, args: {path: 'mine.py:plain'}}"
    found = scores(f"[{own}, {{name: 'mine.py:Backwards', decides: {decides}}}]", "ba", "ab")
    assert [each["correct"] for each in found] == correct
