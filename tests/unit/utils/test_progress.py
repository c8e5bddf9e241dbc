"""Work that a process has done, seen from outside with its children's, and the seconds in which it did none."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.utils.progress import WorkClock, advance, descendants, work_of

CHILD = """
import os, sys
{work}
print("done", flush=True)
sys.stdin.read()
"""
COUNTS = "from roll.utils.progress import advance\nfor _ in range(3): advance()"
WRITES = "with open(os.devnull, 'wb', buffering=0) as file: file.write(bytes(2**25 + 2**24))"


def test_what_a_child_counts_reads_and_writes_is_work():
    alone = work_of([os.getpid()], with_children=False)[0]
    advance()
    assert work_of([os.getpid()], with_children=False)[0] > alone
    for work in (COUNTS, WRITES):
        program = [sys.executable, "-c", CHILD.format(work=work)]
        child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        assert child.pid in descendants(os.getpid()) and 3 <= work_of([child.pid])[0] < 10
        child.communicate()
    assert work_of([child.pid]) == [0], "it is gone"


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
            open_work.append(ExitStack())
            open_work[-1].enter_context(clock.work())
        elif event == "end" and open_work:
            open_work.pop(0).close()
        elif event == "take":
            told += clock.take_idle_s()
            assert told == idle


def test_work_that_fails_is_over():
    now = 0.0
    clock = WorkClock(lambda: now)
    with pytest.raises(ValueError), clock.work():
        now = 2.0
        raise ValueError
    now = 5.0
    assert clock.take_idle_s() == 3.0
