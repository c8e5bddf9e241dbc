"""The experts of episodes on their way to the batch: nothing is lost, and those that were known first stay."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np

from roll.data.columns import ExpertArray, Records
from roll.data.requests import Completion
from roll.rollout.group_calls import FlatGroups
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Collected, RolloutGroup, Trajectory, Turn
from tests.unit.rollout.test_trajectory import make_trajectory, make_turn


def experts(first: int, tokens: int) -> ExpertArray:
    """Two layers of one expert each, numbered on, the last token unknown."""
    told = np.arange(first, first + 2 * tokens, dtype=np.int16).reshape(tokens, 2)
    told[-1] = -1
    return told


def routed(turn: Turn, first: int) -> Turn:
    tokens = len(turn.prompt_ids) + len(turn.completion.token_ids)
    return replace(turn, completion=replace(turn.completion, experts=experts(first, tokens)))


def conversation(member: int = 0, *, history: bool = True) -> Trajectory:
    """Two turns, the second with a prompt that begins with the first: rows of 4 and of 7 tokens."""
    turns = [routed(make_turn([1, 2], [3, 4]), 0), routed(make_turn([1, 2, 3, 4, 5], [6, 7]), 100)]
    return make_trajectory(turns, history=history, member=member)


def test_a_row_has_for_each_token_the_experts_that_were_known_first() -> None:
    batch = groups_to_batch([RolloutGroup(0, "A", (conversation(),))], ["A"])
    expected = [[0, 1], [2, 3], [4, 5], [106, 107], [108, 109], [110, 111], [-1, -1]]
    assert batch.experts_TE is not None and batch.experts_TE.tolist() == expected
    apart = groups_to_batch([RolloutGroup(0, "A", (conversation(history=False),))], ["A"])
    assert apart.experts_TE[:4].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    assert apart.experts_TE[4:].tolist() == [*([100 + 2 * n, 101 + 2 * n] for n in range(6)), [-1, -1]]


def test_rows_without_experts_are_left_to_the_routers() -> None:
    plain = make_trajectory([make_turn([1], [2, 3])], history=True)
    batch = groups_to_batch([RolloutGroup(0, "A", (plain, conversation()))], ["A"])
    assert batch.experts_TE[:3].tolist() == [[-1, -1]] * 3 and batch.experts_TE[3].tolist() == [0, 1]
    assert groups_to_batch([RolloutGroup(0, "A", (plain,))], ["A"]).experts_TE is None


def test_a_turn_that_tells_none_leaves_what_is_known_of_its_row() -> None:
    silent = make_turn([1, 2, 3, 4, 5], [6, 7])
    turns = [routed(make_turn([1, 2], [3, 4]), 0), silent]
    groups = [RolloutGroup(0, "A", (make_trajectory(turns, history=True),))]
    expected = [[0, 1], [2, 3], [4, 5], *[[-1, -1]] * 4]
    for found in (groups, list(FlatGroups.of(groups))):
        assert groups_to_batch(found, ["A"]).experts_TE.tolist() == expected
    late = [make_turn([1, 2], [3, 4]), routed(silent, 100)]
    groups = [RolloutGroup(0, "A", (make_trajectory(late, history=True),))]
    told = groups_to_batch(list(FlatGroups.of(groups)), ["A"]).experts_TE
    assert told[:2].tolist() == [[100, 101], [102, 103]] and len(told) == 7


def test_groups_arrive_with_the_experts_of_their_rows_each_token_once(tmp_path: Path) -> None:
    plain = make_trajectory([make_turn([1], [2, 3])], history=True)
    groups = [
        RolloutGroup(0, "A", (conversation(0), plain, conversation(2, history=False)), baseline=conversation(-1)),
        RolloutGroup(1, "A", (conversation(0),)),
    ]
    sent = FlatGroups.of(groups)
    assert len(sent.per_token["experts"][0]) == 3 * (4 + 4) + 4 + 7, "a turn adds its own, and that of the token before"
    arrived = list(pickle.loads(pickle.dumps(sent)))
    Collected(arrived, []).save(tmp_path)
    for found in (arrived, Collected.load(tmp_path).groups):
        for group, other in zip(groups, found, strict=True):
            batch, same = (groups_to_batch([each], ["A"]) for each in (group, other))
            assert batch.experts_TE.tolist() == same.experts_TE.tolist()
            assert other.trajectories[0].turns[1].completion.experts.shape == (7, 2)
        assert found[0].trajectories[1].turns[0].completion.experts is None
        assert found[0].baseline.turns[0].completion.experts[:3].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_completions_arrive_with_theirs() -> None:
    first, second = (turn.completion for turn in conversation().turns)
    plain = make_turn([1], [2]).completion
    found = list(pickle.loads(pickle.dumps(Records.of(Completion, [first, plain, second]))))
    assert found[1].experts is None
    for sent, got in ((first, found[0]), (second, found[2])):
        np.testing.assert_array_equal(got.experts, sent.experts)
        assert got.experts.dtype == np.int16 and got.experts.base is None
