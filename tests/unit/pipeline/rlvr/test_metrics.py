"""Accuracy over several samples, rewards by domain, and which groups dynamic sampling keeps."""

import itertools
import math
from collections.abc import Sequence
from statistics import mean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.rewards import RewardFilterConfig
from roll.configs.rlvr import RLVRConfig
from roll.pipeline.prompts import RewardFailureError, accuracy_metrics, check_error_rates, reward_metrics
from roll.pipeline.rollouts import passes_filter
from roll.pipeline.session import RunFailedError
from roll.rewards.accuracy import Judged, Tally, best_of_k, majority_correct, majority_of_k, pass_at_k
from roll.rewards.types import RewardResult
from roll.rollout.types import VALID_UNKNOWN, RolloutGroup, Trajectory
from tests.support.rollouts import make_trajectory, told_turn


def answer(
    score: float = 0.0, correct: bool = False, text: str | None = None, tag: str = "a", **info: Any
) -> Trajectory:
    return make_trajectory([told_turn(text or "", "?", text, score)], tag=tag, success=correct, info=info)


def group(
    *answers: Trajectory, tag: str = "a", dropped: int = 0, errors: Sequence[str] = (), number: int = 0
) -> RolloutGroup:
    return RolloutGroup(number, tag, answers, dropped, tuple(errors))


def config(**rewards: dict[str, Any]) -> RLVRConfig:
    domains = rewards or {"A": {"tag_included": ["a"]}, "B": {"tag_included": ["b", "c"]}}
    return RLVRConfig.model_validate(
        {"rewards": {name: {"verifiers": [{"name": "format"}], **domain} for name, domain in domains.items()}}
    )


@given(correct=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    exact = mean(any(subset) for subset in itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k(len(correct), sum(correct), 10) == any(correct), "with the samples that there are"


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        # answers and whether each is correct; the share of the majority that is
        ([("1", True), ("1", True), ("2", False)], 1.0),
        ([("1", False), ("1", False), ("2", True)], 0.0),
        ([("1", True), ("2", False)], 0.5),  # a tie is shared
        ([("1", True), ("1", True), ("2", False), ("2", False), ("3", False)], 0.5),
        ([("1", True), ("2", False), ("3", False)], 1 / 3),
        ([(None, False), (None, False), ("1", True)], 1.0),  # no answer, no vote
        ([(None, False), (None, False)], 0.0),
        ([("1", True), ("1", False)], 0.5),  # the same answer, judged by more than the answer
        ([], 0.0),
    ],
)
def test_the_majority_decides_and_ties_share_the_vote(votes, expected):
    answers = [Judged(0, correct, text) for text, correct in votes]
    assert majority_correct(answers) == majority_of_k(answers, 9) == pytest.approx(expected)


@given(scores=st.lists(st.floats(-2, 2), min_size=1, max_size=7), data=st.data())
def test_best_of_k_is_the_mean_over_all_choices(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    assert best_of_k(scores, k) == pytest.approx(mean(map(max, itertools.combinations(scores, k))), abs=1e-12)
    assert best_of_k(scores, len(scores)) == max(scores)


def test_the_majority_of_k_is_the_mean_over_all_choices_or_near_it():
    answers = [Judged(0, text == "1", text) for text in "1112233"]
    for k, choices in ((2, 21), (3, 35)):
        exact = mean(map(majority_correct, itertools.combinations(answers, k)))
        assert math.comb(7, k) == choices and majority_of_k(answers, k) == pytest.approx(exact)
    many = answers * 2
    exact = mean(map(majority_correct, itertools.combinations(many, 4)))
    assert majority_of_k(many, 4) == pytest.approx(exact, abs=0.15)  # 100 of 1,001: three standard errors
    assert majority_of_k(many, 4) == majority_of_k(many, 4)


def test_accuracy_over_several_samples_by_prompt_and_by_tag():
    groups = [
        group(answer(1.0, True, "1"), answer(0.25, False, "2"), answer(0.5, False, "2"), answer(0.0, False)),
        group(answer(0.5, True, "x", "b"), answer(0.75, True, "x", "b"), tag="b", dropped=2),
        group(tag="b", dropped=4),  # nothing could be scored: no zero in any mean
    ]
    first = {"mean@4": 1 / 4, "pass@1": 1 / 4, "pass@2": 1 / 2, "pass@4": 1.0, "maj@4": 0.0, "maj@2": 2 / 6}
    first |= {"best@4": 1.0, "best@2": 4.25 / 6, "worst@4": 0.0, "worst@2": 1.0 / 6}
    first["std@4"] = pstdev([1.0, 0.25, 0.5, 0.0])
    second = dict.fromkeys(("mean@4", "pass@1", "pass@2", "pass@4", "maj@4", "maj@2"), 1.0)
    second |= {"best@4": 0.75, "best@2": 0.75, "worst@4": 0.5, "worst@2": 0.5, "std@4": 0.125}
    found = accuracy_metrics(groups, 4, "eval")
    for name in first:
        told = [found.pop(f"eval/{tag}{name}") for tag in ("", "a/", "b/")]
        assert told == pytest.approx([(first[name] + second[name]) / 2, first[name], second[name]]), name
    assert not found


def tallied(groups: Sequence[RolloutGroup], *, unread: Sequence[int] = ()) -> dict[str, float]:
    """Figures of the same answers as ``roll score`` tells them; ``unread``: of which groups nobody looks for one."""
    tally = Tally()
    for number, each in enumerate(groups):
        for one in each.trajectories:
            found = RewardResult(one.score, one.success, one.turns[-1].action, seeks_answer=number not in unread)
            tally.add(number, found)
    return tally.summary()


def test_figures_of_scored_answers_are_those_of_a_runs_evaluation():
    groups = [
        group(answer(0.25, True, "1"), answer(0.5, False, "2"), answer(1.0, True, "1"), answer(0.0, False, None)),
        group(answer(0.0, False, "1"), answer(0.75, False, "2"), answer(0.0, True, "3"), answer(0.1, True, "3")),
    ]
    found, expected = tallied(groups), accuracy_metrics(groups, 4, "x")
    assert {f"x/{name}": value for name, value in found.items() if "@" in name} == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(expected["x/mean@4"]) and "x/worst@2" in expected


def test_prompts_to_which_nobody_looks_for_an_answer_have_no_vote():
    unread = {VALID_UNKNOWN: True}
    groups = [
        group(answer(1.0, True, "1"), answer(0.0, False, "2")),
        group(answer(1.0, True, None, "b", **unread), answer(1.0, True, None, "b", **unread), tag="b"),
    ]
    found = accuracy_metrics(groups, 2, "eval")
    assert {name: value for name, value in found.items() if "maj@" in name} == {"eval/maj@2": 0.5, "eval/a/maj@2": 0.5}
    assert found["eval/mean@2"] == 0.75 and found["eval/b/pass@2"] == 1
    judged = tallied(groups, unread=[1])
    assert (judged["maj@2"], judged["found"]) == (0.5, 1)


@pytest.mark.parametrize(("n", "ks"), [(1, {1}), (2, {1, 2}), (6, {1, 2, 4, 6}), (8, {1, 2, 4, 8})])
def test_pass_at_k_is_told_for_powers_of_two_and_for_all(n, ks):
    metrics = accuracy_metrics([group(*[answer(1.0, True, "1")] * n)], n, "eval")
    assert {int(name.rpartition("@")[2]) for name in metrics if "pass@" in name} == ks
    assert accuracy_metrics([group(dropped=n)], n, "eval") == {}


def test_rewards_are_told_by_domain_with_the_verifiers_own_numbers():
    groups = [
        group(answer(1.0, True, **{"math/score": 2.0, "kind": "x"}), answer(0.0, **{"math/score": 0.0}), dropped=1),
        group(answer(0.5, True, tag="b", **{"math/score": 1.0}), tag="b"),
        group(answer(0.25, tag="c", **{"format/score": 0.5, "over_budget": "math: too dear"}), tag="c", dropped=2),
    ]
    assert reward_metrics(groups, config()) == {
        "reward/over_budget": 1,
        "reward/A/over_budget": 0,
        "reward/B/over_budget": 1,
        "reward/A/errors": 1,
        "reward/A/score": 0.5,
        "reward/A/accuracy": 0.5,
        "reward/A/math/score": 1.0,
        "reward/B/errors": 2,
        "reward/B/score": 0.375,
        "reward/B/accuracy": 0.5,
        "reward/B/math/score": 1.0,
        "reward/B/format/score": 0.5,
    }
    none = {"reward/over_budget": 0, "reward/A/over_budget": 0}
    assert reward_metrics([group(dropped=4)], config()) == {"reward/A/errors": 4} | none


def test_too_many_errors_of_a_domain_end_the_run_with_the_numbers_and_the_last_error():
    limits = config(A={"tag_included": ["a"], "max_error_rate": 0.25}, B={"tag_included": ["b"], "max_error_rate": 1.0})
    good, bad = group(*[answer()] * 4), group(*[answer()] * 3, dropped=1, errors=["first", "second"])
    hopeless = group(tag="b", dropped=4, errors=["other"])
    check_error_rates([], limits)
    check_error_rates([good, bad, hopeless], limits)  # 1 of 8, and 4 of 4 where all may fail
    check_error_rates([bad], limits)  # 1 of 4 is the limit itself
    with pytest.raises(RewardFailureError) as raised:
        check_error_rates([bad, group(answer(), dropped=3, errors=["third"]), good, hopeless], limits)
    told = "rewards.A: 4 of 12 answers could not be scored, more than max_error_rate=0.25; the last error: third"
    assert str(raised.value) == told


def keeps(limits: RewardFilterConfig, *scores: float) -> bool:
    return passes_filter(group(*map(answer, scores)), limits)


def test_dynamic_sampling_keeps_groups_with_scores_strictly_between_the_bounds():
    spread = RewardFilterConfig(type="std_filter", low=0.1, high=0.5)
    assert keeps(spread, 0.0, 0.5)
    assert not keeps(spread, 0.0, 0.2)  # the standard deviation, of all and not of a sample, is the lower bound
    assert not keeps(spread, 0.0, 1.0)  # and here the upper one
    centre = RewardFilterConfig(type="mean_filter", low=0.0, high=1.0)
    assert keeps(centre, 0.0, 1.0)
    assert not keeps(centre, 0.0, 0.0) and not keeps(centre, 1.0, 1.0)
    assert keeps(RewardFilterConfig(type="mean_filter", low=0.0), 7.0, 8.0), "no upper bound"
    assert keeps(RewardFilterConfig(), 1.0, 1.0) and keeps(RewardFilterConfig())
    for kind in ("mean_filter", "std_filter"):
        assert not keeps(RewardFilterConfig.model_validate({"type": kind, "low": -1.0}))


def test_dynamic_sampling_by_a_function_of_the_users(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def keep(group):\n    return len(group.trajectories) > 2\n"
        "def vague(group):\n    return None\ndef broken(group):\n    return group.nothing\n"
    )
    by_size = RewardFilterConfig(path=f"{file}:keep")
    assert keeps(by_size, 1.0, 1.0, 1.0) and not keeps(by_size, 0.0, 1.0) and not keeps(by_size)
    both = RewardFilterConfig(type="std_filter", path=f"{file}:keep")
    assert keeps(both, 0.0, 0.0, 1.0) and not keeps(both, 0.0, 0.0, 0.0) and not keeps(both, 0.0, 1.0)
    for name, told in (("vague", "returned None, expected True or False"), ("broken", "raised AttributeError")):
        with pytest.raises(RunFailedError, match=f"mine.py:{name}, asked of group 0 of a, {told}"):
            keeps(RewardFilterConfig(path=f"{file}:{name}"), 1.0)


@given(score=st.floats(-1e6, 1e6), size=st.integers(1, 16))
def test_equal_scores_have_no_spread_whatever_they_are(score, size):
    assert not keeps(RewardFilterConfig(type="std_filter"), *[score] * size)
    assert not keeps(RewardFilterConfig(type="mean_filter", low=score), *[score] * size)
    assert keeps(RewardFilterConfig(type="std_filter"), *[score] * size, score + 1.0)
