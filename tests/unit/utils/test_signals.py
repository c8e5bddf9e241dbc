"""Ctrl-C and SIGTERM: when they act, when they wait, and what the second one does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from roll.utils import signals
from roll.utils.signals import Interrupted, SignalGuard


def kill_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs the handler between two instructions of the main thread


def in_a_thread(target: Callable[..., None], *args: object) -> None:
    thread = threading.Thread(target=target, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises_with_the_exit_code_and_the_old_handlers_return(number, exit_code):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match=f"stopped by {number.name}") as caught, SignalGuard():
        kill_self(number)
        pytest.fail("the signal did nothing")
    assert caught.value.exit_code == exit_code and isinstance(caught.value, KeyboardInterrupt)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_within_deferred_blocks_a_signal_waits_for_the_end_of_the_outermost():
    steps = []
    with pytest.raises(Interrupted), SignalGuard() as guard:
        with guard.deferred():
            with guard.deferred():
                kill_self(signal.SIGTERM)
                guard.check()
                steps.append("inner")
            steps.append("outer")
        steps.append("never")
    assert steps == ["inner", "outer"]


def test_an_error_in_a_deferred_block_stays_and_a_keyboard_interrupt_gets_the_signals_exit_code():
    with pytest.raises(ValueError, match="broken"), SignalGuard() as guard, guard.deferred():
        kill_self(signal.SIGTERM)
        raise ValueError("broken")
    with pytest.raises(Interrupted) as caught, SignalGuard() as guard, guard.deferred():
        kill_self(signal.SIGTERM)
        raise KeyboardInterrupt  # as Ray does when the signal arrives in one of its calls
    assert caught.value.exit_code == 143


def test_one_signal_delivered_twice_counts_once():
    with pytest.raises(Interrupted), SignalGuard():
        try:
            kill_self(signal.SIGINT)
        finally:
            kill_self(signal.SIGINT)  # while the first one unwinds


def test_a_failure_beside_the_main_thread_stops_it_and_is_raised_from_the_block():
    with pytest.raises(OSError, match="gone") as caught, SignalGuard() as guard, guard.deferred():
        in_a_thread(guard.stop_for, OSError("gone"))
        time.sleep(0.01)
    assert isinstance(caught.value.__cause__, Interrupted)


def test_a_failure_while_a_run_stops_is_no_second_press_and_hides_no_reason(monkeypatch):
    monkeypatch.setattr(signals, "_SAME_PRESS_S", -1.0)  # a second press would end this process
    saved = []
    with pytest.raises(Interrupted, match="stopped by SIGTERM"), SignalGuard() as guard:
        try:
            kill_self(signal.SIGTERM)
        finally:
            in_a_thread(guard.stop_for, OSError("gone"))
            saved.append(True)
    assert saved


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with SignalGuard():
            kill_self(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_press_ends_the_process_at_once():
    program = f"""
import os, signal, time
from roll.utils.signals import SignalGuard
with SignalGuard() as guard, guard.deferred():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep({signals._SAME_PRESS_S} + 0.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 130


def test_outside_the_main_thread_it_changes_nothing():
    seen = []

    def run() -> None:
        with SignalGuard():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    in_a_thread(run)
    assert seen == [before]


def test_a_signal_can_be_outlived_from_any_thread_and_children_still_obey_it():
    code = """
import os, signal, subprocess, threading
from roll.utils.signals import outlive
worker = threading.Thread(target=outlive, args=(signal.SIGTERM, signal.SIGHUP))
worker.start(); worker.join()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
    os.kill(os.getpid(), number)
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print("alive", child.wait())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["alive", str(-signal.SIGTERM)]
