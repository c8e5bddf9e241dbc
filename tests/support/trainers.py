"""A batch, its shares and a context, for the tests of trainers that run the same step in several ways."""

from pathlib import Path
from typing import Any

import torch

from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import StrategyContext

VOCABULARY = 61
TEMPERATURE = 0.8


def make_batch(num_sequences: int = 9, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (num_sequences,), generator=generator)
    num_tokens = int(lengths.sum())
    tokens = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    batch = Batch(lengths, tokens, torch.zeros(num_tokens).bool())
    mask = (torch.rand(num_tokens, generator=generator) < 0.5) & (batch.positions_T > 0)
    return batch.replace(loss_mask_T=mask, advantages_T=torch.randn(num_tokens, generator=generator))


def shares(step: int) -> list[Batch]:
    """Ragged shares of the two ranks: 7 and 2 sequences, 9 and 0, 2 and 7."""
    batch = make_batch(seed=step)
    cut = (7, 9, 2)[step % 3]
    rows = torch.arange(batch.num_sequences)
    return [batch.select(rows[:cut]), batch.select(rows[cut:])]


def make_context(model: Path, name: str, strategy: dict[str, Any] | None = None, **kwargs: Any) -> StrategyContext:
    """``kwargs``: sections and keys of the role's configuration to change, and anything else of the context."""
    worker = {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True, **kwargs.pop("model_args", {})},
        "training_args": {
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "lr_scheduler_type": "cosine",
            "per_device_train_batch_size": 2,
            **kwargs.pop("training_args", {}),
        },
        "strategy_args": {"strategy_name": name, "strategy_config": strategy or {}},
        **kwargs.pop("worker", {}),
    }
    options = {"temperature": TEMPERATURE, "max_grad_norm": 0.5, "total_optimizer_steps": 10, **kwargs}
    return StrategyContext(
        worker=WorkerConfig.model_validate(worker), **{"role": "actor_train", "model_path": str(model), **options}
    )
