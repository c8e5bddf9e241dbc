"""Decides which rollout groups may start and which a step takes: how far rollouts may run ahead of training.

A *draw* is the number of a rollout group: its prompt or environment and its seeds follow from it. A draw is started,
plays until it is *ready*, and is *taken* by one step, or *settled* when dynamic sampling turns it down. With

- B, the groups that a step takes,
- A, the groups that may run ahead of the open step (S·B where they may run S steps ahead),
- W, the window,

a draw may start while a step is open if fewer than ``B + A`` are running, ready or taken by that step: without losses
draw k may start in step n (n = 1, 2 …) if ``k < n·B + A + settled``. A batch is the B lowest of the ready draws below
``o + W``, where o is the lowest draw that is still under way; where dynamic sampling has given up, it is those
that are ready, fewer than B or none, and counts as B. So

- a draw taken by step n was started while a step ≥ ``n − ⌈(A + W − 1)/B⌉`` was open,
- what waits for a step is bounded,
- at most W − 1 later draws are taken before a draw that is slow, and none is ever dropped for its age.

A = 0 and W = 1 is synchronous, on-policy training in the order of the draws. What a step took counts once the step is
*committed*: until then a checkpoint gives those draws back. So every draw is trained or settled exactly once, through
any number of stops and crashes.

Pure state: no clocks, no processes. What happens to one draw takes O(log n) steps, a batch O(n log n).
``tests/unit/rollout/test_admission.py`` proves the bounds as properties.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Admission:
    """The state of all draws of a run."""

    batch_size: int
    """B."""
    ahead: int = 0
    """A."""
    window: int = 1
    """W."""
    last_step: int | None = None
    """No more groups are started than the steps up to this one take."""
    step: int = 0
    """The open step; 0 before the first, when nothing may start."""
    used: int = 0
    """B once the open step has its batch, which counts until the next one is opened, with new weights."""
    fell_short: bool = False
    """The last committed step had fewer than B draws."""
    next_draw: int = 0
    """The lowest draw that was never started."""
    num_trained: int = 0
    """Draws of committed steps."""
    num_settled: int = 0
    """Draws that dynamic sampling turned down, those since the last commit included."""
    again: list[int] = field(default_factory=list)
    """Lower draws that must be sampled again, or for the first time after a resume; a heap."""
    running: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    taken: tuple[int, ...] = ()
    """Draws that the open step took, until it is committed."""
    settled: set[int] = field(default_factory=set)
    """Draws that were settled since the last commit."""
    _started: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """Heap of the draws that run; those that ended are removed once they are the lowest."""
    _beyond: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """Heap of the ready draws that were not within the window when it was last looked at."""
    _num_within: int = field(default=0, init=False, repr=False, compare=False)
    """The other ready draws."""

    def open(self, step: int) -> None:
        """Begins a step: its weights have been published.

        Raises:
            ValueError: the step before was not committed.
        """
        if self.taken:
            raise ValueError(f"step {step} cannot begin: step {self.step} took groups and was not committed")
        self.step, self.used = step, 0

    @property
    def capacity(self) -> int:
        """Most draws that are running, ready, or taken by the open step."""
        if self.last_step is None:
            return self.batch_size + self.ahead
        return self.batch_size + min(self.ahead, (self.last_step - self.step) * self.batch_size)

    @property
    def may_start(self) -> bool:
        return self.step > 0 and len(self.running) + len(self.ready) + self.used < self.capacity

    @property
    def num_under_way(self) -> int:
        """Draws that are running or are to be played again."""
        return len(self.running) + len(self.again)

    @property
    def next(self) -> int:
        """The next draw to play."""
        return self.again[0] if self.again else self.next_draw

    def start(self) -> int:
        """Starts the next draw."""
        assert self.may_start, "nothing may start"
        if self.again:
            draw = heapq.heappop(self.again)
        else:
            draw, self.next_draw = self.next_draw, self.next_draw + 1
        self.running.add(draw)
        heapq.heappush(self._started, draw)
        return draw

    def finish(self, draw: int) -> None:
        """The draw was played and may be taken."""
        self.running.remove(draw)
        self.ready.add(draw)
        heapq.heappush(self._beyond, draw)

    def settle(self, draw: int) -> None:
        """The draw was played and turned down: another one may start in its place."""
        self.running.remove(draw)
        self.settled.add(draw)
        self.num_settled += 1

    def lose(self, draws: Iterable[int]) -> None:
        """Gives up draws that were running and are gone; they have to be played again."""
        for draw in draws:
            self.running.remove(draw)
            heapq.heappush(self.again, draw)

    def discard(self, draws: Iterable[int]) -> None:
        """Drops draws that are ready, or settled since the last batch: they are useless and have to be played again."""
        for draw in draws:
            if draw in self.ready:
                self.ready.remove(draw)
            else:
                self.settled.discard(draw)
                self.num_settled -= 1
            heapq.heappush(self.again, draw)
        self._look_again()

    def search_limit(self, most_batches: int) -> int:
        """Groups that dynamic sampling may have played for the open step, by how many of them it has kept so far.

        ``2·B``, or ``B`` after a step that fell short, and for each group that was kept as many more as make it
        ``most_batches·B`` where B were kept: a batch fills where about one group in ``most_batches`` is kept, and where
        none is, little is played in vain. It only grows as groups finish, so where the search ends depends on the
        groups and not on which of them finishes first.
        """
        first = min(most_batches, 1 if self.fell_short else 2)
        return first * self.batch_size + (most_batches - first) * len(self.ready)

    def take(self, recorded: Collection[int] | None = None, *, short: bool = False) -> tuple[int, ...] | None:
        """The open step's batch, ascending; ``None`` as long as there is none.

        Args:
            recorded: the batch of this step in the run that is repeated; it is taken whatever else is ready.
            short: nothing more is to come: the ready draws are the batch.
        """
        assert not self.taken, "the open step has its batch"
        if short:
            batch = sorted(self.ready)[: self.batch_size]
        elif recorded is not None:
            batch = sorted(self.ready.intersection(recorded))
            if len(batch) < len(recorded):
                return None
        else:
            if len(self.ready) < self.batch_size:
                return None
            end = self._oldest() + self.window
            while self._beyond and self._beyond[0] < end:
                heapq.heappop(self._beyond)
                self._num_within += 1
            if self._num_within < self.batch_size:
                return None
            batch = heapq.nsmallest(self.batch_size, self.ready)  # ready draws beyond the window are higher
        self.ready.difference_update(batch)
        self._look_again()
        self.taken, self.used = tuple(batch), self.batch_size
        return self.taken

    def _oldest(self) -> int:
        """The lowest draw that is under way; it never falls, since what starts is higher or was under way before."""
        while self._started and self._started[0] not in self.running:
            heapq.heappop(self._started)
        return min((*self._started[:1], *self.again[:1]), default=self.next_draw)

    def _look_again(self) -> None:
        """Counts the ready draws anew."""
        self._beyond, self._num_within = sorted(self.ready), 0

    def commit(self) -> None:
        """The open step is done: what it took was trained on."""
        self.num_trained += len(self.taken)
        self.fell_short = len(self.taken) < self.batch_size
        self.taken = ()
        self.settled.clear()

    def counts(self) -> dict[str, int]:
        """Counts the draws so far by what became of them: each is trained, settled or waiting."""
        waiting = len(self.running) + len(self.ready) + len(self.again) + len(self.taken)
        assert self.num_trained + self.num_settled + waiting == self.next_draw, "a draw was lost or used twice"
        return {"trained": self.num_trained, "settled": self.num_settled, "waiting": waiting}

    def state_dict(self, *, keeps_groups: bool) -> dict[str, Any]:
        """State that a resumed run goes on from, JSON values.

        Args:
            keeps_groups: the finished groups of ``ready`` and ``taken`` are saved beside it. Otherwise the open step is
                played again as a whole: what it settled is given back too.
        """
        finished = {*self.ready, *self.taken}
        again = {*self.running, *self.again}
        if not keeps_groups:
            again |= finished | self.settled
        return {
            "next_draw": self.next_draw,
            "trained": self.num_trained,
            "settled": self.num_settled - (0 if keeps_groups else len(self.settled)),
            "again": sorted(again),
            "ready": sorted(finished if keeps_groups else ()),
            "fell_short": self.fell_short,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_groups: bool) -> None:
        """Takes up a state; steps are counted by who calls ``open``.

        Args:
            keeps_groups: the finished groups that were saved beside it are there; otherwise they are played again.
        """
        self.next_draw, self.num_trained = int(state["next_draw"]), int(state["trained"])
        self.num_settled = int(state["settled"])
        self.fell_short = bool(state.get("fell_short", False))
        self.again, self.ready = sorted(state["again"]), set(state["ready"])
        if not keeps_groups:
            self.again, self.ready = sorted({*self.again, *self.ready}), set()
        self.running, self.taken, self.settled = set(), (), set()
        self._started = []
        self._look_again()
