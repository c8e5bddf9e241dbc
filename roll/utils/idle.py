"""Time in which a worker had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class IdleClock:
    """Sums up the seconds in which no work was under way; pieces of work may overlap. For one thread or event loop.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way = 0
        self._idle_s = 0.0
        """Up to ``_idle_since``."""
        self._idle_since = now()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Something is under way for as long as the block takes."""
        if not self._under_way:
            self._idle_s += self._now() - self._idle_since
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle_since = self._now()

    def take(self) -> float:
        """Idle seconds since the last call, or since the start."""
        now = self._now()
        idle_s = self._idle_s + (0.0 if self._under_way else now - self._idle_since)
        self._idle_s, self._idle_since = 0.0, now
        return idle_s
