"""``deepspeed_train`` and ``deepspeed_infer``: DeepSpeed with ZeRO 0 to 3, on GPUs (nccl) or CPUs (gloo).

DeepSpeed averages gradients over ranks, and the losses' shares are to be summed: so the loss is multiplied by the
number of ranks. The number of micro-batches changes from step to step, so the engine is told which one is the last.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.configs.engines.deepspeed import AUTO, CARD, DeepSpeedConfig
from roll.configs.problems import ConfigErrors
from roll.distributed.strategy import ignore_renamed_collectives, require_engine
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.deepspeed.weights import WEIGHTS, EngineWeights
from roll.distributed.strategy.training.checkpoint import TrainerState
from roll.distributed.strategy.training.module_trainer import (
    ModuleScorer,
    ModuleTrainer,
    rates_by_name,
    recompute_activations,
)
from roll.distributed.strategy.training.optim import parameter_groups, set_rates
from roll.models.scoring import TokenScorer

if TYPE_CHECKING:
    from roll.configs.worker import TrainingArguments


BATCHES = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
"""A rank's micro-batches are the trainer's affair; DeepSpeed wants numbers."""


def training_config(options: DeepSpeedConfig, args: TrainingArguments, *, bf16: bool, limit: float) -> dict[str, Any]:
    """For a trainer.

    Args:
        limit: of the gradient's norm; 0: none.
    """
    config = _passed_on(options)
    adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    torch_adam = {"torch_adam": True, "fused": True} if options.torch_adam else {}
    config["optimizer"] = {"type": "AdamW", "params": adam | torch_adam}
    config["gradient_clipping"] = limit
    config["zero_optimization"]["stage"] = options.stage
    if bf16 and options.stage == 0:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        config.pop("bf16", None)
    elif bf16:
        # Without it, gradients of a step's micro-batches are added up with 8 bits.
        config["data_types"] = {"grad_accum_dtype": "fp32"} | config.get("data_types", {})
        config.setdefault("communication_data_type", "fp32")
        # The trainer looks for NaN itself, before the step.
        config["bf16"] = {"check_grad_overflow": False} | config.get("bf16", {}) | {"enabled": True}
    return config


def scoring_config(options: DeepSpeedConfig) -> dict[str, Any]:
    """For a model without an optimizer, of which only stage 3 partitions anything; its weights have their format."""
    config = _passed_on(options)
    config.pop("bf16", None)
    zero = config["zero_optimization"] if options.stage == 3 else {"stage": 0}
    zero.pop("offload_optimizer", None)
    return config | {"zero_optimization": zero}


def _passed_on(options: DeepSpeedConfig) -> dict[str, Any]:
    """The keys that go to DeepSpeed as they are, without those that say ``auto``."""
    config: dict[str, Any] = _without_auto(options.model_dump(exclude_unset=True, exclude={"fp16", "optimizer"}))
    return {"zero_optimization": {}} | config | BATCHES


def _without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(item) for key, item in value.items() if item != AUTO and item is not None}


class DeepSpeedInfer(ModuleScorer[EngineWeights]):
    """Computes log-probs: whole weights on each rank, or partitioned with ZeRO stage 3."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        strategy = context.worker.strategy_args
        require_engine("deepspeed", extra="deepspeed", strategy=strategy.strategy_name)
        if problems := list(CARD.option_problems(strategy.strategy_config)):
            prefix = f"{context.role}.strategy_args.strategy_config"
            raise ConfigErrors([problem.under(prefix) for problem in problems])
        self._options = DeepSpeedConfig.model_validate(strategy.strategy_config)

    def setup(self) -> RankInfo:
        return self._set_up(self._options.precision, alone=True)

    def move(self, what: States, device: torch.device) -> None:
        super().move(what, device)
        (self.weights.leave if device.type == "cpu" else self.weights.come_back)(what)

    def shutdown(self) -> None:
        if self._weights is not None:
            self._weights.engine.destroy()
            self._weights = self.own_forward = None

    @property
    def _stage(self) -> int:
        # Without an optimizer, stages 1 and 2 have nothing to partition.
        return self._options.stage if self._trained or self._options.stage == 3 else 0

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self.weights.engine
        return module

    def _place(self, scorer: TokenScorer, compute_dtype: torch.dtype) -> EngineWeights:
        if self._stage == 3 and self.context.worker.use_sequence_packing and scorer.state_layers.modules:
            # They run once for each sequence. Ranks have different numbers of these, and each run gathers weights.
            raise ValueError(
                f"{self.context.role}.use_sequence_packing: true, expected false with zero_optimization.stage: 3: "
                f"{type(scorer.model).__name__} has layers with a state"
            )
        self._prepare(scorer)
        engine = start_engine(scorer, self._engine_config(compute_dtype), self._parameter_groups(scorer), self.device)
        return WEIGHTS[self._stage](engine, scorer, self.device)

    def _prepare(self, scorer: TokenScorer) -> None:
        """Called before the engine takes the model over."""

    def _parameter_groups(self, scorer: TokenScorer) -> list[dict[str, Any]] | None:
        return None

    def _engine_config(self, compute_dtype: torch.dtype) -> dict[str, Any]:
        return scoring_config(self._options)


class DeepSpeedTrain(ModuleTrainer[EngineWeights], DeepSpeedInfer):
    """Takes AdamW steps."""

    def setup(self) -> RankInfo:
        info = super().setup()
        self.reset_optimizer()
        return info

    def reset_optimizer(self) -> None:
        self.weights.reset_moments()
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)

    def before_forward(self, *, last: bool) -> None:
        self.weights.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.weights.engine.backward(loss * self.context.world_size)

    def reduce_gradients(self) -> None:
        """The engine did it in the last backward pass."""

    def add_l2(self, coefficient: float) -> Tensor:
        weights = self.weights
        for name in weights.fragments:
            weights.gradient(name).add_(weights.share(name), alpha=2 * coefficient)
        weights.gradients_changed()
        return coefficient * self._square_norm([weights.share(name) for name in weights.fragments])

    def square_norm(self) -> Tensor:
        return self._square_norm([self.weights.gradient(name) for name in self.weights.fragments])

    def apply_gradients(self, rate: float, norm: float) -> None:
        engine = self.weights.engine
        set_rates(engine.basic_optimizer.param_groups, rate, self.weight_decay)
        engine.step()

    def drop_gradients(self) -> None:
        self.weights.drop_gradients()

    def _square_norm(self, shares: list[Tensor]) -> Tensor:
        """Their part of the sum of squares over all ranks, float64; a rank may have no share of a small model."""
        if not shares:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        norms = torch._foreach_norm([share.float() for share in shares])
        squares = torch.stack([norm.to(self.device).double() for norm in norms]).square()
        return squares.sum() / self.weights.copies

    def _prepare(self, scorer: TokenScorer) -> None:
        if not self.context.worker.model_args.disable_gradient_checkpointing:
            recompute_activations(scorer)

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        stored = super()._stored_dtype(compute_dtype)
        return compute_dtype if self._stage else stored  # its optimizer keeps float32 copies then

    def _parameter_groups(self, scorer: TokenScorer) -> list[dict[str, Any]] | None:
        trained = {name: parameter for name, parameter in scorer.named_parameters() if parameter.requires_grad}
        args = self.context.worker.training_args
        groups = parameter_groups(trained, trained, args, rates_by_name(scorer, args))
        return [group for group in groups if group["params"]]

    def _engine_config(self, compute_dtype: torch.dtype) -> dict[str, Any]:
        bf16, limit = compute_dtype == torch.bfloat16, self.context.max_grad_norm
        return training_config(self._options, self.context.worker.training_args, bf16=bf16, limit=limit)


def start_engine(
    scorer: TokenScorer, config: dict[str, Any], groups: list[dict[str, Any]] | None, device: torch.device
) -> Any:
    """Hands a model with unset weights to DeepSpeed (collective)."""
    deepspeed = _import_deepspeed(device)
    deepspeed.init_distributed(dist_init_required=False)
    partitioned = config["zero_optimization"]["stage"] == 3
    head = [] if scorer.head is None else scorer.head.modules
    if partitioned:
        _zero_init()(module=scorer, config_dict_or_path=config)
        for buffer in scorer.buffers():
            buffer.data = buffer.data.to(device)
    with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory figures
        engine, *_ = deepspeed.initialize(model=scorer, model_parameters=groups, config=config)
    for part in head if partitioned else ():
        # A rank has as many chunks of logits as its tokens make. If each gathered the output layer, ranks would wait
        # for each other for ever: so it is gathered with the scorer's own parameters, once for all.
        for parameter in part.parameters(recurse=False):
            deepspeed.zero.register_external_parameter(scorer, parameter)
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    return engine


@functools.cache
def _zero_init() -> Any:
    """DeepSpeed's way of partitioning a module whose parameters are unset: none is sent to all ranks or copied."""
    import deepspeed

    class Init(deepspeed.zero.Init):  # type: ignore[misc]
        def _zero_init_param(self, param: Any) -> None:
            self._convert_to_deepspeed_param(param)
            with _NothingCopied():
                param.partition()

    return Init


class _NothingCopied(TorchFunctionMode):
    """``copy_`` leaves its target as it is: a rank's part of an unset parameter need not be written twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.copy_ else func(*args, **(kwargs or {}))


def _import_deepspeed(device: torch.device) -> Any:
    """The package, told where it runs by environment variables as its own launcher would."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", "1")  # otherwise DeepSpeed asks numactl at every step
    import deepspeed

    if device.type == "cpu":
        # Collectives through shared memory, for tensor-parallel inference only: they take minutes to compile.
        deepspeed.ops.__compatible_ops__ = {}
    ignore_renamed_collectives()
    return deepspeed
