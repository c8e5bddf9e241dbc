"""Collects rollout groups from environment workers, whatever happens to single workers on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray

from roll.agentic.types import RolloutGroup
from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.errors import RpcTimeoutError, WorkerDiedError
from roll.distributed.scheduler.router import EngineUnavailableError
from roll.utils.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupSpec:
    """One rollout group to play; equal specs give equal groups."""

    group_id: int
    tag: str
    env_seed: int
    group_size: int
    redundancy: int = 0
    greedy: bool = False
    expert_share: float | None = None
    """Play by script instead of the policy: the share of optimal actions (see ``roll.agentic.demonstrations``)."""


@dataclass(frozen=True)
class GroupPlan:
    """Which groups there are: environment slot ``i`` plays groups ``i``, ``i + env_groups``, …"""

    tags: tuple[str, ...]
    slots_per_tag: tuple[int, ...]
    """How many of the environment slots each tag has."""
    group_size: int
    redundancy: int
    seed: int
    name: str
    """``train`` or ``val``: part of the seeds."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""
    expert_share: float | None = None
    """Play by script instead of the policy."""

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_tag)

    def spec(self, group_id: int) -> GroupSpec:
        slot = group_id % self.num_slots
        tag = next(tag for tag, end in zip(self.tags, _running_sum(self.slots_per_tag), strict=True) if slot < end)
        env_seed = derive_seed(self.seed, self.name, group_id)
        return GroupSpec(group_id, tag, env_seed, self.group_size, self.redundancy, self.greedy, self.expert_share)


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
        plan: GroupPlan,
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
        first_group_id: int,
        num_groups: int,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ) -> list[RolloutGroup]:
        """Plays ``num_groups`` groups and returns them in the order of their ids.

        Args:
            first_group_id: the groups are numbered from here; ``group_ids_per_batch`` ids are taken.
            num_groups: how many complete groups make the batch.
            on_group: called as each group arrives, for progress.

        Raises:
            WorkerDiedError: a worker died and ``recover`` could not bring it back.
            RpcTimeoutError: a group took longer than ``rpc_timeout``.
            Exception: what a worker's own code raised, such as ``PromptTooLongError``.
        """
        total = self.group_ids_per_batch(num_groups)
        waiting = [self.plan.spec(first_group_id + i) for i in range(total)][::-1]
        running: dict[ray.ObjectRef, tuple[GroupSpec, int, float]] = {}
        try:
            done = self._collect(num_groups, waiting, running, on_group)
        finally:
            for ref in running:  # extra groups, or all of them when an error or a stop ends the batch
                ray.cancel(ref)
        return sorted(done, key=lambda group: group.group_id)

    def group_ids_per_batch(self, num_groups: int) -> int:
        """How many group ids one batch takes up: the extra groups have ids too."""
        return num_groups + self._extra_groups

    def _collect(
        self,
        num_groups: int,
        waiting: list[GroupSpec],
        running: dict[ray.ObjectRef, tuple[GroupSpec, int, float]],
        on_group: Callable[[RolloutGroup], None],
    ) -> list[RolloutGroup]:
        done: list[RolloutGroup] = []
        while len(done) < num_groups:
            while waiting and len(running) < self.plan.num_slots:
                self._start(waiting.pop(), running)
            ready, _ = ray.wait(list(running), timeout=1.0)
            for ref in ready:
                spec, worker, _ = running.pop(ref)
                try:
                    group: RolloutGroup = self.workers.gather([ref], call=_call(spec), ranks=[worker])[0]
                except (WorkerDiedError, EngineUnavailableError) as error:
                    logger.warning("group %d was lost (%s); it is played again", spec.group_id, error)
                    waiting.append(spec)
                    self._recover(error)
                    waiting += self._reclaim(running)
                else:
                    done.append(group)
                    on_group(group)
            self._check_time(running)
            self._on_tick()
        return done

    def _start(self, spec: GroupSpec, running: dict[ray.ObjectRef, tuple[GroupSpec, int, float]]) -> None:
        loads = [0] * self.workers.world_size
        for _, worker, _ in running.values():
            loads[worker] += 1
        worker = loads.index(min(loads))
        ref: ray.ObjectRef = self.workers.handles[worker].run_group.remote(spec)
        running[ref] = (spec, worker, time.monotonic())

    def _reclaim(self, running: dict[ray.ObjectRef, tuple[GroupSpec, int, float]]) -> list[GroupSpec]:
        """After a recovery nothing that was running can be trusted to finish: all of it is played again."""
        lost = [spec for spec, _, _ in running.values()]
        for ref in running:
            ray.cancel(ref)
        running.clear()
        return lost

    def _check_time(self, running: dict[ray.ObjectRef, tuple[GroupSpec, int, float]]) -> None:
        for spec, worker, started in running.values():
            seconds = time.monotonic() - started
            if seconds > self._rpc_timeout:
                raise RpcTimeoutError(self.workers.name, (worker,), _call(spec), Cluster.current_step, seconds)


def _call(spec: GroupSpec) -> str:
    return f"run_group({spec.group_id})"


def _running_sum(values: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return sums
