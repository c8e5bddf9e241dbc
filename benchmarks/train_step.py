"""Tokens per second of ``fsdp2_train`` next to a plain torch loop on the same work, in one run.

The work is that of the embedded demo: a tiny model, 1,000 sequences of 23 prompt and 4 answer tokens per update, in
four optimizer steps. The plain loop knows that all sequences have one length, keeps flat gradients and sums them with
one all-reduce: the least that a hand-written trainer can do. Both alternate, and the fastest round of each counts,
so that other load on the machine falls out of the ratio.

    python benchmarks/train_step.py --world-size 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.fsdp2 import Fsdp2Train
from roll.models.tiny import make_tiny_model

PROMPT, ANSWER, OPTIMIZER_STEPS = 23, 4, 4
LEARNING_RATE, MAX_NORM, ENTROPY_COEF = 1e-3, 1.0, 0.01


def pg_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """REINFORCE with an entropy bonus."""
    assert scores.logprobs_T is not None and scores.entropy_T is not None and batch.advantages_T is not None
    gain = batch.advantages_T.to(scores.logprobs_T.device) * scores.logprobs_T + ENTROPY_COEF * scores.entropy_T
    return LossOutput(-gain.sum() / context.num_tokens)


def make_batch(num_sequences: int, seed: int) -> Batch:
    """Sequences of one length; advantages are 0 outside the answer."""
    generator = torch.Generator().manual_seed(seed)
    length = PROMPT + ANSWER
    tokens = torch.randint(0, 200, (num_sequences * length,), generator=generator)
    mask = (torch.arange(length) >= PROMPT).repeat(num_sequences)
    advantages = torch.randn(len(tokens), generator=generator) * mask
    return Batch(torch.full((num_sequences,), length), tokens, mask, advantages_T=advantages)


class PlainLoop:
    """What one would write by hand for exactly this work."""

    def __init__(self, model_path: Path, world_size: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, view in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        self.world_size = world_size

    def step(self, batch: Batch, micro_batch_size: int) -> None:
        tokens = batch.tokens_T.view(batch.num_sequences, -1)
        assert batch.advantages_T is not None
        advantages = batch.advantages_T.view_as(tokens)
        num_tokens = batch.num_sequences * ANSWER * self.world_size
        for ids, advantage in zip(tokens.split(micro_batch_size), advantages.split(micro_batch_size), strict=True):
            self._loss(ids, advantage[:, PROMPT:], num_tokens).backward()
        if self.world_size > 1:
            dist.all_reduce(self.flat)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.flat.zero_()

    def _loss(self, ids: Tensor, advantage: Tensor, num_tokens: int) -> Tensor:
        logits = self.model(ids, use_cache=False, logits_to_keep=ANSWER + 1).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return -(advantage * chosen + ENTROPY_COEF * entropy).sum() / num_tokens


def make_trainer(model_path: Path, micro_batch_size: int, fsdp_size: int, rank: int, world_size: int) -> Fsdp2Train:
    worker = WorkerConfig.model_validate(
        {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            "training_args": {
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "per_device_train_batch_size": micro_batch_size,
            },
            "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": fsdp_size}},
        }
    )
    context = StrategyContext(
        worker, "actor_train", str(model_path), rank=rank, world_size=world_size, max_grad_norm=MAX_NORM
    )
    trainer = Fsdp2Train(context)
    trainer.setup()
    return trainer


def run(rank: int, world_size: int, port: int, model_path: str, args: argparse.Namespace) -> None:
    """One rank; rank 0 prints the result."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(args.threads)
    path, micro = Path(model_path), args.micro_batch_size
    trainers = {"fsdp2_train, replicas": make_trainer(path, micro, 1, rank, world_size)}
    if world_size > 1:
        trainers["fsdp2_train, sharded"] = make_trainer(path, micro, -1, rank, world_size)
    plain = PlainLoop(path, world_size)
    steps = [make_batch(args.sequences // OPTIMIZER_STEPS // world_size, seed) for seed in range(OPTIMIZER_STEPS)]
    contenders = {"plain loop": lambda batch: plain.step(batch, micro)} | {
        name: lambda batch, trainer=trainer: trainer.train_step(batch, pg_loss) for name, trainer in trainers.items()
    }
    best = dict.fromkeys(contenders, float("inf"))
    for round_number in range(args.rounds + 1):
        for name, step in contenders.items():
            if world_size > 1:
                dist.barrier()
            start = time.perf_counter()
            for batch in steps:
                step(batch)
            if round_number > 0:  # the first round warms up
                best[name] = min(best[name], time.perf_counter() - start)
    if rank == 0:
        num_tokens = world_size * sum(batch.num_tokens for batch in steps)
        for name, seconds in best.items():
            result = {
                "what": name,
                "world_size": world_size,
                "tokens_per_s": round(num_tokens / seconds),
                "speed_vs_plain": round(best["plain loop"] / seconds, 3),
            }
            print(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--sequences", type=int, default=1000, help="sequences per update, over all processes")
    parser.add_argument("--micro-batch-size", type=int, default=125, help="sequences per forward pass")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates of each kind")
    args = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        model_path = Path(folder) / "model"
        make_tiny_model(model_path, seed=0)
        torch.multiprocessing.spawn(run, (args.world_size, port, str(model_path), args), nprocs=args.world_size)


if __name__ == "__main__":
    main()
