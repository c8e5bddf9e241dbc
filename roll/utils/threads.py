"""Background work: one call, many calls with results in order, calls gathered into batches, and time limits."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from roll.utils.foreign import Fault

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


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class MicroBatcher(Generic[ItemT, ResultT]):
    """Runs an asynchronous ``function`` on up to ``max_size`` waiting items, in order of arrival.

    Args:
        function: items to as many results, in the same order. What it raises, every caller of that batch gets.
        wait: seconds that a batch which is not full waits for more. Items that arrive while all batches run wait for
            the next.
        parallel: batches that run at the same time.
    """

    def __init__(
        self,
        function: Callable[[list[ItemT]], Awaitable[Sequence[ResultT]]],
        max_size: int,
        wait: float,
        parallel: int = 1,
    ) -> None:
        self._function = function
        self._max_size = max_size
        self._wait = wait
        self._parallel = parallel
        self._waiting: deque[tuple[ItemT, asyncio.Future[ResultT]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()

    async def submit(self, item: ItemT) -> ResultT:
        """The result for ``item``. A cancelled call leaves the queue; a batch that already runs goes on."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._workers = {task for task in self._workers if not task.done()}
        if len(self._workers) < min(self._parallel, len(self._waiting)):
            self._workers.add(asyncio.create_task(self._run_batches()))
        return await future

    async def close(self) -> None:
        """Cancels those who still wait and lets running batches end."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _run_batches(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._max_size:
                await asyncio.sleep(self._wait)
            batch = self._take()
            if not batch:
                continue
            with Fault() as fault:  # it belongs to all who wait for this batch
                results = await self._function([item for item, _ in batch])
                assert len(results) == len(batch), f"{len(results)} results for {len(batch)} items"
            if fault.error is not None:
                _fail(batch, fault.error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def _take(self) -> list[tuple[ItemT, asyncio.Future[ResultT]]]:
        batch: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        while self._waiting and len(batch) < self._max_size:
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch


def _fail(batch: list[tuple[ItemT, asyncio.Future[ResultT]]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
