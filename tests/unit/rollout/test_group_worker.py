"""Groups of workers: started and fetched many at a time, sent equal in every field, the arrays of all turns as four."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest

from roll.data.columns import Item, expand
from roll.rollout.plans import GroupSpec
from roll.rollout.types import RolloutGroup, Trajectory
from roll.rollout.workers import FlatGroups, GroupWorker, Series
from tests.support.rollouts import assert_equal, conversation, group_of, make_trajectory, make_turn

FIRST, SECOND = Series("driver", 0), Series("driver", 1)


class Player(GroupWorker):
    """Plays groups when it is told to; those with odd numbers fail."""

    def __init__(self) -> None:
        super().__init__("envs", 0, 1, {})
        self.go = asyncio.Event()
        self.cancelled: list[int] = []

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(spec.group_id)
            raise
        if spec.group_id % 2:
            raise KeyError(spec.group_id)
        return RolloutGroup(spec.group_id, spec.tag, ())


def specs(*numbers: int) -> list[GroupSpec]:
    return [GroupSpec(number, "A", 0, 1) for number in numbers]


async def fetched(player: Player, series: Series) -> tuple[list[int], list[int]]:
    finished, *_ = await player.finished_groups(series)
    return [group.group_id for group in finished.groups], finished.failed


async def test_what_has_finished_is_fetched_once_and_failures_are_raised_when_asked_for():
    player = Player()
    await player.start_groups(FIRST, specs(0, 1, 2))
    waiting = asyncio.create_task(fetched(player, FIRST))
    await asyncio.sleep(0)
    assert not waiting.done()
    player.go.set()
    assert await waiting == ([0, 2], [1])
    with pytest.raises(KeyError, match="1"):
        await player.failure(FIRST, 1)
    await player.start_groups(FIRST, specs(4))
    assert await fetched(player, FIRST) == ([4], [])


async def test_a_series_that_is_given_up_ends_and_what_arrives_late_for_it_is_not_played():
    player = Player()
    await player.start_groups(FIRST, specs(0, 2))
    waiting = asyncio.create_task(fetched(player, FIRST))
    await asyncio.sleep(0)
    await player.give_up(FIRST)
    assert await waiting == ([], []), "who still waits is told at once"
    assert player.cancelled == [0, 2]
    await player.start_groups(FIRST, specs(4))  # sent before, on the way for longer
    await player.start_groups(SECOND, specs(0))  # the same group again
    player.go.set()
    assert await fetched(player, FIRST) == ([], [])
    assert await fetched(player, SECOND) == ([0], [])


async def test_two_callers_do_not_meet():
    player, other = Player(), Series("another", 5)
    await player.start_groups(FIRST, specs(0))
    await player.start_groups(other, specs(0, 2))
    await player.give_up(other)
    player.go.set()
    assert await fetched(player, FIRST) == ([0], [])
    assert await fetched(player, Series("another", 6)) == ([], [])


def talk(member: int) -> Trajectory:
    parts = [([1, 2], [3, 4], 0.5), ([5], [], 0.0), ([6, 7, 8], [9], 1.0 + member)]
    return make_trajectory(conversation(parts), member=member)


def there_and_back(*groups: RolloutGroup) -> tuple[list[RolloutGroup], int]:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(FlatGroups.of(groups), protocol=5, buffer_callback=buffers.append)
    return list(pickle.loads(data, buffers=buffers)), len(buffers)


def test_groups_arrive_as_they_were_in_four_arrays():
    steps = make_trajectory([make_turn([1, 2], [3, 4], 0.5), make_turn([1, 2], [], 0.0, -0.1)], history=False)
    steps = replace(steps, info={"prompt_id": "p", "count": 3}, frames=(b"png", "text"))
    groups = [
        group_of(talk(0), steps, talk(1), number=7, dropped=2, errors=("fell",), baseline=talk(-1)),
        group_of(steps, number=8),
        group_of(number=9, dropped=4, errors=("lost",)),
        group_of(talk(0), make_trajectory([]), number=10),
    ]
    got, num_arrays = there_and_back(*groups)
    assert_equal(got, groups)
    assert num_arrays == 4
    assert there_and_back() == ([], 4)


def test_a_conversation_is_there_once_and_does_not_keep_other_groups():
    long = make_trajectory(conversation([([1] * 100, [2] * 100, 0.0)] * 20))
    (group, _), _ = there_and_back(group_of(long), group_of(long, number=1))
    assert len(expand(FlatGroups.of([group]).block.arrays["tokens_T"])) == 20 * 200
    assert group.trajectories[0].turns[0].prompt_ids.base is None


def test_what_is_no_conversation_though_it_should_be_one_arrives_too():
    turns = [make_turn([1, 2], [3]), make_turn([1, 2, 4, 5], [6]), make_turn([1], [2]), make_turn([1, 2, 3], [4])]
    group = group_of(make_trajectory(turns))
    assert_equal(there_and_back(group)[0], [group])


def test_pictures_lie_in_a_block_of_their_own_which_is_not_kept_for_those_that_are_known():
    cat, dog = (Item(np.full((4, 4, 3), shade, dtype=np.uint8)) for shade in (1, 2))
    turns = [replace(make_turn([1], [2]), items=items) for items in ((cat,), (dog, cat), ())]
    group = group_of(make_trajectory(turns, history=False))
    known: dict[str, Item] = {}
    (first,) = FlatGroups.of([group]).read(known)
    assert_equal([first], [group])
    flat = FlatGroups.of([group])
    (again,) = flat.read(known)
    assert [*again.items] == [cat, dog, cat] and all(item is known[item.hash] for item in again.items)
    assert len(again.blocks) == 2 and flat.pictures not in again.blocks
