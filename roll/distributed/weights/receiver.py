"""The receiving end of an update: takes buckets, checks them, and feeds the engine bucket by bucket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from roll.distributed.weights import device_memory
from roll.distributed.weights.buckets import verify
from roll.distributed.weights.collective import BroadcastGroup, join
from roll.distributed.weights.contents import WeightBucket
from roll.distributed.weights.messages import (
    BucketMessage,
    Close,
    DeviceMemory,
    Join,
    Message,
    Open,
    Payload,
    Reply,
    SharedMemory,
    UpdateDigest,
)
from roll.distributed.weights.routes import Link
from roll.distributed.weights.segments import SegmentReader

Load = Callable[[Payload, AsyncIterator[WeightBucket], int], Awaitable[None]]
"""Puts an update of some version into an engine."""


class WeightReceiver:
    """Answers a sender's messages. The engine loads one bucket while the next is on its way.

    Args:
        load: gets each update as it comes in.
        host: the address at which this process can be reached.
    """

    def __init__(self, load: Load, host: str) -> None:
        self._load = load
        self._host = host
        self._segments = SegmentReader()
        self._group: BroadcastGroup | None = None
        self._update: _Update | None = None

    async def handle(self, message: Message, link: Link) -> Reply:
        """Does what the message says.

        Raises:
            Exception: the engine refused the update, or a bucket was damaged. The update is over.
        """
        match message:
            case Open():
                await self.give_up()
                self._segments.forget_all_but(message.segments)
                self._update = _Update(self._load, message)
                holding = self._segments.holding  # before what is released, or a release would be told too late
                return Reply(self._segments.take_released(), holding=holding)
            case Join():
                await asyncio.to_thread(self._join, message)
            case BucketMessage():
                update = self._current()
                async with update.turn(message.number):  # also after a refusal: others wait in the same broadcast
                    bucket = await asyncio.to_thread(self._fetch, message, link)
                    await update.put(bucket)
                    del bucket
            case Close():
                update = self._current()
                async with update.turn(message.number):
                    digest = await update.finish()
                self._update = None
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # a bucket's memory, which others on the device may want
                return Reply(self._segments.take_released(), digest)
        return Reply(self._segments.take_released())

    async def give_up(self) -> None:
        """Ends an update that nobody will finish."""
        update, self._update = self._update, None
        if update is not None:
            await update.cancel()

    def _current(self) -> _Update:
        if self._update is None:
            raise RuntimeError("weights arrived outside an update; expected Open first")
        return self._update

    def _join(self, message: Join) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._group = join(message.invitation, message.rank, self._host)

    def _fetch(self, message: BucketMessage, link: Link) -> WeightBucket:
        data: np.ndarray | Tensor
        match message.place:
            case SharedMemory(segment, file):
                data = self._segments.read(segment, file, message.num_bytes)
            case DeviceMemory(handle):
                assert link.device is not None
                data = device_memory.open_shared(handle, link.device)
            case _:
                data = self._receive(message.num_bytes, link)
        return WeightBucket(message.names, message.dtypes, message.shapes, data, message.checksum)

    def _receive(self, num_bytes: int, link: Link) -> Tensor:
        if self._group is None:
            raise RuntimeError("a broadcast without a process group; expected Join first")
        device = torch.device("cpu") if link.device is None else torch.device("cuda", link.device)
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._group.broadcast(data)
        return data


class _Update:
    """One update on its way into the engine."""

    def __init__(self, load: Load, message: Open) -> None:
        self._digest = UpdateDigest()
        self._queue: asyncio.Queue[WeightBucket | Exception | None] = asyncio.Queue(maxsize=1)
        self._arrived = 0
        self._broken = False
        self._turn = asyncio.Condition()
        self._task = asyncio.ensure_future(load(message.payload, self._buckets(), message.version))

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Waits until the messages before are done with."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._arrived == number)
            try:
                yield
            except BaseException:
                self._broken = True
                raise
            finally:
                self._arrived += 1
                self._turn.notify_all()

    async def put(self, bucket: WeightBucket) -> None:
        """Returns when the bucket is checked and the engine has taken the one before."""
        self._check_whole()
        try:
            await asyncio.to_thread(verify, bucket)
        except Exception as error:
            await self._offer(error)  # so that the engine knows that no more will come
            with contextlib.suppress(Exception):
                await self._task
            raise
        self._digest.add(bucket)
        await self._offer(replace(bucket, checked=True))

    async def finish(self) -> str:
        """Returns when the engine uses the new weights: the digest of all that it was given."""
        self._check_whole()
        await self._offer(None)
        await self._task
        return self._digest.hex()

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError("an earlier bucket of this update was refused")

    async def cancel(self) -> None:
        self._task.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await self._task

    async def _offer(self, item: WeightBucket | Exception | None) -> None:
        putting = asyncio.ensure_future(self._queue.put(item))
        await asyncio.wait({putting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if putting.done() and not self._task.done():
            return
        putting.cancel()
        self._task.result()  # raises what went wrong
        if item is not None:
            raise RuntimeError("the engine stopped reading before the last bucket")

    async def _buckets(self) -> AsyncIterator[WeightBucket]:
        while True:
            match await self._queue.get():
                case None:
                    return
                case Exception() as error:
                    raise error
                case bucket:
                    yield bucket
                    del bucket
