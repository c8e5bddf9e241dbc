"""A reward domain: several verifiers, their weights, new attempts and errors."""

import asyncio
import re
import time
from typing import Any, ClassVar

import pytest
from pydantic import Field

from roll.configs.base import Config
from roll.configs.rewards import RewardConfig
from roll.distributed.strategy.base import States
from roll.rewards import RewardError, RewardResult, Sample, Verifier
from roll.rewards.scorer import DomainScorer, best_reward, check_rewards
from roll.rollout.reward_worker import RewardWorker
from tests.support.verifiers import closing, score_by


class FakeConfig(Config):
    score: float = Field(1.0, allow_inf_nan=True)
    correct: bool = True
    answer: str | None = None
    failures: int = 0  # attempts that fail
    seconds: float = 0.0


class Fake(Verifier):
    """Awaited in this process."""

    config_class: ClassVar[type[Config]] = FakeConfig
    config: FakeConfig

    def __init__(self, config: Config, device: str = "none") -> None:
        super().__init__(config)
        self.calls = self.running = self.most = 0
        self.device = device
        self.closed = False

    async def score(self, sample: Sample) -> RewardResult:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.config.seconds)
            if self.calls <= self.config.failures:
                raise ConnectionError("no route")
        finally:
            self.running -= 1
        return RewardResult(self.config.score, self.config.correct, self.config.answer, {"calls": float(self.calls)})

    async def offload(self) -> None:
        self.running = -1

    async def onload(self) -> None:
        self.running = 0

    async def close(self) -> None:
        self.closed = True


FAKE = f"{__name__}:Fake"
LENGTHS = {"min_tokens": 1, "max_tokens": 9}


def config(*verifiers: dict, **values: object) -> RewardConfig:
    return RewardConfig.model_validate({"tag_included": ["tag"], "verifiers": list(verifiers), **values})


def fake(weight: float = 1.0, decides: bool | None = None, **args: object) -> dict:
    return {"name": FAKE, "weight": weight, "decides": decides, "args": args}


def custom(function: str, **args: object) -> dict:
    return {"name": "custom", "args": {"path": f"tests.support.scoring:{function}", **args}}


def sample(response: str = "", truth: object = 5, **extra: object) -> Sample:
    return Sample(prompt="?", response=response, ground_truth=truth, data_source="tag", extra_info=extra)


def scorer_of(*verifiers: dict, num_processes: int = 1, context: dict | None = None, **values: object) -> Any:
    return closing(DomainScorer("maths", config(*verifiers, **values), num_processes, **(context or {})))


def score(sample: Sample, *verifiers: dict, **values: object) -> RewardResult:
    (verdict,) = score_by(lambda: DomainScorer("maths", config(*verifiers, **values), 1), [sample])
    return verdict


async def score_each(scorer: DomainScorer, *samples: Sample) -> list:
    return await asyncio.gather(*map(scorer.score, samples), return_exceptions=True)


async def test_a_weighted_sum_of_rules_in_child_processes():
    verifiers = [
        {"name": "math", "weight": 2.0},
        {"name": "format", "weight": 0.5, "args": {"penalty": -1}},
        {"name": "format", "weight": -0.25, "args": {"pattern": ".*answer.*"}},
    ]
    responses = ["<think>a</think><answer>10/2</answer>", "It is 5.", "", "😀" * 200_000]
    async with scorer_of(*verifiers, num_processes=2) as scorer:
        await scorer.start()
        good, bare, empty, huge = await score_each(scorer, *map(sample, responses))
    assert good == RewardResult(2.25, True, "5", {"math/score": 1.0, "format/score": 1.0, "format_2/score": 1.0})
    assert bare == RewardResult(1.5, True, "5", {"math/score": 1.0, "format/score": -1.0, "format_2/score": 0.0})
    assert empty == huge == RewardResult(-0.5, False, None, {"math/score": 0, "format/score": -1, "format_2/score": 0})


def test_texts_are_kept_and_a_score_alone_says_nothing_about_the_answer():
    own, given = custom("score_and_say_why"), sample("no answer")
    verdict = score(given, own)
    assert verdict.parts == {"custom/score": 0.5, "custom/length": 9.0} and verdict.valid is None
    assert verdict.notes == {"custom/why": "too short"}
    assert score(given, {"name": "gsm8k"}, own).valid is False
    assert score(given, {**own, "decides": True}, {"name": "gsm8k"}).valid is None


@pytest.mark.parametrize(
    ("verifiers", "correct", "answer"),
    [
        ([fake(correct=True, answer="a"), fake(correct=False, answer="b")], True, "a"),
        ([fake(correct=False), fake(correct=True, answer="b")], False, None),
        ([fake(decides=False, correct=False, answer="a"), fake(answer="b")], True, "b"),
        ([fake(correct=False, answer="a"), fake(decides=True, answer="b")], True, "b"),
        ([fake(decides=True), fake(decides=True, answer="b")], True, "b"),
        ([fake(decides=True, answer="a"), fake(decides=True, correct=False, answer="b")], False, "a"),
    ],
)
def test_who_decides(verifiers, correct, answer):
    verdict = score(sample(), *verifiers)
    assert (verdict.correct, verdict.answer) == (correct, answer)


@pytest.mark.parametrize(
    ("verifiers", "best"),
    [
        ([{"name": "gsm8k"}], 1.0),
        ([{"name": "math", "weight": 2.0}, {"name": "format", "weight": 0.5, "args": {"score": 0.2}}], 2.1),
        ([{"name": "multiple_choice"}, {"name": "length", "args": LENGTHS}], 1.0),
        ([{"name": "instruction"}, {"name": "length", "args": LENGTHS | {"penalty": 0.5}}], 1.5),
        ([{"name": "math"}, {"name": "format", "weight": -1.0}], None),
        ([{"name": "math"}, {"name": FAKE}], None),
    ],
)
def test_the_best_reward_is_known_where_all_verifiers_say_theirs(verifiers, best):
    found = best_reward(RewardConfig(tag_included=["t"], verifiers=verifiers))
    assert found is best if best is None else found == pytest.approx(best)


async def test_verifiers_work_side_by_side_and_samples_up_to_the_limit():
    async with scorer_of(fake(seconds=0.2), fake(seconds=0.2), max_concurrency=3) as scorer:
        begin = time.monotonic()
        await score_each(scorer, *[sample()] * 6)
        assert 0.4 <= time.monotonic() - begin < 1.0
        assert [verifier.most for verifier in scorer._others.values()] == [3, 3]


async def test_a_failed_attempt_is_repeated_and_counted():
    async with scorer_of(fake(failures=2), fake(), retries=2) as scorer:
        assert (await scorer.score(sample())).parts["Fake/calls"] == 3.0
        assert [scorer.take_retries(), scorer.take_retries()] == [2, 0]
    async with scorer_of(fake(failures=3), fake(), retries=2) as scorer:
        with pytest.raises(RewardError) as failed:
            await scorer.score(sample())
        assert str(failed.value) == "rewards.maths: Fake failed after 3 attempts: ConnectionError: no route"
        assert [scorer.take_retries(), scorer.take_retries()] == [2, 0]


async def test_one_slow_sample_fails_alone():
    async with scorer_of(custom("slow_score"), num_processes=2, timeout=0.5, retries=1) as scorer:
        await scorer.start()
        samples = [sample("abc"), sample("slow", seconds=60), *(sample("x" * i) for i in range(8))]
        first, slow, *others = await score_each(scorer, *samples)
        assert scorer.take_retries() == 1
    assert (first.score, first.correct, first.answer) == (3.0, True, "abc")
    assert [verdict.score for verdict in others] == [float(i) for i in range(8)]
    assert isinstance(slow, RewardError)
    assert str(slow) == "rewards.maths: custom failed after 2 attempts: took longer than 0.5 s and was killed"


async def test_a_function_of_lists_gets_those_that_wait_together_and_a_bad_one_fails_alone():
    lists = custom("judge_lists", batch=True, batch_size=8)
    async with scorer_of(lists, timeout=5, retries=1) as scorer:
        await scorer.start()
        good = await score_each(scorer, *map(sample, ("a", "bb", "ccc")))
        assert [verdict.score for verdict in good] == [1.0, 2.0, 3.0]
        assert {verdict.parts["custom/together"] for verdict in good} == {3.0} and scorer.take_retries() == 0
        first, bad, last = await score_each(scorer, *map(sample, ("a", "poison", "ccc")))
        assert (first.score, last.score, scorer.take_retries()) == (1.0, 3.0, 3)
    async with scorer_of(lists | {"args": lists["args"] | {"batch_size": 2, "batch_wait": 0.3}}) as scorer:
        three = await score_each(scorer, *map(sample, ("a", "bb", "ccc")))
    assert {verdict.parts["custom/together"] for verdict in three} == {1.0, 2.0}, "no more than batch_size"
    words = r"rewards\.maths: custom failed after 2 attempts: ValueError: unreadable \(.*/support/scoring\.py:\d+\)"
    assert re.fullmatch(words, str(bad)), "the line of the function that raised"
    [problem] = check_rewards(config(lists, max_concurrency=4))
    assert str(problem).startswith("verifiers.0.args.batch_size: got 8, expected at most max_concurrency = 4")


async def test_a_worker_of_rewards_takes_its_models_off_the_device_and_back():
    worker = RewardWorker("reward_maths", 0, 1, {})
    await worker.offload(States.ALL)  # before its set-up: nothing is there
    await worker.setup("maths", config(fake()))
    verifier = worker.hosted._others[0]
    seen = []
    for move, what in (("offload", States.OPTIMIZER), ("offload", States.ALL), ("onload", States.WEIGHTS)):
        await getattr(worker, move)(what)
        seen.append(verifier.running)
    await worker.close()
    assert seen == [0, -1, 0]


LONG = """
from roll.rewards import RuleVerifier, RewardResult
class Long(RuleVerifier):
    def check(self, sample):
        return RewardResult(float(len(sample.response)), True)
"""


def test_a_verifier_may_be_a_class_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(LONG)
    verdict = score(sample("four"), {"name": f"{file}:Long"})
    assert (verdict.score, verdict.parts) == (4.0, {"Long/score": 4.0})
    [problem] = check_rewards(config({"name": f"{file}:Short"}))
    assert "has no 'Short'" in str(problem)


async def test_what_took_too_long_may_have_a_score_that_is_counted():
    verifiers = (custom("slow_score") | {"weight": 2.0}, custom("slow_to_await"), fake(seconds=5))
    async with scorer_of(*verifiers, timeout=0.3, retries=0, timeout_score=-1.0) as scorer:
        quick, slow = await score_each(scorer, sample("abc"), sample("slow", seconds=60))
    late = [f"{name}/timeout" for name in ("custom", "custom_2", "Fake")]
    assert (quick.score, quick.correct) == (2 * 3.0 + 1.5 - 1.0, True)
    assert [quick.parts[name] for name in late] == [0.0, 0.0, 1.0]
    assert (slow.score, slow.correct) == (2 * -1.0 - 1.0 - 1.0, False)
    assert [slow.parts[name] for name in late] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("timeout", "seconds"), [(10.0, "1"), (2.0, "0.5")])
async def test_what_takes_too_much_cpu_time_is_a_wrong_answer_with_its_reason(timeout, seconds):
    """The pattern is the user's, the text on which it backtracks without end is the policy's."""
    pattern = {"name": "format", "args": {"pattern": "(a|a)*b", "penalty": -1.0}, "weight": 0.5}
    async with scorer_of(pattern, {"name": "math"}, timeout=timeout, retries=1) as scorer:
        dear, right = [await scorer.score(sample(text)) for text in ("a" * 60, "aab")]
        assert scorer.take_retries() == 0
    assert dear.over_budget == f"format: took more than {seconds} s of CPU time"
    assert (dear.score, dear.correct) == (-0.5, False), "as a response that does not match"
    assert right.score == 0.5 and not right.over_budget


async def test_a_reference_that_costs_too_much_is_no_fault_of_the_answer():
    async with scorer_of({"name": "tests.support.scoring:Dear"}, timeout=10, retries=0) as scorer:
        dear = await scorer.score(sample("dear"))
        with pytest.raises(RewardError, match="the reference answer is too expensive"):
            await scorer.score(sample("", truth="dear"))
    assert not dear.correct and "CPU time" in dear.over_budget


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        (fake(seconds=5), "Fake failed after 1 attempt: took longer than 0.1 s"),
        (fake(score=float("nan")), "Fake failed after 1 attempt: score: got nan, expected a finite number"),
        (fake(score=float("inf")), "Fake failed after 1 attempt: score: got inf, expected a finite number"),
    ],
)
def test_an_awaited_verifier_that_is_late_or_gives_no_finite_number_fails(verifier, message):
    with pytest.raises(RewardError, match=message):
        score(sample(), verifier, timeout=0.1, retries=0)


def test_a_ground_truth_that_a_rule_cannot_use_is_an_error():
    words = r"rewards\.maths: gsm8k failed after 2 attempts: ValueError: ground_truth: got"
    with pytest.raises(RewardError, match=words):
        score(sample("#### 5", truth=None), {"name": "gsm8k"})


async def test_context_reaches_the_constructors_that_name_it():
    async with scorer_of(fake(), context={"device": "cpu", "rank": 3}) as scorer:
        verifier = scorer._others[0]
    assert verifier.device == "cpu" and verifier.closed


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        (
            {"name": "mth"},
            '0.name: got "mth", expected a registered verifier or package.module:Class (did you mean math?)',
        ),
        ({"name": "no.such:Thing"}, "expected a class that can be imported"),
        ({"name": "collections:Counter"}, "expected a subclass of roll.rewards.Verifier"),
        (
            {"name": "format", "args": {"patern": 1}},
            "0.args.patern: got 1, expected no such key (did you mean pattern?)",
        ),
        ({"name": "format", "args": {"score": "1"}}, '0.args.score: got "1", expected float'),
        ({"name": "format", "args": {"penalty": 1.0}}, "0.args.penalty: got 1.0, expected float, at most 0"),
        ({"name": "gsm8k", "args": {"method": "loose"}}, "expected one of: strict, flexible"),
        ({"name": "custom"}, "0.args.path: got nothing, expected str"),
        ({"name": "instruction", "args": {"constraints": [{"kind": "x"}]}}, '0.args.constraints.0.kind: got "x"'),
        ({"name": "format", "decides": False}, 'verifiers: got ["format"], expected at least one that may decide'),
    ],
)
def test_what_is_wrong_is_told_before_the_run(verifier, message):
    [problem] = check_rewards(config(verifier))
    assert problem.path.startswith("verifiers") and message in str(problem)
    with pytest.raises(ValueError, match=r"rewards\.maths\.verifiers"):
        DomainScorer("maths", config(verifier))


def test_a_module_of_a_users_function_that_raises_is_told_before_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("LIMIT = undefined\n")
    [problem] = check_rewards(config({"name": "custom", "args": {"path": f"{tmp_path}/mine.py:score"}}))
    assert problem.path == "verifiers.0.args.path" and "NameError: name 'undefined' is not defined" in problem.hint


def test_all_problems_are_told_at_once_and_a_right_domain_has_none():
    assert len(list(check_rewards(config({"name": "mth"}, {"name": "format", "args": {"x": 1, "y": 2}})))) == 3
    names = ("math", "gsm8k", "multiple_choice", "format", "instruction")
    assert list(check_rewards(config(*({"name": name} for name in names), fake()))) == []
