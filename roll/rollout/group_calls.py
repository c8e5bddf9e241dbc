"""The driver's end of ``GroupWorker``: groups under way at the workers of a cluster, and what comes back of them."""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from roll.distributed.cluster.cluster import Cluster
from roll.rollout.group_worker import Finished, Series
from roll.rollout.plans import GroupSpec
from roll.rollout.types import RolloutGroup


@dataclass(frozen=True)
class GroupCall:
    """A group under way."""

    group_id: int
    worker: int
    """Its rank."""
    started: float
    """``time.monotonic``."""

    @property
    def name(self) -> str:
        return f"run_group({self.group_id})"


@dataclass(frozen=True)
class _Answer:
    """A remote call is done."""

    series: Series
    worker: int
    group_id: int | None
    """The group of which it tells, if it is one."""
    future: Future[Any]


class GroupCalls:
    """Starts groups, each at the worker with the fewest, and fetches them."""

    def __init__(self, workers: Cluster) -> None:
        self.running: dict[int, GroupCall] = {}
        """By group, in the order of their start."""
        self.failed: int | None = None
        """The group of which the last error told."""
        self._workers = workers
        self._series = Series(uuid.uuid4().hex, 0)
        self._loads = [0] * workers.world_size
        self._outbox: defaultdict[int, list[GroupSpec]] = defaultdict(list)
        self._polled: set[int] = set()
        """Workers that have been asked for what is finished and have not answered."""
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()

    def start(self, spec: GroupSpec) -> None:
        """Starts a group with the next ``send``."""
        worker = self._loads.index(min(self._loads))
        self.running[spec.group_id] = GroupCall(spec.group_id, worker, time.monotonic())
        self._loads[worker] += 1
        self._outbox[worker].append(spec)

    def send(self) -> None:
        """Sends what was started to the workers."""
        outbox, self._outbox = self._outbox, defaultdict(list)
        for worker, specs in outbox.items():
            self._await(worker, self._workers.handles[worker].start_groups.remote(self._series, specs))
            self._poll(worker)

    def wait(self, seconds: float) -> Iterator[RolloutGroup | None]:
        """Groups that have finished, ``None`` for an interruption; waits for the first of them, and no longer.

        Raises:
            WorkerDiedError: a worker died.
            Exception: what a worker's own code raised. ``failed`` is the group.
        """
        end, has_waited = time.monotonic() + seconds, False
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._answers.get(timeout=0.0 if has_waited else max(0.0, end - time.monotonic()))
                if answer is None:
                    has_waited = True
                    yield None
                elif answer.series == self._series:  # others were given up
                    for group in self._take_in(answer):
                        has_waited = True
                        yield group

    def interrupt(self) -> None:
        """Ends a ``wait``, in any thread."""
        self._answers.put(None)

    def give_up(self) -> list[int]:
        """Ends everything that runs; returns its groups."""
        for worker in {call.worker for call in self.running.values()}:
            self._workers.handles[worker].give_up.remote(self._series)
        lost = list(self.running)
        self.running.clear()
        self._outbox.clear()
        self._polled.clear()
        self._loads = [0] * self._workers.world_size
        self._series = Series(self._series.caller, self._series.number + 1)
        return lost

    def _take_in(self, answer: _Answer) -> Iterator[RolloutGroup]:
        worker = answer.worker
        self.failed = answer.group_id
        if self.failed is None:  # the oldest has waited longest for it
            self.failed = next((call.group_id for call in self.running.values() if call.worker == worker), None)
        result = self._workers.result(answer.future, rank=worker, call=f"run_group({self.failed})")
        self.failed = None
        if not isinstance(result, Finished):  # nothing has gone wrong with the start of some
            return
        self._polled.discard(worker)
        for group_id in result.failed:
            ref: ray.ObjectRef = self._workers.handles[worker].failure.remote(self._series, group_id)
            self._await(worker, ref, group_id)
        groups = list(result.groups)
        if self._loads[worker] > len(groups):
            self._poll(worker)
        for group in groups:
            del self.running[group.group_id]
            self._loads[worker] -= 1
            yield group

    def _poll(self, worker: int) -> None:
        if worker not in self._polled:
            self._polled.add(worker)
            self._await(worker, self._workers.handles[worker].finished_groups.remote(self._series))

    def _await(self, worker: int, ref: ray.ObjectRef, group_id: int | None = None) -> None:
        series = self._series
        ref.future().add_done_callback(lambda done: self._answers.put(_Answer(series, worker, group_id, done)))
