"""A worker's end of groups that are started and fetched many at a time."""

import asyncio

import pytest

from roll.rollout.plans import GroupSpec
from roll.rollout.types import RolloutGroup
from roll.rollout.workers import GroupWorker, Series

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
