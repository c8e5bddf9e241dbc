"""A batch, its shares, a context and losses, for the tests of trainers that run the same step in several ways."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.types import LossContext, LossFn, LossOutput, TokenScores
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import Metrics, StrategyContext

VOCABULARY = 61  # divides by nothing: vocabulary-parallel layers must pad
TEMPERATURE = 0.8
ENTROPY_COEF = 0.01


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


def make_trainer(model: Path, name: str, strategy: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """A trainer, or a scorer, that is set up."""
    trainer = STRATEGIES.get(name)(make_context(model, name, strategy, **kwargs))
    trainer.setup()
    return trainer


def with_reference(batch: Batch, seed: int = 0, hidden_size: int = 32) -> Batch:
    """Adds what KL terms read. The hidden states are no model's: the KL to them is far from 0 from the start."""
    generator = torch.Generator().manual_seed(100 + seed)
    mask_T = batch.loss_mask_T
    return batch.replace(
        old_logprobs_T=(torch.randn(batch.num_tokens, generator=generator) * 0.3 - 4) * mask_T,
        marked_T=(torch.rand(batch.num_tokens, generator=generator) < 0.5) & mask_T,
        ref_hidden_TH=torch.randn(batch.num_tokens, hidden_size, generator=generator) * mask_T[:, None],
    )


def policy_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """REINFORCE with entropy, and the KL to a reference where it is there; of a critic the squared error."""
    assert batch.advantages_T is not None
    if scores.values_T is not None:
        error = (scores.values_T - batch.advantages_T)[batch.loss_mask_T].square().sum() / context.num_tokens
        return LossOutput(error, {"critic/error": error.detach()})
    assert scores.logprobs_T is not None and scores.entropy_T is not None
    mask_T, advantages_T = (each.to(scores.logprobs_T.device) for each in (batch.loss_mask_T, batch.advantages_T))
    gain_T = advantages_T * scores.logprobs_T + ENTROPY_COEF * scores.entropy_T
    if scores.kl_T is not None:
        gain_T = gain_T - scores.kl_T
    loss = -gain_T[mask_T].sum() / context.num_tokens
    totals = {"actor/entropy": scores.entropy_T, "actor/logprob": scores.logprobs_T}
    return LossOutput(loss, {name: total_T.detach().sum() / context.num_tokens for name, total_T in totals.items()})


def gain_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """REINFORCE alone."""
    assert batch.advantages_T is not None and scores.logprobs_T is not None
    gain_T = batch.advantages_T * scores.logprobs_T
    return LossOutput(-gain_T[batch.loss_mask_T].sum() / context.num_tokens, {})


def nan_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """Broken in micro-batches of one sequence only: other micro-batches, and other ranks, may be sound."""
    output = policy_loss(scores, batch, context)
    return LossOutput(output.loss * math.nan if batch.num_sequences == 1 else output.loss, output.metrics)


def module_gradients(trainer: Any) -> dict[str, Tensor]:
    """Gradients of an FSDP2 trainer in one process, or of DeepSpeed's, before they are clipped."""
    weights = trainer.weights
    if hasattr(trainer, "_gradients"):
        return dict(zip(weights.trained, trainer._gradients, strict=True))
    return {name: weights.gradient(name).view(weights.shape(name)) for name in weights.trained}


def step_and_gradient(trainer: Any, batch: Batch, loss: LossFn) -> tuple[Metrics, dict[str, Tensor]]:
    """A step's metrics, and its ``module_gradients`` by the model's names."""
    gradients, square_norm = {}, trainer.square_norm

    def watch() -> Any:
        named = module_gradients(trainer)
        gradients.update({name.removeprefix("model."): gradient.clone() for name, gradient in named.items()})
        return square_norm()

    trainer.square_norm = watch
    return trainer.train_step(batch, loss), gradients
