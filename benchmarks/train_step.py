"""Tokens per second of every trainer next to a plain torch loop on the same work, in one run.

The work is that of RLVR on a small model: ragged sequences (8 to 32 prompt and 4 to 96 answer tokens), several
optimizer steps per update. The plain loop is what one would write by hand for it: it applies the output layer to the
answers alone, keeps flat gradients and sums them with one all-reduce. It is there twice: with sequences sorted by
length and padded, its fastest way, and packed end to end with positions that restart. All take turns, and the fastest
round of each counts, so that other load on the machine falls out of the ratio; where there is much of it, the ratio of
CPU times says more. ``fsdp2 bf16`` computes in bfloat16, which pays on processors that can, and with matrices that are
large enough: ``--wide`` takes the model of ``grpo_step.py`` (6 layers, hidden 256) in place of the tiny one.

    python benchmarks/train_step.py --world-size 2 [--padded] [--wide] [--trainers fsdp2,deepspeed,megatron]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from grpo_step import make_model
from torch import Tensor

from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.engines import packages
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.packing import make_micro_batches, make_packs
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import StrategyContext, TrainStrategy
from roll.models.tiny import make_tiny_model

PACKAGES = packages()

OPTIMIZER_STEPS = 4
LEARNING_RATE, MAX_NORM, ENTROPY_COEF = 1e-3, 1.0, 0.01
TARGET = 0.9
"""Of the speed of the plain loop on sorted, padded rows, for ``fsdp2_train`` on packed ones."""
PADDED, PACKED = "plain loop, padded", "plain loop, packed"
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2_train", {"fsdp_size": 1}),
    "fsdp2 bf16": ("fsdp2_train", {"fsdp_size": 1, "param_dtype": "bf16"}),
    "fsdp2 sharded": ("fsdp2_train", {"fsdp_size": -1}),
    "deepspeed": ("deepspeed_train", {"zero_optimization": {"stage": 1}}),
    "megatron": ("megatron_train", {}),
}


def pg_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """REINFORCE with an entropy bonus."""
    assert scores.logprobs_T is not None and scores.entropy_T is not None and batch.advantages_T is not None
    gain = batch.advantages_T.to(scores.logprobs_T.device) * scores.logprobs_T + ENTROPY_COEF * scores.entropy_T
    return LossOutput(-gain.sum() / context.num_tokens)


def make_batch(num_sequences: int, seed: int) -> Batch:
    """Ragged sequences; advantages are 0 outside the answers."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(8, 33, (num_sequences,), generator=generator)
    lengths = prompts + torch.randint(4, 97, (num_sequences,), generator=generator)
    tokens = torch.randint(0, 200, (int(lengths.sum()),), generator=generator)
    batch = Batch(lengths, tokens, torch.zeros(len(tokens), dtype=torch.bool))
    mask = batch.positions_T >= prompts[batch.rows_T]
    return batch.replace(loss_mask_T=mask, advantages_T=torch.randn(len(tokens), generator=generator) * mask)


class PlainLoop:
    """What one would write by hand for this work."""

    def __init__(self, model_path: Path, world_size: int, *, packed: bool, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, view in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        self.world_size, self.packed, self.max_tokens = world_size, packed, max_tokens

    def step(self, batch: Batch) -> None:
        count = batch.loss_mask_T.sum().double()
        if self.world_size > 1:
            dist.all_reduce(count)
        cut = make_packs if self.packed else make_micro_batches
        for rows in cut(batch.lengths_B, max_tokens=self.max_tokens):
            self._loss(batch.select(rows), float(count)).backward()
        if self.world_size > 1:
            dist.all_reduce(self.flat)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.flat.zero_()

    def _loss(self, batch: Batch, count: float) -> Tensor:
        if self.packed:
            hidden_TH = self.model.model(
                batch.tokens_T[None], position_ids=batch.positions_T[None], use_cache=False
            ).last_hidden_state[0]
            source = batch.loss_mask_T.nonzero().flatten() - 1
        else:
            width = int(batch.lengths_B.max())
            place_T = batch.rows_T * width + batch.positions_T
            ids = torch.zeros(batch.num_sequences * width, dtype=torch.int64).index_put((place_T,), batch.tokens_T)
            hidden_TH = self.model.model(ids.view(-1, width), use_cache=False).last_hidden_state.flatten(0, 1)
            source = place_T[batch.loss_mask_T] - 1
        logprobs_KV = self.model.lm_head(hidden_TH[source]).float().log_softmax(-1)
        chosen_K = logprobs_KV.gather(-1, batch.tokens_T[batch.loss_mask_T, None]).squeeze(-1)
        entropy_K = -(logprobs_KV.exp() * logprobs_KV).sum(-1)
        assert batch.advantages_T is not None
        return -(batch.advantages_T[batch.loss_mask_T] * chosen_K + ENTROPY_COEF * entropy_K).sum() / count


def make_trainer(name: str, model_path: Path, args: argparse.Namespace, rank: int) -> TrainStrategy:
    strategy, options = TRAINERS[name]
    worker = WorkerConfig.model_validate(
        {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            "training_args": {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"},
            "strategy_args": {"strategy_name": strategy, "strategy_config": options},
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": args.max_tokens,
            "use_sequence_packing": not args.padded,
        }
    )
    context = StrategyContext(
        worker,
        "actor_train",
        str(model_path),
        rank=rank,
        world_size=args.world_size,
        max_grad_norm=MAX_NORM,
        sequence_length=128,
    )
    trainer: TrainStrategy = STRATEGIES.get(strategy)(context)
    trainer.setup()
    return trainer


def chosen(names: str, world_size: int) -> list[str]:
    """The trainers to measure: those that are installed, and sharding only where there is something to shard over."""
    wanted = names.split(",")
    packages = {name: PACKAGES.get(TRAINERS[name][0]) for name in TRAINERS if name.split()[0] in wanted}
    installed = [name for name, package in packages.items() if package is None or package.installed]
    return [name for name in installed if world_size > 1 or "sharded" not in name]


def run(rank: int, port: int, model_path: str, args: argparse.Namespace) -> None:
    """One rank; rank 0 prints the result."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(args.threads)
    path = Path(model_path)
    trainers = {name: make_trainer(name, path, args, rank) for name in chosen(args.trainers, args.world_size)}
    plain = {
        name: PlainLoop(path, args.world_size, packed=name == PACKED, max_tokens=args.max_tokens)
        for name in (PADDED, PACKED)
    }
    count = args.sequences // OPTIMIZER_STEPS // args.world_size
    steps = [make_batch(count, args.world_size * seed + rank) for seed in range(OPTIMIZER_STEPS)]
    contenders = {name: loop.step for name, loop in plain.items()} | {
        name: lambda batch, trainer=trainer: trainer.train_step(batch, pg_loss) for name, trainer in trainers.items()
    }
    best = {name: (float("inf"), float("inf")) for name in contenders}
    for round_number in range(args.rounds + 1):
        for name, step in contenders.items():
            if args.world_size > 1:
                dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            for batch in steps:
                step(batch)
            if round_number > 0:  # the first round warms up
                took = time.perf_counter() - start, time.process_time() - start_cpu
                best[name] = min(best[name][0], took[0]), min(best[name][1], took[1])
    if rank == 0:
        num_tokens = args.world_size * sum(batch.num_tokens for batch in steps)
        report(best, num_tokens, args)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # torch's threads sometimes abort the interpreter's own end


def report(best: dict[str, tuple[float, float]], num_tokens: int, args: argparse.Namespace) -> None:
    """Prints a row for each, of its fastest round and of the one with the least CPU time on rank 0."""
    for name, (seconds, cpu_seconds) in best.items():
        result = {
            "what": name if name in (PADDED, PACKED) else f"{name}, {'padded' if args.padded else 'packed'}",
            "world_size": args.world_size,
            "tokens_per_s": round(num_tokens / seconds),
            "speed_vs_padded": round(best[PADDED][0] / seconds, 3),
            "speed_vs_packed": round(best[PACKED][0] / seconds, 3),
            "cpu_time_vs_padded": round(cpu_seconds / best[PADDED][1], 3),
        }
        print(json.dumps(result), flush=True)
    if "fsdp2" in best and not args.padded:
        ratio = best[PADDED][0] / best["fsdp2"][0]
        print(f"fsdp2_train, packed: {ratio:.2f} of the padded plain loop, expected at least {TARGET}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--sequences", type=int, default=256, help="sequences per update, over all processes")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens per forward pass")
    parser.add_argument("--padded", action="store_true", help="the trainers get rectangles, not packed rows")
    parser.add_argument("--wide", action="store_true", help="a model of 6 layers, hidden 256")
    parser.add_argument("--trainers", default="fsdp2,deepspeed,megatron", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates of each kind")
    args = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        model_path = Path(folder) / "model"
        if args.wide:
            make_model(model_path, None)
        else:
            make_tiny_model(model_path, seed=0)
        torch.multiprocessing.spawn(run, (port, str(model_path), args), nprocs=args.world_size)


if __name__ == "__main__":
    main()
