"""Background work: one call, many calls with results in order, and time limits."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """Runs ``work`` in a thread that does not keep the process alive; a failure is the result's."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where the result is waited for
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


R = TypeVar("R")


async def in_order(
    items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
) -> AsyncGenerator[tuple[T, R]]:
    """Each item with what its work returned, in order. What is under way is cancelled when the caller closes this.

    Args:
        items: taken one by one, as there is room.
        window: items that are under way, or done and waiting for one before them, at the same time.
    """
    source = iter(items)
    waiting: deque[tuple[T, asyncio.Task[R]]] = deque()
    try:
        while True:
            for item in itertools.islice(source, window - len(waiting)):
                waiting.append((item, asyncio.create_task(work(item))))
            if not waiting:
                return
            first, task = waiting[0]
            result = await task
            waiting.popleft()
            yield first, result
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)


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
