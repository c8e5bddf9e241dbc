"""Work beside the caller's: one call, or many whose results come in order."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import Future
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
