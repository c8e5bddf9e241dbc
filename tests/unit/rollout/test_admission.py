"""The bounds of ``Admission`` as properties: whatever finishes when, is turned down, is lost, or is stopped."""

import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.rollout.admission import Admission
from tests.support.examples import examples


@dataclass
class World:
    """Plays a run on an ``Admission``: groups take random times, some are turned down, some are lost."""

    admission: Admission
    rng: random.Random
    rejecting: float = 0.0
    giving_up: float = 0.0
    """Chance, whenever there is no batch yet, that dynamic sampling gives up: what runs is finished, nothing starts."""
    losing: float = 0.0
    slots: int = 10**9
    slow: frozenset[int] = frozenset()
    """Draws that finish only when nothing else can."""
    opened: dict[int, int] = field(default_factory=dict)
    """The step that was open when a draw was last started."""
    trained: dict[int, int] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)

    def step(self, step: int, *, beside: int = 0) -> tuple[int, ...]:
        admission = self.admission
        admission.open(step)
        while (batch := admission.take()) is None:
            if self.rng.random() < self.giving_up:
                while admission.running:
                    self.move(starts=False)
                batch = admission.take(short=True)
                assert batch is not None
                break
            self.move()
        for _ in range(self.rng.randint(0, beside)):  # while the trainer works
            if admission.running or self.startable:
                self.move()
        for draw in batch:
            assert draw not in self.trained and draw not in self.rejected
            self.trained[draw] = step
        admission.commit()
        return batch

    def assert_complete(self) -> None:
        """Every draw has been used once, or waits."""
        admission, used = self.admission, set(self.trained) | self.rejected
        waiting = admission.running | admission.ready | set(admission.again)
        assert used | waiting == set(range(admission.next_draw)) and not used & waiting
        counts = {"trained": len(self.trained), "settled": len(self.rejected), "waiting": len(waiting)}
        assert admission.counts() == counts

    @property
    def startable(self) -> bool:
        return self.admission.may_start and len(self.admission.running) < self.slots

    def move(self, *, starts: bool = True) -> None:
        admission = self.admission
        while starts and self.startable:
            draw = admission.start()
            self.opened[draw] = admission.step
        assert len(admission.running) + len(admission.ready) <= admission.capacity
        candidates = sorted(admission.running - self.slow) or sorted(admission.running)
        assert candidates, "nothing runs, nothing may start, and there is no batch"
        draw = self.rng.choice(candidates)
        if self.rng.random() < self.losing:
            admission.lose(self.rng.sample(sorted(admission.running), self.rng.randint(1, len(admission.running))))
        elif self.rng.random() < self.rejecting:
            admission.settle(draw)
            self.rejected.add(draw)
        else:
            admission.finish(draw)


worlds = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 6),
        "ahead": st.integers(0, 24),
        "window": st.integers(1, 12),
        "slots": st.integers(1, 40),
        "rejecting": st.sampled_from([0.0, 0.3, 0.8]),
        "losing": st.sampled_from([0.0, 0.1]),
        "slow": st.frozensets(st.integers(0, 60), max_size=6),
        "seed": st.integers(0, 2**32),
    }
)


def world_of(batch_size: int, ahead: int, window: int, seed: int, **others: Any) -> World:
    return World(Admission(batch_size, ahead, window), random.Random(seed), **others)


@examples(400)
@given(worlds, st.sampled_from([0.0, 0.0, 0.05, 0.3]))
def test_the_lag_is_bounded_nothing_is_lost_and_nothing_overtaken_by_more_than_the_window(chosen, giving_up):
    """Also where batches fall short; then nothing is lost on the way, which would be missing at the end."""
    world = world_of(**chosen | ({"losing": 0.0} if giving_up else {}), giving_up=giving_up)
    admission = world.admission
    batch, ahead, window = admission.batch_size, admission.ahead, admission.window
    for step in range(1, 16):
        unfinished = set(admission.running) | set(admission.again)
        taken = world.step(step, beside=20)
        assert admission.next_draw <= step * batch + ahead + len(world.rejected), "the rule of the design"
        assert taken == tuple(sorted(taken)) and (len(taken) == batch or giving_up)
        assert len(taken) <= batch and admission.fell_short == (len(taken) < batch)
        assert all(step - world.opened[draw] <= math.ceil((ahead + window - 1) / batch) for draw in taken)
        if not giving_up:
            for draw in unfinished & (admission.running | set(admission.again)):  # under way all along
                assert sum(other > draw for other in world.trained) <= window - 1
    world.assert_complete()


@given(st.integers(1, 8), st.integers(1, 10), st.booleans(), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 1]))
def test_where_a_search_ends_depends_on_its_groups_and_not_on_their_order(batch, most, fell_short, seed, share):
    wanted = [random.Random(seed).random() < share for _ in range(batch * most)]

    def played(order: random.Random) -> tuple[tuple[int, ...], int]:
        admission = Admission(batch, fell_short=fell_short)
        admission.open(1)
        finished = 0
        while (taken := admission.take()) is None:
            while admission.may_start and finished + len(admission.running) < admission.search_limit(most):
                admission.start()
            if not admission.running:
                taken = admission.take(short=True)
                break
            draw = order.choice(sorted(admission.running))
            (admission.finish if wanted[draw] else admission.settle)(draw)
            finished += 1
        assert taken is not None
        return taken, admission.next_draw

    taken, played_in_all = played(random.Random(0))
    assert all(played(random.Random(number)) == (taken, played_in_all) for number in range(1, 6))
    assert played_in_all <= batch * most
    first = 1 if fell_short else 2  # so many batches are played in any case
    if len(taken) < batch:
        assert played_in_all == batch * min(most, first) + max(0, most - first) * len(taken)


@given(worlds)
def test_with_nothing_ahead_and_no_window_a_run_is_synchronous_and_in_order(chosen):
    world = world_of(**chosen | {"ahead": 0, "window": 1})
    admission, order = world.admission, []
    for step in range(1, 10):
        order += world.step(step, beside=20)
        assert not admission.running and not admission.ready and not admission.again
    assert order == sorted(order)
    assert set(order) | world.rejected == set(range(admission.next_draw))


@given(worlds, st.integers(1, 9))
def test_nothing_is_left_over_at_the_end_of_a_run(chosen, last):
    world = world_of(**chosen)
    world.admission.last_step = last
    for step in range(1, last + 1):
        world.step(step, beside=20)
    batch = world.admission.batch_size
    assert world.admission.counts() == {"trained": last * batch, "settled": len(world.rejected), "waiting": 0}


@examples(200)
@given(worlds, st.booleans())
@example(
    {"batch_size": 1, "ahead": 0, "window": 1, "slots": 1, "rejecting": 0.8, "losing": 0.0}
    | {"slow": frozenset(), "seed": 0},
    False,
)
def test_every_draw_is_used_exactly_once_through_stops_at_any_moment(chosen, keeps):
    """A run is stopped at random moments and resumed from the last checkpoint or a rescue: with or without groups."""
    world = world_of(**chosen)
    done = 0
    for _ in range(12):
        admission = world.admission
        admission.open(done + 1)
        settled_before = set(world.rejected)
        for _ in range(world.rng.randint(0, 30)):
            if not (admission.running or world.startable):
                break
            world.move()
        batch = admission.take()
        if batch is not None and world.rng.random() < 0.7:
            world.trained |= dict.fromkeys(batch, done + 1)
            admission.commit()
            done += 1
        elif not keeps:  # what the open step settled is given back: it is decided again
            world.rejected = settled_before
        state = json.loads(json.dumps(admission.state_dict(keeps_groups=keeps)))
        assert (set(state["again"]) | set(state["ready"])) & (set(world.trained) | world.rejected) == set()
        resumed = Admission(admission.batch_size, admission.ahead, admission.window)
        resumed.load_state_dict(state, keeps_groups=keeps)
        world.admission = resumed
    for step in range(done + 1, done + 6):
        world.step(step)
    world.assert_complete()
    assert len(world.trained) == (done + 5) * world.admission.batch_size


def test_a_run_that_goes_on_without_the_saved_groups_plays_them_again():
    admission = Admission(2, ahead=2)
    state = {"next_draw": 6, "trained": 2, "settled": 0, "again": [4], "ready": [2, 3, 5]}
    admission.load_state_dict(state, keeps_groups=False)
    assert admission.counts() == {"trained": 2, "settled": 0, "waiting": 4}
    admission.open(2)
    assert [admission.start() for _ in range(4)] == [2, 3, 4, 5]


def test_what_was_discarded_is_played_again_before_others():
    admission = Admission(2, ahead=2)
    admission.open(1)
    for draw in [admission.start() for _ in range(4)]:
        admission.finish(draw)
    admission.discard([0, 3])
    assert admission.take() is None and admission.counts() == {"trained": 0, "settled": 0, "waiting": 4}
    assert [admission.start() for _ in range(2)] == [0, 3]
    admission.finish(0)
    assert admission.take() == (0, 1)


@examples(200)
@given(worlds)
def test_the_batch_is_the_lowest_ready_draws_within_the_window_of_the_oldest_under_way(chosen):
    world = world_of(**chosen)
    admission = world.admission
    for step in range(1, 12):
        admission.open(step)
        batch = None
        while batch is None:
            world.move()
            oldest = min(admission.running | set(admission.again), default=admission.next_draw)
            within = sorted(draw for draw in admission.ready if draw < oldest + admission.window)
            expected = tuple(within[: admission.batch_size]) if len(within) >= admission.batch_size else None
            batch = admission.take()
            assert batch == expected
        admission.commit()


def test_a_step_that_was_not_committed_is_an_error():
    admission = Admission(1)
    admission.open(1)
    admission.finish(admission.start())
    assert admission.take() == (0,)
    with pytest.raises(ValueError, match="step 2 cannot begin: step 1 took groups and was not committed"):
        admission.open(2)
