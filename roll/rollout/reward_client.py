"""Sends answers and questions to the workers of rewards, one at a time for the caller, in batches over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ray.exceptions import RayActorError

from roll.rollout.router import EngineUnavailableError
from roll.utils.foreign import Fault

ItemT = TypeVar("ItemT")
ToldT = TypeVar("ToldT")


class WorkerClient(Generic[ItemT, ToldT]):
    """``send(item)`` for many concurrent episodes, over few remote calls.

    An item goes to the worker with the fewest in flight. Those that arrive in the same tick of the event loop travel
    in one call to each worker, and come back together.

    Args:
        name: of the workers, for messages.
        method: of the workers, from a list of items to a list of what is told of each, or an exception.
    """

    def __init__(self, name: str, workers: Sequence[Any], method: str) -> None:
        self.name = name
        self._method = method
        self._workers = list(workers)
        self._in_flight = [0] * len(self._workers)
        self._outbox: list[tuple[ItemT, asyncio.Future[ToldT]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, item: ItemT) -> ToldT:
        """Sends one item; returns what a worker tells of it.

        Raises:
            EngineUnavailableError: the worker died.
            Exception: what it tells in place of an answer: a ``RewardError`` where it cannot judge or say anything.
        """
        future: asyncio.Future[ToldT] = asyncio.get_running_loop().create_future()
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((item, future))
        return await future

    def _flush(self) -> None:
        waiting, self._outbox = [entry for entry in self._outbox if not entry[1].done()], []
        shares: list[list[tuple[ItemT, asyncio.Future[ToldT]]]] = [[] for _ in self._workers]
        for entry in waiting:
            worker = self._in_flight.index(min(self._in_flight))
            self._in_flight[worker] += 1
            shares[worker].append(entry)
        for worker, share in enumerate(shares):
            if share:
                task = asyncio.get_running_loop().create_task(self._send(worker, share))
                self._sending.add(task)  # the event loop itself only holds a weak reference
                task.add_done_callback(self._sending.discard)

    async def _send(self, worker: int, waiting: list[tuple[ItemT, asyncio.Future[ToldT]]]) -> None:
        outcomes: Sequence[ToldT | Exception] = ()
        try:
            with Fault() as fault:  # its death, or a bug in it: that belongs to all who wait for it
                outcomes = await getattr(self._workers[worker], self._method).remote([item for item, _ in waiting])
        finally:
            self._in_flight[worker] -= len(waiting)
        if (error := fault.error) is not None:
            died = isinstance(error, RayActorError)
            failure = EngineUnavailableError(f"worker {worker} of {self.name} died: {error}") if died else error
            outcomes = [failure] * len(waiting)
        for (_, future), outcome in zip(waiting, outcomes, strict=True):
            if future.done():  # its episode was cancelled
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
