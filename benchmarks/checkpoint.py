"""Seconds of a checkpoint, next to a plain write of the same bytes in the same run.

Two real training workers on a local Ray hold a model in bf16 with float32 weights and moments, sharded over both; the
checkpoint is whole (a Hugging Face model folder and the optimizer) and goes through ``Checkpointer``: gathered, hashed,
forced to disk, listed, renamed. Three contestants:

- a plain write: each worker writes half of the bytes to a file and forces it to disk;
- a save: what the driver waits for;
- a save with ``async_save``: what the driver waits for before it could go on with the next step. That is the copy of
  each worker's share; gathering, hashing and writing follow in the background.

In every round each contestant has its turn, in an order that moves on from round to round; before a turn the disk has
taken what came earlier, deletions included. A contestant is compared with the plain write of its round. The median of
these ratios counts, printed with the least and the greatest: on a shared disk single rounds differ by half. The first
round, in which memory for the copies is made, is left out and printed. A save should take at most 1.2 of the plain
write, and with ``async_save`` block the step for at most 0.3 of it. Everything that was written is deleted.

    python benchmarks/checkpoint.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import torch

from roll.configs.worker import WorkerConfig
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import StrategyContext
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.workers import TrainWorker
from roll.tracking.checkpointer import Checkpointer

RANKS = 2
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4
LIMITS = {"save": 1.2, "async_save, blocked": 0.3}


class PlainWorker(TrainWorker):
    """Writes bytes of its own too."""

    def plain_write(self, folder: Path, num_bytes: int) -> None:
        if not hasattr(self, "_block"):
            self._block = torch.randint(0, 255, (2**26,), dtype=torch.uint8).numpy()
        with (folder / f"plain-{self.rank}").open("wb", buffering=0) as file:
            while num_bytes > 0:
                num_bytes -= file.write(self._block[:num_bytes].data)
            os.fsync(file.fileno())


def make_model(path: Path, num_bytes: int) -> None:
    """Writes a random Qwen2 in bf16 whose checkpoint has about that many bytes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roll.models.tiny import make_tokenizer

    hidden = 1024 if num_bytes >= 5e8 else 128
    layers = max(1, round(num_bytes / BYTES_PER_PARAMETER / (4 * hidden**2 + 3 * hidden * 4 * hidden)))
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    tokenizer.save_pretrained(path)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(model: Path, folder: Path, args: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Seconds of every round of each contestant, and the bytes of a checkpoint."""
    placement = create_placement(plan_placement([RoleRequest("actor_train", (0, 1))], discover_nodes()))
    cluster = Cluster("actor_train", PlainWorker, placement)
    cluster.start()
    section = {
        "model_args": {"dtype": "bf16"},
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": args.fsdp_size}},
    }
    role = ModelCluster(cluster)
    role.setup(StrategyContext(WorkerConfig.model_validate(section), "actor_train", str(model), sequence_length=128))
    in_steps, beside = (Checkpointer(folder / str(b), 1, background=b) for b in (False, True))
    size = 0

    def write(path: Path) -> Callable[[], list]:
        files = role.save(path)
        return lambda: files

    def save() -> dict[str, float]:
        nonlocal size
        took = seconds(lambda: in_steps.save(1, write, {}))
        size = sum(file.stat().st_size for file in (folder / "False").rglob("*") if file.is_file())
        return {"save": took}

    def save_beside() -> dict[str, float]:
        blocked = seconds(lambda: beside.save(1, role.start_save, {}))
        return {"async_save, blocked": blocked, "async_save, until on disk": blocked + seconds(beside.wait)}

    def plain_write() -> dict[str, float]:
        (folder / "plain").mkdir()
        return {"plain write": seconds(lambda: cluster.call("plain_write", folder / "plain", size // RANKS))}

    turns = deque([save, save_beside, plain_write])
    took: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        timed: dict[str, float] = {}
        for turn in turns:
            timed |= turn()
            for written in ("False", "True", "plain"):
                shutil.rmtree(folder / written, ignore_errors=True)
            os.sync()
        if number > 0:  # the first round warms up
            turns.rotate(-1)
            for name, value in timed.items():
                took[name].append(value)
        print(json.dumps({"round": number, **{name: round(value, 2) for name, value in timed.items()}}), flush=True)
    cluster.shutdown()
    placement.remove()
    return took, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of a checkpoint")
    parser.add_argument("--fsdp-size", type=int, default=-1, help="1: whole replicas instead of shards")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each kind")
    parser.add_argument("--folder", default=None, help="on the disk to measure; the temporary folder's if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name, ray_session({"object_store_memory": 2**27}):
        folder = Path(name)
        make_model(folder / "model", round(args.gigabytes * 1e9))
        took, size = measure(folder / "model", folder, args)
    typical = {name: statistics.median(values) for name, values in took.items()}
    spread = {name: sorted(v / p for v, p in zip(took[name], took["plain write"], strict=True)) for name in took}
    ratios = {name: statistics.median(values) for name, values in spread.items()}
    print(f"\n{size / 1e9:.2f} GB by {RANKS} workers, medians of {args.rounds}\n")
    print(f"{'what':<28} {'seconds':>8} {'GB/s':>6} {'of plain':>9} {'least to greatest':>18}")
    for name, value in typical.items():
        print(
            f"{name:<28} {value:>8.2f} {size / value / 1e9:>6.2f} {ratios[name]:>9.2f} "
            f"{spread[name][0]:>9.2f} to {spread[name][-1]:.2f}"
        )
    missed = [name for name, limit in LIMITS.items() if ratios[name] > limit]
    for name, limit in LIMITS.items():
        print(f"{name}: limit of {limit} of a plain write {'NOT met' if name in missed else 'met'}")
    print(
        json.dumps({name: {"seconds": round(s, 3), "of_plain": round(ratios[name], 3)} for name, s in typical.items()})
    )
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
