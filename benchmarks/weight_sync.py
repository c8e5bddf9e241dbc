"""Gigabytes per second of a full weight sync, next to a plain memcpy of the same bytes in the same run.

Real workers on a local Ray: ``fsdp2_train`` exports a model of 512 MiB, packs it into buckets with checksums, sends it,
and the generator checks and loads it; the time is what the driver waits. Three ways:

- shared memory (the route of colocated roles on a CPU) into ``hf_infer``, whose model lives in what it is sent;
- shared memory into a receiver that loads each bucket as it comes, copying it into its own weights;
- a gloo broadcast (the route between nodes) into ``hf_infer``.

The memcpy is NumPy's, one thread, from one set of tensors like the model's to another, both touched before. Rounds
alternate and the fastest of each counts, so that other load on the machine falls out of the ratio, as long as it leaves
both cores free now and then. A sync on one device should reach half of the memcpy.

    python benchmarks/weight_sync.py --rounds 7
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from roll.configs.worker import WorkerConfig
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.placement import create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.weights import sync
from roll.distributed.weights.buckets import unpack_bucket
from roll.distributed.weights.contents import WeightBucket
from roll.distributed.weights.messages import Payload
from roll.distributed.weights.receiver import WeightReceiver
from roll.distributed.weights.routes import Link, Route
from roll.pipeline.workers import InferWorker, TrainWorker

LIMIT = 0.5


class LoadingWorker(InferWorker):
    """Loads each bucket as it comes, as engines do whose loader takes one tensor at a time."""

    def setup(self, context: StrategyContext, continuous: bool = True) -> None:
        self._receiver = WeightReceiver(self._load_weights, self.node_ip())
        self._weights: dict[str, Tensor] = {}

    async def _load_weights(self, payload: Payload, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        async for bucket in buckets:
            for name, tensor in unpack_bucket(bucket):
                if name not in self._weights:
                    self._weights[name] = torch.empty_like(tensor)
                self._weights[name].copy_(tensor)
            del bucket, tensor


def make_model(path: Path, mebibytes: int) -> list[int]:
    """Writes a random Qwen2 of about that size in float32 and returns the bytes of each of its tensors."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roll.models.loading import save_model
    from roll.models.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    hidden = 1024 if mebibytes >= 64 else 256
    per_layer = 4 * (4 * hidden**2 + 3 * hidden * 4 * hidden)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=max(1, round((mebibytes << 20) / per_layer)),
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    save_model(model, path)
    tokenizer.save_pretrained(path)
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
    plan = plan_placement([RoleRequest(name, (0,)) for name in workers], discover_nodes())
    placement = create_placement(plan)
    clusters = {name: Cluster(name, worker, placement) for name, worker in workers.items()}
    for cluster in clusters.values():
        cluster.launch()
    for name, strategy in (("actor_train", "fsdp2_train"), ("actor_infer", "hf_infer"), ("loader", "hf_infer")):
        clusters[name].wait_ready()
        clusters[name].call("setup", context(path, name, strategy))
    trainer, bucket_bytes = clusters["actor_train"], args.bucket_mb << 20
    hf_infer = sync.WeightSync(trainer, clusters["actor_infer"], bucket_bytes=bucket_bytes)
    loader = sync.WeightSync(trainer, clusters["loader"], bucket_bytes=bucket_bytes)
    by_place = sync.plan_link

    def over_gloo() -> None:
        sync.plan_link = lambda *_: Link(Route.COLLECTIVE, None)
        hf_infer.sync(0)
        sync.plan_link = by_place

    contestants: dict[str, Callable[[], object]] = {
        "memcpy": lambda: [np.copyto(*pair) for pair in zip(target, source, strict=True)],
        "shared memory, hf_infer": lambda: hf_infer.sync(0),
        "shared memory, loads as it comes": lambda: loader.sync(0),
        "gloo broadcast, hf_infer": over_gloo,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mb", type=int, default=512, help="size of the model, MiB")
    parser.add_argument("--bucket-mb", type=int, default=128, help="model_update_buffer_size_mb")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ray_session({"object_store_memory": 2**27}):
        sizes = make_model(Path(folder), args.model_mb)
        best = measure(Path(folder), sizes, args)
    num_bytes = sum(sizes)
    rows = {name: (num_bytes / took / 1e9, best["memcpy"] / took) for name, took in best.items()}
    print(f"\n{num_bytes / 2**20:.0f} MiB in buckets of {args.bucket_mb} MiB, best of {args.rounds}\n")
    print(f"{'way':<34} {'GB/s':>6} {'of memcpy':>10}")
    for name, (speed, ratio) in rows.items():
        print(f"{name:<34} {speed:>6.2f} {ratio:>10.2f}")
    for name in ("shared memory, hf_infer", "shared memory, loads as it comes"):
        print(f"{name}: limit of {LIMIT} of a memcpy {'met' if rows[name][1] >= LIMIT else 'NOT met'}")
    result = {
        name: {"gb_per_s": round(speed, 3), "of_memcpy": round(ratio, 3)} for name, (speed, ratio) in rows.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
