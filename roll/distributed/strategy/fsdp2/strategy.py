"""``fsdp2_train`` and ``fsdp2_infer``: PyTorch's own ``fully_shard``, on GPUs (nccl) or CPUs (gloo).

``strategy_config.fsdp_size`` says over how many ranks the weights are sharded. All of them (-1) is the default; 1 keeps
a whole replica on every rank and sums one flat gradient, which is faster for models that are small next to the cost of
a collective call; a divisor in between replicates groups of shards (HSDP). With ``tensor_parallel_size`` neighbouring
ranks split each layer and count as one; with ``model_args.ulysses_size`` they share every sequence.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from roll.algorithms.types import TokenScores
from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.data.batch import Batch
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.fsdp2.muon import Muon
from roll.distributed.strategy.fsdp2.weights import (
    ReplicatedWeights,
    ShardCopies,
    ShardedWeights,
    Weights,
    load_shards,
    save_shards,
    shards_of,
)
from roll.distributed.strategy.training.checkpoint import (
    SHARDS_FOLDER,
    UNTRAINED,
    Contents,
    TrainerState,
    restore_checkpoint,
    resume_folder,
    to_device,
)
from roll.distributed.strategy.training.module_trainer import (
    ModuleScorer,
    ModuleTrainer,
    rates_by_name,
    recompute_activations,
)
from roll.distributed.strategy.training.module_weights import buffer_pieces
from roll.distributed.strategy.training.optim import make_adamw, set_rates
from roll.distributed.strategy.training.trainer import MicroBatchLimits
from roll.models.loading import load_config
from roll.models.scoring import TokenScorer

MIN_BYTES = 2**20
"""Smaller tensors are not worth a transfer."""


class OffloadedActivations(saved_tensors_hooks):
    """A context for forward passes: large activations saved in it wait in host memory (pinned, beside a GPU).

    On a GPU they travel on a stream of their own. A backward pass that takes one starts the one saved before it.
    """

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self._away: list[_Away | None] = []

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        owner = tensor._base if tensor._base is not None else tensor
        # Subclasses such as DTensor know their own places.
        if type(tensor) is not Tensor or isinstance(owner, nn.Parameter) or tensor.nbytes < MIN_BYTES:
            return tensor
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            # A view with gaps or repeated elements, whose strides a copy would not have. Backward passes count on
            # them: memory-efficient attention pads the rows of its mask, and refuses one without the padding.
            return tensor
        away = _Away(tensor, len(self._away))
        self._away.append(away)
        return away

    def _unpack(self, packed: Tensor | _Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.fetch()
        self._away[packed.number] = None
        if packed.number and (before := self._away[packed.number - 1]) is not None:
            before.fetch()
        return packed.take()


class _Away:
    """A tensor in host memory, and its way there and back."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.number = number
        """Place among those of its forward pass."""
        self._device = tensor.device
        self._back: Tensor | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copy(self._host, tensor, tensor)

    def fetch(self) -> None:
        """Starts the way back, unless it was started."""
        if self._back is None:
            self._back = torch.empty_like(self._host, device=self._device)
            self._copy(self._back, self._host, self._back)

    def take(self) -> Tensor:
        """The tensor on its device, where ``fetch`` has been called; what runs there from now on waits for it."""
        assert self._back is not None
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        back, self._back = self._back, None
        return back

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> None:
        if self._device.type != "cuda":
            target.copy_(source)
            return
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))  # by then the source is computed, the target free
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        on_device.record_stream(side)
        self._copied = side.record_event()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Fsdp2Infer(ModuleScorer[Weights]):
    """Computes log-probs with a model that is sharded over the role's workers."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._config = Fsdp2Config.model_validate(context.worker.strategy_args.strategy_config)

    def setup(self) -> RankInfo:
        context, config = self.context, self._config
        if context.lora is not None and config.tensor_parallel_size > 1:
            raise ValueError(
                f"{context.role}: strategy_config.tensor_parallel_size: {config.tensor_parallel_size}, expected 1 "
                "with lora_target, whose layers are not split"
            )
        self._tensor_size = config.tensor_parallel_size
        return self._set_up(config.param_dtype, alone=not _replicated(config, context.world_size))

    def forward_all(self, micro_batches: list[Batch], limits: MicroBatchLimits) -> list[TokenScores]:
        scores = super().forward_all(micro_batches, limits)
        self.weights.after_scoring()
        return scores

    def move(self, what: States, device: torch.device) -> None:
        super().move(what, device)
        if States.WEIGHTS in what and not self._config.cpu_offload:  # else they are, and must stay, in host memory
            self.weights.move(device)

    @property
    def _module(self) -> nn.Module:
        return self.weights.scorer

    def _forward_context(self) -> contextlib.AbstractContextManager[object]:
        return self.weights.forward_context()

    def _place(self, scorer: TokenScorer, compute_dtype: torch.dtype) -> Weights:
        if _replicated(self._config, self.context.world_size):
            return ReplicatedWeights(scorer, self.device, compute_dtype=compute_dtype, trained=self._trained)
        return ShardedWeights(scorer, self.device, compute_dtype=compute_dtype, config=self._config)


class Fsdp2Train(ModuleTrainer[Weights], Fsdp2Infer):
    """Takes AdamW or Muon steps."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._shard_copies = ShardCopies()

    def setup(self) -> RankInfo:
        info = super().setup()
        if not self.context.worker.model_args.disable_gradient_checkpointing:
            recompute_activations(self.weights.scorer)
        if self._config.checkpoint == "sharded" and self.context.lora is None:
            self._check_sharded()
        self.reset_optimizer()
        return info

    def _check_sharded(self) -> None:
        args, model = self.context.worker.model_args, self.weights.scorer.model
        folder = load_config(
            self.context.model_path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code
        )
        if self.context.head == "lm" and folder.model_type != model.config.model_type:
            key = f"{self.context.role}.strategy_args.strategy_config.checkpoint"
            words = f"{self.context.model_path} ({folder.model_type}) has more than a language model in it"
            raise ValueError(f"{key}: got sharded, expected whole: {words}, which only a model folder keeps")

    def reset_optimizer(self) -> None:
        weights, args = self.weights, self.context.worker.training_args
        if args.optimizer == "muon":
            weights.optimizer = Muon(weights, args)
        else:
            weights.optimizer = make_adamw(
                weights.trained, weights.parameters, args, rates_by_name(weights.scorer, args)
            )
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)

    def forward(self, micro_batch: Batch, limits: MicroBatchLimits) -> TokenScores:
        offloads = self._config.activation_offload and torch.is_grad_enabled()
        with OffloadedActivations() if offloads else contextlib.nullcontext():
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
        set_rates(optimizer.param_groups, rate, self.weight_decay)
        optimizer.step()

    def drop_gradients(self) -> None:
        self._gradients = []
        self.weights.drop_gradients()

    def contents(self, path: Path, *, copied: bool = False) -> list[Contents]:
        if self._config.checkpoint != "sharded":
            return super().contents(path, copied=copied)
        self._require(States.WEIGHTS | States.OPTIMIZER)
        shards = shards_of(self.weights)
        if copied:
            shards = self._shard_copies.take(shards)
        # There is no model folder: `roll export` makes one of the shards and what is beside them.
        resume = self._resume_contents(path, ())
        folder = resume.path / SHARDS_FOLDER
        untrained = [*buffer_pieces(self.weights), *self._source.kept] if self.context.lora is None else []
        beside = replace(self.model_contents(folder), tensors={UNTRAINED: untrained})
        return [resume, replace(beside, write_shards=partial(save_shards, folder, shards))]

    def load(self, path: Path) -> None:
        if not (shards := resume_folder(path, self.context.role) / SHARDS_FOLDER).is_dir():
            super().load(path)
            return
        self._require(States.WEIGHTS | States.OPTIMIZER)
        state = restore_checkpoint(path, self.context.role, self.trained, self.context.loads, tensors=False)
        load_shards(shards, self.weights, moments="optimizer" in self.context.loads)
        self._continue_from(state, path)

    def move(self, what: States, device: torch.device) -> None:
        super().move(what, device)
        if States.OPTIMIZER in what and not self._config.cpu_offload:
            for name, share in self.weights.trained.items():
                moments = self.weights.optimizer.state[share]
                moments.update({kind: to_device(moments[kind], device) for kind in self.weights.kinds(name)})


def _replicated(config: Fsdp2Config, world_size: int) -> bool:
    """Tells whether every rank holds a whole replica. A lone one does, unless it offloads to the CPU as FSDP2 can."""
    if config.cpu_offload or config.tensor_parallel_size > 1:
        return False
    return world_size == 1 or config.fsdp_size == 1
