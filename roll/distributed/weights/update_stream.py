"""Taking in what a trainer sends: all of it, checked, before a generator changes anything, if there is room for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Generic, TypeVar

from torch import Tensor

from roll.distributed.weights.buckets import WeightMismatchError, host_bytes, unpack_bucket, verify
from roll.distributed.weights.contents import WeightBucket

PlanT = TypeVar("PlanT")


class UpdateStream(Generic[PlanT]):
    """An engine's updates of all weights, bucket by bucket.

    The first one, and all that come through host memory, are received as a whole and checked before the first bucket
    is handed out. Later ones that lie on a device are handed out as they come, as no device has room for a second
    model: they must consist of what the first one did, and what they do not is found only when it is missed.

    Args:
        check: checks a whole update; returns what the engine wants to know for loading it, and any other like it.
        from_device: updates on a device may be handed out as they come.
    """

    def __init__(self, check: Callable[[Mapping[str, Tensor]], PlanT], *, from_device: bool = True) -> None:
        self._check = check
        self._from_device = from_device
        self._plan: PlanT | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    async def open(self, buckets: AsyncIterator[WeightBucket]) -> tuple[AsyncIterator[WeightBucket], PlanT]:
        """The buckets to load, and what ``check`` returned for them.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not the model's. Also while the buckets are read.
        """
        first = await anext(buckets, None)
        if self._plan is not None and first is not None and on_device(first):
            return self._as_they_come(first, buckets), self._plan
        received, tensors = await receive(_joined(first, buckets))
        plan = await asyncio.to_thread(self._check, tensors)
        if self._from_device:
            self._plan = plan
            self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return _handed_over(received), plan

    async def _as_they_come(
        self, first: WeightBucket, rest: AsyncIterator[WeightBucket]
    ) -> AsyncIterator[WeightBucket]:
        missing, buckets = dict(self._shapes), _joined(first, rest)
        del first
        async for bucket in buckets:
            if not bucket.checked:
                await asyncio.to_thread(verify, bucket)
            for name, shape in zip(bucket.names, bucket.shapes, strict=True):
                if (expected := missing.pop(name, None)) != shape:
                    raise WeightMismatchError(f"{name} has shape {shape}, expected {expected}, as in the first update")
            yield bucket
        if missing:
            raise WeightMismatchError(f"missing {', '.join(missing)}, which the first update had")


def on_device(bucket: WeightBucket) -> bool:
    """Whether the bytes lie on an accelerator."""
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


async def receive(buckets: AsyncIterator[WeightBucket]) -> tuple[list[WeightBucket], dict[str, Tensor]]:
    """All buckets, in host memory, and their tensors by name, which are views of them.

    Raises:
        WeightChecksumError: a bucket was damaged.
        ValueError: a bucket's description does not fit its data.
    """
    received: list[WeightBucket] = []
    tensors: dict[str, Tensor] = {}
    async for bucket in buckets:
        # Checksums and copies of a large model take seconds, in which this loop must go on serving requests.
        on_host, named = await asyncio.to_thread(_take, bucket)
        received.append(on_host)
        tensors.update(named)
    return received, tensors


def _take(bucket: WeightBucket) -> tuple[WeightBucket, list[tuple[str, Tensor]]]:
    if not bucket.checked:
        verify(bucket)
    # The device has no room for a second model.
    on_host = dataclasses.replace(bucket, data=host_bytes(bucket), checked=True)
    return on_host, list(unpack_bucket(on_host))
