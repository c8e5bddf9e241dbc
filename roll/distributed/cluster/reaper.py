"""A small process that outlives the driver and clears up what its local Ray cluster left behind.

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
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ROLL_RAY_SESSION"
"""Environment variable that all processes of the cluster inherit; its value is the session's folder."""

_SWEEP_S = 5.0


class Reaper:
    """The driver's side: starts the process and, at the end, waits until it has done its work."""

    def __init__(self, folder: Path) -> None:
        # A session of its own, so that neither Ctrl-C nor a kill of the driver's process group reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Ends the session's processes and removes its folder."""
        self._process.communicate(timeout=4 * _SWEEP_S)


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
    """Whether the process carries the mark, or is one of Ray's that has files open in the session's folder.

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


def _sweep(folder: str) -> None:
    deadline = time.monotonic() + _SWEEP_S
    while (pids := marked_processes(folder)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the driver closes the pipe or is gone
    _sweep(sys.argv[1])
