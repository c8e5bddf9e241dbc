"""A trainer's weights on their way out: gathered bucket by bucket on the ranks that send them.

A rank that sends none gives its parts and never has a tensor whole, unless that is how it trains.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.distributed.strategy.training.pieces import Piece, TensorForm, gather, own_rank
from roll.distributed.weights.buckets import allocate, as_tensor, pack
from roll.distributed.weights.contents import BucketOutline, WeightBucket, aligned, outline_of
from roll.utils.collector import paused_collector

_PACKERS = 2
"""Buckets in host memory that are packed at once."""


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket before it has values; the same in every export."""

    outline: BucketOutline
    pieces: tuple[Piece, ...]
    """Gathered for it: those whose first tensor lies in it. The last one's others may lie in the next buckets."""
    device: torch.device


@paused_collector()
def plan_buckets(pieces: Sequence[Piece], bucket_bytes: int) -> list[PlannedBucket]:
    """Buckets of at most ``bucket_bytes`` for tensors, in order; a larger tensor gets a bucket of its own.

    Raises:
        ValueError: no positive number of bytes.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: {bucket_bytes}, expected a positive number of bytes")
    planned: list[PlannedBucket] = []
    named: list[tuple[str, TensorForm]] = []
    begun: list[Piece] = []
    size, device = 0, torch.device("cpu")

    def close() -> None:
        planned.append(PlannedBucket(outline_of(named), tuple(begun), device))

    for piece in pieces:
        for number, (name, form) in enumerate(piece.outline.items()):
            num_bytes = aligned(form.nbytes)
            if named and size + num_bytes > bucket_bytes:
                close()
                named, begun, size = [], [], 0
            if number == 0:
                begun.append(piece)
                device = piece.spreads[0].device
            named.append((name, form))
            size += num_bytes
    if named:
        close()
    return planned


def export(planned: Sequence[PlannedBucket], ranks: Collection[int], *, check: bool) -> Iterator[WeightBucket]:
    """Yields the buckets on some ranks and nothing on the others; all must exhaust the iterator (collective).

    Two buckets in host memory are packed at the same time, each by a thread, while the next ones are gathered; on
    another device one. No more than these are held.
    """
    if own_rank() not in ranks:
        for bucket in planned:
            gather(bucket.pieces, ranks)
        return
    whole: dict[str, Tensor] = {}
    begun: deque[Future[WeightBucket]] = deque()
    for bucket in planned:
        outline = bucket.outline
        data = allocate(outline.num_bytes, bucket.device)
        places = dict(outline.views(as_tensor(data)))
        whole |= gather(bucket.pieces, ranks, into=places)
        tensors = [whole.pop(name) for name in outline.names]
        packing = functools.partial(pack, outline, tensors, data, list(places.values()), check=check)
        if bucket.device.type == "cpu":
            begun.append(_packers().submit(packing))
            if len(begun) < _PACKERS:
                continue
        else:
            begun.append(Future())
            begun[-1].set_result(packing())
        del packing, tensors, places, data
        yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


@functools.cache
def _packers() -> ThreadPoolExecutor:
    """Copies and sums release the interpreter's lock."""
    return ThreadPoolExecutor(_PACKERS, thread_name_prefix="packer")
