"""Megatron's gradient buffers and optimizer, with gradients that are plain sums, and states that can be read by name.

Megatron means gradients to be averages: its schedules divide a loss by the number of micro-batches, and its gradient
buffers by the number of data-parallel ranks. ``MegatronTrain.accumulate`` undoes both.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.configs.engines.megatron import MegatronConfig
from roll.configs.worker import TrainingArguments
from roll.distributed.strategy.megatron.model import MegatronModel
from roll.distributed.strategy.training.checkpoint import to_device
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER


def wrap_for_data_parallelism(model: MegatronModel, options: MegatronConfig) -> None:
    """Gives the chunks float32 gradient buffers that are reduced over data-parallel (and context-parallel) ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": True, **_fields_of(DistributedDataParallelConfig, options)}
    )
    # Only the first chunk's communication is on the critical path; the others' goes in one piece.
    model.wrapped = [
        DistributedDataParallel(model.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    if config.overlap_grad_reduce:
        several = len(model.wrapped) > 1
        no_sync = [chunk.no_sync for chunk in model.wrapped]
        start = [chunk.start_grad_sync for chunk in model.wrapped]
        model.config.no_sync_func = no_sync if several else no_sync[0]
        model.config.grad_sync_func = start if several else start[0]


class MegatronAdam:
    """AdamW on float32 copies of the weights, whole or (distributed optimizer) a share per data-parallel rank.

    Args:
        rates: peak learning rates of those that have one of their own.
    """

    def __init__(
        self,
        model: MegatronModel,
        options: MegatronConfig,
        args: TrainingArguments,
        rates: Mapping[nn.Parameter, float],
    ) -> None:
        optimizer_module = importlib.import_module("megatron.core.optimizer")
        config = optimizer_module.OptimizerConfig(
            **{
                **_fields_of(optimizer_module.OptimizerConfig, options),
                "optimizer": "adam",
                "bf16": model.config.bf16,
                "params_dtype": model.config.params_dtype,
                "lr": args.learning_rate,
                "weight_decay": args.weight_decay,
                "adam_beta1": args.adam_beta1,
                "adam_beta2": args.adam_beta2,
                "adam_eps": args.adam_epsilon,
                "clip_grad": 0.0,
            }
        )
        self._chunks, self._peak = model.wrapped, args.learning_rate
        biased = model.converted.family.experts.biased
        overrides = _without_decay() if biased else optimizer_module.get_standard_config_overrides(config)
        self._chained = optimizer_module.get_megatron_optimizer(
            config, model.wrapped, overrides | _own_rates(rates), use_gloo_process_groups=False
        )
        self._parts = [part for part in self._chained.chained_optimizers if not part.is_stub_optimizer]
        self._distributed = bool(config.use_distributed_optimizer)
        # Without Megatron's own scheduler, every group would decay by the default.
        self._set_rates(args.learning_rate, args.weight_decay)
        self.allocate()

    @property
    def groups(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self._chained.param_groups)

    def allocate(self, step: int = 0) -> None:
        """Sets the moments to zero, so that a lack of memory shows at setup and a fresh optimizer can be saved."""
        for part in self._parts:
            for share in part.get_parameters():
                part.optimizer.state[share] = {
                    name: torch.zeros_like(share, requires_grad=False) for name in ADAM_STATE
                }
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Sets the number of steps that Adam's bias correction counts."""
        for part in self._parts:
            own = isinstance(part.optimizer, torch.optim.Optimizer) and type(part.optimizer) is torch.optim.AdamW
            for group in part.optimizer.param_groups:
                if not own:
                    group["step"] = step  # fused implementations count once per group
                    continue
                for share in group["params"]:
                    part.optimizer.state[share]["step"] = torch.tensor(float(step))

    def reduce_gradients(self) -> None:
        """After the last backward pass: sums over ranks, and makes the sums the float32 shares' gradients."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self._chunks)
        self._chained.prepare_grads()

    def square_norm(self, device: torch.device) -> Tensor:
        """This rank's part of the gradient's squared norm, float64; what several ranks hold is counted once in all."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in self._parts:
            gradients = part.get_main_grads_for_grad_norm()
            if gradients:
                total += torch.stack(torch._foreach_norm(gradients)).double().square().sum() / self._copies(part)
        return total

    def add_l2(self, coefficient: float, device: torch.device) -> Tensor:
        """Adds the gradient of ``coefficient × Σ w²``; returns this rank's part of the penalty."""
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer.module import param_is_not_shared

        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in self._parts:
            for share in part.get_parameters():
                share.grad.add_(share.detach(), alpha=2 * coefficient)
                if param_is_not_shared(share) and param_is_not_tensor_parallel_duplicate(share, part.tp_group):
                    total += share.detach().double().square().sum() / self._copies(part)
        return coefficient * total

    @torch.no_grad()
    def step(self, rate: float, decay: float, scale: float) -> None:
        """Takes a step with gradients multiplied by ``scale``; the new weights are on all ranks when it returns."""
        self._set_rates(rate, decay)
        for part in self._parts:
            gradients = [share.grad for share in part.get_parameters() if share.grad is not None]
            if gradients and scale != 1.0:
                torch._foreach_mul_(gradients, scale)
        self._chained.step_with_ready_grads()

    def _set_rates(self, rate: float, decay: float) -> None:
        for group in self.groups:
            group["lr"], group["weight_decay"] = rate * (group["max_lr"] / self._peak), decay * group["wd_mult"]

    def drop_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._chained.zero_grad()

    def place(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Start and size of this rank's share of a flat parameter; the size may be 0, and is where it is frozen."""
        if not parameter.requires_grad:
            return 0, 0
        share, start = self._share(self._part_of(parameter), parameter)
        return start, 0 if share is None else share.numel()

    def share(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """This rank's share of a moment or of the float32 weight, as it is.

        Args:
            parameter: of the model, one that is trained.
            kind: one of ``ADAM_STATE``, or ``MASTER``.
        """
        part = self._part_of(parameter)
        return _state(part, cast(Tensor, self._share(part, parameter)[0]), kind)

    @torch.no_grad()
    def set(self, parameter: nn.Parameter, kind: str, whole: Tensor) -> None:
        """Sets a moment or the float32 weight, of which each rank takes its share; the model's own stays as it is."""
        if not parameter.requires_grad:
            return
        part = self._part_of(parameter)
        share, start = self._share(part, parameter)
        if share is not None:
            _state(part, share, kind).view(-1).copy_(whole.reshape(-1)[start : start + share.numel()])

    def move(self, device: torch.device) -> None:
        """Moves moments, and float32 weights that are not the model's own memory."""
        for part in self._parts:
            for state in part.optimizer.state.values():
                for name in ADAM_STATE:
                    state[name] = to_device(state[name], device)
            own = getattr(part, "shard_fp32_from_float16_groups", None) or getattr(part, "fp32_from_float16_groups", [])
            for share in itertools.chain.from_iterable(own):
                if share is not None:
                    share.data = to_device(share.data, device)

    def _part_of(self, parameter: nn.Parameter) -> Any:
        """The optimizer that has the parameter: routed experts have one of their own."""
        expert = not getattr(parameter, "allreduce", True)
        for part in self._parts:
            if any(group["is_expert_parallel"] == expert for group in part.optimizer.param_groups):
                return part
        raise LookupError(f"no optimizer for a parameter of shape {tuple(parameter.shape)}")

    def _share(self, part: Any, parameter: nn.Parameter) -> tuple[Tensor | None, int]:
        """This rank's float32 share and where it starts in the flattened parameter; ``None`` if it has none."""
        if not self._distributed:
            return getattr(parameter, "main_param", parameter), 0
        if parameter not in part.model_param_group_index_map:
            return None, 0
        group, index = part.model_param_group_index_map[parameter]
        start = part._get_model_param_range_map(parameter)["param"].start
        return part.optimizer.param_groups[group]["params"][index], start

    def _copies(self, part: Any) -> int:
        """Ranks that hold the same gradients."""
        return dist.get_world_size() // cast(int, part.get_grad_stats_parallel_group().size())


def _state(part: Any, share: Tensor, kind: str) -> Tensor:
    return share.detach() if kind == MASTER else cast(Tensor, part.optimizer.state[share][kind])


def _without_decay() -> dict[Any, Any]:
    """Groups of parameters without weight decay: vectors, but for biases of experts, which are one matrix elsewhere."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    vectors = ParamWithNamePredicate("vectors", lambda tensor, name: tensor.ndim == 1 and ".local_experts." not in name)
    return {ParamKey(with_name_predicate=vectors): {"wd_mult": 0.0}}


def _own_rates(rates: Mapping[nn.Parameter, float]) -> dict[Any, Any]:
    """Groups of parameters with a peak learning rate of their own."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    def has(rate: float) -> Any:
        return ParamKey(predicate=ParamPredicate(f"rate {rate}", lambda parameter: rates.get(parameter) == rate))

    return {has(rate): {"max_lr": rate} for rate in sorted(set(rates.values()))}


def _fields_of(owner: type, options: MegatronConfig) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(owner)}
    return {name: value for name, value in options.engine_arguments().items() if name in names}
