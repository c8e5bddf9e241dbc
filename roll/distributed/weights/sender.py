"""The sending end of an update: every bucket once to every receiver, by the route that suits it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import ray
import torch
from torch import Tensor

from roll.distributed.executor.errors import RpcTimeoutError
from roll.distributed.strategy.base import WeightBucket
from roll.distributed.weight_sync import as_tensor, copy_exact, host_bytes, packing_into
from roll.distributed.weights import device_memory
from roll.distributed.weights.collective import BroadcastGroup, invite
from roll.distributed.weights.messages import (
    Broadcast,
    Close,
    DeviceMemory,
    Join,
    Message,
    Open,
    Parcel,
    Payload,
    Place,
    Reply,
    SharedMemory,
    UpdateDigest,
    WeightTransferError,
)
from roll.distributed.weights.routes import Receiver, Route
from roll.distributed.weights.segments import Segment, SegmentPool

_DEATH_NOTICE_S = 5.0
_KEPT_SEGMENTS, _KEPT_BYTES = 4, 1 << 30
"""Shared memory that stays for the next update: that many segments, or more of them while they are small."""


@dataclass(frozen=True)
class WeightOrder:
    """What a trainer is asked to send."""

    payload: Payload
    version: int
    receivers: tuple[Receiver, ...]
    bucket_bytes: int
    """Usual size of a bucket."""
    timeout_s: float
    """How long receivers may take for one answer."""
    keep: bool = False
    """Keep the buckets for a receiver that is replaced when the trainer has moved on."""


@dataclass(frozen=True)
class Delivery:
    """An update that has arrived."""

    digest: str
    """Of what was sent."""
    received: tuple[str, ...]
    """Of what each receiver was given, in their order."""
    num_bytes: int
    seconds: float


class WeightSender:
    """Lives on rank 0 of a trainer from update to update, with its shared memory and its process group.

    Args:
        host: this node's address, at which a process group meets.
    """

    def __init__(self, host: str) -> None:
        self._pool = SegmentPool()
        self._host = host
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []

    def send(self, order: WeightOrder, buckets: Iterable[WeightBucket]) -> Delivery:
        """Sends one update and waits until all receivers use it.

        Args:
            buckets: consumed lazily; the next one is packed while the receivers load the one before.

        Raises:
            WeightTransferError: a receiver refused the update; names it.
            ray.exceptions.RayActorError: a receiver died.
            RpcTimeoutError: receivers gave no answer in time.
        """
        started = time.perf_counter()
        digest, num_bytes = UpdateDigest(), 0
        receivers = order.receivers
        talk = _Talk(self._pool, order)
        try:
            talk.ask(Open(order.payload, order.version, self._pool.ids))
            self._pool.drop_held()
            self._meet(talk)
            with self._shared_packing(order):
                for bucket in buckets:
                    talk.wait()
                    self._pass_on(bucket, talk)
                    digest.add(bucket)
                    num_bytes += len(bucket.data)
            talk.wait()
            replies = talk.ask(Close())
        except BaseException:
            self._leave_group()
            raise
        finally:
            self._pool.trim(_KEPT_SEGMENTS, _KEPT_BYTES)
            if any(receiver.link.route is Route.CUDA_IPC for receiver in receivers):
                device_memory.collect()
        received = tuple(replies[receiver.rank].digest or "" for receiver in receivers)
        return Delivery(digest.hex(), received, num_bytes, time.perf_counter() - started)

    def _shared_packing(self, order: WeightOrder) -> AbstractContextManager[None]:
        shared = any(receiver.link.route is Route.SHARED_MEMORY for receiver in order.receivers)
        if not shared:
            return nullcontext()
        return packing_into(lambda num_bytes: self._pool.allocate(num_bytes, at_least=order.bucket_bytes))

    def _pass_on(self, bucket: WeightBucket, talk: _Talk) -> None:
        """Starts the way of one bucket; ``talk.wait`` ends it. The broadcast, if there is one, is over on return."""
        places: dict[int, Place] = {}
        readers = [talk.name(r) for r in talk.order.receivers if r.link.route is Route.SHARED_MEMORY]
        if readers:
            segment = self._segment_of(bucket)
            self._pool.hand_over(segment, readers)
        outgoing: np.ndarray | Tensor | None = None
        for receiver in talk.order.receivers:
            match receiver.link.route:
                case Route.SHARED_MEMORY:
                    places[receiver.rank] = SharedMemory(segment.id, segment.path)
                case Route.CUDA_IPC:
                    outgoing = _on_gpu(bucket)
                    places[receiver.rank] = DeviceMemory(device_memory.share(outgoing))
                case Route.COLLECTIVE:
                    outgoing = host_bytes(bucket) if receiver.link.device is None else _on_gpu(bucket)
                    places[receiver.rank] = Broadcast()
        for receiver in talk.order.receivers:
            talk.tell(receiver, _parcel(bucket, places[receiver.rank]))
        talk.keep = outgoing
        if any(isinstance(place, Broadcast) for place in places.values()):
            assert self._group is not None and outgoing is not None
            with _naming_the_dead(talk):
                self._group.broadcast(as_tensor(outgoing), talk.check)

    def _segment_of(self, bucket: WeightBucket) -> Segment:
        """Where the bucket lies, or a copy of it when it was packed elsewhere."""
        segment = self._pool.find(bucket.data)
        if segment is None:
            data = self._pool.allocate(len(bucket.data))
            copy_exact(torch.from_numpy(data), as_tensor(bucket.data))
            segment = self._pool.find(data)
        assert segment is not None
        return segment

    def _meet(self, talk: _Talk) -> None:
        """Sees to it that there is a process group with just the receivers that need one."""
        guests = [receiver for receiver in talk.order.receivers if receiver.link.route is Route.COLLECTIVE]
        members = [talk.name(receiver) for receiver in guests]
        if not guests or (self._group is not None and members == self._members):
            return
        self._leave_group()
        backend = "gloo" if guests[0].link.device is None else "nccl"
        invitation, store = invite(self._host, backend, 1 + len(guests), talk.order.timeout_s)
        for rank, receiver in enumerate(guests, start=1):
            talk.tell(receiver, Join(invitation, rank))
        with _naming_the_dead(talk):
            self._group = BroadcastGroup(invitation, 0, store, self._host)
        talk.wait()
        self._members = members

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Talk:
    """The messages of one update, and the replies to come."""

    def __init__(self, pool: SegmentPool, order: WeightOrder) -> None:
        self.order = order
        self.keep: object = None
        """What must stay in memory until the replies are there."""
        self._pool = pool
        self._open: dict[ray.ObjectRef, Receiver] = {}

    @staticmethod
    def name(receiver: Receiver) -> str:
        """Another one after a restart."""
        return str(receiver.handle._actor_id.hex())

    def tell(self, receiver: Receiver, message: Message) -> None:
        self._open[receiver.handle.receive_weights.remote(message, receiver.link)] = receiver

    def ask(self, message: Message) -> dict[int, Reply]:
        """Tells everybody the same and returns their replies by rank."""
        for receiver in self.order.receivers:
            self.tell(receiver, message)
        return self.wait()

    def wait(self) -> dict[int, Reply]:
        """All replies that are due, by rank."""
        deadline = time.monotonic() + self.order.timeout_s
        replies = {}
        while self._open:
            ready, _ = ray.wait(list(self._open), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = list(self._open.values())
                ranks = tuple(receiver.rank for receiver in late)
                call = f"update to version {self.order.version}"
                raise RpcTimeoutError(late[0].role, ranks, call, None, self.order.timeout_s)
            rank, reply = self._take(ready[0])
            replies[rank] = reply
        self.keep = None
        return replies

    def check(self, patience_s: float = 0.0) -> None:
        """Raises the error of a receiver that has failed; a death comes first, which makes others fail too."""
        errors: list[Exception] = []
        waiting = list(self._open)
        for ref in ray.wait(waiting, num_returns=len(waiting), timeout=patience_s)[0] if waiting else []:
            try:
                self._take(ref)
            except (WeightTransferError, ray.exceptions.RayActorError) as error:
                errors.append(error)
        if errors:
            raise next((e for e in errors if isinstance(e, ray.exceptions.RayActorError)), errors[0])

    def _take(self, ref: ray.ObjectRef) -> tuple[int, Reply]:
        receiver = self._open.pop(ref)
        try:
            reply: Reply = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}"
            refusal = WeightTransferError(receiver.role, receiver.rank, self.order.payload, self.order.version, reason)
            refusal.add_note(str(error))
            raise refusal from None
        self._pool.release(reply.released, self.name(receiver))
        return receiver.rank, reply


@contextmanager
def _naming_the_dead(talk: _Talk) -> Iterator[None]:
    """A broken process group says which connection is gone; Ray says, a moment later, whose death it was."""
    try:
        yield
    except RuntimeError:
        talk.check(_DEATH_NOTICE_S)
        raise


def _parcel(bucket: WeightBucket, place: Place) -> Parcel:
    return Parcel(bucket.names, bucket.dtypes, bucket.shapes, bucket.checksum, len(bucket.data), place)


def _on_gpu(bucket: WeightBucket) -> Tensor:
    """The bucket's bytes on this process's GPU, copied only if they lie in host memory."""
    return as_tensor(bucket.data).cuda()
