"""Messages between a sender of weights and its receivers, over Ray's actor calls; the bytes are sent separately.

An update is ``Open``, a ``BucketMessage`` each bucket, ``Close``; before the first over a new process group, ``Join``.
The sender waits for replies before it goes on, so at most a few buckets are under way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from roll.distributed.weights.contents import BucketOutline, WeightBucket
from roll.distributed.weights.segments import SharedMemory

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


class UpdateDigest:
    """Names, shapes, dtypes and checksums of all buckets in their order: equal on both ends, or something is lost."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, bucket: WeightBucket) -> None:
        self._hash.update(repr((bucket.outline.key, bucket.checksum)).encode())

    def hex(self) -> str:
        return self._hash.hexdigest()
