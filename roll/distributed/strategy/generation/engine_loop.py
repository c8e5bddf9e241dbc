"""An event loop on a thread of its own, for engines that belong to one loop while their callers come from several.

It also keeps the caller's loop free: an engine's start takes many seconds, and its bookkeeping per token adds up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from roll.distributed.strategy.generation.requests import EngineStoppedError

T = TypeVar("T")


class EngineLoop:
    """Runs coroutines for callers on any thread and any event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs it; cancelling the future cancels it.

        Raises:
            EngineStoppedError: the loop was closed.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise EngineStoppedError("the generation engine was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels what still runs, waits for it to end, and stops the thread."""
        if self._loop.is_closed():
            return
        self.submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def brought_from(home: asyncio.AbstractEventLoop, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Reads ``items``, which live on the loop ``home`` and are never ``None``, on another loop."""

    async def following() -> T | None:
        return await anext(items, None)

    while (item := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(following(), home))) is not None:
        yield item
        del item


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
