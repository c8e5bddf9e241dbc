"""A small process that outlives the driver and cleans up after its local Ray cluster.

Ray's daemons follow a killed driver, but its agents take a minute to notice, a worker's own children may never, and
the session's folder stays. So every process of the cluster carries a mark in its environment, and the reaper, a child
of the driver that waits for the end of a pipe, then kills whatever carries it (and Ray's own processes that have files
open in the session's folder, see ``_belongs``) and removes the folder. An ordinary end
takes the same way. Looking for marks needs ``/proc``: elsewhere only the folder is removed.

Run as a script by ``Reaper``; it imports nothing but the standard library, to be small and quick.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ROLL_RAY_SESSION"
"""Environment variable that all processes of the cluster inherit; its value is the session's folder."""

_SWEEP_S = 20.0
_LOOK_S = 5.0
_SHARED = Path("/dev/shm")
_NAMES = ("sem.mp-*", "psm_*")
"""Of multiprocessing's semaphores and shared memory."""
_MAPPED = re.compile(rb"(\d+) +/dev/shm/")


class Reaper:
    """The driver's side: starts the process and, at the end, waits until it has done its work."""

    def __init__(self, folder: Path) -> None:
        # A session of its own, so that neither Ctrl-C nor a kill of the driver's process group reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def look(self) -> None:
        """Notes what the session's processes share by name; to be called before they end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            self._process.stdout.readline()

    def finish(self) -> None:
        """Ends the session's processes and removes its folder and what they shared by name."""
        self._process.communicate(timeout=2 * _SWEEP_S)


def marked_processes(folder: str) -> list[int]:
    """Ids of the running processes that belong to this session's folder."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError):  # ended in between, or another user's
                if _belongs(Path("/proc", name), folder):
                    found.append(int(name))
    return found


def _belongs(process: Path, folder: str) -> bool:
    """Tells whether the process carries the mark, or is one of Ray's that has files open in the session's folder.

    Ray's agents give themselves a title, which is written over a part of the environment that /proc shows, and now and
    then over the mark.
    """
    if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
        return True
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed in between
            if os.readlink(descriptor).startswith(f"{folder}/"):
                return True
    return False


def _shared_names(folder: str, known: set[str]) -> set[str]:
    """Paths of Python's named semaphores and shared memory that the session's processes have open, but for known ones.

    They are found by inode: a semaphore got its name after it was mapped.
    """
    named = {str(path) for pattern in _NAMES for path in _SHARED.glob(pattern)} - known
    if not named:  # as nearly always: looking for the session's processes takes 20 ms of a core, among 180
        return set()
    mapped: set[int] = set()
    for pid in marked_processes(folder):
        with contextlib.suppress(OSError):
            mapped |= {int(inode) for inode in _MAPPED.findall(Path("/proc", str(pid), "maps").read_bytes())}
    found = set()
    for path in named:
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino in mapped:
                found.add(path)
    return found


def _sweep(folder: str, shared: set[str]) -> None:
    """Kills what belongs to the folder and removes it, until neither is there any more, and what was shared.

    More than once, since a process that is being started shows its mark late, and one that is being killed may still
    write to the folder.
    """
    deadline = time.monotonic() + _SWEEP_S
    while time.monotonic() < deadline:
        for pid in (pids := marked_processes(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            for name in shared:  # Ray kills Python's resource trackers, which would have done it
                with contextlib.suppress(OSError):
                    os.unlink(name)
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
        time.sleep(0.05)


def _serve(folder: str) -> None:
    """Looks for shared memory now and then and when asked to; clears up once the driver closes the pipe or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the driver; this process is needed after it
    shared: set[str] = set()
    while True:
        asked, _, _ = select.select([0], [], [], _LOOK_S)
        over = asked and not os.read(0, 1)
        shared |= _shared_names(folder, shared)
        if over:
            break
        if asked:
            os.write(1, b"\n")
    _sweep(folder, shared)


if __name__ == "__main__":
    _serve(sys.argv[1])
