"""Weights from a sharded trainer to two generators on a local Ray: by every route a CPU has, and when it goes wrong."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.algorithms.losses import build_sft_loss
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import RpcTimeoutError, WorkerDiedError
from roll.distributed.cluster.resources import RoleRequest, WorkerSlot
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.weights import sync
from roll.distributed.weights.buckets import WeightBucket, unpack_bucket
from roll.distributed.weights.messages import BucketMessage, Close, Message, Reply, WeightTransferError
from roll.distributed.weights.sender import Link, Route, TransferRequest, TransferResult
from roll.distributed.weights.sync import WeightSync
from roll.models.lora import LoraSpec
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.workers import InferWorker, TrainWorker
from tests.support.clusters import local_clusters
from tests.support.processes import happens

BUCKET_BYTES = 100_000
PROMPT = np.arange(5, 45, dtype=np.int64)


def random_batch(seed: int) -> Batch:
    tokens = torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(seed))
    return Batch(torch.full((4,), 16), tokens, torch.arange(64) % 16 > 0)


class Trainer(TrainWorker):
    """Can be made to damage a bucket, or the word of what it has sent."""

    damaged_bucket = -1
    lost_bucket = -1

    def learn(self, seed: int) -> None:
        self.strategy.train_step(random_batch(seed), build_sft_loss())

    def weights(self, adapter: bool = False) -> dict[str, np.ndarray]:
        export = self.strategy.export_adapter if adapter else self.strategy.export_weights
        buckets = list(export(BUCKET_BYTES))
        return {name: tensor.clone().cpu().numpy() for bucket in buckets for name, tensor in unpack_bucket(bucket)}

    def spoil(self, damaged_bucket: int = -1, lost_bucket: int = -1) -> None:
        self.damaged_bucket, self.lost_bucket = damaged_bucket, lost_bucket

    def num_segments(self) -> int:
        return len(self._sender._pool.ids) if self._sender else 0

    def _send(self, order: TransferRequest, buckets: Iterable[WeightBucket]) -> TransferResult:
        return super()._send(order, self._spoiled(buckets))

    def _spoiled(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        for number, bucket in enumerate(buckets):
            if number == self.damaged_bucket:
                bucket.data[77] ^= 4
            if number == self.lost_bucket:
                outline = dataclasses.replace(bucket.outline, names=("lost", *bucket.outline.names[1:]))
                bucket = dataclasses.replace(bucket, outline=outline)
            yield bucket


class Generator(InferWorker):
    """Can be made to die, to hang or to lie in the middle of an update."""

    orders: dict[str, int]

    def order(self, **orders: int) -> None:
        self.orders, self.parcels = orders, 0

    async def receive_weights(self, message: Message, link: Link) -> Reply:
        orders = getattr(self, "orders", {})
        if isinstance(message, BucketMessage):
            self.parcels = getattr(self, "parcels", 0) + 1
            if orders.get("die_at") == self.parcels:
                os.kill(os.getpid(), signal.SIGKILL)
            if orders.get("hang_at") == self.parcels:
                await asyncio.sleep(3600)
        reply = await super().receive_weights(message, link)
        if isinstance(message, Close) and "lie" in orders:
            return dataclasses.replace(reply, digest="0" * 32)
        return reply

    async def weights(self) -> dict[str, np.ndarray]:
        return {name: as_bytes(tensor) for name, tensor in self.strategy._model.state_dict().items()}

    async def greedy(self) -> Completion:
        params = SamplingParams(max_new_tokens=6, temperature=0.0)
        return await self.strategy.generate(GenerateRequest("it", PROMPT, params))


def as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def context(model: Path, role: str, strategy: str, dtype: str = "fp32", rate: float = 1e-2) -> StrategyContext:
    section = {
        "model_args": {"dtype": dtype, "attn_implementation": "sdpa"},
        "training_args": {"learning_rate": rate, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4},
        "strategy_args": {"strategy_name": strategy},
    }
    return StrategyContext(WorkerConfig.model_validate(section), role, str(model), sequence_length=64)


@pytest.fixture(scope="module")
def clusters(model: Path) -> Iterator[tuple[Cluster, Cluster]]:
    workers = {
        RoleRequest("actor_train", None, world_size=2): Trainer,
        RoleRequest("actor_infer", None, world_size=2): Generator,
    }
    with local_clusters(workers, rpc_timeout=120.0) as (trainer, generator):
        trainer.wait_ready()
        trainer.rendezvous()
        contexts = [context(model, "actor_train", "fsdp2_train").at_rank(rank, 2) for rank in range(2)]
        loading = trainer.submit_each("setup", [(c,) for c in contexts])
        generator.call("setup", context(model, "actor_infer", "hf_infer"))
        trainer.gather(loading, call="setup")
        yield trainer, generator


@pytest.fixture(params=[Route.SHARED_MEMORY, Route.COLLECTIVE], ids=lambda route: route.name)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Route:
    """Every route that a CPU has; the driver is made to believe that the workers' places ask for it."""

    def from_rank_0(
        plan: object, trainers: object, receivers: Sequence[WorkerSlot], **_: bool
    ) -> dict[int, dict[int, Link]]:
        return {0: {slot.rank: Link(request.param, None) for slot in receivers}}

    monkeypatch.setattr(sync, "plan_routes", from_rank_0)
    return request.param


def restart(generator: Cluster, rank: int, model: Path, own: StrategyContext | None = None) -> None:
    generator.restart(rank)
    generator.call_rank(rank, "setup", own or context(model, "actor_infer", "hf_infer"))


def greedy_reference(model: Path, weights: dict[str, np.ndarray]) -> list[int]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    named = dict(reference.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(torch.tensor(value))
    ids = torch.from_numpy(PROMPT)[None]
    out: Tensor = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def assert_serves(generator: Cluster, model: Path, weights: dict[str, np.ndarray], version: int) -> None:
    """Both generators decode as Hugging Face does with these weights."""
    expected = greedy_reference(model, weights)
    for completion in generator.call("greedy"):
        assert completion.token_ids.tolist() == expected[: len(completion.token_ids)]
        assert completion.weight_version == version


def test_generators_decode_as_hugging_face_with_the_trained_weights(clusters, model, route):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True)
    outputs = set()
    for version in range(3):
        trainer.call("learn", version)
        updates.sync(version)
        weights = trainer.call("weights")[0]
        assert_serves(generator, model, weights, version)
        outputs.add(tuple(greedy_reference(model, weights)))
    assert len(outputs) > 1, "training changes nothing that greedy decoding shows"


def test_each_rank_serves_those_that_are_near_it(clusters, model, monkeypatch):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES)
    for version, route in ((30, Route.SHARED_MEMORY), (31, Route.COLLECTIVE)):
        link = Link(route, None)
        monkeypatch.setattr(sync, "plan_routes", lambda *_, link=link, **options: {0: {1: link}, 1: {0: link}})
        trainer.call("learn", version)
        updates.sync(version)
        assert_serves(generator, model, trainer.call("weights")[0], version)
    monkeypatch.setattr(sync, "plan_routes", lambda *_, **options: {1: {0: link, 1: link}})
    updates.sync(32)
    assert_serves(generator, model, trainer.call("weights")[0], 32)


@pytest.mark.slow
def test_a_replaced_generator_gets_the_version_of_the_others_when_the_trainer_has_moved_on(clusters, model):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True, trains_between=True)
    updates.sync(8)
    weights = trainer.call("weights")[0]
    trainer.call("learn", 8)
    restart(generator, 0, model)
    updates.restore(0)
    assert_serves(generator, model, weights, 8)
    updates.sync(9)
    assert_serves(generator, model, trainer.call("weights")[0], 9)


def test_a_damaged_bucket_is_refused_by_name_and_the_old_weights_stay(clusters, model, route):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True)
    updates.sync(10)
    weights = trainer.call("weights")[0]
    trainer.call("learn", 10)
    trainer.call_rank(0, "spoil", damaged_bucket=1)
    message = r"actor_infer rank [01] did not accept weights of version 11: WeightChecksumError: .* damaged in transfer"
    with pytest.raises(WeightTransferError, match=message):
        updates.sync(11)
    assert_serves(generator, model, weights, 10)
    trainer.call_rank(0, "spoil")
    updates.sync(12)
    assert_serves(generator, model, trainer.call("weights")[0], 12)


def test_names_that_do_not_fit_and_a_wrong_digest_are_refused_by_name(clusters):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True)
    trainer.call_rank(0, "spoil", lost_bucket=0)
    with pytest.raises(WeightTransferError, match=r"actor_infer rank [01] .* WeightMismatchError: .*unknown name lost"):
        updates.sync(13)
    trainer.call_rank(0, "spoil")
    generator.call_rank(1, "order", lie=1)
    with pytest.raises(WeightTransferError, match=r"actor_infer rank 1 .* digest of the received data 0000"):
        updates.sync(14)
    generator.call_rank(1, "order")
    updates.sync(15)


@pytest.mark.parametrize(
    "route", [Route.SHARED_MEMORY, pytest.param(Route.COLLECTIVE, marks=pytest.mark.slow)], indirect=True
)
def test_a_generator_that_dies_in_an_update_is_named_and_replaced(clusters, model, route):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True)
    trainer.call("learn", 16)
    generator.call_rank(1, "order", die_at=2)
    with pytest.raises(WorkerDiedError) as death:
        updates.sync(16)
    assert (death.value.role, death.value.rank) == ("actor_infer", 1)
    weights = trainer.call("weights")[0]
    if route is Route.SHARED_MEMORY:  # a broken process group would have broken the other's update too
        completion = generator.call_rank(0, "greedy")
        assert completion.weight_version == 16, "the death of one says nothing of the others"
    restart(generator, 1, model)
    updates.restore(1)
    assert_serves(generator, model, weights, 16)
    updates.sync(17)
    assert_serves(generator, model, weights, 17)


@pytest.mark.slow
def test_a_generator_that_hangs_is_named(clusters, model):
    trainer, generator = clusters
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True)
    generator.call_rank(0, "order", hang_at=2)
    trainer.rpc_timeout = 6.0
    with pytest.raises(RpcTimeoutError, match="actor_infer rank 0: update to version 18"):
        updates.sync(18)
    trainer.rpc_timeout = 120.0
    restart(generator, 0, model)
    updates.sync(19)


def test_little_stays_behind(clusters):
    import ray

    def used() -> float:
        return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]

    trainer, generator = clusters
    total = sum(array.nbytes for array in trainer.call("weights")[0].values())
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True)
    for version in range(20, 24):
        updates.sync(version)
    per_update = 2 + total // BUCKET_BYTES
    # One set that the generators compute with, and one for the next update.
    assert 0 < trainer.call("num_segments")[0] <= 2 * per_update + 2
    # The answer of "weights" above did go through the store, and Ray takes its time to count what was let go.
    assert happens(lambda: used() < total / 2), "the weights of an update stay in the object store"


def test_deltas_lead_to_the_same_bits_and_tokens_as_whole_updates(clusters, model, monkeypatch):
    trainer, generator = clusters
    ModelCluster(trainer).setup(context(model, "actor_train", "fsdp2_train", "bf16", 1e-5))
    infer = context(model, "actor_infer", "hf_infer", "bf16")
    generator.call("setup", infer)
    near, far = Link(Route.SHARED_MEMORY, None), Link(Route.COLLECTIVE, None)
    monkeypatch.setattr(sync, "plan_routes", lambda *_, deltas: {0: {0: far, 1: near}})
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, deltas=True)

    def assert_equal() -> float:
        by_delta, whole = generator.call("weights")
        assert by_delta.keys() == whole.keys() and all(np.array_equal(by_delta[name], whole[name]) for name in whole)
        one, other = generator.call("greedy")
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.logprobs, other.logprobs)
        return updates.take_metrics()["weight_update/sent_share"]

    shares = []
    for version in range(3):
        trainer.call("learn", version)
        updates.sync(version)
        shares.append(assert_equal())
    assert shares[0] == 1 and max(shares[1:]) < 0.5
    restart(generator, 0, model, infer)
    updates.restore(0)
    assert assert_equal() == 1


def test_with_lora_generators_decode_as_hugging_face_with_base_and_adapter(clusters, model):
    trainer, generator = clusters
    lora = LoraSpec(rank=4, alpha=32, targets=("q_proj", "v_proj", "down_proj"))
    train = dataclasses.replace(context(model, "actor_train", "fsdp2_train"), lora=lora)
    ModelCluster(trainer).setup(train)
    infer = dataclasses.replace(context(model, "actor_infer", "hf_infer"), lora=lora)
    generator.call("setup", infer)
    updates = WeightSync(trainer, generator, bucket_bytes=BUCKET_BYTES, check=True, adapter_only=True)
    for version in range(2):
        for seed in range(8):
            trainer.call("learn", seed)
        updates.sync(version)
        assert_serves(generator, model, merged(trainer, lora), version)
    restart(generator, 0, model, infer)
    updates.restore(0)
    weights = merged(trainer, lora)
    assert_serves(generator, model, weights, 1)
    base = trainer.call("weights")[0]
    assert greedy_reference(model, weights) != greedy_reference(model, base), "the adapter changes nothing"


def merged(trainer: Cluster, lora: LoraSpec) -> dict[str, np.ndarray]:
    """The base weights plus the adapter's change, in float64."""
    weights, adapter = trainer.call("weights")[0], trainer.call("weights", adapter=True)[0]
    for name in [name for name in adapter if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        down, up = (adapter[name.replace(".lora_A.", part)].astype(np.float64) for part in (".lora_A.", ".lora_B."))
        weights[layer] = (weights[layer] + lora.alpha / lora.rank * (up @ down)).astype(np.float32)
    return weights
