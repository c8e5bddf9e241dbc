"""Routes of buckets: the sender to each receiver, and the way they take, by where both sit."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.distributed.cluster.resources import PlacementPlan, WorkerSlot


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
    plan: PlacementPlan, trainers: Sequence[WorkerSlot], receivers: Sequence[WorkerSlot]
) -> dict[int, dict[int, Link]]:
    """The nearest trainer for every receiver: on its device, else on its node, else any.

    One serves all receivers of a node that it reaches alike; those on nodes without a trainer are left to one that
    serves others already, so that few ranks must hold whole tensors.

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
        links = {trainer.rank: plan_link(plan, trainer, receiver) for trainer in near}
        same_device = [rank for rank, link in links.items() if link.route is Route.CUDA_IPC]
        rank = min(same_device or links)
        routes.setdefault(rank, {})[receiver.rank] = links[rank]
    first = min(routes, default=trainers[0].rank)
    sender = next(trainer for trainer in trainers if trainer.rank == first)
    for receiver in far:
        routes.setdefault(first, {})[receiver.rank] = plan_link(plan, sender, receiver)
    return routes


def plan_link(plan: PlacementPlan, sender: WorkerSlot, receiver: WorkerSlot) -> Link:
    """The fastest way between two workers."""
    same_node = sender.node == receiver.node
    if not (_has_gpu(plan, sender) and _has_gpu(plan, receiver)):
        return Link(Route.SHARED_MEMORY if same_node else Route.COLLECTIVE, None)
    if same_node and sender.devices[0] in receiver.devices:
        return Link(Route.CUDA_IPC, receiver.devices.index(sender.devices[0]))
    return Link(Route.COLLECTIVE, 0)


def _has_gpu(plan: PlacementPlan, slot: WorkerSlot) -> bool:
    return bool(slot.devices) and plan.nodes[slot.node].kind == "gpu"
