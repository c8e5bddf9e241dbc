"""Sends answers to the workers of one reward domain, one at a time for the caller, in batches over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from ray.exceptions import RayActorError

from roll.rewards.types import Sample, Verdict
from roll.rollout.router import EngineUnavailableError

_Waiting: TypeAlias = "tuple[Sample, asyncio.Future[Verdict]]"


class RewardClient:
    """``score(sample)`` for many concurrent episodes, over few remote calls.

    An answer goes to the worker with the fewest in flight. Those that arrive in the same tick of the event loop
    travel in one call to each worker, and come back together.

    Args:
        domain: name of the reward domain, for messages.
    """

    def __init__(self, domain: str, workers: Sequence[Any]) -> None:
        self.domain = domain
        self._workers = list(workers)
        self._in_flight = [0] * len(self._workers)
        self._outbox: list[_Waiting] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> Verdict:
        """Has one answer judged.

        Raises:
            RewardError: the verifiers could not tell.
            EngineUnavailableError: the worker died.
        """
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((sample, future))
        return await future

    def _flush(self) -> None:
        waiting, self._outbox = [entry for entry in self._outbox if not entry[1].done()], []
        shares: list[list[_Waiting]] = [[] for _ in self._workers]
        for entry in waiting:
            worker = self._in_flight.index(min(self._in_flight))
            self._in_flight[worker] += 1
            shares[worker].append(entry)
        for worker, share in enumerate(shares):
            if share:
                task = asyncio.get_running_loop().create_task(self._send(worker, share))
                self._sending.add(task)  # the event loop itself only holds a weak reference
                task.add_done_callback(self._sending.discard)

    async def _send(self, worker: int, waiting: list[_Waiting]) -> None:
        outcomes: Sequence[Verdict | Exception]
        try:
            outcomes = await self._workers[worker].score.remote([sample for sample, _ in waiting])
        except RayActorError as error:
            failure = EngineUnavailableError(f"worker {worker} of the rewards {self.domain!r} died: {error}")
            outcomes = [failure] * len(waiting)
        except Exception as error:  # a bug in the worker: it belongs to all who wait for it
            outcomes = [error] * len(waiting)
        finally:
            self._in_flight[worker] -= len(waiting)
        for (_, future), outcome in zip(waiting, outcomes, strict=True):
            if future.done():  # its episode was cancelled
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
