"""Weight synchronisation as the driver sees it: which version the generators have, and how they get the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.cluster.resources import PlacementPlan, WorkerSlot
from roll.distributed.weights.buckets import dtype_name
from roll.distributed.weights.messages import Payload, WeightTransferError
from roll.distributed.weights.sender import Link, Receiver, Route, TransferRequest, TransferResult, plan_routes

logger = logging.getLogger(__name__)


def useless_deltas(
    plan: PlacementPlan, trainers: Sequence[WorkerSlot], receivers: Sequence[WorkerSlot], dtype: torch.dtype
) -> str:
    """Says why updates by deltas save nothing; empty where they may.

    Args:
        dtype: number format in which the weights are sent.
    """
    links = (link for each in plan_routes(plan, trainers, receivers, deltas=True).values() for link in each.values())
    if not any(link.route is Route.COLLECTIVE for link in links):
        nodes = ", ".join(sorted({plan.nodes[slot.node].node_id for slot in receivers}))
        return f"all generating workers are on nodes with a trainer ({nodes}), and get whole updates there"
    if dtype.itemsize > 2:
        return f"weights are sent in {dtype_name(dtype)}, in which an update changes nearly every element"
    return ""


_SHARE_OF_TIMEOUT = 0.9  # of the driver's own patience, so that the worker that hangs is named and not the sender


class WeightSync:
    """Keeps the generators at one version.

    No weights pass through the driver: the trainer's ranks that are nearest to the generators send them.

    Args:
        trainer: its workers have ``send_weights`` and ``resend_weights``.
        generator: its workers have ``receive_weights``.
        bucket_bytes: size of a bucket.
        check: compare the bytes of every update at both ends; without it, only of the first to each generator.
        adapter_only: the base weights are frozen; they go to each generator once and then the adapter alone.
        trains_between: the trainer may take optimizer steps before the next sync, so that it cannot export anew what
            a replaced generator needs. One of its ranks then keeps each version's buckets until the next.
        deltas: generators on nodes without a trainer get only what an update changes. Those who send to them keep each
            version's buckets until the next, and all bytes are compared.
    """

    def __init__(
        self,
        trainer: Cluster,
        generator: Cluster,
        *,
        bucket_bytes: int,
        check: bool = False,
        adapter_only: bool = False,
        trains_between: bool = False,
        deltas: bool = False,
    ) -> None:
        self.version = -1
        """Version of the weights that the generators have; -1: those that they loaded at their start."""
        self._trainer = trainer
        self._generator = generator
        self._bucket_bytes = bucket_bytes
        self._check = check
        self._adapter_only = adapter_only
        self._keep = trains_between
        self._deltas = deltas
        self._broadcast_bytes = self._saved_bytes = 0
        """Since the last ``take_metrics``."""
        self._have_base: set[int] = set()
        self._were_checked: set[tuple[Payload, int]] = set()
        """Generators that took an update whose bytes were compared, by what it was."""
        self._behind: set[int] = set()
        """Generators that lack the version."""
        self._keeper: int | None = None
        """The rank that has the version's buckets."""

    def sync(self, version: int) -> None:
        """Sends the trainer's present weights to all generators, as ``version``.

        Raises:
            WeightTransferError: a generator refused the update, or got something else than was sent.
            WorkerDiedError: a generator died, which says nothing of the others: ``restore`` it, once it is replaced.
            ClusterError: a worker died or hangs.
        """
        self.version, self._keeper = version, None
        self._behind = set(self._generator.ranks)
        self._catch_up()

    def restore(self, *ranks: int) -> None:
        """Brings replaced generators to the version of the others, and those that a failed update left behind."""
        self._have_base.difference_update(ranks)
        self._were_checked = {(payload, rank) for payload, rank in self._were_checked if rank not in ranks}
        if self.version >= 0:
            self._behind.update(ranks)
            self._catch_up()

    def take_metrics(self) -> dict[str, float]:
        """Of the updates since the last call, if any may have been deltas: what went to other nodes."""
        sent, self._broadcast_bytes = self._broadcast_bytes, 0
        saved, self._saved_bytes = self._saved_bytes, 0
        if not (self._deltas and sent + saved):
            return {}
        return {"weight_update/sent_gb": sent / 1e9, "weight_update/sent_share": sent / (sent + saved)}

    def _catch_up(self) -> None:
        ranks, lost = sorted(self._behind.intersection(self._generator.ranks)), dict[int, str]()
        if self._adapter_only:
            if new := [rank for rank in ranks if rank not in self._have_base]:
                lost = self._deliver("weights", new, keep=False)
                self._have_base.update(set(new) - lost.keys())
            ranks = [rank for rank in ranks if rank not in lost]
        if ranks:
            lost |= self._deliver("adapter" if self._adapter_only else "weights", ranks, keep=self._keep)
            self._behind -= set(ranks) - lost.keys()
        if lost:
            rank = min(lost)
            call = f"the update to version {self.version}"
            raise WorkerDiedError(self._generator.name, rank, call, Cluster.current_step, lost[rank])

    def _deliver(self, payload: Payload, ranks: list[int], *, keep: bool) -> dict[int, str]:
        """Returns the ranks that died, and how."""
        again = keep and self._keeper is not None
        trainers = [slot for slot in self._trainer.slots if not again or slot.rank == self._keeper]
        slots = [self._generator.slots[rank] for rank in ranks]
        routes = plan_routes(self._trainer.placement.plan, trainers, slots, deltas=self._deltas)
        far = any(link.route is Route.COLLECTIVE for links in routes.values() for link in links.values())
        deltas, first_to = self._deltas and far, {(payload, rank) for rank in ranks} - self._were_checked
        order = TransferRequest(
            payload=payload,
            version=self.version,
            receivers={sender: self._receivers(links) for sender, links in routes.items()},
            bucket_bytes=self._bucket_bytes,
            timeout_s=(self._trainer.rpc_timeout or 1800.0) * _SHARE_OF_TIMEOUT,
            check=self._check or bool(first_to) or deltas,
            keeper=min(routes) if (keep or deltas) and not again else None,
            deltas=deltas,
        )
        try:
            lost = self._send(order, again=again)
        except WeightTransferError as error:
            if not order.deltas:
                raise
            logger.warning("%s. The weights are sent again, as a whole", error)
            lost = self._send(replace(order, deltas=False), again=again)
        self._keeper = order.keeper if keep and not again else self._keeper
        self._were_checked |= first_to
        return lost

    def _send(self, order: TransferRequest, *, again: bool) -> dict[int, str]:
        """Has the trainer's ranks send an update, or one of them what it has kept; returns the ranks that died."""
        deliveries: list[TransferResult]
        if again:
            deliveries = [self._trainer.call_rank(min(order.receivers), "resend_weights", order)]
        else:
            deliveries = [each for each in self._trainer.call("send_weights", order) if each is not None]
        lost: dict[int, str] = {}
        for delivery in deliveries:
            for rank, digest in delivery.received.items():
                if not digest == delivery.digest == deliveries[0].digest:
                    reason = f"digest of the received data {digest}, expected {deliveries[0].digest}"
                    raise WeightTransferError(order.role, rank, order.payload, order.version, reason)
            lost |= delivery.lost
            self._broadcast_bytes += delivery.broadcast_bytes
            self._saved_bytes += delivery.saved_bytes
            logger.debug(
                "%s of version %d: %.1f MB to %d workers in %.3f s",
                order.payload,
                order.version,
                delivery.num_bytes / 1e6,
                len(delivery.received),
                delivery.seconds,
            )
        return lost

    def _receivers(self, links: Mapping[int, Link]) -> tuple[Receiver, ...]:
        handles = self._generator.handles
        return tuple(Receiver(self._generator.name, rank, link, handles[rank]) for rank, link in links.items())
