"""Python's garbage collector in processes that import much and hold thousands of episodes."""

from __future__ import annotations

import gc

_ALLOCATIONS = 20_000
_USUAL = gc.get_threshold()


def calm_collector() -> None:
    """Makes the collector look seldom, and never at what is there now: imported modules are most of a process.

    By default it looks after every 700 new objects. In a worker with thousands of episodes in flight that takes as much
    time as playing them; the driver holds those that are finished.
    """
    gc.collect()
    gc.freeze()
    start_calmly()


def start_calmly() -> None:
    """Makes the collector look seldom: it would take a quarter of a start, in which modules are imported for good."""
    gc.set_threshold(_ALLOCATIONS, *_USUAL[1:])


def end_start() -> None:
    """Makes the collector look as often as usual, so that no tensor waits long for it."""
    gc.set_threshold(*_USUAL)
