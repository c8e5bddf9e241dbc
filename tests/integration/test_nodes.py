"""Runs on three Ray nodes: two nodes are lost, one that only generates, then one that trains; an engine has two."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from roll.models.tiny import make_tiny_model
from roll.report.parting import MEASURED
from tests.integration.conftest import Rlvr, Run, Script, assert_same_tensors

STEPS = 3
ALWAYS = (f"max_steps={STEPS}", "max_worker_restarts=2")

MACHINES = """
import sys
from ray.cluster_utils import Cluster
from roll.distributed.cluster.ray_session import bare_node

with bare_node():
    machines = Cluster()
    node = {"num_cpus": 2, "object_store_memory": 2**27, "include_dashboard": False}
    for head in ({"_system_config": {"health_check_period_ms": 1000}}, {}, {}):
        machines.add_node(**node, **head)
    print(machines.address, flush=True)
    others = sorted(machines.worker_nodes, key=lambda node: node.node_id)  # as the driver numbers them
    for line in sys.stdin:
        if line == "another\\n":
            changed = machines.add_node(**node)
        else:
            changed = others[int(line) - 1]
            machines.remove_node(changed, allow_graceful=False)
        print(changed.node_id, flush=True)
    machines.shutdown()
"""


@pytest.fixture
def machines() -> Iterator[Script]:
    """Three nodes with two slots each, whose address it says first.

    A number on its input ends that node as a power cut would, ``another`` starts one; it answers with the node's id.
    """
    script = Script(MACHINES)
    yield script
    script.end()


@pytest.fixture
def lost(rlvr: Rlvr, machines: Script) -> tuple[Run, str, str]:
    """A run on the three nodes that has lost two of them, and the ids of those that generated and trained."""
    layout = (
        "num_nodes=3",
        "actor_train.device_mapping=[0,2]",
        "actor_infer.device_mapping=[1,4]",
        "weight_update_deltas=true",
        "actor_train.training_args.per_device_train_batch_size=4",  # of two ranks
    )
    orders = ("hold-actor_infer-1-generate-1", "hold-actor_train-1-train-2")
    run = rlvr(*ALWAYS, *layout, address=machines.first, orders=orders)
    run.pid_at("actor_infer-1-generate-1")
    generates = machines.answer("2")
    run.pid_at("actor_train-1-train-2")
    trains = machines.answer("1")
    return run.ended(1), generates, trains


@pytest.mark.timeout(600)
def test_a_run_outlives_a_node_that_generates_and_ends_with_one_that_trains(lost):
    run, generates, trains = lost
    assert f"{generates}) is gone" in run.output and "actor_infer goes on with 1 of 2 workers" in run.output
    assert "actor_train rank 1 died" in run.output and f"on node {trains} is gone" in run.said
    assert run.checkpoint(1).exists()
    assert run.metrics[1]["weight_update/sent_share"] == 1, "the first update"
    assert "weight_update_deltas: true saves nothing for actor_infer: weights are sent in float32" in run.said
    assert run.summary["steps"] == 1


@pytest.mark.slow  # other tests resume runs, and load checkpoints of two ranks on one
@pytest.mark.timeout(600)
def test_what_is_left_goes_on_with_fewer_ranks_on_two_nodes(lost, rlvr, machines):
    machines.answer("another")
    layout = ("num_nodes=2", "actor_train.device_mapping=[1]", "actor_infer.device_mapping=[0,2]")
    resumed = rlvr(*ALWAYS, *layout, "resume_from_checkpoint=true", address=machines.first).ended()
    whole = rlvr(f"max_steps={STEPS}", output="whole").ended()
    assert resumed.summary["steps"] == STEPS
    found, expected = resumed.tensors(STEPS), whole.tensors(STEPS)
    for name in [name for name in expected if name.startswith("actor_train/model")]:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=name)


def repeated(run: Run) -> list[dict[str, float]]:
    """The metrics that a run which does the same has, too."""
    every, away = run.metrics.values(), (*MEASURED, "probe/")  # replaced generators are asked anew
    return [{name: value for name, value in each.items() if not name.startswith(away)} for each in every]


@pytest.mark.slow  # vLLM starts three times
@pytest.mark.timeout(1500)
def test_an_engine_over_two_nodes_samples_what_it_does_on_one_and_comes_back_when_a_part_dies(rlvr, machines, tmp_path):
    pytest.importorskip("vllm", reason="vllm: the package vllm is not installed")
    make_tiny_model(tmp_path / "wide", seed=1, num_heads=2)
    layout = (
        "num_nodes=3",
        f"pretrain={tmp_path / 'wide'}",
        "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {tensor_parallel_size: 2}}",
        "max_worker_restarts=1",
    )
    order = "hold-actor_infer-0-generate-2"
    two = rlvr(*layout, "actor_infer.device_mapping=[3,4]", output="two", address=machines.first, orders=(order,))
    two.pid_at("actor_infer-0-generate-2")
    os.kill(two.pid_at("actor_infer-1-ready"), signal.SIGKILL)
    two.release(order)
    two.ended()
    assert "actor_infer rank 0 died in" in two.output, two.output
    one = rlvr(*layout, "actor_infer.device_mapping=[2,3]", output="one", address=machines.first).ended()
    assert repeated(one) == repeated(two)
    assert_same_tensors(two.tensors(2), one.tensors(2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_updates_are_deltas_is_the_one_whose_are_whole(rlvr, machines):
    layout = (
        "num_nodes=3",
        "max_steps=4",
        "save_steps=4",
        "actor_infer.device_mapping=[2]",
        "actor_infer.model_args.dtype=bf16",
        "actor_train.model_args.dtype=bf16",
        "actor_train.training_args.learning_rate=1e-5",
        "validation=null",
    )
    whole, deltas = (
        rlvr(*layout, f"weight_update_deltas={given}", output=given, address=machines.first).ended()
        for given in ("false", "true")
    )
    sent = [deltas.metrics[step]["weight_update/sent_share"] for step in range(1, 5)]
    assert sent[0] >= 0.5 and all(0 < share < 0.2 for share in sent[1:]), sent  # the first update is whole
    assert all(whole.metrics[step]["actor/grad_norm"] > 0 for step in range(1, 5))
    of_deltas = [
        {n: each for n, each in step.items() if not n.startswith("weight_update/")} for step in repeated(deltas)
    ]
    assert of_deltas == repeated(whole)
    assert_same_tensors(deltas.tensors(4), whole.tensors(4))
