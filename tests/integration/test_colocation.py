"""Roles that share devices take turns on them: in which order, and with the real engines on a local Ray."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll.algorithms.losses import build_sft_loss
from roll.distributed.cluster.cluster import Cluster, Worker
from roll.distributed.cluster.resources import NodeInfo, RoleRequest, plan_placement
from roll.distributed.strategy.base import States
from roll.distributed.weights.sync import WeightSync
from roll.pipeline.model_cluster import ModelCluster, OffloadManager
from roll.pipeline.workers import TrainWorker
from tests.integration.test_weight_sync import Generator, context, random_batch
from tests.support.clusters import local_clusters

WEIGHTS, ALL = States.WEIGHTS, States.ALL
REST = ALL & ~WEIGHTS
Calls = list[tuple[str, str, States]]


class RecordingCluster:
    """Stands in for a role's workers: notes what it is told."""

    def __init__(self, name: str, placement: Any, calls: Calls) -> None:
        self.name, self.placement, self.calls = name, placement, calls

    def submit(self, call: str, *args: Any) -> list[Any]:
        if args:
            self.calls.append((call, self.name, *args))
        return []

    def gather(self, refs: list[Any], call: str) -> list[Any]:
        return []


def recorded(kind: str = "gpu", **mappings: tuple[int, ...]) -> tuple[OffloadManager, Calls]:
    """A manager of roles that are all loaded, the last one last, and the calls from then on."""
    nodes = [NodeInfo("a", kind, 8, 8.0)]  # type: ignore[arg-type]
    plan = plan_placement([RoleRequest(name, mapping) for name, mapping in mappings.items()], nodes)
    calls: Calls = []
    clusters: Any = {name: RecordingCluster(name, SimpleNamespace(plan=plan), calls) for name in mappings}
    manager = OffloadManager(clusters)
    for name in mappings:
        manager.reserve(name)
    return manager, calls


PHASES: dict[str, dict[str, States]] = {
    "sync": {"actor_train": WEIGHTS, "actor_infer": WEIGHTS},
    "rollout": {"actor_infer": ALL},
    "logprobs": {"actor_train": WEIGHTS},
    "reference": {"reference": WEIGHTS},
    "train": {"actor_train": ALL},
}


def step(manager: OffloadManager, calls: Calls, phases: dict[str, dict[str, States]] = PHASES) -> dict[str, Calls]:
    """The calls in each phase of a step, by what the pipeline asks for there."""
    found = {}
    for phase, needs in phases.items():
        calls.clear()
        manager.load(needs)
        found[phase] = list(calls)
    return found


def test_roles_on_the_same_devices_take_turns():
    manager, calls = recorded(actor_train=(0, 1), reference=(0, 1), actor_infer=(0, 1))
    assert calls == [("offload", "actor_train", ALL), ("offload", "reference", ALL)], "each makes room for the next"
    first, second = step(manager, calls), step(manager, calls)
    assert first.pop("sync") == [("offload", "actor_infer", REST), ("onload", "actor_train", WEIGHTS)]
    assert second.pop("sync") == [("offload", "actor_train", REST), ("onload", "actor_infer", WEIGHTS)]
    expected = {
        "rollout": [("offload", "actor_train", WEIGHTS), ("onload", "actor_infer", REST)],
        "logprobs": [("offload", "actor_infer", ALL), ("onload", "actor_train", WEIGHTS)],
        "reference": [("offload", "actor_train", WEIGHTS), ("onload", "reference", WEIGHTS)],
        "train": [("offload", "reference", WEIGHTS), ("onload", "actor_train", ALL)],
    }
    assert first == second == expected


def test_roles_apart_and_roles_in_host_memory_are_never_moved():
    manager, calls = recorded(actor_train=(0, 1), reference=(2,), actor_infer=(3, 4))
    for _ in range(2):
        assert not any(step(manager, calls).values())
    manager, calls = recorded("cpu", actor_train=(0, 1), reference=(0, 1), actor_infer=(0, 1))
    assert calls == []
    assert not any(step(manager, calls).values())


def test_a_reward_model_is_there_while_answers_are_sampled_and_leaves_for_training():
    manager, calls = recorded(reward_chat=(1,), actor_train=(0, 1), actor_infer=(0, 1))
    assert calls == [("offload", "reward_chat", ALL), ("offload", "actor_train", ALL)]
    scoring = {"actor_infer": ALL, "reward_chat": WEIGHTS}
    assert step(manager, calls, {"sync": PHASES["sync"], "rollout": scoring, "train": PHASES["train"]}) == {
        "sync": [("offload", "actor_infer", REST), ("onload", "actor_train", WEIGHTS)],
        "rollout": [
            ("offload", "actor_train", WEIGHTS),
            ("onload", "actor_infer", REST),
            ("onload", "reward_chat", WEIGHTS),
        ],
        "train": [
            ("offload", "reward_chat", WEIGHTS),
            ("offload", "actor_infer", ALL),
            ("onload", "actor_train", ALL),
        ],
    }


def test_only_roles_whose_devices_are_needed_move():
    manager, calls = recorded(actor_train=(0, 1, 2, 3), reference=(0, 1), actor_infer=(4, 5), critic=(2, 3))
    assert calls == [("offload", "actor_train", ALL)]
    assert manager.shares_devices("actor_train", "critic") and not manager.shares_devices("reference", "critic")
    calls.clear()
    manager.load({"actor_infer": ALL, "reference": WEIGHTS, "critic": WEIGHTS})
    assert calls == []
    manager.load({"actor_train": ALL})
    assert calls == [("offload", "reference", ALL), ("offload", "critic", ALL), ("onload", "actor_train", ALL)]
    calls.clear()
    manager.load({"reference": WEIGHTS})
    manager.load({"critic": WEIGHTS})
    assert calls == [("offload", "actor_train", ALL), ("onload", "reference", WEIGHTS), ("onload", "critic", WEIGHTS)]


def test_an_evaluation_on_the_trainers_devices_leaves_the_rollouts_theirs():
    manager, calls = recorded(actor_train=(0, 1), val_infer=(0, 1), actor_infer=(2, 3))
    calls.clear()
    for needs in ({"actor_train": WEIGHTS, "val_infer": WEIGHTS}, {"val_infer": ALL, "actor_infer": ALL}):
        manager.load(needs)
    assert calls == [
        ("offload", "val_infer", REST),
        ("onload", "actor_train", WEIGHTS),
        ("offload", "actor_train", WEIGHTS),
        ("onload", "val_infer", REST),
    ]


def test_rollouts_that_share_with_the_trainer_get_their_devices_back_for_an_evaluation_elsewhere():
    manager, calls = recorded(actor_infer=(0, 1), val_infer=(2,), actor_train=(0, 1))
    calls.clear()
    manager.load({"actor_train": WEIGHTS, "val_infer": WEIGHTS})
    manager.load({"val_infer": ALL})
    assert calls == [], "the rollouts are parked"
    manager.load({"val_infer": ALL, "actor_infer": ALL})
    assert calls == [("offload", "actor_train", ALL), ("onload", "actor_infer", ALL)]


class Trainer(TrainWorker):
    """Says what it has on its device."""

    def resident(self) -> States:
        return self.strategy._resident


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[str, Cluster]]:
    """A trainer, a reference and a generator on the same devices."""
    workers = {"actor_train": Trainer, "reference": Trainer, "actor_infer": Generator}
    requests = {RoleRequest(name, (0,)): worker for name, worker in workers.items()}
    with local_clusters(requests, rpc_timeout=120.0) as started:
        yield {cluster.name: cluster for cluster in started}


def test_a_step_of_real_engines_that_take_turns(clusters, model):
    """On a CPU the strategies only note what would have left; using what is away is an error in each of them."""
    manager = OffloadManager(clusters, kinds=("cpu", "gpu"))
    actor, reference = (ModelCluster(clusters[name], manager) for name in ("actor_train", "reference"))
    infer = clusters["actor_infer"]
    reference.setup(context(model, "reference", "fsdp2_infer"))
    actor.setup(context(model, "actor_train", "fsdp2_train"))
    manager.reserve("actor_infer")
    infer.call("setup", context(model, "actor_infer", "hf_infer"))
    actor.call("set_loss", build_sft_loss)
    updates = WeightSync(actor.cluster, infer, bucket_bytes=1 << 20)
    states = [actor.call("resident")[0] | reference.call("resident")[0]]

    losses, tokens = [], []
    for version in range(2):
        manager.load({"actor_train": WEIGHTS, "actor_infer": WEIGHTS})
        updates.sync(version)
        manager.load({"actor_infer": ALL})
        states.append(actor.call("resident")[0])
        tokens.append(infer.call("greedy")[0])
        figures = manager.memory("rollout")
        scores = actor.submit_logprobs(random_batch(0))
        expected = reference.logprobs(random_batch(0)).logprobs_T
        states.append(actor.call("resident")[0])
        actual = scores().logprobs_T
        assert actual is not None and expected is not None
        assert torch.equal(actual, expected) == (version == 0), "the actor learns, the reference does not"
        losses.append(actor.train(random_batch(0), [torch.arange(4)])[0]["actor/loss"])
        assert actor.call("resident")[0] == ALL

    assert losses[1] < losses[0]
    assert [completion.weight_version for completion in tokens] == [0, 1]
    assert all(state == States(0) for state in states), "on a device that another role used"
    unit = "allocated_gb" if torch.cuda.is_available() else "resident_gb"
    for role in clusters:
        assert figures[f"memory/{role}/rollout_{unit}"] > 0


def test_a_dead_role_has_no_memory_figures(clusters):
    import ray

    manager = OffloadManager(clusters)
    ray.kill(clusters["reference"].handles[0])
    deadline = time.monotonic() + 30
    roles = {"reference"}
    while "reference" in roles and time.monotonic() < deadline:  # a killed actor answers for a moment
        roles = {name.split("/")[1] for name in manager.memory("train")}
    assert roles == {"actor_train", "actor_infer"}


def test_the_figures_of_a_process_grow_with_what_it_holds():
    if torch.cuda.is_initialized():
        pytest.skip("counts device memory here")
    worker = Worker("alone", 0, 1, {})
    before = worker.memory_gb()["resident_gb"]
    held = torch.ones(2**26)  # 256 MiB
    assert 0.2 < worker.memory_gb()["resident_gb"] - before < 0.3
    del held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_role_that_leaves_a_gpu_frees_its_memory(clusters, model):
    manager = OffloadManager({name: clusters[name] for name in ("actor_train", "actor_infer")})
    actor, infer = ModelCluster(clusters["actor_train"], manager), clusters["actor_infer"]
    actor.setup(context(model, "actor_train", "fsdp2_train"))
    manager.reserve("actor_infer")
    infer.call("setup", context(model, "actor_infer", "hf_infer"))
    actor.call("set_loss", build_sft_loss)
    actor.train(random_batch(0), [torch.arange(4)])
    trained = manager.memory("x")
    manager.load({"actor_infer": ALL})
    rollout = manager.memory("x")
    name, weights_gb = "memory/{}/x_allocated_gb".format, (model / "model.safetensors").stat().st_size / 2**30
    # Differences, since cuBLAS has more memory for itself than a tiny model needs.
    assert trained[name("actor_train")] - rollout[name("actor_train")] > 0.8 * 4 * weights_gb
    assert rollout[name("actor_infer")] - trained[name("actor_infer")] > 0.8 * weights_gb
