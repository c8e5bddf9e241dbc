"""Placement of the roles' workers on devices: pure planning, usable without Ray and for pretended nodes.

Devices are GPUs where the cluster has any and CPU slots where it has none; either way they carry global ids, counted
node by node. A ``device_mapping`` lists such ids, and each worker takes the next ``num_gpus_per_worker`` of them.
Roles whose mappings overlap share devices (colocation, they take turns); roles whose mappings are apart may run at the
same time.

Example: two nodes of two GPUs carry the ids 0, 1 and 2, 3. ``device_mapping=(0, 1, 2, 3), num_gpus_per_worker=2`` makes
two workers, one per node.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from roll.distributed.cluster.errors import PlacementError

NodeKind = Literal["gpu", "cpu", "planned"]
NOUNS: dict[NodeKind, str] = {"gpu": "GPU", "cpu": "CPU slot", "planned": "device"}
TABLE_WIDTH = 80


@dataclass(frozen=True)
class NodeInfo:
    """One machine of the cluster."""

    node_id: str
    """Ray's id, or any unique name for a pretended node."""
    kind: NodeKind
    """Kind of its devices: GPUs, CPU slots, or not known yet on a machine that only a plan speaks of."""
    num_devices: int
    num_cpus: float
    """CPU cores that Ray may hand out."""


@dataclass(frozen=True)
class RoleRequest:
    """The devices that one role requests."""

    name: str
    device_mapping: tuple[int, ...] | None = None
    """Global device ids; ``None`` for a role that needs no device (environment managers, rewards)."""
    num_gpus_per_worker: int = 1
    """Devices per worker."""
    spans_nodes: bool = False
    """A worker's devices may lie on several nodes, equally many on each."""
    world_size: int | None = None
    """Number of workers: required without a mapping; with one it follows from it and is checked when given."""
    num_cpus: float = 1.0
    """CPU cores a worker would like: steers spreading and reservation, and never refuses a role."""


@dataclass(frozen=True)
class WorkerSlot:
    """Place of one worker."""

    role: str
    rank: int
    node: int
    """Index into ``PlacementPlan.nodes``."""
    devices: tuple[int, ...]
    """Global device ids, all on that node; empty for a role without devices."""
    num_cpus: float
    engine: int
    """Rank of the worker that has the engine on these devices: its own, or of one on another node. The latter gets the
    calls; this one only holds processes of its engine."""


@dataclass(frozen=True)
class PlacementPlan:
    """Every worker's place."""

    nodes: tuple[NodeInfo, ...]
    slots: Mapping[str, tuple[WorkerSlot, ...]]
    """Role name to its workers in rank order."""

    def workers(self, role: str) -> tuple[WorkerSlot, ...]:
        """The role's workers in rank order.

        Raises:
            KeyError: no such role in the plan.
        """
        if role not in self.slots:
            raise KeyError(f"role {role!r} has no placement; placed roles: {', '.join(self.slots) or 'none'}")
        return self.slots[role]

    def devices(self, role: str) -> frozenset[int]:
        """Global ids of all devices that the role uses."""
        return frozenset(device for slot in self.workers(role) for device in slot.devices)

    def shares_devices(self, a: str, b: str) -> bool:
        """True when the two roles are colocated on at least one device and so must take turns."""
        return bool(self.devices(a) & self.devices(b))

    def slots_on(self, node: int) -> list[WorkerSlot]:
        """All workers, of any role, on the node with this index."""
        return [slot for slots in self.slots.values() for slot in slots if slot.node == node]

    def devices_on(self, node: int) -> tuple[int, ...]:
        """Global ids of the devices in use on the node with this index, ascending."""
        return tuple(sorted({device for slot in self.slots_on(node) for device in slot.devices}))

    def cpus_on(self, node: int) -> float:
        """CPU cores to reserve on the node: what its workers would like, at least 1, at most what it has.

        Workers on the same device take turns, so a device claims the largest of their wishes.
        """
        per_device: dict[int, float] = {}
        total = 0.0
        for slot in self.slots_on(node):
            if not slot.devices:
                total += slot.num_cpus
            for device in slot.devices:
                per_device[device] = max(per_device.get(device, 0.0), slot.num_cpus / len(slot.devices))
        return min(self.nodes[node].num_cpus, max(1.0, total + sum(per_device.values())))

    def threads(self, slot: WorkerSlot, cores: int) -> int:
        """Compute threads for a worker on a node with ``cores`` cores: an even share per device in use, at least 1.

        A worker without devices gets one: it waits far more than it computes.
        """
        return max(1, cores * len(slot.devices) // max(1, len(self.devices_on(slot.node))))

    def describe(self) -> list[str]:
        """The plan as the lines of a table, one row per role; cells are wrapped so that a terminal does not."""
        header = ("role", "workers", "each", "where", "shares devices with")
        rows = [header, *(self._row(role) for role in self.slots)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        # The names and the numbers stay whole; the other two columns share what they leave.
        room = TABLE_WIDTH - sum(widths[:3]) - 2 * (len(header) - 1)
        widths[3] = min(widths[3], max(room // 2, room - widths[4]))
        widths[4] = max(room - widths[3], len(header[4]))
        lines = []
        for row in rows:
            cells = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
            for parts in itertools.zip_longest(*cells, fillvalue=""):
                padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
                lines.append("  ".join(padded).rstrip())
        return lines

    def _row(self, role: str) -> tuple[str, str, str, str, str]:
        slots = self.slots[role]
        places = []
        for node, info in enumerate(self.nodes):
            here = [slot for slot in slots if slot.node == node]
            if here and here[0].devices:
                places.append(
                    f"node {node}: {NOUNS[info.kind]} {format_ids(device for slot in here for device in slot.devices)}"
                )
            elif here:
                places.append(f"node {node}: {len(here)} on the CPU")
        partners = [other for other in self.slots if other != role and self.shares_devices(role, other)]
        own = len({slot.engine for slot in slots})
        each = sum(len(slot.devices) for slot in slots) // own
        return role, str(own), str(each) if each else "-", "; ".join(places), ", ".join(partners) or "-"


def nodes_from_resources(resources: Sequence[tuple[str, float, float]]) -> list[NodeInfo]:
    """Turns ``(node id, GPUs, CPUs)`` per machine into nodes: GPUs are the devices if any machine has one.

    Without a GPU every core is a slot, and each machine counts at least two, so that roles can be put apart (and the
    configurations for two devices run) on a single core as well. A machine that offers no CPU offers no slot.
    """
    if any(gpus >= 1 for _, gpus, _ in resources):
        return [NodeInfo(node_id, "gpu" if gpus >= 1 else "cpu", int(gpus), cpus) for node_id, gpus, cpus in resources]
    return [NodeInfo(node_id, "cpu", max(2, int(cpus)) if cpus >= 1 else 0, cpus) for node_id, _, cpus in resources]


def pretend_nodes(num_nodes: int, num_gpus_per_node: int, num_cpus: float = 64.0) -> list[NodeInfo]:
    """Nodes that do not exist, for planning only: an 8-GPU configuration can be checked on a laptop."""
    return [NodeInfo(f"pretended-{i}", "planned", num_gpus_per_node, num_cpus) for i in range(num_nodes)]


def plan_placement(requests: Sequence[RoleRequest], nodes: Sequence[NodeInfo]) -> PlacementPlan:
    """Gives every worker of every role a node and devices.

    Raises:
        PlacementError: with every problem of every role at once.
    """
    node_of = [index for index, node in enumerate(nodes) for _ in range(node.num_devices)]
    problems = [] if nodes else ["the cluster has no node"]
    names = Counter(request.name for request in requests)
    problems += [f"{name}: {count} roles carry this name, expected one" for name, count in names.items() if count > 1]
    for request in requests:
        problems += _problems(request, nodes, node_of)
    if problems:
        raise PlacementError(tuple(problems))

    placed = {r.name: _device_slots(r, r.device_mapping, node_of) for r in requests if r.device_mapping is not None}
    load = [
        sum(slot.num_cpus for slots in placed.values() for slot in slots if slot.node == i) for i in range(len(nodes))
    ]
    for request in requests:
        if request.device_mapping is None:
            placed[request.name] = _spread_slots(request, nodes, load)
    return PlacementPlan(tuple(nodes), {request.name: placed[request.name] for request in requests})


def _device_slots(request: RoleRequest, mapping: tuple[int, ...], node_of: Sequence[int]) -> tuple[WorkerSlot, ...]:
    each = request.num_gpus_per_worker
    shares = [mapping[start : start + each] for start in range(0, len(mapping), each)]
    # Those that get calls first, then those that hold further parts: so ranks of workers are the same on any nodes.
    parts = [[tuple(part) for _, part in groupby(share, key=node_of.__getitem__)] for share in shares]
    places = [(own[0], rank) for rank, own in enumerate(parts)]
    places += [(part, rank) for rank, own in enumerate(parts) for part in own[1:]]
    return tuple(
        WorkerSlot(request.name, rank, node_of[part[0]], part, request.num_cpus, engine)
        for rank, (part, engine) in enumerate(places)
    )


def _spread_slots(request: RoleRequest, nodes: Sequence[NodeInfo], load: list[float]) -> tuple[WorkerSlot, ...]:
    """Puts each worker on the node whose cores are least claimed; ``load`` (claims per node) is brought up to date."""
    usable = [i for i, node in enumerate(nodes) if node.num_cpus > 0] or list(range(len(nodes)))
    slots = []
    for rank in range(request.world_size or 0):
        node = min(usable, key=lambda i: (load[i] + request.num_cpus) / max(nodes[i].num_cpus, 1e-9))
        load[node] += request.num_cpus
        slots.append(WorkerSlot(request.name, rank, node, (), request.num_cpus, rank))
    return tuple(slots)


def _problems(request: RoleRequest, nodes: Sequence[NodeInfo], node_of: Sequence[int]) -> list[str]:
    """Problems of one role's request, one line each."""
    name, mapping, each = request.name, request.device_mapping, request.num_gpus_per_worker
    if mapping is None:
        if request.world_size is None or request.world_size < 1:
            return [
                f"{name}: world_size is {request.world_size}, expected at least 1 as the role has no device_mapping"
            ]
        return []
    if each < 1:
        return [f"{name}: num_gpus_per_worker is {each}, expected at least 1"]
    if not mapping:
        return [f"{name}: device_mapping is empty, expected at least {each} device id{'s' if each > 1 else ''}"]

    problems = []
    outside = sorted({device for device in mapping if not 0 <= device < len(node_of)})
    if outside:
        noun = "device" if len(outside) == 1 else "devices"
        problems.append(
            f"{name}: device_mapping names {noun} {format_ids(outside)}, but the cluster has {format_devices(nodes)}"
        )
    twice = [device for device, count in Counter(mapping).items() if count > 1]
    if twice:
        problems.append(f"{name}: device_mapping names {format_ids(twice)} more than once")
    if len(mapping) % each:
        problems.append(f"{name}: {len(mapping)} devices in device_mapping do not divide by num_gpus_per_worker {each}")
        return problems
    if request.world_size is not None and request.world_size != len(mapping) // each:
        problems.append(
            f"{name}: world_size is {request.world_size}, but {len(mapping)} devices at {each} per worker make "
            f"{len(mapping) // each} workers"
        )
    if not outside:
        problems += _split_workers(request, mapping, node_of)
    return problems


def _split_workers(request: RoleRequest, mapping: tuple[int, ...], node_of: Sequence[int]) -> list[str]:
    problems = []
    for rank, start in enumerate(range(0, len(mapping), request.num_gpus_per_worker)):
        share = mapping[start : start + request.num_gpus_per_worker]
        homes = [node_of[device] for device in share]
        parts = [len([*part]) for _, part in groupby(homes)]
        if len(parts) == 1 or (request.spans_nodes and len(parts) == len({*homes}) and len({*parts}) == 1):
            continue
        expected = "one node, or equally many on each, node after node" if request.spans_nodes else "one node"
        problems.append(
            f"{request.name}: worker {rank} would get devices {format_ids(share)}, which lie on nodes "
            f"{', '.join(map(str, sorted({*homes})))}; a worker's devices must lie on {expected}"
        )
    return problems


def format_devices(nodes: Sequence[NodeInfo]) -> str:
    """``8 GPUs on 1 node (ids 0–7)``; nodes are all of one kind."""
    total = sum(node.num_devices for node in nodes)
    hosts = [node for node in nodes if node.num_devices] or list(nodes)
    noun = NOUNS[nodes[0].kind] if nodes else "device"
    ids = f" (ids {format_ids(range(total))})" if total else ""
    return f"{total} {noun}{'s' * (total != 1)} on {len(hosts)} node{'s' * (len(hosts) != 1)}{ids}"


def format_ids(ids: Iterable[int]) -> str:
    """Ids in ascending order, runs of three and more joined: ``0–3, 6``."""
    parts: list[str] = []
    for _, run in groupby(enumerate(sorted(set(ids))), key=lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        parts += [f"{members[0]}–{members[-1]}"] if len(members) > 2 else map(str, members)
    return ", ".join(parts)
