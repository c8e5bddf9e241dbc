"""Taking in what a trainer sends: all of it, checked, before a generator changes anything."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from torch import Tensor

from roll.distributed.strategy.base import WeightBucket
from roll.distributed.weight_sync import host_bytes, unpack_bucket, verify


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
