"""A Ray worker that plays rollout groups: they are started and fetched many at a time.

A remote call costs each end some tenths of a millisecond, as much as many a group.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.distributed.cluster.worker import Worker
from roll.rollout.flat_groups import FlatGroups
from roll.rollout.plans import GroupSpec
from roll.rollout.types import RolloutGroup

_POLL_S = 1.0


@dataclass(frozen=True)
class Series:
    """The groups that one caller has started since it last gave its groups up. None of the older ones count."""

    caller: str
    number: int


@dataclass(frozen=True)
class Finished:
    """Outcome of some groups."""

    groups: FlatGroups
    failed: list[int]
    """Those that raised: ``GroupWorker.failure`` raises it again."""


class _Playing:
    """The groups of a series that are under way, or finished and not fetched."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[int, asyncio.Task[RolloutGroup]] = {}
        self.finished: list[int] = []
        self.arrived = asyncio.Event()
        self.is_over = False

    def start(self, group_id: int, task: asyncio.Task[RolloutGroup]) -> None:
        self.tasks[group_id] = task
        task.add_done_callback(lambda _: self._arrive(group_id))

    def _arrive(self, group_id: int) -> None:
        if not self.is_over:
            self.finished.append(group_id)
            self.arrived.set()

    def end(self) -> None:
        self.is_over = True
        self.finished.clear()
        for task in self.tasks.values():
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody will look at it
        self.arrived.set()


class GroupWorker(Worker, ABC):
    """Plays groups. Subclasses say how."""

    def __init__(self, role: str, rank: int, world_size: int, env: Mapping[str, str]) -> None:
        super().__init__(role, rank, world_size, env)
        self._playing: dict[str, _Playing] = {}

    @abstractmethod
    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        """Plays one group."""

    async def start_groups(self, series: Series, specs: Sequence[GroupSpec]) -> None:
        """Begins to play groups; ``finished_groups`` brings them."""
        if (playing := self._of(series)) is not None:
            for spec in specs:
                playing.start(spec.group_id, asyncio.create_task(self.run_group(spec)))

    async def finished_groups(self, series: Series) -> Finished:
        """The groups that have finished since the last call; waits up to a second for the first."""
        groups: list[RolloutGroup] = []
        failed: list[int] = []
        if (playing := self._of(series)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(playing.arrived.wait(), _POLL_S)
            playing.arrived.clear()
            finished, playing.finished = playing.finished, []
            for group_id in finished:
                task = playing.tasks[group_id]
                if task.cancelled() or task.exception() is not None:
                    failed.append(group_id)
                else:
                    groups.append(playing.tasks.pop(group_id).result())
        return Finished(FlatGroups.of(groups), failed)

    async def failure(self, series: Series, group_id: int) -> None:
        """Raises what the group raised."""
        if (playing := self._of(series)) is not None:
            await playing.tasks.pop(group_id)

    async def give_up(self, series: Series) -> None:
        """Ends the groups of the series, those included of which this worker has yet to hear."""
        self._of(Series(series.caller, series.number + 1))

    def _of(self, series: Series) -> _Playing | None:
        """Groups of the series that is played; ``None`` if it has been given up."""
        playing = self._playing.get(series.caller)
        if playing is None or playing.number < series.number:
            if playing is not None:
                playing.end()
            playing = self._playing[series.caller] = _Playing(series.number)
        return playing if playing.number == series.number else None
