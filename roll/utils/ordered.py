"""Work on many items side by side whose results come in the order of the items."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
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
