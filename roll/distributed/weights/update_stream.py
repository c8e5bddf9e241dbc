"""Taking in what a trainer sends: all of it, checked, before a generator changes anything, if there is room for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Generic, TypeVar

from torch import Tensor

from roll.distributed.weights.buckets import WeightMismatchError, host_bytes, unpack_bucket, verify
from roll.distributed.weights.contents import BucketOutline, WeightBucket
from roll.utils.collector import paused_collector

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
