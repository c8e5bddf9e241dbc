"""States of roles on the devices: roles that share devices take turns there, roles apart never wait for another.

Nothing is moved on devices without memory of their own (CPU slots): host memory is where things would go.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import ClusterError
from roll.distributed.cluster.resources import NodeKind
from roll.distributed.strategy.base import Metrics, States

logger = logging.getLogger(__name__)

_NOTHING = States(0)
_WITH_MEMORY: tuple[NodeKind, ...] = ("gpu",)


class OffloadManager:
    """Moves states of the model roles on and off the devices.

    Whoever is about to use a role says so by ``load``. What shares a device with it makes room first; what is there
    stays until another role needs the room. A worker does its calls one after the other, so that a role which is still
    at work is moved when it has finished, and the driver waits for that.

    Args:
        clusters: the model roles, and rewards with models, by name; their workers have ``offload`` and ``onload``.
        kinds: nodes whose devices have memory of their own.
    """

    def __init__(self, clusters: Mapping[str, Cluster], kinds: Collection[NodeKind] = _WITH_MEMORY) -> None:
        self._clusters = clusters
        self._devices = {name: _devices(cluster, kinds) for name, cluster in clusters.items()}
        self._resident = dict.fromkeys(clusters, _NOTHING)

    def shares_devices(self, role: str, other: str) -> bool:
        """Tells whether the roles must take turns."""
        return role != other and bool(self._devices[role] & self._devices[other])

    def reserve(self, role: str) -> None:
        """Makes room for a role that is about to load its model, all of which is then on its devices."""
        self._make_room({role: _NOTHING})
        self._resident[role] = States.ALL

    def load(self, needs: Mapping[str, States]) -> None:
        """Sees to it that these roles have these states on their devices, all at the same time.

        Roles that share devices with one of them leave, and so does what one of them does not need itself when another
        of them needs the room.
        """
        self._make_room(needs)
        self._move("onload", {role: what & ~self._resident[role] for role, what in needs.items()})

    def memory(self, phase: str) -> Metrics:
        """Memory of every role after a phase, in GiB: ``memory/<role>/<phase>_<figure>``, the largest of its workers.

        Figures: ``allocated_gb`` by the worker's process on its GPUs and ``device_gb`` in use on them by anybody, or
        ``resident_gb`` of the process in host memory where it has no GPU. A role whose worker is dead has none.
        """
        pending = {name: cluster.submit("memory_gb") for name, cluster in self._clusters.items()}
        metrics: Metrics = {}
        for name, refs in pending.items():
            try:
                workers: list[Metrics] = self._clusters[name].gather(refs, call="memory_gb")
            except ClusterError as error:
                logger.debug("no memory figures: %s", error)
                continue
            for figure in workers[0].keys() & workers[-1].keys():
                metrics[f"memory/{name}/{phase}_{figure}"] = max(worker[figure] for worker in workers)
        return metrics

    def _make_room(self, needs: Mapping[str, States]) -> None:
        leaving = {
            role: resident & ~needs.get(role, _NOTHING)
            for role, resident in self._resident.items()
            if any(self.shares_devices(role, other) for other in needs)
        }
        self._move("offload", leaving)

    def _move(self, call: str, what: Mapping[str, States]) -> None:
        """All roles at the same time."""
        moving = {role: states for role, states in what.items() if states and self._devices[role]}
        pending = {role: self._clusters[role].submit(call, states) for role, states in moving.items()}
        for role, refs in pending.items():
            self._clusters[role].gather(refs, call=call)
            if call == "onload":
                self._resident[role] |= moving[role]
            else:
                self._resident[role] &= ~moving[role]
            logger.debug("%s %s: %s", role, call, moving[role])


def _devices(cluster: Cluster, kinds: Collection[NodeKind]) -> frozenset[int]:
    plan = cluster.placement.plan
    slots = plan.workers(cluster.name)
    return frozenset(device for slot in slots if plan.nodes[slot.node].kind in kinds for device in slot.devices)
