"""What weight updates by deltas send, and what they cost beside updates of all bytes, on a pretrained model.

Real workers on a local Ray: a trainer (``fsdp2_train``: fp32 weights, AdamW, gradients clipped at 1, computed in fp32)
takes steps of a policy gradient on real text, and after each step sends its weights in bf16 to two generators
(``hf_infer``) by gloo broadcasts, the route between nodes: to one with ``weight_update_deltas``, to the other without.
For each learning rate and update:

- the bytes that are sent, as a share of all bytes;
- CPU seconds of trainer and generator in the update, without waiting, which do not depend on other load;
- the seconds that an update takes over networks of 1 and 10 Gbit/s, as the sum of CPU seconds and bytes over the rate:
  an upper bound, since buckets are made, sent and applied side by side. The broadcast itself, which here goes through
  this machine's memory, is in the CPU seconds.

Update 0 is the first and sends everything. The last is again of the same weights. After each, all weights of both
generators are compared bit by bit.

    python benchmarks/weight_deltas.py --model FOLDER [--rates 1e-6,1e-5] [--steps 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.types import LossContext, LossOutput, TokenScores, require_scores
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.weights import sync
from roll.distributed.weights.buckets import checksum
from roll.distributed.weights.sender import Link, Route
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.workers import InferWorker, TrainWorker

ROWS, TOKENS = 4, 128
BUCKET_BYTES = 64 << 20
NETWORKS = {"1_gbit": 125e6, "10_gbit": 1250e6}
"""Bytes per second."""


def policy_gradient(scores: TokenScores, batch: Batch, ctx: LossContext) -> LossOutput:
    """Every other row is better than the mean."""
    logprobs_T = require_scores(scores.logprobs_T, "policy_gradient", "logprobs_T")
    advantage_B = torch.tensor([1.0, -1.0]).repeat(len(batch.lengths_B) // 2)
    weight_T = advantage_B.repeat_interleave(batch.lengths_B) * batch.loss_mask_T
    return LossOutput(-(logprobs_T * weight_T).sum() / ctx.num_tokens)


class Learner(TrainWorker):
    def learn(self, ids: np.ndarray) -> None:
        rows, length = ids.shape
        strategy: Any = self.strategy
        strategy.weights._autocast = None  # many CPUs multiply no bf16, and would take ten times as long
        position_T = torch.arange(ids.size) % length
        batch = Batch(torch.full((rows,), length), torch.from_numpy(ids.reshape(-1)), position_T > 0)
        self.strategy.train_step(batch, policy_gradient)

    def cpu_s(self) -> float:
        return time.process_time()


class Generator(InferWorker):
    async def cpu_s(self) -> float:
        return time.process_time()

    async def weights(self) -> dict[str, int]:
        """A checksum of each."""
        return await asyncio.to_thread(self._checksums)

    def _checksums(self) -> dict[str, int]:
        def words(weight: Tensor) -> np.ndarray:
            data = weight.contiguous().view(-1).view(torch.uint8).numpy()
            return np.concatenate([data, np.zeros(-len(data) % 8, dtype=np.uint8)])

        strategy: Any = self.strategy
        return {name: checksum(words(weight)) for name, weight in strategy._model.state_dict().items()}


def context(model: Path, role: str, strategy: str, rate: float) -> StrategyContext:
    section = {
        "model_args": {"dtype": "bf16", "disable_gradient_checkpointing": True},
        "training_args": {"learning_rate": rate, "lr_scheduler_type": "constant", "per_device_train_batch_size": ROWS},
        "strategy_args": {"strategy_name": strategy},
    }
    return StrategyContext(WorkerConfig.model_validate(section), role, str(model), sequence_length=TOKENS)


def batches(model: Path, steps: int) -> Sequence[np.ndarray]:
    """Token ids of this repository's documents."""
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(model)(text[: 40 * steps * ROWS * TOKENS])["input_ids"]
    return list(np.array(ids[: steps * ROWS * TOKENS], dtype=np.int64).reshape(steps, ROWS, TOKENS))


def updated(updates: sync.WeightSync, version: int, ends: Sequence[Cluster]) -> dict[str, float]:
    """Sends an update; CPU seconds of both ends, and what was sent."""

    def cpu_s() -> list[float]:
        return [cluster.call("cpu_s")[0] for cluster in ends]

    before = cpu_s()
    updates.sync(version)
    trainer_s, generator_s = (after - start for after, start in zip(cpu_s(), before, strict=True))
    return {"trainer_s": trainer_s, "generator_s": generator_s} | updates.take_metrics()


def measure(model: Path, rate: float, steps: int, clusters: dict[str, Cluster], gigabytes: float) -> None:
    trainer = clusters["actor_train"]
    for name, cluster in clusters.items():
        strategy = "fsdp2_train" if cluster is trainer else "hf_infer"
        ModelCluster(cluster).setup(context(model, name, strategy, rate))
    ways = {
        name: sync.WeightSync(trainer, clusters[name], bucket_bytes=BUCKET_BYTES, deltas=name == "deltas")
        for name in clusters
        if name != "actor_train"
    }
    sync.plan_routes = lambda *_, **options: {0: {0: Link(Route.COLLECTIVE, None)}}
    for version, ids in enumerate([None, *batches(model, steps), None]):
        if ids is not None:
            trainer.call("learn", ids)
        for name, updates in ways.items():
            found = updated(updates, version, (trainer, clusters[name]))
            found.setdefault("weight_update/sent_gb", gigabytes)
            for network, speed in NETWORKS.items():
                seconds = found["weight_update/sent_gb"] * 1e9 / speed
                found[f"over_{network}_s"] = seconds + found["trainer_s"] + found["generator_s"]
            shown = {key.rpartition("/")[2]: float(f"{value:.3g}") for key, value in found.items()}
            print(json.dumps({"rate": rate, "update": version, "way": name} | shown), flush=True)
        one, other = (clusters[name].call("weights")[0] for name in ways)
        assert one == other, "a delta led to other weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model")
    parser.add_argument("--rates", default="1e-6,1e-5", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if args.model is None:
        print("no --model: nothing measured (a pretrained model is needed, random weights change otherwise)")
        return
    workers = {"actor_train": Learner, "deltas": Generator, "whole": Generator}
    with ray_session({"object_store_memory": 2**27}):
        plan = plan_placement([RoleRequest(name, (0,)) for name in workers], discover_nodes())
        placement = create_placement(plan)
        threads = {"OMP_NUM_THREADS": "1"}
        clusters = {name: Cluster(name, worker, placement, system_envs=threads) for name, worker in workers.items()}
        for cluster in clusters.values():
            cluster.launch()
        for cluster in clusters.values():
            cluster.wait_ready()
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        gigabytes = sum(weight.nbytes for weight in whole.parameters()) / 1e9
        for rate in args.rates.split(","):
            measure(args.model, float(rate), args.steps, clusters, gigabytes)
        for cluster in clusters.values():
            cluster.shutdown()
        placement.remove()


if __name__ == "__main__":
    main()
