"""Memory of this process: resident, freed but kept by the C library, and Python's garbage collection."""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT_BYTES = 256 * 2**20
"""Most that stays with the process at the end of its heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 * 2**20
"""In bytes; what is larger goes back to the system at once. The C library comes to the same by itself, in time."""


def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed, for the next tensors; otherwise all but a few megabytes goes back to the system.

    Every step makes columns and activations as large as those of the step before, and to have their pages mapped and
    cleared anew takes several times as long as writing to them.

    Returns:
        Whether it does; other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, value)
        for option, value in ((_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    )


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory; ``None`` where the system does not tell (outside of Linux)."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * mmap.PAGESIZE if pages.exists() else None


_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that this machine has left, or its container, if that (control groups of version 2) may use fewer."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    free = next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:")
    limit, used, detail = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.is_file() or not limit.read_text().strip().isdecimal():
        return free
    cached = next((int(line.split()[1]) for line in detail.open() if line.startswith("inactive_file ")), 0)
    return min(free, int(limit.read_text()) - int(used.read_text()) + cached)


_ALLOCATIONS = 20_000
_USUAL = gc.get_threshold()


def relax_gc_at_start() -> None:
    """Makes the collector look seldom: it would take a quarter of a start, in which modules are imported for good."""
    gc.set_threshold(_ALLOCATIONS, *_USUAL[1:])


def relax_gc() -> None:
    """Makes the collector look seldom, and never at what is there now: imported modules are most of a process.

    By default it looks after every 700 new objects. In a worker with thousands of episodes in flight that takes as much
    time as playing them; the driver holds those that are finished.
    """
    _spare_what_is_here()
    relax_gc_at_start()


def freeze_startup_objects() -> None:
    """Makes the collector look as often as usual, so that no tensor waits long for it, but not at a loaded model."""
    _spare_what_is_here()
    gc.set_threshold(*_USUAL)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Leaves the collector out of what makes very many objects that all stay, and no cycles.

    It would look at them, and at all else in the process, again and again: that takes longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_spared = False
"""By this module: what others have frozen, such as a process of which this one is a fork, stays so."""


def _spare_what_is_here() -> None:
    """Collects what has become garbage since the last time; what is left is not looked at again before the end.

    There it has to be: Triton prints pages about leaked objects behind a run's last line otherwise.
    """
    global _spared
    if _spared:  # a second call comes when a worker starts over, whose old model is garbage now
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if not _spared:
        atexit.register(gc.unfreeze)
    _spared = True
