"""``fsdp2_train`` and ``fsdp2_infer``: PyTorch's own ``fully_shard``, on GPUs (nccl) or CPUs (gloo).

``strategy_config.fsdp_size`` says over how many ranks the weights are sharded. All of them (-1) is the default; 1 keeps
a whole replica on every rank and sums one flat gradient, which is faster for models that are small next to the cost of
a collective call; a divisor in between replicates groups of shards (HSDP). With ``tensor_parallel_size`` neighbouring
ranks split each layer and count as one; with ``model_args.ulysses_size`` they share every sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.strategy import Fsdp2Config
from roll.data.batch import Batch
from roll.distributed.strategy.agreement import agreed
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.checkpoint import restore_checkpoint
from roll.distributed.strategy.fsdp2.activation_offload import OffloadedActivations
from roll.distributed.strategy.fsdp2.shards import SHARDS_FOLDER, load_shards, save_shards
from roll.distributed.strategy.fsdp2.weights import ReplicatedWeights, ShardedWeights, Weights
from roll.distributed.strategy.hf_scorer import (
    make_scorer,
    rank_info,
    recompute_activations,
    score_micro_batch,
    share_sequences,
)
from roll.distributed.strategy.module_weights import (
    TrainedModule,
    adapter_weights,
    copy_output_layer,
    hf_weights,
    load_model,
    save_module,
    start_adapter,
)
from roll.distributed.strategy.optim import ADAM_STATE, make_adamw
from roll.distributed.strategy.trainer import Limits, Scorer, Trainer, TrainerState, join_group, local_device
from roll.models import planned_attention
from roll.models.loading import load_config, resolve_dtype
from roll.models.lora import adapter_dropout, adapter_off


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
        self._config = config = self._strategy_config()
        join_group(context, self.device, alone=not _replicated(config, context.world_size))
        self._weights = self._load(config)
        self.info = rank_info(context, context.worker.model_args.ulysses_size * config.tensor_parallel_size)
        return self.info

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError(f"{self.context.role}: setup() has not been called")
        return self._weights

    def forward(self, micro_batch: Batch, limits: Limits) -> TokenScores:
        weights = self.weights
        return score_micro_batch(weights.scorer, micro_batch, limits, weights.forward_context(), self._sequence_group)

    def forward_all(self, micro_batches: list[Batch], limits: Limits) -> list[TokenScores]:
        scores = super().forward_all(micro_batches, limits)
        self.weights.after_scoring()
        return scores

    def without_adapter(self) -> contextlib.AbstractContextManager[object]:
        return adapter_off(self.weights.scorer) if self.context.lora is not None else super().without_adapter()

    def move(self, what: States, device: torch.device) -> None:
        if States.WEIGHTS in what:
            if not self._config.cpu_offload:  # else they are in host memory already, and must stay there
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
        if self.context.lora is not None and config.tensor_parallel_size > 1:
            raise ValueError(
                f"{self.context.role}: strategy_config.tensor_parallel_size: {config.tensor_parallel_size}, expected 1 "
                "with lora_target, whose layers are not split"
            )
        with agreed():
            # The format in which weights leave: exports and saved models.
            self._model_dtype = resolve_dtype(args.dtype, load_config(path, args.model_config_kwargs))
            compute = self._model_dtype if config.param_dtype is None else resolve_dtype(config.param_dtype)
            scorer = make_scorer(self.context, self._stored_dtype(compute))
        self.shares_prompts = self.context.worker.share_prompts and planned_attention.enable(scorer.model)
        self._sequence_group = share_sequences(self.context, scorer, config.tensor_parallel_size)
        weights: Weights
        if _replicated(config, self.context.world_size):
            weights = ReplicatedWeights(scorer, self.device, compute_dtype=compute, trained=self._trained)
        else:
            weights = ShardedWeights(scorer, self.device, compute_dtype=compute, config=config)
        load_model(Path(path), weights, args.model_config_kwargs)
        if self.context.lora is not None:
            start_adapter(weights, self.context.seed)
        if self.context.keeps_output_layer:
            scorer.reference_layer = copy_output_layer(weights, compute)
        return weights


class Fsdp2Train(Fsdp2Infer, Trainer):
    """Takes AdamW steps. Trained weights and moments are float32; ``model_args.dtype`` is what the model computes in.

    With a LoRA adapter, the language model's own weights are frozen, in the format that it computes in.
    """

    _trained = True

    def setup(self) -> RankInfo:
        info = super().setup()
        if not self.context.worker.model_args.disable_gradient_checkpointing:
            recompute_activations(self.weights.scorer)
        self.reset_optimizer()
        return info

    def reset_optimizer(self) -> None:
        weights = self.weights
        weights.optimizer = make_adamw(weights.trained, weights.parameters, self.context.worker.training_args)
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)

    def forward(self, micro_batch: Batch, limits: Limits) -> TokenScores:
        offloads = self._config.activation_offload and torch.is_grad_enabled()
        drops = self.context.lora is not None and self.context.lora.dropout > 0 and torch.is_grad_enabled()
        with (
            OffloadedActivations() if offloads else contextlib.nullcontext(),
            adapter_dropout(self.weights.scorer) if drops else contextlib.nullcontext(),
        ):
            return super().forward(micro_batch, limits)

    def before_forward(self, *, last: bool) -> None:
        self.weights.before_backward(last=last)

    def reduce_gradients(self) -> None:
        self._gradients = self.weights.reduce_gradients()

    def add_l2(self, coefficient: float) -> Tensor:
        shares = [parameter.detach() for parameter in self.weights.trained.values()]
        torch._foreach_add_(self._gradients, shares, alpha=2 * coefficient)
        return coefficient * self.weights.square_norm(shares)

    def square_norm(self) -> Tensor:
        return self.weights.square_norm(self._gradients)

    def apply_gradients(self, rate: float, norm: float) -> None:
        limit = self.context.max_grad_norm
        if 0 < limit < norm:
            torch._foreach_mul_(self._gradients, limit / norm)
        optimizer = self.weights.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    def drop_gradients(self) -> None:
        self._gradients = []
        self.weights.drop_gradients()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return hf_weights(self.weights, self._model_dtype)

    def named_adapter(self) -> Iterator[tuple[str, Tensor]]:
        return super().named_adapter() if self.context.lora is None else adapter_weights(self.weights)

    def save(self, path: Path) -> None:
        """Writes a checkpoint, see ``checkpoint.py`` (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        weights, whole = self.weights, self._config.checkpoint != "sharded"
        if not whole:
            save_shards(path / SHARDS_FOLDER, weights)
        save_module(path, weights, self._state, dtype=self._model_dtype, context=self.context, tensors=whole)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint that any number of ranks has written (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        weights, shards = self.weights, path / SHARDS_FOLDER
        state = restore_checkpoint(path, TrainedModule(weights), tensors=not shards.is_dir())
        if shards.is_dir():
            load_shards(shards, weights)
        self._continue_from(state, path)

    def move(self, what: States, device: torch.device) -> None:
        super().move(what, device)
        if States.OPTIMIZER in what and not self._config.cpu_offload:
            for moments in self.weights.optimizer.state.values():
                for name in ADAM_STATE:
                    moments[name] = moments[name].to(device)

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if compute_dtype == torch.float16:
            raise ValueError(f"{self.context.role}: training in fp16 needs loss scaling; expected bf16 or fp32")
        frozen = self.context.lora is not None and self.context.head == "lm"
        return compute_dtype if frozen else torch.float32


def _replicated(config: Fsdp2Config, world_size: int) -> bool:
    """Whether every rank holds a whole replica. A lone worker does, unless it offloads to the CPU as FSDP2 can."""
    if config.cpu_offload or config.tensor_parallel_size > 1:
        return False
    return world_size == 1 or config.fsdp_size == 1
