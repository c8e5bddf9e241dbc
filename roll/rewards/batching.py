"""Gathers concurrent calls into batches for a function that is faster on many than on one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from roll.utils.foreign import Fault

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
