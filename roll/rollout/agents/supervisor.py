"""Runs an agent's command and ends everything that it has started: ``supervisor.py LIFELINE STATUS COMMAND …``.

A program of its own that uses the standard library only. The arguments are descriptors: when ``LIFELINE`` is closed on
the other side, the caller has had enough or is dead; the command's exit code is written to ``STATUS``. Processes that
the command forks, daemonises or puts into sessions of their own become children of this one when their parents end
(PR_SET_CHILD_SUBREAPER), so that none is out of reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE_S = 10.0
_TICK_MS = 200


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _start(command: list[str], *private: int) -> int:
    """The command's process, which ends when this one is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for descriptor in private:
            os.close(descriptor)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _descendants() -> dict[int, int]:
    """Process groups of all processes below this one by process id, dead ones that nobody has reaped included."""
    below: dict[int, list[tuple[int, int]]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                parent, group = map(int, file.read().rpartition(b")")[2].split()[1:3])
        except (OSError, ValueError):  # reaped in between
            continue
        below.setdefault(parent, []).append((int(entry.name), group))
    found: dict[int, int] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid, group in below.get(waiting.pop(), ()):
            if pid not in found:
                found[pid] = group
                waiting.append(pid)
    return found


def _end_all() -> None:
    """Kills until there is no child, dead or alive, that this process could wait for.

    A process that forks itself again and again is faster than any list of processes, but it does not leave its group,
    which is killed at once: no fork comes in between.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = _descendants()
        for group in set(found.values()) - {os.getpgrp()}:
            _signal(os.killpg, group)
        for pid in found:
            _signal(os.kill, pid)
        if _reap() is None:
            return
        time.sleep(0.001)


def _signal(send: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(OSError):  # ended, or another user's
        send(target, signal.SIGKILL)


def _reap() -> dict[int, int] | None:
    """Exit codes of the children that have ended; ``None`` if there is no child at all."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes or None
        if pid == 0:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def main(lifeline: int, status: int, command: list[str]) -> None:
    """Runs the command to its end, or to that of the lifeline."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    program = _start(command, lifeline, status)
    for descriptor in range(3):  # the pipes must end with the command's processes
        os.close(descriptor)
    poll = select.poll()
    poll.register(lifeline, 0)  # hanging up is always reported
    poll.register(os.pidfd_open(program), select.POLLIN)
    code = None
    while code is None:
        if any(descriptor == lifeline for descriptor, _ in poll.poll(_TICK_MS)):
            break
        code = (_reap() or {}).get(program)
    _end_all()
    if code is not None:
        os.write(status, str(code).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
