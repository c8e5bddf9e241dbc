"""Weights from a trainer to generators by the routes that only GPUs have: CUDA IPC on one, nccl between several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from roll.configs.worker import StrategyArguments
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.weights.sender import Route, plan_routes
from roll.distributed.weights.sync import WeightSync
from roll.pipeline.model_cluster import ModelCluster
from tests.gpu.conftest import OPTIONS, require
from tests.integration.test_weight_sync import BUCKET_BYTES, Generator, Trainer, assert_serves, context
from tests.support.clusters import launched
from tests.support.sizes import tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("weight routes"),  # one Ray
]
IPC, NCCL = Route.CUDA_IPC, Route.COLLECTIVE


@dataclass(frozen=True)
class Case:
    """Who sits where."""

    name: str
    trainer: tuple[int, ...]
    generator: tuple[int, ...]
    routes: tuple[Route, ...]
    """To each generating worker."""
    per_worker: int = 1
    updates: int = 3

    @property
    def num_gpus(self) -> int:
        return len({*self.trainer, *self.generator})


CASES = [
    Case("shared", (0,), (0,), (IPC,), updates=50),
    Case("apart", (0,), (1,), (NCCL,)),
    Case("both", (0, 1), (0, 1), (IPC, IPC)),
    # The generator counts its devices in another order than the trainer's rank 0 does.
    Case("swapped", (1, 0), (0, 1), (IPC, IPC)),
    Case("tp2 shared", (0, 1), (0, 1), (IPC,), per_worker=2),
    Case("tp2 second", (1,), (0, 1), (IPC,), per_worker=2),
    Case("tp2 apart", (0, 1), (2, 3), (NCCL,), per_worker=2),
]


def require_places(case: Case, generator: str) -> None:
    if case.num_gpus > torch.cuda.device_count():
        pytest.skip(f"needs {case.num_gpus} GPUs, there are {torch.cuda.device_count()}")
    if case.per_worker > 1 and generator == "hf_infer":
        pytest.skip("hf_infer has one device per worker")
    require(generator)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory, seed=1, num_heads=2)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session({"num_cpus": 4, "object_store_memory": 2**27}, {"TRITON_F32_DEFAULT": "ieee"}):
        yield


def generating(model: Path, generator: str) -> StrategyContext:
    plain = context(model, "actor_infer", generator)
    options = StrategyArguments(strategy_name=generator, strategy_config=OPTIONS.get(generator, {}))
    return replace(plain, worker=plain.worker.model_copy(update={"strategy_args": options}))


@contextmanager
def started(case: Case, model: Path, generator: str) -> Iterator[list[Cluster]]:
    workers = {
        RoleRequest("actor_train", case.trainer): Trainer,
        RoleRequest("actor_infer", case.generator, num_gpus_per_worker=case.per_worker): Generator,
    }
    with launched(workers, rpc_timeout=600.0) as (trainer, infer):
        for cluster in (trainer, infer):
            cluster.wait_ready()
        ModelCluster(trainer).setup(context(model, "actor_train", "fsdp2_train"))
        infer.call("setup", generating(model, generator))
        yield [trainer, infer]


@pytest.mark.parametrize("generator", ["hf_infer", "vllm", "sglang"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_generators_decode_with_the_weights_that_were_sent(session, model, case, generator):
    require_places(case, generator)
    with started(case, model, generator) as (trainer, infer):
        plan = trainer.placement.plan
        routes = plan_routes(plan, trainer.slots, infer.slots)
        found = {rank: link.route for links in routes.values() for rank, link in links.items()}
        assert tuple(found[rank] for rank in range(infer.world_size)) == case.routes
        updates = WeightSync(trainer, infer, bucket_bytes=BUCKET_BYTES)
        for version in range(case.updates):
            trainer.call("learn", version)
            updates.sync(version)
            if version % 10 in (0, 9) or version == case.updates - 1:
                assert_serves(infer, model, trainer.call("weights")[0], version)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_a_generator_that_dies_in_an_update_is_replaced(session, model, case):
    """The trainer outlives it, and its group with it."""
    require_places(case, "hf_infer")
    with started(case, model, "hf_infer") as (trainer, infer):
        updates = WeightSync(trainer, infer, bucket_bytes=BUCKET_BYTES)
        updates.sync(0)
        last = infer.world_size - 1
        infer.call_rank(last, "order", die_at=2)
        with pytest.raises(WorkerDiedError) as death:
            updates.sync(1)
        assert (death.value.role, death.value.rank) == ("actor_infer", last)
        infer.restart(last)
        infer.call_rank(last, "setup", generating(model, "hf_infer"))
        updates.sync(2)
        assert_serves(infer, model, trainer.call("weights")[0], 2)
