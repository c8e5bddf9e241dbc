"""Milliseconds that a step's batch takes from the driver to two workers and back, beside flat NumPy arrays in one run.

1,024 sequences of 128 to 896 tokens with all columns that a training step has, on a local Ray; the workers compute
nothing. Three trips:

- ``whole batch``: cut by tokens as for two data-parallel ranks, sent, returned, joined in the old order;
- ``scores``: what ``ModelCluster.logprobs`` does around a forward pass: tokens and loss mask there, log-probabilities
  and entropies back in the old order;
- ``flat arrays``: the columns of the whole batch as arrays, the first half to one worker and the second to the other.

They take turns, and the fastest round of each counts. Exit code 1 when the whole batch takes more than ``LIMIT_MS``.

    python benchmarks/batches.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import ray
import torch

from roll.algorithms.types import TokenScores
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import RankInfo, StrategyContext
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.workers import ScoreWorker
from roll.utils.memory import keep_freed_memory

LIMIT_MS = 50.0
NUM_SEQUENCES, GROUP_SIZE = 1024, 8
FLOATS = ("rewards_T", "rollout_logprobs_T", "old_logprobs_T", "advantages_T", "returns_T")


class EchoWorker(ScoreWorker):
    """Gives back what it is given."""

    def setup(self, context: StrategyContext) -> RankInfo:
        return RankInfo(context.rank, context.world_size, context.rank, context.world_size)

    def logprobs(self, batch: Batch, adapter: bool = True) -> TokenScores:
        scores = torch.zeros(batch.num_tokens)
        return TokenScores(logprobs_T=scores, entropy_T=scores)

    def echo(self, batch: Batch) -> Batch:
        return batch

    def echo_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays


def make_batch() -> Batch:
    """All columns of a GRPO step, of random numbers."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(128, 897, (NUM_SEQUENCES,), generator=generator)
    num_tokens = int(lengths_B.sum())
    rows = torch.arange(NUM_SEQUENCES)
    tokens_T = torch.randint(0, 50_000, (num_tokens,), generator=generator)
    batch = Batch(lengths_B, tokens_T, torch.zeros(num_tokens, dtype=torch.bool))
    scores = {name: torch.randn(num_tokens, generator=generator) for name in FLOATS}
    return batch.replace(
        loss_mask_T=batch.positions_T > 64,
        turn_T=torch.zeros(num_tokens, dtype=torch.int64),
        rollout_versions_T=torch.zeros(num_tokens, dtype=torch.int64),
        group_B=rows // GROUP_SIZE,
        traj_B=rows,
        scores_B=torch.randn(NUM_SEQUENCES, generator=generator),
        **scores,
    )


@contextmanager
def workers() -> Iterator[Cluster]:
    with ray_session({"num_cpus": 2, "object_store_memory": 2**29}):
        placement = create_placement(plan_placement([RoleRequest("actor_train", (0, 1))], discover_nodes()))
        cluster = Cluster("actor_train", EchoWorker, placement, system_envs={"OMP_NUM_THREADS": "1"})
        cluster.launch()
        cluster.wait_ready()
        yield cluster
        cluster.shutdown()


def send_whole(cluster: Cluster, batch: Batch) -> Batch:
    parts = batch.split(2)
    refs = cluster.submit_each("echo", [(ray.put(batch.select(part)),) for part in parts])
    back: list[Batch] = cluster.gather(refs, call="echo")
    names = [field.name for field in fields(Batch) if getattr(batch, field.name) is not None]
    columns: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in back]) for name in names}
    joined = Batch(**columns)
    return joined.select(torch.cat(parts).argsort())


def send_arrays(cluster: Cluster, batch: Batch) -> dict[str, np.ndarray]:
    arrays = {name: column.numpy() for name, column in _columns(batch)}
    half = NUM_SEQUENCES // 2
    cuts = {"B": half, "T": int(batch.lengths_B[:half].sum())}
    halves = [
        {name: array[: cuts[name[-1]]] if first else array[cuts[name[-1]] :] for name, array in arrays.items()}
        for first in (True, False)
    ]
    refs = cluster.submit_each("echo_arrays", [(ray.put(each),) for each in halves])
    back = cluster.gather(refs, call="echo_arrays")
    return {name: np.concatenate([each[name] for each in back]) for name in arrays}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed trips of each kind")
    args = parser.parse_args()
    keep_freed_memory()  # as the driver of a run does
    batch = make_batch()
    with workers() as cluster:
        role = ModelCluster(cluster)
        role.setup(StrategyContext(WorkerConfig(), "actor_train", ""))
        trips: dict[str, Callable[[], object]] = {
            "whole batch": lambda: send_whole(cluster, batch),
            "scores": lambda: role.logprobs(batch),
            "flat arrays": lambda: send_arrays(cluster, batch),
        }
        best = dict.fromkeys(trips, float("inf"))
        for round_number in range(args.rounds + 1):
            for name, trip in trips.items():
                start = time.perf_counter()
                trip()
                if round_number > 0:  # the first round warms up
                    best[name] = min(best[name], time.perf_counter() - start)
        same = send_whole(cluster, batch)
    if not all(torch.equal(getattr(same, name), column) for name, column in _columns(batch)):
        raise RuntimeError("the batch came back changed")
    num_bytes = sum(column.nbytes for _, column in _columns(batch))
    print(json.dumps({"sequences": NUM_SEQUENCES, "tokens": batch.num_tokens, "MB": round(num_bytes / 1e6, 1)}))
    for name, seconds in best.items():
        row = {"what": name, "ms": round(1e3 * seconds, 1), "vs_flat": round(seconds / best["flat arrays"], 2)}
        print(json.dumps(row), flush=True)
    took = 1e3 * best["whole batch"]
    print(f"whole batch: {took:.1f} ms, expected at most {LIMIT_MS}")
    sys.exit(int(took > LIMIT_MS))


def _columns(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    for f in fields(batch):
        if (column := getattr(batch, f.name)) is not None:
            yield f.name, column


if __name__ == "__main__":
    main()
