"""What a sender of weights and its receivers agree on: the places of tensors in a bucket, and the messages.

An update is ``Open``, a ``BucketMessage`` for each bucket, ``Close``; before the first over a new process group,
``Join``. Messages are arguments of Ray's actor calls, the bytes travel separately. The sender waits for replies before
it goes on, so at most a few buckets are under way. Engines that load weights in a process of their own read buckets by
the same places.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll.distributed.weights.segments import SegmentPool, SharedMemory

ALIGNMENT = 64  # bytes; as torch aligns its own tensors, so that a model computes the same with views of a bucket

Contents: TypeAlias = Sequence[tuple[str, str, Sequence[int], int]]
"""(name, dtype name, shape, offset in bytes) of tensors in a block of bytes: plain, for any message format."""

Layout: TypeAlias = Sequence[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int, int]]
"""The same with what a view needs: name, dtype, shape, strides, first element, and the byte at which it ends."""


@dataclass(frozen=True)
class BucketOutline:
    """Tensors of a bucket without their values: the same in every update of a run."""

    names: tuple[str, ...]
    """Hugging Face's."""
    dtypes: tuple[str, ...]
    """torch dtype names without the prefix, e.g. ``float32``."""
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def contents(self) -> Contents:
        """Places of the tensors, in their order, each aligned to ``ALIGNMENT``.

        Raises:
            ValueError: a dtype that torch does not have.
        """
        found, offset = [], 0
        for name, dtype_name, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            found.append((name, dtype_name, shape, offset))
            offset += aligned(_form(dtype_name, shape).num_bytes)
        return found

    @cached_property
    def num_bytes(self) -> int:
        """Length of the bucket."""
        if not self.contents:
            return 0
        _, dtype_name, shape, offset = self.contents[-1]
        return offset + aligned(_form(dtype_name, tuple(shape)).num_bytes)

    def views(self, block: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a bucket, as ``views``."""
        return _cut(block, self._layout)

    @cached_property
    def _layout(self) -> Layout:
        return _layout(self.contents)

    @cached_property
    def key(self) -> str:
        """A digest that stands for the outline in messages."""
        told = repr((self.names, self.dtypes, self.shapes)).encode()
        return hashlib.blake2b(told, digest_size=16).hexdigest()


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's weights in one flat buffer, under Hugging Face names."""

    outline: BucketOutline
    data: np.ndarray | Tensor
    """uint8 [num_bytes], the tensors end to end: an array in host memory, or a tensor on a GPU."""
    checksum: int | None = None
    """``buckets.checksum`` of ``data``, which the receiver compares; ``None`` in an update that is not checked."""
    checked: bool = False
    """This process has compared the checksum."""
    place: SharedMemory | None = None
    """Shared memory in which other processes of this machine find ``data``, as long as something here refers to it."""


class Described(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def outline_of(tensors: Iterable[tuple[str, Described]]) -> BucketOutline:
    """The outline of a bucket with these tensors."""
    described = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    names, dtypes, shapes = zip(*described, strict=True) if described else ((), (), ())
    return BucketOutline(names, dtypes, shapes)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def renamed(contents: Contents, names: Mapping[str, str]) -> Contents:
    """Entries of a bucket that are wanted, under their new names.

    Args:
        names: the tensors that are wanted, and their new names.
    """
    return [(names[name], dtype, shape, offset) for name, dtype, shape, offset in contents if name in names]


def views(block: Tensor, wanted: Contents) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, without a copy.

    Args:
        block: uint8 [num_bytes].

    Raises:
        ValueError: a dtype that torch does not have, or a tensor that ends behind the block.
    """
    return _cut(block, _layout(wanted))


def _layout(contents: Contents) -> Layout:
    found = []
    for name, dtype_name, shape, offset in contents:
        form = _form(dtype_name, tuple(shape))
        start, end = offset // form.dtype.itemsize, offset + form.num_bytes
        found.append((name, form.dtype, form.shape, form.strides, start, end))
    return found


def _cut(block: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    typed: dict[torch.dtype, tuple[Tensor, int]] = {}
    num_bytes = len(block)
    for name, dtype, shape, strides, start, end in layout:
        if end > num_bytes:
            raise ValueError(f"weight bucket: {name} ends at byte {end}, the data has {num_bytes}")
        if dtype not in typed:
            numbers = block[: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
            typed[dtype] = numbers, int(numbers.storage_offset())
        numbers, base = typed[dtype]
        yield name, numbers.as_strided(shape, strides, base + start)


class _Form(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_bytes: int


@functools.cache
def _form(dtype_name: str, shape: tuple[int, ...]) -> _Form:
    """Form of a view of a whole tensor; a model has many tensors, but few forms."""
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight bucket: dtype {dtype_name!r}, expected the name of a torch dtype")
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return _Form(dtype, shape, strides, math.prod(shape) * dtype.itemsize)


Payload: TypeAlias = Literal["weights", "adapter"]
"""A model's weights, or a LoRA adapter alone."""


class WeightTransferError(ValueError):
    """A weight update was damaged or refused by the receiver."""

    def __init__(self, role: str, rank: int, payload: Payload, version: int, reason: str) -> None:
        super().__init__(role, rank, payload, version, reason)
        self.role = role
        self.rank = rank
        self.payload = payload
        self.version = version
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} did not accept {self.payload} of version {self.version}: {self.reason}"


@dataclass(frozen=True)
class Open:
    """An update begins; an earlier one that was not closed is dropped."""

    payload: Payload
    version: int
    segments: tuple[str, ...]
    """Ids of the shared memory that the sender still has; the receiver forgets all other."""
    deltas: bool = False
    """What comes by broadcast is kept, since the next update may tell only what it changes of it."""


@dataclass(frozen=True)
class Invitation:
    """Meeting place of a process group."""

    group: str
    """Its unique name."""
    host: str
    port: int
    backend: Literal["gloo", "nccl"]
    world_size: int
    """The sender, which is rank 0, and the receivers."""
    timeout_s: float


@dataclass(frozen=True)
class Join:
    """Form a process group with the sender."""

    invitation: Invitation
    rank: int


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes are in a block of a GPU that both processes use."""

    handle: tuple[Any, ...]
    """Of ``share_on_gpu``."""


@dataclass(frozen=True)
class Broadcast:
    """The bytes come as a broadcast in the process group that was joined last."""

    counts: tuple[int, ...] | None = None
    """Those of a delta against the same bucket of the update before; ``None``: the whole bucket."""


Place: TypeAlias = SharedMemory | DeviceMemory | Broadcast


@dataclass(frozen=True)
class BucketMessage:
    """One bucket, without its bytes."""

    number: int
    """Its place in the update, from 0: Ray may deliver calls out of order."""
    key: str
    """Of its outline."""
    outline: BucketOutline | None
    """Left out for a receiver that knows it from an earlier update."""
    checksum: int | None
    """``None``: nothing is compared."""
    place: Place


@dataclass(frozen=True)
class Close:
    """All buckets are sent: answer when they are in use."""

    number: int
    """Number of buckets; some may still be on their way."""


Message: TypeAlias = Open | Join | BucketMessage | Close


@dataclass(frozen=True)
class Reply:
    """Answer of a receiver."""

    released: tuple[str, ...] = ()
    """Segments that it no longer reads, one entry per bucket."""
    digest: str | None = None
    """Of the whole update, in the answer to ``Close``."""
    holding: tuple[str, ...] = ()
    """Segments that it still reads, in the answer to ``Open``."""
    outlines: tuple[str, ...] = ()
    """Keys of those that it knows, in the answer to ``Open``."""
    base: str | None = None
    """Digest of the update whose buckets it has kept, in the answer to ``Open``."""


class UpdateDigest:
    """Names, shapes, dtypes and checksums of all buckets in their order: equal on both ends, or something is lost."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, bucket: WeightBucket) -> None:
        self._hash.update(repr((bucket.outline.key, bucket.checksum)).encode())

    def hex(self) -> str:
        return self._hash.hexdigest()


class Lender:
    """Lends buckets where they lie, or as copies where no other process could map that memory."""

    def __init__(self) -> None:
        self._copies = SegmentPool()
        self._lent: dict[str, tuple[set[str], object]] = {}
        """By segment: who reads it, and what keeps its bytes as they are."""
        self.segments: list[str] = []
        """Those of this update."""

    def lend(self, bucket: WeightBucket, readers: Iterable[str]) -> SharedMemory:
        """Place where ``readers`` find a bucket in host memory; its bytes stay until each has given it back."""
        place, data = bucket.place, bucket.data
        assert isinstance(data, np.ndarray)
        if place is None:
            memory = self._copies.allocate(len(data))
            np.copyto(memory, data)
            segment = self._copies.find(memory)
            assert segment is not None
            place = segment.place
            self._copies.hand_over(segment, readers)
        self._lent[place.segment] = set(readers), data
        self.segments.append(place.segment)
        return place

    def take_back(self, segments: Iterable[str], reader: str) -> None:
        """The reader is done with these."""
        segments = tuple(segments)
        self._copies.release(segments, reader)
        for segment in segments:
            if segment in self._lent:
                readers, _ = self._lent[segment]
                readers.discard(reader)
                if not readers:
                    del self._lent[segment]

    def end(self, num_copies: int) -> None:
        """The update is over; keeps at most so many free copies for the next."""
        self.segments = []
        self._copies.trim(num_copies, 0)
