"""Weight synchronisation as the driver sees it: which version the generators have, and how they get the next."""

from __future__ import annotations

import logging

from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.weights.messages import Payload, WeightTransferError
from roll.distributed.weights.routes import Receiver, plan_link
from roll.distributed.weights.sender import Delivery, WeightOrder

logger = logging.getLogger(__name__)

_SHARE_OF_TIMEOUT = 0.9  # of the driver's own patience, so that the worker that hangs is named and not the sender


class WeightSync:
    """Keeps the generators at one version.

    No weights pass through the driver: rank 0 of the trainer sends them itself.

    Args:
        trainer: its workers have ``send_weights`` and ``resend_weights``.
        generator: its workers have ``receive_weights``.
        bucket_bytes: size of a bucket.
        adapter_only: the base weights are frozen; they go to each generator once and then the adapter alone.
        trains_between: the trainer may take optimizer steps before the next sync, so that it cannot export anew what
            a replaced generator needs. Rank 0 then keeps each version's buckets until the next.
    """

    def __init__(
        self,
        trainer: Cluster,
        generator: Cluster,
        *,
        bucket_bytes: int,
        adapter_only: bool = False,
        trains_between: bool = False,
    ) -> None:
        self.version = -1
        """What the generators have; -1: what they loaded at their start."""
        self._trainer = trainer
        self._generator = generator
        self._bucket_bytes = bucket_bytes
        self._adapter_only = adapter_only
        self._keep = trains_between
        self._have_base: set[int] = set()
        self._behind: set[int] = set()
        """Generators that lack the version."""
        self._kept = False
        """Rank 0 has the version's buckets."""

    def sync(self, version: int) -> None:
        """Sends the trainer's present weights to all generators, as ``version``.

        Raises:
            WeightTransferError: a generator refused the update, or got something else than was sent.
            WorkerDiedError: a generator died, which says nothing of the others: ``restore`` it, once it is replaced.
            ClusterError: a worker died or hangs.
        """
        self.version, self._kept = version, False
        self._behind = set(range(self._generator.world_size))
        self._catch_up()

    def restore(self, *ranks: int) -> None:
        """Brings replaced generators to the version of the others, and those that a failed update left behind."""
        self._have_base.difference_update(ranks)
        if self.version >= 0:
            self._behind.update(ranks)
            self._catch_up()

    def _catch_up(self) -> None:
        ranks, lost = sorted(self._behind), dict[int, str]()
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
        receivers = tuple(self._receiver(rank) for rank in ranks)
        timeout = (self._trainer.rpc_timeout or 1800.0) * _SHARE_OF_TIMEOUT
        again = keep and self._kept
        order = WeightOrder(payload, self.version, receivers, self._bucket_bytes, timeout, keep and not again)
        delivery: Delivery
        if again:
            delivery = self._trainer.call_rank(0, "resend_weights", order)
        else:
            delivery = self._trainer.call("send_weights", order)[0]
        self._kept = self._kept or keep
        for rank, digest in delivery.received.items():
            if digest != delivery.digest:
                reason = f"digest of what arrived {digest}, expected {delivery.digest}"
                raise WeightTransferError(self._generator.name, rank, payload, self.version, reason)
        logger.debug(
            "%s of version %d: %.1f MB to %d workers in %.3f s",
            payload,
            self.version,
            delivery.num_bytes / 1e6,
            len(receivers),
            delivery.seconds,
        )
        return delivery.lost

    def _receiver(self, rank: int) -> Receiver:
        plan = self._trainer.placement.plan
        link = plan_link(plan, self._trainer.slots[0], self._generator.slots[rank])
        return Receiver(self._generator.name, rank, link, self._generator.handles[rank])
