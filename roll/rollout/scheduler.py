"""Collects rollout groups from environment workers, and survives the failure of single workers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from roll.distributed.cluster.cluster import Cluster, RayBlock, on_lost_nodes
from roll.distributed.cluster.errors import RpcTimeoutError, WorkerDiedError
from roll.rollout.admission import Admission
from roll.rollout.plans import GroupSpec, RolloutPlan
from roll.rollout.router import EngineUnavailableError
from roll.rollout.schedule import Schedule, StepDraws
from roll.rollout.types import Collected, RolloutGroup
from roll.rollout.workers import GroupCalls
from roll.utils.progress import advance, waiting

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_POLL_S = 0.01


class _GroupsLostError(Exception):
    """Some worker died: nothing that was running can be trusted to finish. The cause says who."""


class RolloutScheduler:
    """Keeps as many groups running as ``admission`` allows and ``plan`` has slots for.

    Args:
        recover: called when rollout workers died; brings them back so that lost groups can be played again. Always in
            the thread that calls ``take``.
        rpc_timeout: seconds that one group may take.
        on_tick: called at least once a second while ``take`` waits; may raise to stop.
        beside: go on between two calls of ``take``, on a thread of its own; otherwise what a batch leaves running is
            given up.
        max_running: most groups that are played at once, if fewer than the plan has slots for.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        workers: Cluster,
        recover: Callable[[BaseException], None],
        rpc_timeout: float,
        on_tick: Callable[[], None] = lambda: None,
        *,
        beside: bool = False,
        replay: Schedule | None = None,
        max_running: int | None = None,
    ) -> None:
        self.plan = plan
        self.workers = workers
        self.groups: dict[int, RolloutGroup] = {}
        """Finished and accepted, waiting to be taken, by id."""
        self.rejected: list[RolloutGroup] = []
        """Finished since the last batch and turned down, waiting to be told with the next one."""
        self.taken = Collected([], [])
        """Groups that the last ``take`` of rollouts that go on has returned, until ``commit``."""
        self.replay = replay
        self._inherited = 0
        """Number of ``rejected`` that an earlier run turned down, which are no reason for this one to give up."""
        self._num_slots = plan.num_slots if max_running is None else min(plan.num_slots, max_running)
        self._recover = recover
        self._rpc_timeout = rpc_timeout
        self._on_tick = on_tick
        self._calls = GroupCalls(workers)
        self._goes_on = beside
        self._beside: threading.Thread | None = None
        self._is_halted = threading.Event()
        """The thread shall end."""
        self._rollouts: _Rollouts | None = None
        """Rollouts that the thread is after."""
        self._failure: BaseException | None = None
        """Exception that ended the thread."""

    def collect(
        self, num_groups: int, first: int = 0, on_group: Callable[[RolloutGroup], None] = lambda group: None
    ) -> list[RolloutGroup]:
        """Plays the groups with the ids from ``first`` on; what it raises is that of ``take``."""
        return self.take(Admission(num_groups, next_draw=first), 1, on_group).groups

    def take(
        self,
        admission: Admission,
        step: int,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
        accept: Callable[[RolloutGroup], bool] = lambda group: True,
        max_batches: int | None = None,
        goes_on: Callable[[Sequence[RolloutGroup]], bool] = lambda rejected: False,
    ) -> Collected:
        """The batch of a step: opens it and plays groups until ``admission`` has enough of them.

        With nothing ahead and no window the result depends on the state of ``admission`` alone: a rejected group is
        replaced by the next one, and everything that was started is finished.

        Args:
            admission: the state of the groups; the caller commits the step.
            step: its number; the weights of the step before are with the engines.
            on_group: called as each accepted group arrives, for progress.
            accept: whether a finished group counts (dynamic sampling).
            max_batches: times the step's groups that are played at most in the search for groups that count, see
                ``Admission.search_limit``. When the search is over, those that were found are the batch, if any.
                ``None``: until there are enough.
            goes_on: asked with all that was turned down where the search is over and nothing was found: whether it goes
                on, to ``max_batches`` times the step's groups.

        Raises:
            WorkerDiedError: a worker died and ``recover`` could not bring it back.
            RpcTimeoutError: a group took longer than ``rpc_timeout``.
            ValueError: a group that is repeated was not accepted then, or is not now.
            Exception: what a worker's own code raised.
        """
        self.halt()
        failure, self._failure = self._failure, None
        admission.open(step)
        ahead = admission.ahead if self._goes_on else 0  # those are for the steps to come
        recorded = self.replay.steps[step] if self.replay else None
        most = None if self.replay else max_batches
        rollouts = _Rollouts(admission, accept, on_group, most, spare=ahead + self._inherited)
        try:
            if failure is not None:
                self._repair(failure)
            self._discard_lost(admission)
            while (taken := self._batch(admission, recorded)) is None:
                if not self._fill(rollouts) and (taken := self._end_search(rollouts, recorded, goes_on)) is not None:
                    break
                try:
                    self._wait(rollouts)
                except _GroupsLostError as error:
                    self._repair(error)
                    self._discard_lost(admission)
                self._on_tick()
        except BaseException:
            self._cancel(admission)
            raise
        rejected = sorted(self.rejected, key=lambda group: group.group_id)
        told = [group for group in rejected if recorded is None or group.group_id in recorded.settled]
        later = [group for group in rejected if recorded is not None and group.group_id not in recorded.settled]
        collected = Collected([self.groups[group_id] for group_id in taken], told)
        if self._goes_on:
            self.taken = collected
        for group_id in taken:
            del self.groups[group_id]
        self.rejected, self._inherited = later, 0
        if self._goes_on:
            rollouts.on_group = lambda group: None
            self._rollouts = rollouts
            self.go_on()
        else:
            self._cancel(admission)
        return collected

    def take_found(
        self, admission: Admission, step: int, found: Collected, max_batches: int | None = None
    ) -> Collected:
        """The batch of a step out of groups that were played before; nothing is played.

        Args:
            found: what ``take`` returned then, synchronous, with nothing ahead and with these ``max_batches``.

        Raises:
            ValueError: they are not the groups that this run would play now.
        """
        admission.open(step)
        first, rejected = admission.next_draw, {group.group_id for group in found.rejected}
        expected: int | None = None
        for draw in sorted([*rejected, *(group.group_id for group in found.groups)]):
            expected = admission.start() if admission.may_start else None
            if expected != draw:
                break
            (admission.settle if draw in rejected else admission.finish)(draw)
        finished = len(found.groups) + len(rejected)
        short = max_batches is not None and finished >= admission.search_limit(max_batches)
        if expected is None or admission.running or admission.take(short=short) is None:
            there = sorted(group.group_id for group in found.groups)
            raise ValueError(
                f"the rollouts of step {step} are of the groups {there}, expected {admission.batch_size} from {first} "
                "on: they come from a run with other batches, or with another position in the data"
            )
        return found

    def commit(self, admission: Admission) -> dict[str, int]:
        """The step is done that took the last batch: it was trained on. Returns what became of all draws so far."""
        with self.halted():
            admission.commit()
            self.taken = Collected([], [])
            return admission.counts()

    def finished(self, admission: Admission) -> Collected:
        """Groups that have finished and were not committed: a cut through the draws has them beside the state of
        ``admission``.

        Consistent while halted, whatever has interrupted ``take``.
        """
        ready = {group.group_id: group for group in (*self.taken.groups, *self.groups.values())}
        rejected = {group.group_id: group for group in (*self.taken.rejected, *self.rejected)}
        under_way = {*admission.running, *admission.again}
        return Collected(
            [ready[draw] for draw in sorted({*admission.ready, *admission.taken})],
            [rejected[draw] for draw in sorted(rejected.keys() - under_way)],
        )

    def restore(self, admission: Admission, finished: Collected) -> None:
        """Takes up ``finished`` of a cut; groups that ``plan`` has otherwise by now are played again."""

        def of_plan(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
            return [group for group in groups if self.plan.spec(group.group_id).describes(group)]

        self.groups = {group.group_id: group for group in of_plan(finished.groups)}
        self.rejected = of_plan(finished.rejected)
        self._inherited = len(self.rejected)
        found = {group.group_id for group in (*finished.groups, *finished.rejected)}
        if others := sorted(found.difference(self.groups, (group.group_id for group in self.rejected))):
            logger.warning("groups %s were sampled under another configuration; they are sampled again", others)
            admission.discard(others)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Waits while rollouts go on beside.

        Raises:
            Exception: what ended them.
        """
        while not done():
            if self._failure is not None:
                self._repair(self._failure)
            self._on_tick()
            time.sleep(_POLL_S)

    def halt(self) -> None:
        """Starts no more groups and takes no results in, so that nobody else changes ``groups`` and the admission."""
        if self._beside is not None:
            self._is_halted.set()
            self._calls.interrupt()
            if self._beside.ident is not None:  # a stop may come before its start
                self._beside.join()
            self._beside = None

    def go_on(self) -> None:
        """Goes on after ``halt``, unless something failed: then the next ``take`` sees to it."""
        if self._rollouts is not None and self._failure is None:
            self._is_halted.clear()
            self._beside = threading.Thread(target=self._play_on, args=(self._rollouts,), name="rollouts", daemon=True)
            self._beside.start()

    @contextmanager
    def halted(self) -> Iterator[None]:
        """``halt`` for as long as the block takes."""
        was_on = self._beside is not None
        self.halt()
        yield
        if was_on:
            self.go_on()

    def close(self) -> None:
        """Gives up what is running."""
        self.halt()
        if self._rollouts is not None:
            self._cancel(self._rollouts.admission)
            self._rollouts = None

    def _play_on(self, rollouts: _Rollouts) -> None:
        try:
            while not self._is_halted.is_set():
                self._fill(rollouts)
                self._wait(rollouts)
        except BaseException as error:  # raised by the next ``take``
            self._failure = error

    def _fill(self, rollouts: _Rollouts) -> bool:
        """Starts what may start; tells whether anything runs."""
        admission = rollouts.admission
        finished = len(self.groups) + len(self.rejected)
        left = rollouts.most_groups - finished - admission.num_under_way
        while (left > 0 or admission.again) and admission.may_start and len(self._calls.running) < self._num_slots:
            if self.replay is not None and admission.next not in self.replay.draws:
                break  # where the recorded search was over, others would have come next
            left -= 0 if admission.again else 1
            self._calls.start(self._spec(admission.start()))
        self._calls.send()
        return bool(self._calls.running)

    def _end_search(
        self,
        rollouts: _Rollouts,
        recorded: StepDraws | None,
        goes_on: Callable[[Sequence[RolloutGroup]], bool],
    ) -> tuple[int, ...] | None:
        """Nothing runs and nothing may start: takes what there is, unless nothing was found and the search goes on.

        Raises:
            ValueError: the recorded batch is another.
        """
        if recorded is not None:
            wanted = sorted(recorded.taken | recorded.settled)
            raise ValueError(
                f"replay_schedule: of the groups {wanted} of step {rollouts.admission.step} some never arrived"
            )
        if not self.groups and not rollouts.goes_on and goes_on(self.rejected):
            rollouts.goes_on = True
            return None
        return rollouts.admission.take(short=True)

    def _batch(self, admission: Admission, recorded: StepDraws | None) -> tuple[int, ...] | None:
        """Draws that the open step takes, as soon as there are enough."""
        if recorded is None:
            return admission.take()
        if len(admission.ready) < len(recorded.taken):  # looking closer takes time that grows with the batch
            return None
        settled = {group.group_id for group in self.rejected}
        return admission.take(recorded.taken) if recorded.settled <= settled else None

    def _spec(self, group_id: int) -> GroupSpec:
        spec = self.plan.spec(group_id)
        return spec if self.replay is None else replace(spec, recorded=self.replay.draws[group_id])

    def _wait(self, rollouts: _Rollouts) -> None:
        """Takes in what has finished; waits up to a second for the first.

        Raises:
            RpcTimeoutError: see ``take``.
            _GroupsLostError: a worker died; nothing is running any more.
        """
        try:
            with waiting(self._oldest):
                for group in self._calls.wait(_TICK_S):
                    if group is not None:
                        self._finish(group, rollouts)
                        advance()
        except (WorkerDiedError, EngineUnavailableError) as error:
            logger.warning("group %s was lost (%s); it is sampled again", self._calls.failed, error)
            self._cancel(rollouts.admission)
            raise _GroupsLostError from error
        for call in self._calls.running.values():  # the first is the oldest
            seconds = time.monotonic() - call.started
            if seconds > self._rpc_timeout:
                name = self.workers.name
                raise RpcTimeoutError(name, (call.worker,), call.name, Cluster.current_step, seconds)
            break

    def _oldest(self) -> str:
        running = list(self._calls.running.values())
        if not running:
            return "groups, none of which runs"
        oldest, worker = running[0], f"{self.workers.name} rank {running[0].worker}"
        seconds = time.monotonic() - oldest.started
        return f"{len(running)} groups, of which group {oldest.group_id} at {worker} began {seconds:.0f} s ago"

    def _finish(self, group: RolloutGroup, rollouts: _Rollouts) -> None:
        accepted = rollouts.accept(group)
        if self.replay is not None and accepted == (group.group_id in self.replay.settled):
            then, now = ("rejected", "is not") if accepted else ("trained on", "is rejected")
            raise ValueError(
                f"replay_schedule: group {group.group_id} was {then} in the recorded run and {now} here: rewards or "
                "data differ"
            )
        if not accepted:
            self.rejected.append(group)
            rollouts.admission.settle(group.group_id)
            return
        self.groups[group.group_id] = group
        rollouts.admission.finish(group.group_id)
        rollouts.on_group(group)

    def _repair(self, error: BaseException) -> None:
        if not isinstance(error, _GroupsLostError):
            raise error
        assert error.__cause__ is not None
        self._recover(error.__cause__)

    def _discard_lost(self, admission: Admission) -> None:
        """Has groups played again that wait and were lost with a node."""
        waiting = [*self.groups.values(), *self.rejected]
        blocks = {group.group_id: group.blocks for group in waiting}
        gone = on_lost_nodes({block for own in blocks.values() for block in own if isinstance(block, RayBlock)})
        lost = {group_id for group_id, own in blocks.items() if own & gone}
        if lost:
            logger.warning("groups %s were lost with their node; they are sampled again", sorted(lost))
            self.groups = {group_id: group for group_id, group in self.groups.items() if group_id not in lost}
            self.rejected = [group for group in self.rejected if group.group_id not in lost]
            admission.discard(lost)

    def _cancel(self, admission: Admission) -> None:
        admission.lose(self._calls.give_up())


@dataclass
class _Rollouts:
    """Rollouts that ``take`` was asked for."""

    admission: Admission
    accept: Callable[[RolloutGroup], bool]
    on_group: Callable[[RolloutGroup], None]
    max_batches: int | None
    """See ``RolloutScheduler.take``."""
    spare: int
    """Groups that are no part of the step's own search."""
    goes_on: bool = False
    """The search found nothing and goes on to its end."""

    @property
    def most_groups(self) -> float:
        """Groups that may be finished or under way before there is a batch."""
        if self.max_batches is None:
            return math.inf
        whole = self.max_batches * self.admission.batch_size
        return self.spare + (whole if self.goes_on else self.admission.search_limit(self.max_batches))
