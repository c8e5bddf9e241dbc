"""Python's garbage collector in processes that import much and hold thousands of episodes or tensors."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS = 20_000
_USUAL = gc.get_threshold()


def start_calmly() -> None:
    """Makes the collector look seldom: it would take a quarter of a start, in which modules are imported for good."""
    gc.set_threshold(_ALLOCATIONS, *_USUAL[1:])


def calm_collector() -> None:
    """Makes the collector look seldom, and never at what is there now: imported modules are most of a process.

    By default it looks after every 700 new objects. In a worker with thousands of episodes in flight that takes as much
    time as playing them; the driver holds those that are finished.
    """
    _spare_what_is_here()
    start_calmly()


def end_start() -> None:
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


def _spare_what_is_here() -> None:
    """Collects what has become garbage since the last time; what is left is not looked at again before the end.

    There it has to be: Triton prints pages about leaked objects behind a run's last line otherwise.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
