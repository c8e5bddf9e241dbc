"""Sends generation requests to engine workers, one at a time for the caller, in batches over the wire."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.data.columns import Records
from roll.data.requests import Completion, GenerateFn, GenerateRequest
from roll.data.stored import heavy, leave
from roll.distributed.cluster.cluster import RayBlock


class EngineUnavailableError(RuntimeError):
    """The generating worker of a request died; the request can be sent again when it is back."""


class GenerationError(RuntimeError):
    """An engine's error for one request, as text, since exceptions may not survive pickling."""


@dataclass(frozen=True)
class Outcomes:
    """The outcome of some requests."""

    completions: Records[Completion]
    errors: list[tuple[str, GenerationError]]
    """By request id."""


def own_order(num_workers: int, share: tuple[int, int]) -> list[int]:
    """Workers in the order in which a client prefers them where they have equally much to do for it.

    Clients know nothing of each other: if all began at the first, a thousand workers would leave the work to a few.

    Args:
        share: the client's number among all clients of the workers, and how many there are.
    """
    number, num_clients = share
    first = number * num_workers // num_clients
    return [*range(first, num_workers), *range(first)]


class GenerationClient:
    """``generate(request)`` for many concurrent episodes, over few remote calls.

    Requests made in the same tick of the event loop travel in one call; finished completions come back through one
    long poll per engine worker. A request goes to the worker with the fewest requests in flight, of this client. Large
    pictures are left in the object store.

    Args:
        engines: in rank order, ``None`` for one that is lost.
        share: see ``own_order``.
    """

    def __init__(self, engines: Sequence[Any], share: tuple[int, int] = (0, 1)) -> None:
        self.client_id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._engines = list(engines)
        self._order = [place for place in own_order(len(engines), share) if engines[place] is not None]
        self._outbox: list[dict[str, GenerateRequest]] = [{} for _ in engines]
        self._pending: list[dict[str, asyncio.Future[Completion]]] = [{} for _ in engines]
        self._submitted: list[Any] = [None for _ in engines]
        """The last call to each worker that brought requests."""
        self._pollers: list[asyncio.Task[None] | None] = [None for _ in engines]
        self._flush_scheduled = False

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one completion.

        Raises:
            EngineUnavailableError: the worker died.
            GenerationError: the engine raised for this request.
        """
        return await self._generate(request, self._least_loaded())

    def pinned(self) -> GenerateFn:
        """A ``generate`` whose requests all go to one worker, the least loaded when the first of them is made.

        Requests with a common prompt then find its keys and values in that worker's cache.
        """
        engine: int | None = None

        async def generate(request: GenerateRequest) -> Completion:
            nonlocal engine
            engine = self._least_loaded() if engine is None else engine
            return await self._generate(request, engine)

        return generate

    def _least_loaded(self) -> int:
        return min(self._order, key=lambda i: len(self._pending[i]))

    async def _generate(self, request: GenerateRequest, engine: int) -> Completion:
        # Ids are the caller's and may repeat between callers, tries and pipelines that share an engine.
        wire_id = f"{self.client_id}/{next(self._numbers)}"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[engine][wire_id] = future
        try:
            if pictures := heavy(request.items):
                await asyncio.to_thread(leave, pictures, RayBlock.put)
            self._outbox[engine][wire_id] = request
            if not self._flush_scheduled:
                self._flush_scheduled = True
                asyncio.get_running_loop().call_soon(self._flush)
            return replace(await future, request_id=request.request_id, engine=engine)
        except asyncio.CancelledError:
            self._engines[engine].abort.remote(wire_id, self._submitted[engine])
            raise
        finally:
            self._pending[engine].pop(wire_id, None)

    def _flush(self) -> None:
        self._flush_scheduled = False
        for engine, outbox in enumerate(self._outbox):
            self._outbox[engine] = {}
            requests = {wire_id: outbox[wire_id] for wire_id in outbox if wire_id in self._pending[engine]}
            if not requests:  # or all have been given up in the same tick
                continue
            records = Records.of(GenerateRequest, [*requests.values()], request_id=[*requests])
            self._submitted[engine] = self._engines[engine].submit.remote(self.client_id, records)
            poller = self._pollers[engine]
            if poller is None or poller.done():
                self._pollers[engine] = asyncio.get_running_loop().create_task(self._poll(engine))

    async def _poll(self, engine: int) -> None:
        """Fetches results until nothing is pending at this worker."""
        from ray.exceptions import RayActorError, RayError  # half a second, which `roll env check` does without

        pending = self._pending[engine]
        while pending:
            try:
                outcomes: Outcomes = await self._engines[engine].poll.remote(self.client_id)
            except RayError as error:
                failure: Exception = error
                if isinstance(error, RayActorError):
                    failure = EngineUnavailableError(f"engine worker {engine} died: {error}")
                for future in pending.values():
                    if not future.done():
                        future.set_exception(failure)
                pending.clear()
                return
            for completion in outcomes.completions:
                waiting = pending.get(completion.request_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(completion)
            for request_id, failed in outcomes.errors:
                waiting = pending.get(request_id)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(failed)
            # Woken callers run now, so that their next requests are counted before the loop condition is read.
            await asyncio.sleep(0)
