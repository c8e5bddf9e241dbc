"""Gigabytes per second of a full weight sync, next to a plain memcpy of the same bytes in the same run.

Real workers on a local Ray: ``fsdp2_train`` exports a model of 512 MiB, packs it into buckets and sends it, and the
generator loads it; the time is what the driver waits:

- shared memory (the route of colocated roles on a CPU) into ``hf_infer``, whose model lives in what it is sent, also
  with ``check_weight_update``;
- shared memory into a receiver that loads each bucket as it comes, copying it into its own weights;
- a gloo broadcast (the route between nodes) into ``hf_infer``.

Apart from that, of the same bytes between two ranks of a trainer that shards them: the gather of whole tensors on one
of them, into buckets, and a gloo broadcast of the buckets.

The memcpy is NumPy's, one thread, from one set of tensors like the model's to another, both touched before. Rounds
alternate and the fastest of each counts, so that other load on the machine falls out of the ratio, as long as it leaves
both cores free now and then. A sync on one device should reach 0.6 of the memcpy into ``hf_infer``, and 0.5 into an
engine that copies. Both ends of that one copy, so it takes two memcpys of memory traffic: half of the memcpy by two
threads is the most that any way through host memory can reach, and where memory is shared with other machines that
limit comes and goes.

Planning is all that an update needs to know of 20,000 tensors without touching a weight: names, shapes, buckets and
messages on the sender; messages, the way of every tensor into the model and its place in a bucket on the receiver. Each
end should take less than 50 ms. The load beside it is the rest that grows with the number of tensors, however small.

    python benchmarks/weight_sync.py --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.configs.worker import WorkerConfig
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.fsdp2.weights import ReplicatedWeights
from roll.distributed.strategy.training.module_weights import hf_pieces
from roll.distributed.strategy.training.trainer import PlannedBucket, export, plan_buckets
from roll.distributed.weights import sync
from roll.distributed.weights.buckets import BucketOutline, WeightBucket, packing_into, unpack_bucket
from roll.distributed.weights.messages import BucketMessage, Payload
from roll.distributed.weights.receiver import WeightReceiver, WeightUpdate, tensors_of
from roll.distributed.weights.segments import SegmentPool, SharedMemory
from roll.distributed.weights.sender import Link, Route
from roll.models.scoring import TokenScorer
from roll.models.tiny import make_tokenizer
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.workers import InferWorker, TrainWorker
from roll.utils.memory import freeze_startup_objects

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Config

T = TypeVar("T")

LIMITS = {"shared memory, hf_infer": 0.6, "shared memory, loads as it comes": 0.5}
"""Of a memcpy."""
NUM_TENSORS = 20_000
BUCKET_BYTES = 1 << 20
"""Of these."""
PLANNING_LIMIT_S = 0.05


class ShardingWorker(TrainWorker):
    """Does alone what a sync does with several trainers."""

    def gather(self, bucket_bytes: int) -> None:
        """Gathers the whole model on rank 0, bucket by bucket, into memory that it has used before."""
        self._pool = getattr(self, "_pool", None) or SegmentPool()
        with packing_into(lambda num_bytes: self._pool.allocate(num_bytes, at_least=bucket_bytes)):
            for bucket in self.strategy.export_weights(bucket_bytes, check=False):
                segment = self._pool.find(bucket.data)
                assert segment is not None
                self._pool.hand_over(segment, [])

    def broadcast(self, num_bytes: int, bucket_bytes: int) -> None:
        """Broadcasts so many bytes from rank 0."""
        if not hasattr(self, "_bytes"):
            self._bytes = torch.ones(bucket_bytes, dtype=torch.uint8)
        for start in range(0, num_bytes, bucket_bytes):
            torch.distributed.broadcast(self._bytes[: num_bytes - start], src=0)


class LoadingWorker(InferWorker):
    """Loads each bucket as it comes, as engines do whose loader takes one tensor at a time."""

    def setup(self, context: StrategyContext, continuous: bool = True, others: Sequence[Any] = ()) -> None:
        self._receiver = WeightReceiver(self._load_weights, self.node_ip())
        self._weights: dict[str, Tensor] = {}

    async def _load_weights(self, payload: Payload, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        async for bucket in buckets:
            await asyncio.to_thread(self._copy, bucket)  # the loop answers requests meanwhile
            del bucket

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in unpack_bucket(bucket):
            if name not in self._weights:
                self._weights[name] = torch.empty_like(tensor)
            self._weights[name].copy_(tensor)


def config_of(hidden: int, num_layers: int) -> Qwen2Config:
    """A Qwen2 with the tokenizer of the tiny model; 12 tensors a layer."""
    from transformers import Qwen2Config

    tokenizer = make_tokenizer()
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(path: Path, mebibytes: int) -> list[int]:
    """Writes a random model of about that size in float32 and returns the bytes of each of its tensors."""
    from transformers import Qwen2ForCausalLM

    hidden = 1024 if mebibytes >= 64 else 256
    per_layer = 4 * (4 * hidden**2 + 3 * hidden * 4 * hidden)
    model = Qwen2ForCausalLM(config_of(hidden, max(1, round((mebibytes << 20) / per_layer)))).float()
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return [parameter.numel() * parameter.element_size() for parameter in model.parameters()]


def context(path: Path, role: str, strategy: str) -> StrategyContext:
    section = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": strategy}}
    return StrategyContext(WorkerConfig.model_validate(section), role, str(path), sequence_length=128)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(path: Path, sizes: list[int], args: argparse.Namespace) -> dict[str, float]:
    """The fastest round of each contestant, in seconds."""
    source, target = ([torch.ones(size, dtype=torch.uint8).numpy() for size in sizes] for _ in range(2))
    workers = {"actor_train": TrainWorker, "actor_infer": InferWorker, "loader": LoadingWorker}
    workers |= {"sharding": ShardingWorker}
    requests = [RoleRequest(name, (0, 1) if name == "sharding" else (0,)) for name in workers]
    plan = plan_placement(requests, discover_nodes())
    placement = create_placement(plan)
    threads = {"OMP_NUM_THREADS": "1"}
    clusters = {name: Cluster(name, worker, placement, system_envs=threads) for name, worker in workers.items()}
    for cluster in clusters.values():
        cluster.launch()
    for name, cluster in clusters.items():
        cluster.wait_ready()
        strategy = "fsdp2_train" if issubclass(workers[name], TrainWorker) else "hf_infer"
        ModelCluster(cluster).setup(context(path, name, strategy))
    trainer, sharding, bucket_bytes = clusters["actor_train"], clusters["sharding"], args.bucket_mb << 20
    hf_infer = sync.WeightSync(trainer, clusters["actor_infer"], bucket_bytes=bucket_bytes)
    checking = sync.WeightSync(trainer, clusters["actor_infer"], bucket_bytes=bucket_bytes, check=True)
    loader = sync.WeightSync(trainer, clusters["loader"], bucket_bytes=bucket_bytes)
    by_place, copiers = sync.plan_routes, ThreadPoolExecutor(2)

    def memcpy() -> None:
        for into, from_ in zip(target, source, strict=True):
            np.copyto(into, from_)

    def memcpy_by_two() -> None:
        list(copiers.map(np.copyto, target, source))

    def over_gloo() -> None:
        sync.plan_routes = lambda *_, **options: {0: {0: Link(Route.COLLECTIVE, None)}}
        hf_infer.sync(0)
        sync.plan_routes = by_place

    contestants: dict[str, Callable[[], object]] = {
        "memcpy": memcpy,
        "memcpy by two threads": memcpy_by_two,
        "shared memory, hf_infer": lambda: hf_infer.sync(0),
        "shared memory, hf_infer, checked": lambda: checking.sync(0),
        "shared memory, loads as it comes": lambda: loader.sync(0),
        "gloo broadcast, hf_infer": over_gloo,
        "gather from two ranks alone": lambda: sharding.call("gather", bucket_bytes),
        "gloo broadcast alone": lambda: sharding.call("broadcast", sum(sizes), bucket_bytes),
    }
    best = dict.fromkeys(contestants, float("inf"))
    for number in range(args.rounds + 1):
        for name, action in contestants.items():
            took = seconds(action)
            if number > 0:  # the first round warms up
                best[name] = min(best[name], took)
    for cluster in clusters.values():
        cluster.shutdown()
    placement.remove()
    return best


def many_tensors() -> PreTrainedModel:
    """A model of ``NUM_TENSORS`` small tensors, whose values are not set."""
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(config_of(16, NUM_TENSORS // 12)).float()
    return model.to_empty(device="cpu")


def measure_planning(rounds: int) -> dict[str, float]:
    """Seconds of both ends for ``NUM_TENSORS`` tensors, in one process; the fastest round of what is done again."""
    float32, cpu = torch.float32, torch.device("cpu")
    weights = ReplicatedWeights(TokenScorer(many_tensors()), cpu, compute_dtype=float32, trained=False)
    model, pool, place = many_tensors(), SegmentPool(), SharedMemory("segment", "path")
    freeze_startup_objects()  # as workers do once their model is loaded

    def messages(outlines: list[BucketOutline], *, known: bool) -> bytes:
        told = [BucketMessage(i, o.key, None if known else o, None, place) for i, o in enumerate(outlines)]
        return pickle.dumps(told)

    def plan() -> tuple[list[PlannedBucket], bytes]:
        planned = plan_buckets(hf_pieces(weights, float32), BUCKET_BYTES)
        return planned, messages([bucket.outline for bucket in planned], known=False)

    def pack() -> list[WeightBucket]:
        with packing_into(pool.allocate):
            buckets = list(export(planned, [0], check=False))
        for bucket in buckets:
            segment = pool.find(bucket.data)
            assert segment is not None
            pool.hand_over(segment, [])
        return buckets

    def hear() -> WeightUpdate:
        outlines = [message.outline for message in pickle.loads(told)]
        arrived = [replace(bucket, outline=outline) for bucket, outline in zip(buckets, outlines, strict=True)]
        return WeightUpdate(model, tensors_of(arrived))

    took: dict[str, float] = {}

    def timed(name: str, action: Callable[[], T], rounds: int = 1) -> T:
        for _ in range(rounds):
            started = time.perf_counter()
            result = action()
            took[name] = min(time.perf_counter() - started, took.get(name, float("inf")))
        return result

    planned, told = timed("sender, first update", plan)
    outlines = [bucket.outline for bucket in planned]
    buckets = pack()
    update = timed("receiver, first update", hear)
    again = timed("sender, later updates", lambda: messages(outlines, known=True), rounds)
    timed("receiver, later updates", lambda: (pickle.loads(again), tensors_of(buckets)), rounds)
    timed("sender, gather and pack", pack, rounds)
    timed("receiver, load", lambda: update.apply(tensors_of(buckets)), rounds)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mb", type=int, default=512, help="size of the model, MiB")
    parser.add_argument("--bucket-mb", type=int, default=128, help="model_update_buffer_size_mb")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ray_session({"object_store_memory": 2**27}):
        model = Path(folder) / "model"
        sizes = make_model(model, args.model_mb)
        best = measure(model, sizes, args)
    planning = measure_planning(args.rounds)
    num_bytes = sum(sizes)
    rows = {name: (num_bytes / took / 1e9, best["memcpy"] / took) for name, took in best.items()}
    print(f"\n{num_bytes / 2**20:.0f} MiB in buckets of {args.bucket_mb} MiB, best of {args.rounds}\n")
    print(f"{'way':<34} {'GB/s':>6} {'of memcpy':>10}")
    for name, (speed, ratio) in rows.items():
        print(f"{name:<34} {speed:>6.2f} {ratio:>10.2f}")
    for name, limit in LIMITS.items():
        print(f"{name}: limit of {limit} of a memcpy {'met' if rows[name][1] >= limit else 'NOT met'}")
    print(f"\nplanning of {NUM_TENSORS:,} tensors\n")
    for name, took in planning.items():
        print(f"{name:<34} {took * 1e3:>6.1f} ms")
    for end in ("sender", "receiver"):
        met = planning[f"{end}, later updates"] <= PLANNING_LIMIT_S
        print(f"{end}: limit of {PLANNING_LIMIT_S * 1e3:.0f} ms {'met' if met else 'NOT met'}")
    result = {
        name: {"gb_per_s": round(speed, 3), "of_memcpy": round(ratio, 3)} for name, (speed, ratio) in rows.items()
    }
    print(json.dumps(result | {"planning_ms": {name: round(took * 1e3, 2) for name, took in planning.items()}}))


if __name__ == "__main__":
    main()
