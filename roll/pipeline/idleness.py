"""Idle time of trainers and generators where rollouts go on beside training: seconds in which they had no work."""

from __future__ import annotations

import logging

from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import ClusterError
from roll.distributed.strategy.base import Metrics

logger = logging.getLogger(__name__)


class Idleness:
    """Measures steps, on the workers themselves.

    Args:
        trainer: idle while it neither scores, trains nor sends weights.
        generator: idle while no request is in flight.
    """

    def __init__(self, trainer: Cluster, generator: Cluster) -> None:
        self._clusters = {"trainer": trainer, "generator": generator}

    def start(self) -> None:
        """A step begins."""
        for cluster in self._clusters.values():
            cluster.submit("take_idle_s")

    def metrics(self) -> Metrics:
        """``async/idle_<who>_s`` since ``start``, means over the workers; none of a role one of whose workers died."""
        pending = {name: cluster.submit("take_idle_s") for name, cluster in self._clusters.items()}
        metrics: Metrics = {}
        for name, refs in pending.items():
            try:
                seconds: list[float] = self._clusters[name].gather(refs, call="take_idle_s")
            except ClusterError as error:
                logger.debug("no idle seconds: %s", error)
                continue
            metrics[f"async/idle_{name}_s"] = sum(seconds) / len(seconds)
        return metrics
