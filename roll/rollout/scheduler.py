"""Collects rollout groups from environment workers, whatever happens to single workers on the way."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import ray

from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import RpcTimeoutError, WorkerDiedError
from roll.rollout.plans import RolloutPlan
from roll.rollout.router import EngineUnavailableError
from roll.rollout.types import RolloutGroup

logger = logging.getLogger(__name__)


class TooManyRejectedError(RuntimeError):
    """Dynamic sampling gave up: too few groups were worth training on. ``groups`` are all that finished."""

    def __init__(self, message: str, groups: Sequence[RolloutGroup]) -> None:
        super().__init__(message)
        self.groups = groups


@dataclass(frozen=True)
class Collected:
    """Result of one ``RolloutScheduler.collect``."""

    groups: list[RolloutGroup]
    """In the order of their ids."""
    rejected: list[RolloutGroup]
    """Finished, but turned down by ``accept``."""
    unfinished: list[int]
    """Ids that were started, or about to be, and then given up; ascending."""


class RolloutScheduler:
    """Keeps ``plan.num_slots`` groups running until a batch is complete.

    Args:
        plan: which groups to play.
        workers: the environment manager's cluster.
        recover: called when rollout workers died; brings them back so that lost groups can be played again.
        rpc_timeout: seconds that one group may take.
        extra_groups: groups started beyond those asked for (``is_use_additional_prompts``): the batch is complete with
            the first finished ones, and a straggler holds nobody up. Which groups count then depends on timing.
        on_tick: called at least once a second while groups run; may raise to stop.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        workers: Cluster,
        recover: Callable[[BaseException], None],
        rpc_timeout: float,
        extra_groups: int = 0,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.workers = workers
        self._recover = recover
        self._rpc_timeout = rpc_timeout
        self._extra_groups = extra_groups
        self._on_tick = on_tick

    def collect(
        self,
        group_ids: Iterable[int],
        num_groups: int,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
        accept: Callable[[RolloutGroup], bool] = lambda group: True,
        max_groups: int | None = None,
    ) -> Collected:
        """Plays groups until ``num_groups`` of them are accepted.

        Without ``extra_groups`` the result depends on the ids alone: a rejected group is replaced by that of the next
        id, and everything that was started is finished.

        Args:
            group_ids: ids to play, in this order; as many are taken as are needed.
            num_groups: how many accepted groups make the batch.
            on_group: called as each accepted group arrives, for progress.
            accept: whether a finished group counts (dynamic sampling).
            max_groups: give up after this many finished groups.

        Raises:
            TooManyRejectedError: ``max_groups`` finished and too few were accepted.
            WorkerDiedError: a worker died and ``recover`` could not bring it back.
            RpcTimeoutError: a group took longer than ``rpc_timeout``.
            Exception: what a worker's own code raised.
        """
        batch = _Batch(iter(group_ids), num_groups, num_groups + self._extra_groups, max_groups)
        try:
            while len(batch.accepted) < num_groups:
                batch.fill()
                while batch.waiting and len(batch.running) < self.plan.num_slots:
                    self._start(batch.waiting.pop(0), batch.running)
                ready, _ = ray.wait(list(batch.running), timeout=1.0)
                for ref in ready:
                    group = self._finish(ref, batch)
                    if group is None:
                        break  # a recovery: nothing that was running can be trusted to finish
                    if not accept(group):
                        batch.rejected.append(group)
                        continue
                    batch.accepted.append(group)
                    on_group(group)
                self._check_time(batch.running)
                self._on_tick()
        finally:
            for ref in batch.running:  # extra groups, or all of them when an error or a stop ends the batch
                ray.cancel(ref)
        unfinished = sorted([*batch.waiting, *(group_id for group_id, _, _ in batch.running.values())])
        return Collected(sorted(batch.accepted, key=_group_id), sorted(batch.rejected, key=_group_id), unfinished)

    def group_ids_per_batch(self, num_groups: int) -> int:
        """Number of group ids that one batch takes up if none is rejected: the extra groups have ids too."""
        return num_groups + self._extra_groups

    def _finish(self, ref: ray.ObjectRef, batch: _Batch) -> RolloutGroup | None:
        """The finished group; ``None`` after a recovery, when all that was running has to be played again."""
        group_id, worker, _ = batch.running.pop(ref)
        try:
            group: RolloutGroup = self.workers.gather([ref], call=_call(group_id), ranks=[worker])[0]
        except (WorkerDiedError, EngineUnavailableError) as error:
            logger.warning("group %d was lost (%s); it is played again", group_id, error)
            self._recover(error)
            for running in batch.running:
                ray.cancel(running)
            batch.waiting[:0] = sorted([group_id, *(lost for lost, _, _ in batch.running.values())])
            batch.running.clear()
            return None
        return group

    def _start(self, group_id: int, running: _Running) -> None:
        loads = [0] * self.workers.world_size
        for _, worker, _ in running.values():
            loads[worker] += 1
        worker = loads.index(min(loads))
        ref: ray.ObjectRef = self.workers.handles[worker].run_group.remote(self.plan.spec(group_id))
        running[ref] = (group_id, worker, time.monotonic())

    def _check_time(self, running: _Running) -> None:
        for group_id, worker, started in running.values():
            seconds = time.monotonic() - started
            if seconds > self._rpc_timeout:
                raise RpcTimeoutError(self.workers.name, (worker,), _call(group_id), Cluster.current_step, seconds)


_Running: TypeAlias = dict[ray.ObjectRef, tuple[int, int, float]]
"""Group id, rank of the worker and time of the start, by the call's result to come."""


@dataclass
class _Batch:
    """The state of one ``collect``."""

    ids: Iterator[int]
    num_groups: int
    width: int
    """Number of groups accepted or under way at any time: those asked for and the extra ones."""
    max_groups: int | None
    accepted: list[RolloutGroup] = field(default_factory=list)
    rejected: list[RolloutGroup] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: _Running = field(default_factory=dict)

    def fill(self) -> None:
        """Takes as many further ids as rejected groups have left room for."""
        finished = len(self.accepted) + len(self.rejected)
        under_way = len(self.waiting) + len(self.running)
        room = self.width - len(self.accepted) - under_way
        if self.max_groups is not None:
            room = min(room, self.max_groups - finished - under_way)
        self.waiting += itertools.islice(self.ids, max(room, 0))
        if not self.waiting and not self.running:
            raise TooManyRejectedError(
                f"of {finished} groups only {len(self.accepted)} were accepted, {self.num_groups} are needed",
                [*self.accepted, *self.rejected],
            )


def _group_id(group: RolloutGroup) -> int:
    return group.group_id


def _call(group_id: int) -> str:
    return f"run_group({group_id})"
