"""Placement planning: device numbering, colocation, spreading and the messages for what does not fit."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.distributed.cluster.cluster import Cluster, Worker
from roll.distributed.cluster.errors import PlacementError
from roll.distributed.cluster.resources import (
    NodeInfo,
    PlacementPlan,
    RoleRequest,
    format_ids,
    nodes_from_resources,
    plan_placement,
    pretend_nodes,
)


def problems_of(requests: list[RoleRequest], nodes: list[NodeInfo]) -> tuple[str, ...]:
    with pytest.raises(PlacementError) as caught:
        plan_placement(requests, nodes)
    return caught.value.problems


def devices(plan: PlacementPlan, role: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(slot.node, slot.devices) for slot in plan.workers(role)]


def test_each_worker_takes_the_next_devices_of_its_mapping_on_one_node():
    plan = plan_placement([RoleRequest("train", (0, 1, 2, 3, 6, 7), 2)], pretend_nodes(2, 4))
    assert devices(plan, "train") == [(0, (0, 1)), (0, (2, 3)), (1, (6, 7))]
    assert plan.devices_on(1) == (6, 7)


def test_overlapping_mappings_share_devices_and_apart_ones_do_not():
    plan = plan_placement(
        [RoleRequest("train", (0, 1, 2, 3)), RoleRequest("infer", (3, 4)), RoleRequest("critic", (5,))],
        pretend_nodes(1, 8),
    )
    assert plan.shares_devices("train", "infer")
    assert plan.shares_devices("infer", "train")
    assert not plan.shares_devices("train", "critic")


def test_without_a_gpu_every_core_is_a_slot_unless_other_nodes_have_gpus():
    nodes = nodes_from_resources([("a", 0, 1), ("b", 0, 6), ("c", 0, 0)])
    assert [(node.kind, node.num_devices) for node in nodes] == [("cpu", 2), ("cpu", 6), ("cpu", 0)]
    nodes = nodes_from_resources([("head", 0, 8), ("worker", 4, 32)])
    plan = plan_placement([RoleRequest("train", (0, 1, 2, 3), 4)], nodes)
    assert [(node.kind, node.num_devices) for node in nodes] == [("cpu", 0), ("gpu", 4)]
    assert devices(plan, "train") == [(1, (0, 1, 2, 3))]


def test_roles_without_devices_spread_by_cores_away_from_devices_in_use():
    nodes = [NodeInfo("small", "cpu", 4, 4), NodeInfo("large", "cpu", 12, 12)]
    plan = plan_placement([RoleRequest("env", None, world_size=16)], nodes)
    assert [len(plan.slots_on(node)) for node in (0, 1)] == [4, 12]
    nodes = [NodeInfo("a", "cpu", 2, 2), NodeInfo("b", "cpu", 2, 2)]
    plan = plan_placement([RoleRequest("env", None, world_size=2), RoleRequest("train", (0, 1))], nodes)
    assert [slot.node for slot in plan.workers("env")] == [1, 1]


def test_a_device_outside_the_cluster_is_named_with_what_there_is():
    assert problems_of([RoleRequest("actor_infer", (8, 9, 7))], pretend_nodes(1, 8)) == (
        "actor_infer: device_mapping names devices 8, 9, but the cluster has 8 devices on 1 node (ids 0–7)",
    )
    assert problems_of([RoleRequest("critic", (2,))], nodes_from_resources([("laptop", 0, 2)])) == (
        "critic: device_mapping names device 2, but the cluster has 2 CPU slots on 1 node (ids 0, 1)",
    )


def test_all_problems_of_all_roles_are_reported_at_once():
    seen = problems_of(
        [
            RoleRequest("a", (0, 0, 1), 2),
            RoleRequest("b", (3, 4), 2),
            RoleRequest("c", None),
            RoleRequest("d", (1,), world_size=2),
            RoleRequest("e", (0,), 0),
            RoleRequest("f", ()),
            RoleRequest("f", (-1,)),
        ],
        pretend_nodes(2, 4),
    )
    assert seen == (
        "f: 2 roles carry this name, expected one",
        "a: device_mapping names 0 more than once",
        "a: 3 devices in device_mapping do not divide by num_gpus_per_worker 2",
        "b: worker 0 would get devices 3, 4, which lie on nodes 0, 1; a worker's devices must lie on one node",
        "c: world_size is None, expected at least 1 as the role has no device_mapping",
        "d: world_size is 2, but 1 devices at 1 per worker make 1 workers",
        "e: num_gpus_per_worker is 0, expected at least 1",
        "f: device_mapping is empty, expected at least 1 device id",
        "f: device_mapping names device -1, but the cluster has 8 devices on 2 nodes (ids 0–7)",
    )


def test_a_worker_over_several_nodes_has_equally_many_devices_on_each():
    nodes = pretend_nodes(3, 2)
    plan = plan_placement([RoleRequest("infer", (0, 1, 2, 3), 4, True), RoleRequest("val", (4, 5), 1, True)], nodes)
    first, second = plan.workers("infer")
    assert (first.node, first.devices, first.engine) == (0, (0, 1), 0)
    assert (second.rank, second.node, second.devices, second.engine) == (1, 1, (2, 3), 0)
    assert [slot.engine for slot in plan.workers("val")] == [0, 1]
    assert plan.describe()[1].split()[:3] == ["infer", "1", "4"]
    plan = plan_placement([RoleRequest("infer", (1, 2, 3, 4), 2, True)], nodes)
    places = [(slot.node, slot.devices, slot.engine) for slot in plan.workers("infer")]
    assert places == [(0, (1,), 0), (1, (3,), 1), (1, (2,), 0), (2, (4,), 1)]
    for mapping, homes in (((0, 1, 2), "0, 1"), ((0, 2, 1), "0, 1"), ((1, 2, 0, 3), "0, 1")):
        (seen,) = problems_of([RoleRequest("infer", mapping, len(mapping), True)], nodes)
        assert f"which lie on nodes {homes}; a worker's devices must lie on one node, or equally many" in seen


def test_calls_reach_one_process_of_each_engine():
    plan = plan_placement([RoleRequest("infer", (0, 1, 2, 3, 4, 5, 6, 7), 4, True)], pretend_nodes(4, 2))
    cluster = Cluster("infer", Worker, cast(Any, SimpleNamespace(plan=plan)))
    cluster.handles = cast(Any, ["a", "b", "part of a", "part of b"])
    assert (cluster.world_size, cluster.ranks, cluster.present) == (2, [0, 1], ["a", "b"])
    assert [cluster.parts(rank) for rank in cluster.ranks] == [[0, 2], [1, 3]]


def test_a_cluster_without_nodes_and_an_unknown_role_are_reported():
    assert "the cluster has no node" in problems_of([RoleRequest("env", None, world_size=1)], [])
    plan = plan_placement([RoleRequest("train", (0,))], pretend_nodes(1, 1))
    with pytest.raises(KeyError, match=r"'trian' has no placement; placed roles: train"):
        plan.workers("trian")


def test_threads_are_an_even_share_of_the_cores_per_device_in_use():
    plan = plan_placement(
        [RoleRequest("train", (0, 1, 2, 3), 2), RoleRequest("infer", (0,)), RoleRequest("env", None, world_size=1)],
        pretend_nodes(1, 8),
    )
    assert [plan.threads(plan.workers(role)[0], 16) for role in ("train", "infer", "env")] == [8, 4, 1]
    assert plan.threads(plan.workers("infer")[0], 2) == 1


def test_reserved_cpus_count_colocated_workers_once_and_stay_within_the_node():
    requests = [RoleRequest("train", (0, 1)), RoleRequest("infer", (0, 1)), RoleRequest("env", None, world_size=3)]
    assert plan_placement(requests, [NodeInfo("big", "gpu", 8, 64)]).cpus_on(0) == 5
    assert plan_placement(requests, [NodeInfo("small", "cpu", 2, 2)]).cpus_on(0) == 2


def test_the_description_names_places_and_partners():
    plan = plan_placement(
        [RoleRequest("train", (0, 1, 2, 3)), RoleRequest("infer", (2, 3), 2), RoleRequest("env", None, world_size=2)],
        pretend_nodes(2, 2, num_cpus=4),
    )
    assert plan.describe() == [
        "role   workers  each  where                                  shares devices with",
        "train  4        1     node 0: device 0, 1; node 1: device    infer",
        "                      2, 3",
        "infer  1        2     node 1: device 2, 3                    train",
        "env    2        -     node 0: 2 on the CPU                   -",
    ]


def test_the_description_fits_a_terminal_of_80_columns():
    names = ["actor_train", "actor_infer", "critic", "reference", "train_env_manager", "val_env_manager"]
    plan = plan_placement([RoleRequest(name, tuple(range(32))) for name in names], pretend_nodes(4, 8))
    lines = plan.describe()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "node 3: device" in text and text.count("24–31") == len(names)


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([1, 0], "0, 1"), ([0, 1, 2, 5, 7, 8, 9], "0–2, 5, 7–9")]
)
def test_runs_of_ids_are_joined(ids, text):
    assert format_ids(ids) == text


@given(
    num_nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    each=st.integers(1, 4),
    mapping=st.lists(st.integers(-1, 33), min_size=1, max_size=12, unique=True),
)
def test_a_plan_keeps_the_mapping_and_never_splits_a_worker(num_nodes, per_node, each, mapping):
    home = {device: device // per_node for device in range(num_nodes * per_node)}
    shares = [mapping[i : i + each] for i in range(0, len(mapping), each)]
    fits = len(mapping) % each == 0 and all(device in home for device in mapping)
    fits = fits and all(len({home[device] for device in share}) == 1 for share in shares)
    try:
        plan = plan_placement([RoleRequest("role", tuple(mapping), each)], pretend_nodes(num_nodes, per_node))
    except PlacementError:
        assert not fits
    else:
        assert fits
        assert devices(plan, "role") == [(home[share[0]], tuple(share)) for share in shares]
