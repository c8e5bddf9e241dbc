"""Time limits of work that has to wait for its turn, which does not count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class _Clock:
    """A time limit that stands still while any of the work in it waits."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._waiting = 0
        self._left = 0.0
        self.is_over = False

    def stop(self) -> None:
        when = self._timeout.when()
        if when is not None and not self._done:
            self._left = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        self._waiting += 1

    def go_on(self) -> None:
        self._waiting -= 1
        if not self._waiting and not self._done:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    @property
    def _done(self) -> bool:
        return self.is_over or self._timeout.expired()


_clock: ContextVar[_Clock | None] = ContextVar("time_limit", default=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """``asyncio.timeout``, but waits in ``turn`` do not count, nor do those of tasks that were started inside.

    Raises:
        TimeoutError: what is in the block has worked for longer.
    """
    async with asyncio.timeout(seconds) as timeout:
        clock = _Clock(timeout)
        token = _clock.set(clock)
        try:
            yield timeout
        finally:
            clock.is_over = True
            _clock.reset(token)


@asynccontextmanager
async def turn(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Waits for one of the slots and holds it; the wait is no part of the innermost ``time_limit`` around it."""
    clock = _clock.get()
    if clock is None:
        await slots.acquire()
    else:
        clock.stop()
        try:
            await slots.acquire()
        finally:
            clock.go_on()
    try:
        yield
    finally:
        slots.release()
