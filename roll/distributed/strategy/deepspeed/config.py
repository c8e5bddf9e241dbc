"""From a ``strategy_config`` to the configuration that ``deepspeed.initialize`` gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.configs.engines.deepspeed import AUTO, DeepSpeedConfig

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
