"""A placement plan made real on Ray: one placement group per node, and for each worker its seat in it.

The group's single bundle holds the node's devices that the plan uses, so no other job can take them. Workers claim only
a sliver of the bundle each, which lets any number of roles share a device, and are told their devices through
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.distributed.cluster.errors import PlacementError
from roll.distributed.cluster.resources import NodeInfo, PlacementPlan, WorkerSlot, nodes_from_resources

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ACTOR_SHARE = 0.001
"""Ray resource units that one worker claims inside its bundle, which already holds the real amounts."""


def discover_nodes() -> list[NodeInfo]:
    """The live nodes of the connected Ray cluster: the head first, then by address."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(
        key=lambda node: (
            "node:__internal_head__" not in node["Resources"],
            node["NodeManagerAddress"],
            node["NodeID"],
        )
    )
    return nodes_from_resources(
        [(node["NodeID"], node["Resources"].get("GPU", 0.0), node["Resources"].get("CPU", 0.0)) for node in alive]
    )


@dataclass(frozen=True)
class NodeView:
    """View of a process on the node."""

    gpu_ids: tuple[str, ...]
    """The real ids of the bundle's GPUs."""
    num_cores: int
    """CPU cores that the process may run on."""


@dataclass(frozen=True)
class Placement:
    """Reserved devices. Give them back with ``remove``."""

    plan: PlacementPlan
    groups: Mapping[int, PlacementGroup]
    """Node index to its placement group; nodes without workers have none."""
    views: Mapping[int, NodeView]

    def actor_options(self, slot: WorkerSlot) -> dict[str, Any]:
        """Ray actor options that put the worker on its seat."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        on_gpu = bool(slot.devices) and self.plan.nodes[slot.node].kind == "gpu"
        return {
            "num_cpus": ACTOR_SHARE,
            "num_gpus": ACTOR_SHARE if on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.groups[slot.node], placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            ),
        }

    def visible_devices(self, slot: WorkerSlot) -> str:
        """CUDA_VISIBLE_DEVICES for the worker: real GPU ids in the order of its mapping, empty without a GPU.

        Ray decides which physical GPUs a bundle gets; the plan's n-th device on a node is the bundle's n-th.
        """
        if self.plan.nodes[slot.node].kind == "cpu":
            return ""
        in_use = self.plan.devices_on(slot.node)
        return ",".join(self.views[slot.node].gpu_ids[in_use.index(device)] for device in slot.devices)

    def environment(self, slot: WorkerSlot) -> dict[str, str]:
        """Environment variables that follow from the worker's seat."""
        return {
            "OMP_NUM_THREADS": str(self.plan.threads(slot, self.views[slot.node].num_cores)),
            "CUDA_VISIBLE_DEVICES": self.visible_devices(slot),
            # Ray would replace the list by the one GPU of which the worker holds a sliver.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }

    def remove(self) -> None:
        """Gives the devices back; workers still on them are killed by Ray. Calling it again does nothing."""
        _remove(self.groups)


def create_placement(plan: PlacementPlan, *, timeout: float = 60.0) -> Placement:
    """Reserves the plan's devices and CPUs on the connected Ray cluster.

    Args:
        timeout: seconds to wait for devices that another job holds at the moment.

    Raises:
        PlacementError: a node of the plan does not exist, or its resources did not become free in time.
    """
    import ray

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    used = [index for index in range(len(plan.nodes)) if plan.slots_on(index)]
    missing = [plan.nodes[index].node_id for index in used if plan.nodes[index].node_id not in alive]
    if missing:
        raise PlacementError((f"nodes {', '.join(missing)} of the plan are not in the Ray cluster",))

    deadline = time.monotonic() + timeout
    groups = {index: _reserve(plan, index) for index in used}
    try:
        for index, group in groups.items():
            if not group.wait(math.ceil(max(0.0, deadline - time.monotonic()))):  # Ray drops fractions
                raise PlacementError((_unavailable(plan, index, timeout),))
        views = {index: _view(plan, index, group, deadline) for index, group in groups.items()}
    except BaseException:
        _remove(groups)
        raise
    return Placement(plan, groups, views)


def _bundle(plan: PlacementPlan, node: int) -> dict[str, float]:
    bundle = {"CPU": plan.cpus_on(node)}
    if plan.nodes[node].kind == "gpu" and plan.devices_on(node):
        bundle["GPU"] = float(len(plan.devices_on(node)))
    return {name: amount for name, amount in bundle.items() if amount > 0}


def _reserve(plan: PlacementPlan, node: int) -> PlacementGroup:
    from ray.util.placement_group import placement_group

    on_node = {"ray.io/node-id": plan.nodes[node].node_id}
    return placement_group([_bundle(plan, node)], strategy="STRICT_PACK", bundle_label_selector=[on_node])


def _remove(groups: Mapping[int, PlacementGroup]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    if not ray.is_initialized():  # the cluster is gone, and the groups with it
        return
    for group in groups.values():
        remove_placement_group(group)


def _unavailable(plan: PlacementPlan, node: int, timeout: float) -> str:
    import ray

    has, free = ray.cluster_resources(), ray.available_resources()
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in _bundle(plan, node).items())
    state = ", ".join(f"{has.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("GPU", "CPU"))
    roles = ", ".join(dict.fromkeys(slot.role for slot in plan.slots_on(node)))
    return (
        f"{roles}: {wanted} on node {node} did not become free within {timeout:g} s; the cluster has {state} "
        f"on {len(plan.nodes)} node{'s' * (len(plan.nodes) != 1)}, the rest is held by other jobs"
    )


def _view(plan: PlacementPlan, node: int, group: PlacementGroup, deadline: float) -> NodeView:
    """Looks from inside the bundle; without a GPU on the driver's own node there is no need to start a process."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    info, num_gpus = plan.nodes[node], _bundle(plan, node).get("GPU", 0)
    gpu_ids: list[str] = []
    if not num_gpus and ray.get_runtime_context().get_node_id() == info.node_id:
        cores = _num_cores()
    else:
        probe = ray.remote(_look_around).options(
            num_cpus=ACTOR_SHARE,
            num_gpus=num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        try:
            gpu_ids, cores = ray.get(probe.remote(), timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise PlacementError((f"node {node} ({info.node_id}) did not start a process in time",)) from error
    return NodeView(tuple(gpu_ids), max(1, min(cores, int(info.num_cpus))))


def _look_around() -> tuple[list[str], int]:
    """The GPU ids that Ray assigned to this process, and the cores it may run on."""
    import ray

    return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name)), _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
