"""The messages between a sender of weights and its receivers, and buckets that an engine's own processes read.

An update is ``Open``, a ``BucketMessage`` for each bucket, ``Close``; before the first over a new process group,
``Join``. Messages are arguments of Ray's actor calls, the bytes travel separately. The sender waits for replies before
it goes on, so at most a few buckets are under way. Engines that load weights in a process of their own read buckets by
the same places (``Lender``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from roll.distributed.weights.buckets import BucketOutline, WeightBucket
from roll.distributed.weights.segments import SegmentPool, SharedMemory

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
