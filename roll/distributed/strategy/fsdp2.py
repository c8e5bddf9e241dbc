"""``fsdp2_train`` and ``fsdp2_infer``: PyTorch's own ``fully_shard``, on GPUs (nccl) or CPUs (gloo).

``strategy_config.fsdp_size`` says over how many ranks the weights are sharded. All of them (-1) is the default; 1 keeps
a whole replica on every rank and sums one flat gradient, which is faster for models that are small next to the cost of
a collective call; a divisor in between replicates groups of shards (HSDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.strategy import Fsdp2Config
from roll.data.batch import Batch
from roll.distributed.strategy.base import RankInfo, States, StrategyContext, WeightBucket
from roll.distributed.strategy.fsdp2_checkpoint import hf_weights, load_weights, restore_weights, save_weights
from roll.distributed.strategy.fsdp2_weights import (
    ReplicatedWeights,
    ShardedWeights,
    Weights,
    copy_output_layer,
    decoder_layers,
)
from roll.distributed.strategy.hf_scorer import make_scorer, score_micro_batch
from roll.distributed.strategy.optim import ADAM_STATE, make_adamw
from roll.distributed.strategy.trainer import Limits, Scorer, Trainer, TrainerState, join_group, local_device
from roll.models import planned_attention
from roll.models.loading import load_config, resolve_dtype
from roll.models.scoring import TokenScorer


class Fsdp2Infer(Scorer):
    """Scores tokens with a model that is sharded over the role's workers."""

    _trained = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._weights: Weights | None = None

    def setup(self) -> RankInfo:
        context = self.context
        torch.manual_seed(context.seed)
        self.device = local_device(context.rank)
        config = self._strategy_config()
        join_group(context, self.device, alone=not _replicated(config, context.world_size))
        self._weights = self._load(config)
        self.info = RankInfo(context.rank, context.world_size, dp_rank=context.rank, dp_size=context.world_size)
        return self.info

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError(f"{self.context.role}: setup() has not been called")
        return self._weights

    def forward(self, micro_batch: Batch, limits: Limits) -> TokenScores:
        return score_micro_batch(self.weights.scorer, micro_batch, limits, self.weights.forward_context())

    def forward_all(self, micro_batches: list[Batch], limits: Limits) -> list[TokenScores]:
        scores = super().forward_all(micro_batches, limits)
        self.weights.after_scoring()
        return scores

    def move(self, what: States, device: torch.device) -> None:
        if States.WEIGHTS in what:
            self.weights.move(device)
            scorer = self.weights.scorer
            if scorer.reference_layer is not None:
                scorer.reference_layer = scorer.reference_layer.to(device)

    def _strategy_config(self) -> Fsdp2Config:
        return Fsdp2Config.model_validate(self.context.worker.strategy_args.strategy_config)

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The number format in which the parameters are kept."""
        return compute_dtype

    def _load(self, config: Fsdp2Config) -> Weights:
        args, path = self.context.worker.model_args, self.context.model_path
        # The format in which weights leave: exports and saved models.
        self._model_dtype = resolve_dtype(args.dtype, load_config(path, args.model_config_kwargs))
        compute = self._model_dtype if config.param_dtype is None else resolve_dtype(config.param_dtype)
        scorer = make_scorer(self.context, self._stored_dtype(compute))
        self.shares_prompts = self.context.worker.share_prompts and planned_attention.enable(scorer.model)
        weights: Weights
        if _replicated(config, self.context.world_size):
            weights = ReplicatedWeights(scorer, self.device, compute_dtype=compute, trained=self._trained)
        else:
            weights = ShardedWeights(scorer, self.device, compute_dtype=compute, config=config)
        load_weights(Path(path), weights, self.context.head, args.model_config_kwargs)
        if self.context.keeps_output_layer:
            scorer.reference_layer = copy_output_layer(weights, compute)
        return weights


class Fsdp2Train(Fsdp2Infer, Trainer):
    """Takes AdamW steps. Weights and moments are float32; ``model_args.dtype`` is what the model computes in."""

    _trained = True

    def setup(self) -> RankInfo:
        info = super().setup()
        if not self.context.worker.model_args.disable_gradient_checkpointing:
            _recompute_activations(self.weights.scorer)
        self.reset_optimizer()
        return info

    def reset_optimizer(self) -> None:
        self._optimizer = make_adamw(self.weights.local, self.weights.shapes, self.context.worker.training_args)
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)

    def before_forward(self, *, last: bool) -> None:
        self.weights.before_backward(last=last)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def reduce_gradients(self) -> None:
        self._gradients = self.weights.reduce_gradients()

    def add_l2(self, coefficient: float) -> Tensor:
        shares = [parameter.detach() for parameter in self.weights.local.values()]
        torch._foreach_add_(self._gradients, shares, alpha=2 * coefficient)
        return coefficient * _square_norm(shares) / self.weights.copies

    def square_norm(self) -> Tensor:
        return _square_norm(self._gradients) / self.weights.copies

    def apply_gradients(self, rate: float, norm: float) -> None:
        limit = self.context.max_grad_norm
        if 0 < limit < norm:
            gradients = [cast(Tensor, parameter.grad) for parameter in self.weights.local.values()]
            torch._foreach_mul_(gradients, limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def drop_gradients(self) -> None:
        self._gradients = []
        self.weights.drop_gradients()

    def export_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        from roll.distributed.weight_sync import pack_buckets

        self._require(States.WEIGHTS)
        named = hf_weights(self.weights, self._model_dtype)
        if self.context.rank == 0:
            yield from pack_buckets(named, bucket_bytes)
        else:
            for _ in named:
                pass

    def save(self, path: Path) -> None:
        """Writes a checkpoint, see ``checkpoint.py`` (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        save_weights(
            path,
            self.weights,
            self._optimizer,
            self._state,
            dtype=self._model_dtype,
            tokenizer_from=self.context.model_path,
        )

    def load(self, path: Path) -> None:
        """Continues from a checkpoint that any number of ranks has written (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        self._continue_from(restore_weights(path, self.weights, self._optimizer), path)

    def move(self, what: States, device: torch.device) -> None:
        super().move(what, device)
        if States.OPTIMIZER in what:
            for moments in self._optimizer.state.values():
                for name in ADAM_STATE:
                    moments[name] = moments[name].to(device)

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if compute_dtype == torch.float16:
            raise ValueError(f"{self.context.role}: training in fp16 needs loss scaling; expected bf16 or fp32")
        return torch.float32


def _replicated(config: Fsdp2Config, world_size: int) -> bool:
    """Whether every rank holds a whole replica. A lone worker does, unless it offloads to the CPU as FSDP2 can."""
    return not config.cpu_offload and (config.fsdp_size == 1 or world_size == 1)


def _recompute_activations(scorer: TokenScorer) -> None:
    """Keeps only the layers' inputs and computes the rest again in the backward pass."""
    scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(scorer):
        # transformers recomputes only in training mode. Set on the layers alone, so that dropout inside them stays off:
        # the log-probabilities of one policy must not depend on who computes them.
        layer.training = True


def _square_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, float64."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
