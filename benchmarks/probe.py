"""CPU seconds of a probe of the weights, as a share of a step, for the tiny model and for one of SmolLM2-135M's shape.

    python benchmarks/probe.py [--rounds 5]

Trainer (`fsdp2_train`) and generator (`hf_infer`) are in this process, on one thread. A step is what `rlvr_math` and
`rlvr_smollm2` do with these models: responses are sampled, and one optimizer step is taken on them. A probe is the
answer to its question, sampled beside the rollouts, and the trainer's log-probs of that. A run has two generating
workers, so two probes count, and they come with every `probe_every`-th step (the default). Weights are random: they
cost what trained ones do.

Exit code 1 when the probes of a step take more than 50 ms (tiny) or 1% of it (SmolLM2-135M).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.algorithms.types import LossOutput
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import WorkerConfig
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy import make_strategy
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.evidence import rows_of
from roll.models.tiny import make_tiny_model, make_tokenizer
from roll.pipeline.probe import PROMPTED, SAMPLED

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
WORKERS = 2
"""Generating workers of the demonstrations."""
EVERY = RLVRConfig.model_fields["probe_every"].default
SIZES = {"tiny": (64, 8, 24, 24), "SmolLM2-135M": (8, 8, 45, 6)}
"""Prompts, responses to each, tokens of a prompt, sampled tokens."""


def make_model(name: str, folder: Path) -> None:
    if name == "tiny":
        make_tiny_model(folder, seed=0)
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SMOLLM2, eos_token_id=0, bos_token_id=None)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def strategy(name: str, role: str, folder: Path) -> Any:
    worker = WorkerConfig.model_validate(
        {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": 16},
            "strategy_args": {"strategy_name": name},
        }
    )
    made = make_strategy(StrategyContext(worker, role, str(folder), sequence_length=128, max_running_requests=512))
    made.setup()
    return made


def cpu_seconds(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """Of each, the least of several alternating rounds, the first of which is not counted."""
    found = np.zeros((rounds + 1, len(works)))
    for took in found:
        for number, work in enumerate(works):
            started = time.process_time()
            work()
            took[number] = time.process_time() - started
    return [float(each) for each in found[1:].min(0)]


def measure(name: str, rounds: int) -> tuple[float, float, float]:
    """CPU seconds of a probe alone, of one beside the rollouts of its step, and of the step."""
    prompts, answers, long, sampled = SIZES[name]
    with tempfile.TemporaryDirectory() as place:
        make_model(name, Path(place))
        trainer, generator = (
            strategy(*each, Path(place)) for each in (("fsdp2_train", "actor_train"), ("hf_infer", "actor_infer"))
        )
    ids = np.random.default_rng(0).integers(5, 60, (prompts + 1, max(long, PROMPTED)))
    params = SamplingParams(sampled, ignore_eos=True, seed=1)
    asked = [
        GenerateRequest(f"{i}-{j}", ids[i, :long], replace(params, seed=j))
        for i in range(prompts)
        for j in range(answers)
    ]
    question = GenerateRequest("probe", ids[-1, :PROMPTED], replace(params, max_new_tokens=SAMPLED))

    def sample(requests: list[GenerateRequest]) -> Any:
        async def all_of_them() -> Any:
            return await asyncio.gather(*map(generator.generate, requests))

        return rows_of(requests, asyncio.run(all_of_them()))

    def loss(scores: Any, batch: Any, context: Any) -> LossOutput:
        return LossOutput((scores.logprobs_T * batch.loss_mask_T).sum() / context.num_tokens, {})

    trainer.own_forward = None  # of the first step alone
    row, rows = sample([question]), sample(asked)
    alone, scored, without, beside, trained = cpu_seconds(
        [
            lambda: sample([question]),
            lambda: trainer.logprobs(row),
            lambda: sample(asked),
            lambda: sample([question, *asked]),
            lambda: trainer.train_step(rows, loss),
        ],
        rounds,
    )
    generator.shutdown()
    return alone + scored, max(0.0, beside - without) + scored, without + trained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    missed = False
    for name in SIZES:
        alone, probe, step = measure(name, options.rounds)
        each = probe * WORKERS / EVERY
        print(
            f"{name}: a probe {1e3 * alone:.0f} ms alone, {1e3 * probe:.0f} ms beside rollouts, a step {step:.2f} s; "
            f"of {WORKERS} workers, every {EVERY} steps: {1e3 * each:.1f} ms a step, {each / step:.2%}",
            flush=True,
        )
        missed |= each > 0.05 if name == "tiny" else each / step > 0.01
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
