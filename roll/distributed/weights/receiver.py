"""The receiving end of an update: takes buckets, checks all of them if there is room, feeds the engine or a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.distributed.weights.buckets import (
    BucketOutline,
    UpdateDigest,
    WeightBucket,
    WeightMismatchError,
    as_tensor,
    host_bytes,
    unpack_bucket,
    verify,
)
from roll.distributed.weights.collective import BroadcastGroup, join
from roll.distributed.weights.deltas import apply_delta, delta_bytes
from roll.distributed.weights.messages import (
    Broadcast,
    BucketMessage,
    Close,
    DeviceMemory,
    Join,
    Message,
    Open,
    Payload,
    Reply,
)
from roll.distributed.weights.segments import SegmentPool, SegmentReader, SharedMemory, open_on_gpu
from roll.distributed.weights.sender import Link, Route
from roll.models.loading import checkpoint_shapes, to_hf_weights
from roll.utils.memory import paused_collector
from roll.utils.progress import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Load = Callable[[Payload, AsyncIterator[WeightBucket], int], Awaitable[None]]
"""Puts an update of some version into an engine."""

_ENGINE = "the engine"


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
        self._own = SegmentPool()
        """Memory for what comes by broadcast, in which an engine's processes can read it too."""
        self._own_segments = SegmentReader()
        self._outlines: dict[Payload, dict[str, BucketOutline]] = {}
        """Of the buckets of the last updates, by key."""
        self._kept: tuple[str, dict[str, WeightBucket]] | None = None
        """Digest and buckets of the last update, if the next may be a delta and none has begun."""
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
                keeps = message.deltas and link.route is Route.COLLECTIVE
                base, buckets = (keeps and self._kept) or (None, {})
                self._kept, self._update = None, _Update(self._load, message, buckets, keeps=keeps)
                del buckets
                holding = self._segments.holding  # before what is released, or a release would be told too late
                known = tuple(key for outlines in self._outlines.values() for key in outlines)
                return Reply(self._segments.take_released(), holding=holding, outlines=known, base=base)
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
                self._outlines[update.payload] = update.outlines
                if update.keeps:
                    self._kept = digest, update.kept
                self._update = None
                self._trim()
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
        update = self._current()
        outline = update.outlines[message.key] = message.outline or self._known(message.key)
        base = update.base.pop(message.key, None)
        data: np.ndarray | Tensor
        place: SharedMemory | None = None
        match message.place:
            case SharedMemory() as place:
                data = self._segments.read(place, outline.num_bytes)
            case DeviceMemory(handle):
                assert link.device is not None
                data = open_on_gpu(handle, link.device)
            case _ if link.device is not None:
                data = torch.empty(outline.num_bytes, dtype=torch.uint8, device=torch.device("cuda", link.device))
                self._receive(data)
            case Broadcast(counts) if counts is not None:
                if base is None:
                    raise RuntimeError("changes of a bucket that is not here; expected the whole one")
                data, place = self._changed(base, counts)
            case _:
                data, place = self._in_host_memory(outline.num_bytes, lambda data: self._receive(as_tensor(data)))
        bucket = WeightBucket(outline, data, message.checksum, place=place)
        if update.keeps:
            update.kept[message.key] = bucket
        return bucket

    def _known(self, key: str) -> BucketOutline:
        for outlines in self._outlines.values():
            if key in outlines:
                return outlines[key]
        raise RuntimeError("a bucket without its outline; expected it in the first update that has it")

    def _receive(self, data: Tensor) -> None:
        if self._group is None:
            raise RuntimeError("a broadcast without a process group; expected Join first")
        self._group.broadcast(data)

    def _changed(self, base: WeightBucket, counts: tuple[int, ...]) -> tuple[np.ndarray, SharedMemory | None]:
        """Memory with a bucket of which changes come: that of the one before if there are none."""
        old, outline = host_bytes(base), base.outline
        if not any(counts):
            return old, base.place
        delta = np.empty(delta_bytes(outline, counts), dtype=np.uint8)
        self._receive(as_tensor(delta))
        return self._in_host_memory(len(old), lambda data: apply_delta(outline, old, counts, delta, data))

    def _in_host_memory(self, num_bytes: int, write: Callable[[np.ndarray], None]) -> tuple[np.ndarray, SharedMemory]:
        """Memory in which an engine's processes read what ``write`` puts there."""
        self._own.release(self._own_segments.take_released(), _ENGINE)
        data = self._own.allocate(num_bytes)
        write(data)
        segment = self._own.find(data)
        assert segment is not None
        self._own.hand_over(segment, [_ENGINE])
        return self._own_segments.read(segment.place, num_bytes), segment.place

    def _trim(self) -> None:
        """Gives up most of the memory that the engine does not use after an update."""
        self._own.release(self._own_segments.take_released(), _ENGINE)
        self._own.trim()
        self._own_segments.forget_all_but(self._own.ids)


class _Update:
    """One update on its way into the engine."""

    def __init__(self, load: Load, message: Open, base: dict[str, WeightBucket], *, keeps: bool) -> None:
        self.payload = message.payload
        self.outlines: dict[str, BucketOutline] = {}
        """Of its buckets, by key."""
        self.base = base
        """Buckets of the update before that may be needed for those that are to come, by key."""
        self.keeps = keeps
        """Its buckets may be needed for the next."""
        self.kept: dict[str, WeightBucket] = {}
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
        advance()
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


PlanT = TypeVar("PlanT")


class UpdateStream(Generic[PlanT]):
    """An engine's updates of all weights, bucket by bucket.

    The first one, and all that come through host memory, are received as a whole before the first bucket is handed
    out; the first one, and any of other names and shapes than the one before, is checked. Later ones that lie on a
    device are handed out as they come, as no device has room for a second model: they must consist of what the first
    one did, and what they do not is found only when it is missed.

    Args:
        check: checks a whole update; returns what the engine wants to know for loading it, and any other like it.
        from_device: updates on a device may be handed out as they come.
    """

    def __init__(self, check: Callable[[Mapping[str, Tensor]], PlanT], *, from_device: bool = True) -> None:
        self._check = check
        self._from_device = from_device
        self._plan: PlanT | None = None
        self._outlines: list[BucketOutline] = []
        """Of the update that was checked last."""

    async def open(self, buckets: AsyncIterator[WeightBucket]) -> tuple[AsyncIterator[WeightBucket], PlanT]:
        """The buckets to load, and what ``check`` returned for them.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not the model's. Also while the buckets are read.
        """
        first = await anext(buckets, None)
        if self._from_device and self._plan is not None and first is not None and on_device(first):
            return self._as_they_come(first, buckets), self._plan
        received = await receive(_joined(first, buckets))
        outlines = [bucket.outline for bucket in received]
        if self._plan is None or outlines != self._outlines:
            self._plan = await asyncio.to_thread(lambda: self._check(tensors_of(received)))
            self._outlines = outlines
        return _handed_over(received), self._plan

    async def _as_they_come(
        self, first: WeightBucket, rest: AsyncIterator[WeightBucket]
    ) -> AsyncIterator[WeightBucket]:
        missing: dict[str, tuple[int, ...]] = {}
        for outline in self._outlines:
            missing.update(zip(outline.names, outline.shapes, strict=True))
        buckets = _joined(first, rest)
        del first
        async for bucket in buckets:
            if not bucket.checked:
                await asyncio.to_thread(verify, bucket)
            for name, shape in zip(bucket.outline.names, bucket.outline.shapes, strict=True):
                if (expected := missing.pop(name, None)) != shape:
                    raise WeightMismatchError(f"{name} has shape {shape}, expected {expected}, as in the first update")
            yield bucket
        if missing:
            raise WeightMismatchError(f"missing {', '.join(missing)}, which the first update had")


def on_device(bucket: WeightBucket) -> bool:
    """Tells whether the bytes lie on an accelerator."""
    return isinstance(bucket.data, Tensor) and bucket.data.device.type != "cpu"


async def _joined(first: WeightBucket | None, rest: AsyncIterator[WeightBucket]) -> AsyncIterator[WeightBucket]:
    bucket = first
    del first
    while bucket is not None:
        yield bucket
        bucket = None  # before the next one comes
        bucket = await anext(rest, None)


async def _handed_over(received: list[WeightBucket]) -> AsyncIterator[WeightBucket]:
    while received:
        yield received.pop(0)


async def receive(buckets: AsyncIterator[WeightBucket]) -> list[WeightBucket]:
    """All buckets, in host memory.

    Raises:
        WeightChecksumError: a bucket was damaged.
    """
    # Checksums and copies of a large model take seconds, in which this loop must go on serving requests.
    return [await asyncio.to_thread(_take, bucket) async for bucket in buckets]


@paused_collector()
def tensors_of(buckets: Iterable[WeightBucket]) -> dict[str, Tensor]:
    """Tensors by name, views of buckets.

    Raises:
        ValueError: a bucket's description does not fit its data.
    """
    return {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}


def _take(bucket: WeightBucket) -> WeightBucket:
    if not bucket.checked:
        verify(bucket)
    # The device has no room for a second model.
    return dataclasses.replace(bucket, data=host_bytes(bucket), checked=True)


class WeightUpdate:
    """The way of a model's weights from tensors of certain names and shapes: found once, then used for every update.

    Checkpoint names and shapes are not always the model's own (transformers fuses the experts of a layer into one
    parameter, for example); its own conversion table says which elements go where.

    Args:
        model: the receiver, unchanged until ``apply``.
        tensors: all parameters by Hugging Face name; tied weights under one of their names, or under several that
            agree. Buffers are optional.

    Raises:
        WeightMismatchError: unknown or missing names, wrong shapes, tied names that differ; all are listed.
    """

    @paused_collector()
    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        self._problems: list[str] = []
        own = dict(model.named_parameters(remove_duplicate=False))
        self.parts = checkpoint_shapes(model, own)
        """For each parameter, the tensors of a checkpoint that make it up."""
        twins: dict[int, list[str]] = {}
        for name, parameter in own.items():
            twins.setdefault(id(parameter), []).append(name)
        self._sources = {names[0]: self._source(names, tensors) for names in twins.values()}
        buffers = {name: buffer.shape for name, buffer in model.named_buffers()}
        self._buffers = [name for name in buffers if name in tensors]
        self._check_shapes(tensors, buffers)
        if self._problems:
            shown, rest = self._problems[:8], len(self._problems) - 8
            more = f"; and {rest} more" if rest > 0 else ""
            raise WeightMismatchError(f"weight update refused, the old weights stay: {'; '.join(shown)}{more}")

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives the parameters their new values, across dtypes and devices.

        Where neither changes, the tensors themselves become the model's, without a copy: they must stay as they are
        for as long as the model has them, and nothing may write to the model's parameters in place.

        Args:
            tensors: of the same names and shapes.
        """
        targets = dict(self._model.named_parameters())
        for name, source in self._sources.items():
            target = targets[name]
            if list(source) == [name] and self.parts[name][name] == target.shape:
                target.data = tensors[source[name]].to(target.device, target.dtype)
                continue
            # Converting the element numbers shows where every element of every part belongs.
            numbers = torch.arange(target.numel(), device=target.device).view(target.shape)
            whole = torch.empty_like(target)
            for part, index in to_hf_weights(self._model, name, numbers).items():
                values = tensors[source[part]].to(target.device, target.dtype)
                whole.view(-1).index_copy_(0, index.reshape(-1), values.reshape(-1))
            target.data = whole
        buffers = dict(self._model.named_buffers()) if self._buffers else {}
        for name in self._buffers:
            buffers[name].copy_(tensors[name])

    def _source(self, names: list[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Names of the tensors that make up one parameter, given the names it goes by (several when tied)."""
        complete = [name for name in names if all(part in tensors for part in self.parts[name])]
        if not complete:
            self._problems += [f"missing name {part}" for part in self.parts[names[0]] if part not in tensors]
            return {}
        sources = [list(self.parts[name]) for name in complete]
        for name, source in zip(complete[1:], sources[1:], strict=True):
            if not all(tensors[a].equal(tensors[b]) for a, b in zip(sources[0], source, strict=True)):
                self._problems.append(f"{name} is tied to {complete[0]} in this model, but came with other values")
        # Under the model's own name of the parameter, whichever of its twins' names the values come by.
        return dict(zip(self.parts[names[0]], sources[0], strict=True))

    def _check_shapes(self, tensors: Mapping[str, Tensor], buffers: Mapping[str, torch.Size]) -> None:
        expected = {part: shape for group in self.parts.values() for part, shape in group.items()} | dict(buffers)
        for name, tensor in tensors.items():
            if (shape := expected.get(name)) is None:
                self._problems.append(f"unknown name {name}")
            elif tensor.shape != shape:
                self._problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
