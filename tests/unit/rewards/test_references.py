"""Reference answers that no answer can equal are found before a run."""

from __future__ import annotations

import time

import pytest

from roll.configs.rewards import RewardConfig
from roll.data.prompts import Prompt
from roll.extras.maths.verifier import MathVerifier
from roll.rewards.scoring import References

DOMAINS = {
    "maths": ("math", {}),
    "boxed": ("math", {"strict_boxed": True}),
    "sums": ("gsm8k", {}),
    "choices": ("multiple_choice", {"num_choices": 4}),
    "orders": ("instruction", {}),
    "programs": ("code", {}),
    "own": ("custom", {"path": f"{__name__}:score"}),
    "form": ("format", {}),
}


def score(data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> float:
    return 1.0


def problems(rows: list[tuple[str, object]], **extra: object) -> dict[str, str]:
    rewards = {
        name: RewardConfig(tag_included=[name], verifiers=[{"name": verifier, "args": args}])
        for name, (verifier, args) in DOMAINS.items()
    }
    told: list[str] = []
    prompts = [
        (f"f:{i}", Prompt(str(i), tag, ({"role": "user", "content": "?"},), truth, extra))
        for i, (tag, truth) in enumerate(rows)
    ]
    found = dict(References(rewards, 30.0, told.append)(prompts))
    assert not told
    return found


@pytest.mark.parametrize(
    ("tag", "truth", "reason"),
    [
        ("maths", float("nan"), "expected a finite number"),
        ("maths", float("inf"), "expected a finite number"),
        ("maths", "a\ud800", "half of a surrogate pair"),
        ("maths", "  ", "expected a mathematical expression"),
        ("maths", None, "expected a mathematical expression"),
        ("maths", True, "expected a mathematical expression"),
        ("maths", ["1"], "expected a mathematical expression"),
        ("boxed", r"\frac{1}{2", "does not equal itself"),
        ("sums", "at least 18", "expected a number"),
        ("sums", float("nan"), "expected a number"),
        ("sums", "18 or 19", "expected a number"),
        ("sums", "", "expected a number"),
        ("choices", "E", "expected the letter of one of 4"),
        ("choices", "A or B", "expected the letter of one of 4"),
        ("choices", 1, "expected the letter of one of 4"),
        ("orders", None, "constraints"),
        ("programs", "[", "tests"),
        ("programs", [{"input": "\ud800", "output": "1"}], "half of a surrogate pair"),
        ("programs", [], "tests"),
    ],
)
def test_rows_that_cannot_be_scored_are_told_with_their_place(tag, truth, reason):
    found = problems([("maths", "1"), (tag, truth)])
    assert found.keys() == {"f:1"} and found["f:1"].startswith(f"rewards.{tag}.verifiers.0") and reason in found["f:1"]


def test_references_that_can_be_reached_pass():
    truths = [
        "5",
        5,
        0.5,
        r"\frac{1}{2}",
        "x^2+1",
        "blue",
        r"so it is $\boxed{3}$",
        r"\{1, 2\}",
        "(0,1)",
        "5 cm",
        "HTH",
        "7/8",
    ]
    rows = [("maths", truth) for truth in truths] + [("boxed", truth) for truth in truths]
    rows += [("sums", truth) for truth in ("18", "9*2 = 18\n#### 18", 18, "$1,000.50")] + [
        ("choices", "(B)"),
        ("choices", "b"),
    ]
    rows += [("programs", '["assert f(1) == 2"]'), ("own", float("nan")), ("form", float("nan"))]
    assert problems(rows) == {}


def test_a_reference_that_costs_too_much_is_a_problem_of_its_row(monkeypatch):
    monkeypatch.setitem(DOMAINS, "maths", (f"{__name__}:Slow", {}))
    found = problems([("maths", "dear"), ("maths", "x+y"), ("maths", "dear")])
    assert found.keys() == {"f:0", "f:2"} and "the reference answer costs too much" in found["f:0"]


def test_many_rows_are_looked_at_in_little_time():
    started = time.process_time()
    assert problems([("maths", str(i)) for i in range(20_000)] + [("sums", f"#### {i}") for i in range(20_000)]) == {}
    assert time.process_time() - started < 6


class Slow(MathVerifier):
    """Never ends with one reference."""

    cpu_seconds = 0.2

    def try_row(self, sample):
        while sample.ground_truth == "dear":
            pass
