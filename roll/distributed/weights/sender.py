"""The sending end of an update: routes by placement, and every bucket once to every receiver."""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from torch import Tensor

from roll.distributed.cluster.cluster import death_reason
from roll.distributed.cluster.errors import RpcTimeoutError
from roll.distributed.cluster.resources import PlacementPlan, WorkerSlot
from roll.distributed.weights.buckets import (
    BucketOutline,
    UpdateDigest,
    WeightBucket,
    as_tensor,
    host_bytes,
    packing_into,
)
from roll.distributed.weights.collective import BroadcastGroup, invite
from roll.distributed.weights.deltas import delta_between
from roll.distributed.weights.messages import (
    Broadcast,
    BucketMessage,
    Close,
    DeviceMemory,
    Join,
    Message,
    Open,
    Payload,
    Place,
    Reply,
    WeightTransferError,
)
from roll.distributed.weights.segments import Segment, SegmentPool, collect_on_gpu, plain_gpu_memory, share_on_gpu


class Route(enum.Enum):
    """A way for bytes."""

    SHARED_MEMORY = "shared memory"
    """Same node, and one of the two computes on the CPU: host memory that both processes map."""
    CUDA_IPC = "CUDA IPC"
    """Same GPU: the receiver opens the sender's device memory."""
    COLLECTIVE = "collective"
    """Other nodes or other GPUs: a broadcast, by nccl between GPUs and by gloo otherwise."""


@dataclass(frozen=True)
class Link:
    """The way from a sender to one receiver."""

    route: Route
    device: int | None
    """Index of the GPU that the receiver gets the bytes on, among those it sees; ``None`` for host memory."""


@dataclass(frozen=True)
class Receiver:
    """A worker that takes weights."""

    role: str
    rank: int
    link: Link
    handle: Any
    """Its Ray actor, with a method ``receive_weights(message, link) -> Reply``."""


def plan_routes(
    plan: PlacementPlan, trainers: Sequence[WorkerSlot], receivers: Sequence[WorkerSlot], *, deltas: bool = False
) -> dict[int, dict[int, Link]]:
    """The nearest trainer for every receiver: on its device, else on its node, else any.

    One serves all receivers of a node that it reaches alike; those on nodes without a trainer are left to one that
    serves others already, so that few ranks must hold whole tensors.

    Args:
        deltas: updates may be deltas, which are made and applied in host memory.

    Returns:
        For the rank of every trainer that sends, its links by the ranks of its receivers.
    """
    routes: dict[int, dict[int, Link]] = {}
    far = []
    for receiver in receivers:
        near = [trainer for trainer in trainers if trainer.node == receiver.node]
        if not near:
            far.append(receiver)
            continue
        links = {trainer.rank: plan_link(plan, trainer, receiver, deltas=deltas) for trainer in near}
        same_device = [rank for rank, link in links.items() if link.route is Route.CUDA_IPC]
        rank = min(same_device or links)
        routes.setdefault(rank, {})[receiver.rank] = links[rank]
    first = min(routes, default=trainers[0].rank)
    sender = next(trainer for trainer in trainers if trainer.rank == first)
    for receiver in far:
        routes.setdefault(first, {})[receiver.rank] = plan_link(plan, sender, receiver, deltas=deltas)
    return routes


def plan_link(plan: PlacementPlan, sender: WorkerSlot, receiver: WorkerSlot, *, deltas: bool = False) -> Link:
    """The fastest way between two workers."""
    same_node, on_gpus = sender.node == receiver.node, _has_gpu(plan, sender) and _has_gpu(plan, receiver)
    if on_gpus and same_node and sender.devices[0] in receiver.devices:
        return Link(Route.CUDA_IPC, receiver.devices.index(sender.devices[0]))
    if on_gpus and not deltas:
        return Link(Route.COLLECTIVE, 0)
    return Link(Route.SHARED_MEMORY if same_node else Route.COLLECTIVE, None)


def _has_gpu(plan: PlacementPlan, slot: WorkerSlot) -> bool:
    return bool(slot.devices) and plan.nodes[slot.node].kind == "gpu"


_DEATH_NOTICE_S = 5.0
_UNDER_WAY = 2
"""Buckets that may be without a reply while the next is packed: the receivers' answers take as long as their work."""


@dataclass(frozen=True)
class TransferRequest:
    """A request to a trainer to send weights."""

    payload: Payload
    version: int
    receivers: Mapping[int, tuple[Receiver, ...]]
    """By the rank that sends to them. The others give it their parts of the weights."""
    bucket_bytes: int
    """Usual size of a bucket."""
    timeout_s: float
    """Seconds that receivers may take for one answer."""
    check: bool
    """Compare the bytes of every bucket at both ends."""
    keeper: int | None = None
    """Rank that keeps the buckets for a receiver that is replaced when the trainer has moved on, or for deltas."""
    deltas: bool = False
    """The keeper broadcasts only what differs from the last update of this role and kind, if that is shorter."""

    @property
    def role(self) -> str:
        """Of all receivers."""
        return next(iter(self.receivers.values()))[0].role

    @property
    def kept_as(self) -> str:
        """Name under which the keeper reads its buckets; no receiver's."""
        return f"kept {self.payload} of {self.role}"


@dataclass(frozen=True)
class TransferResult:
    """An update that has arrived, from one rank."""

    digest: str
    """Of what was sent."""
    received: dict[int, str]
    """Of what each receiver was given, by rank."""
    lost: dict[int, str]
    """Receivers that died meanwhile, by rank, and how; the others have the update all the same."""
    num_bytes: int
    seconds: float
    broadcast_bytes: int = 0
    """Sent by broadcast."""
    saved_bytes: int = 0
    """By which deltas were shorter than what they stand for."""


class WeightSender:
    """Lives on a trainer's rank from update to update, with its shared memory and its process groups.

    Args:
        host: this node's address, at which a process group meets.
    """

    def __init__(self, rank: int, host: str) -> None:
        self._rank = rank
        self._pool = SegmentPool()
        self._host = host
        self._groups: dict[str, tuple[list[str], BroadcastGroup]] = {}
        """By the receivers' role, with those who are in it."""
        self._kept: dict[str, tuple[str, dict[str, WeightBucket]]] = {}
        """Digest and buckets of the last update of each role's workers and kind, see ``TransferRequest.keeper``."""

    def kept(self, order: TransferRequest) -> list[WeightBucket]:
        """The buckets of the last update of this role and kind, which this rank keeps."""
        _, buckets = self._kept[order.kept_as]
        return list(buckets.values())

    def forget(self, order: TransferRequest) -> None:
        """Gives up what is kept of the last update of this role and kind, if anything."""
        self._kept.pop(order.kept_as, None)
        self._pool.release(self._pool.ids, order.kept_as)

    def send(self, order: TransferRequest, buckets: Iterable[WeightBucket]) -> TransferResult:
        """Sends one update and waits until all receivers of this rank use it.

        Args:
            buckets: consumed lazily; the next one is packed while the receivers load the one before.

        Raises:
            WeightTransferError: a receiver refused the update; names it.
            ray.exceptions.RayActorError: a receiver of the process group died, which breaks it for all.
            RpcTimeoutError: receivers gave no answer in time.
        """
        started = time.perf_counter()
        digest, num_buckets, num_bytes = UpdateDigest(), 0, 0
        transfer = _Transfer(self._pool, order, order.receivers[self._rank], keeps=order.keeper == self._rank)
        try:
            self._pool.abandon_unwritten()
            transfer.tell_all(Open(order.payload, order.version, self._pool.ids, order.deltas))
            into_pool = packing_into(lambda num_bytes: self._pool.allocate(num_bytes, at_least=order.bucket_bytes))
            with into_pool, plain_gpu_memory() if self._shares_a_gpu(order) else contextlib.nullcontext():
                buckets = iter(buckets)
                bucket = next(buckets, None)  # packed while the receivers get ready
                self._meet(transfer)
                while bucket is not None:
                    transfer.wait(_UNDER_WAY - 1)
                    self._pass_on(bucket, num_buckets, transfer)
                    digest.add(bucket)
                    num_buckets, num_bytes = num_buckets + 1, num_bytes + len(bucket.data)
                    bucket = next(buckets, None)
            transfer.tell_all(Close(num_buckets))
            transfer.wait()
            replies = transfer.answers()
        except BaseException:
            self._leave_group(order.role)
            if transfer.keeps:
                self.forget(order)
            raise
        finally:
            self._pool.trim()
            if self._shares_a_gpu(order):
                collect_on_gpu()
        if transfer.keeps:
            self._kept[order.kept_as] = digest.hex(), transfer.kept
        received = {rank: reply.digest or "" for rank, reply in replies.items() if rank not in transfer.lost}
        seconds, sent = time.perf_counter() - started, (transfer.broadcast_bytes, transfer.saved_bytes)
        return TransferResult(digest.hex(), received, transfer.lost, num_bytes, seconds, *sent)

    def _shares_a_gpu(self, order: TransferRequest) -> bool:
        return any(receiver.link.route is Route.CUDA_IPC for receiver in order.receivers[self._rank])

    def _pass_on(self, bucket: WeightBucket, number: int, transfer: _Transfer) -> None:
        """Starts the way of one bucket; ``transfer.wait`` ends it. A broadcast is over on return."""
        links = [receiver.link for receiver in transfer.receivers]
        on_gpu = as_tensor(bucket.data).cuda() if any(link.device is not None for link in links) else None
        in_host = transfer.keeps or any(link.device is None for link in links)
        segment = self._segment_of(bucket) if in_host else self._pool.find(bucket.data)
        if segment is not None:
            readers = [_name(r) for r in transfer.receivers if r.link.route is Route.SHARED_MEMORY]
            self._pool.hand_over(segment, [*readers, transfer.order.kept_as] if transfer.keeps else readers)
        if transfer.keeps:
            assert segment is not None
            transfer.kept[bucket.outline.key] = replace(bucket, data=segment.array[: len(bucket.data)])
        broadcast, outgoing = Broadcast(), on_gpu
        if any(link == Link(Route.COLLECTIVE, None) for link in links):
            assert segment is not None
            broadcast, outgoing = self._to_broadcast(bucket.outline, segment.array[: len(bucket.data)], transfer)
        for receiver in transfer.receivers:
            place: Place
            match receiver.link.route:
                case Route.SHARED_MEMORY:
                    assert segment is not None
                    place = segment.place
                case Route.CUDA_IPC:
                    assert on_gpu is not None
                    place = DeviceMemory(share_on_gpu(on_gpu))
                case Route.COLLECTIVE:
                    place = broadcast
            outline = None if bucket.outline.key in transfer.known[receiver.rank] else bucket.outline
            transfer.tell(receiver, BucketMessage(number, bucket.outline.key, outline, bucket.checksum, place))
        transfer.passed_on((on_gpu, outgoing))
        if outgoing is not None and any(link.route is Route.COLLECTIVE for link in links):
            _, group = self._groups[transfer.order.role]
            with _naming_the_dead(transfer):
                group.broadcast(outgoing, transfer.check)

    def _to_broadcast(
        self, outline: BucketOutline, data: np.ndarray, transfer: _Transfer
    ) -> tuple[Broadcast, Tensor | None]:
        """What goes by broadcast for a bucket: its bytes, or what changes of those that all have, if anything."""
        base = transfer.base.pop(outline.key, None)
        delta = None if base is None else delta_between(outline, host_bytes(base), data)
        if base is not None and transfer.keeps and (before := self._pool.find(base.data)) is not None:
            self._pool.release([before.id], transfer.order.kept_as)
        counts, sent = delta or (None, data)
        transfer.broadcast_bytes += len(sent)
        transfer.saved_bytes += len(data) - len(sent)
        return Broadcast(counts), as_tensor(sent) if len(sent) else None

    def _segment_of(self, bucket: WeightBucket) -> Segment:
        """The segment in which the bucket lies, or a copy of it when it was packed elsewhere."""
        segment = self._pool.find(bucket.data)
        if segment is None:
            data = self._pool.allocate(len(bucket.data))
            as_tensor(data).copy_(as_tensor(bucket.data))
            segment = self._pool.find(data)
        assert segment is not None
        return segment

    def _meet(self, transfer: _Transfer) -> None:
        """Hears that the receivers are ready; sees to it that those that need a process group have one."""
        opened = transfer.answers()
        self._pool.reclaim({_name(r): opened[r.rank].holding for r in transfer.receivers})
        transfer.known = {rank: frozenset(reply.outlines) for rank, reply in opened.items()}
        guests = [receiver for receiver in transfer.receivers if receiver.link.route is Route.COLLECTIVE]
        digest, buckets = self._kept.get(transfer.order.kept_as, (None, {}))
        if transfer.order.deltas and digest and {opened[guest.rank].base for guest in guests} == {digest}:
            transfer.base = dict(buckets)
        elif transfer.keeps:
            self.forget(transfer.order)
        members = [_actor(receiver) for receiver in guests]
        if not guests or (transfer.order.role in self._groups and members == self._groups[transfer.order.role][0]):
            return
        self._leave_group(transfer.order.role)
        backend = "gloo" if guests[0].link.device is None else "nccl"
        invitation, store = invite(self._host, backend, 1 + len(guests), transfer.order.timeout_s)
        for rank, receiver in enumerate(guests, start=1):
            transfer.tell(receiver, Join(invitation, rank))
        with _naming_the_dead(transfer):
            self._groups[transfer.order.role] = members, BroadcastGroup(invitation, 0, store, self._host)
        transfer.answers()

    def _leave_group(self, role: str) -> None:
        if role in self._groups:
            _, group = self._groups.pop(role)
            group.close()


class _Transfer:
    """The messages of one update, and the replies to come."""

    def __init__(
        self, pool: SegmentPool, order: TransferRequest, receivers: Sequence[Receiver], *, keeps: bool
    ) -> None:
        self.order = order
        self.keeps = keeps
        """This rank keeps the buckets."""
        self.kept: dict[str, WeightBucket] = {}
        """Those so far, by the key of their outlines."""
        self.base: dict[str, WeightBucket] = {}
        """Buckets of the update before that deltas start from, if all receivers have them too."""
        self.broadcast_bytes = self.saved_bytes = 0
        self._receivers = receivers
        self.known: dict[int, frozenset[str]] = {}
        """Keys of the outlines that each receiver has from earlier updates, by rank."""
        self.lost: dict[int, str] = {}
        """Receivers that have died, by rank, and how."""
        self._pool = pool
        self._due: dict[ray.ObjectRef, Receiver] = {}
        self._told: list[ray.ObjectRef] = []
        """The messages since the last ``passed_on``."""
        self._under_way: deque[tuple[list[ray.ObjectRef], object]] = deque()
        """Of each bucket, oldest first: its messages, and what must stay in memory until they are answered."""

    @property
    def receivers(self) -> list[Receiver]:
        """Those that live, as far as is known."""
        return [receiver for receiver in self._receivers if receiver.rank not in self.lost]

    def tell(self, receiver: Receiver, message: Message) -> None:
        ref = receiver.handle.receive_weights.remote(message, receiver.link)
        self._due[ref] = receiver
        self._told.append(ref)

    def passed_on(self, keep: object) -> None:
        """The last messages were those of one bucket."""
        self._under_way.append((self._told, keep))
        self._told = []

    def tell_all(self, message: Message) -> None:
        for receiver in self.receivers:
            self.tell(receiver, message)

    def answers(self) -> dict[int, Reply]:
        """The replies to what was told last, by rank."""
        told, self._told = self._told, []
        return self._replies(told)

    def wait(self, at_most: int = 0) -> None:
        """Returns when no more than so many buckets are without a reply."""
        while len(self._under_way) > at_most:
            self._replies(self._under_way[0][0])
            self._under_way.popleft()

    def _replies(self, refs: list[ray.ObjectRef]) -> dict[int, Reply]:
        deadline = time.monotonic() + self.order.timeout_s
        replies = {}
        while late := [ref for ref in refs if ref in self._due]:
            ready, _ = ray.wait(late, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                receivers = [self._due[ref] for ref in late]
                ranks = tuple(receiver.rank for receiver in receivers)
                call = f"update to version {self.order.version}"
                raise RpcTimeoutError(receivers[0].role, ranks, call, None, self.order.timeout_s)
            receiver, reply = self._take(ready[0])
            if reply is not None:
                replies[receiver.rank] = reply
        return replies

    def check(self, patience_s: float = 0.0) -> None:
        """Raises the error of a receiver that has failed; a death comes first, which makes others fail too."""
        errors: list[Exception] = []
        waiting = list(self._due)
        for ref in ray.wait(waiting, num_returns=len(waiting), timeout=patience_s)[0] if waiting else []:
            try:
                self._take(ref)
            except (WeightTransferError, ray.exceptions.RayActorError) as error:
                errors.append(error)
        if errors:
            raise next((e for e in errors if isinstance(e, ray.exceptions.RayActorError)), errors[0])

    def _take(self, ref: ray.ObjectRef) -> tuple[Receiver, Reply | None]:
        """The answer; none of a receiver that has died, if the others can do without it."""
        receiver = self._due.pop(ref)
        try:
            reply: Reply = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            if receiver.link.route is Route.COLLECTIVE:
                raise
            self.lost.setdefault(receiver.rank, death_reason(error))
            self._pool.reclaim({_name(receiver): ()})
            return receiver, None
        except ray.exceptions.RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}"
            refusal = WeightTransferError(receiver.role, receiver.rank, self.order.payload, self.order.version, reason)
            refusal.add_note(str(error))
            raise refusal from None
        self._pool.release(reply.released, _name(receiver))
        return receiver, reply


@contextlib.contextmanager
def _naming_the_dead(transfer: _Transfer) -> Iterator[None]:
    """A broken process group says which connection is gone; Ray says, a moment later, whose death it was."""
    try:
        yield
    except RuntimeError:
        transfer.check(_DEATH_NOTICE_S)
        raise


def _name(receiver: Receiver) -> str:
    """The same after a restart."""
    return f"{receiver.role}/{receiver.rank}"


def _actor(receiver: Receiver) -> str:
    """Another one after a restart."""
    return str(receiver.handle._actor_id.hex())
