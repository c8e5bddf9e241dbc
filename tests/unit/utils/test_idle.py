"""Idle seconds, against a list of all seconds."""

from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from roll.utils.progress import WorkClock

EVENTS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "end", "take"])), max_size=40)


@settings(max_examples=100)
@given(EVENTS)
def test_idle_is_what_no_piece_of_work_covers(events):
    """Each event comes so many seconds after the one before; a second is idle if no work was open in it."""
    now, idle, told = 0, 0, 0.0
    clock = WorkClock(lambda: float(now), lambda: float(now))
    open_work: list[ExitStack] = []
    for seconds, event in [*events, (1, "take")]:
        idle += 0 if open_work else seconds
        now += seconds
        if event == "begin":
            stack = ExitStack()
            stack.enter_context(clock.work())
            open_work.append(stack)
        elif event == "end" and open_work:
            open_work.pop(0).close()
        elif event == "take":
            told += clock.take_idle_s()
            assert told == idle


def test_work_that_fails_is_over():
    now = 0.0
    clock = WorkClock(lambda: now)
    try:
        with clock.work():
            now = 2.0
            raise ValueError
    except ValueError:
        now = 5.0
    assert clock.take_idle_s() == 3.0
