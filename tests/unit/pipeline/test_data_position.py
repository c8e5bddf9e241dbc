"""Where a run is in its data: every draw is used once, whatever was given up on the way."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from roll.pipeline.rlvr.position import DataPosition
from roll.rollout.scheduler import Collected
from roll.rollout.types import RolloutGroup


def collected(accepted: list[int], rejected: list[int], unfinished: list[int]) -> Collected:
    def groups(ids: list[int]) -> list[RolloutGroup]:
        return [RolloutGroup(number, "a", ()) for number in ids]

    return Collected(groups(accepted), groups(rejected), unfinished)


@given(data=st.data(), num_steps=st.integers(1, 8))
def test_no_draw_is_lost_and_none_is_used_twice(data: st.DataObject, num_steps: int) -> None:
    position, used = DataPosition(), []
    for _ in range(num_steps):
        taken = list(itertools.islice(position.ids(), data.draw(st.integers(1, 12))))
        fates = data.draw(st.lists(st.sampled_from("aru"), min_size=len(taken), max_size=len(taken)))
        parts = {fate: [draw for draw, own in zip(taken, fates, strict=True) if own == fate] for fate in "aru"}
        position = position.after(collected(parts["a"], parts["r"], parts["u"]))
        used += parts["a"] + parts["r"]
        # A checkpoint in between changes nothing.
        position = DataPosition.from_state_dict(json.loads(json.dumps(position.state_dict())))
    assert len(used) == len(set(used))
    assert sorted([*used, *position.returned]) == list(range(position.next_id))


def test_draws_that_were_given_up_come_first() -> None:
    position = DataPosition(4, (1, 2)).after(collected([2, 5], [4], [1, 6]))
    assert position == DataPosition(7, (1, 6))
    assert list(itertools.islice(position.ids(), 4)) == [1, 6, 7, 8]


def test_a_draw_that_was_returned_and_not_asked_for_again_is_kept() -> None:
    assert DataPosition(9, (3, 5, 7)).after(collected([3], [], [])) == DataPosition(9, (5, 7))
