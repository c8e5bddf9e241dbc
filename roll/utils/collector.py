"""Python's garbage collector in processes that hold thousands of episodes."""

from __future__ import annotations

import gc

_ALLOCATIONS = 20_000


def calm_collector() -> None:
    """Makes the collector look seldom, and never at what is there now: imported modules are most of a process.

    By default it looks after every 700 new objects. In a worker with thousands of episodes in flight that takes as much
    time as playing them; the driver holds those that are finished.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
