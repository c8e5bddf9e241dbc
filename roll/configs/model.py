"""``model_args``: how a role loads its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem


class ModelArguments(Config):
    """Loading and running of the weights."""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The names in ``lora_target``; none without LoRA."""
        return tuple(name.strip() for name in (self.lora_target or "").split(",") if name.strip())

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        """The names in ``lora_exclude``."""
        return tuple(name.strip() for name in (self.lora_exclude or "").split(",") if name.strip())

    @property
    def frozen_prefixes(self) -> tuple[str, ...]:
        """The names in ``freeze_module_prefix``."""
        return tuple(name.strip() for name in (self.freeze_module_prefix or "").split(",") if name.strip())

    @property
    def adapter_alpha(self) -> int:
        """``lora_alpha``, given or not."""
        return self.lora_alpha or 2 * self.lora_rank

    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Number format of the weights. null: that of the checkpoint."
    )
    disable_gradient_checkpointing: bool = Field(
        default=False,
        description="Keep all activations for the backward pass instead of recomputing them: faster, more memory.",
    )
    attn_implementation: Literal["sdpa", "eager", "fa2", "auto"] = Field(
        default="auto",
        description="Attention kernel. auto lets Transformers choose; fa2 is FlashAttention 2. Megatron uses "
        "TransformerEngine's if it is installed (fa2: flash, eager: unfused); vllm and sglang have their own.",
    )
    lora_rank: int = Field(default=8, ge=1, description="Rank of the LoRA matrices, with lora_target.")
    lora_alpha: int | None = Field(
        default=None, ge=1, description="The adapter's output is scaled by lora_alpha / lora_rank. null: 2 × lora_rank."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the LoRA matrices in training.")
    lora_target: str | None = Field(
        default=None,
        description="Layers that get a LoRA adapter (Hu et al. 2021), the rest is frozen: names separated by commas, "
        "all-linear (all linear layers but the output layer; not the routed experts of a mixture, which are not "
        "linear layers), or null for full training. Set it on actor_train; it applies to every copy of the actor.",
    )
    lora_exclude: str | None = Field(
        default=None, description="Layers that all-linear omits: names separated by commas."
    )
    adapter_name_or_path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a peft adapter from which actor_train starts. null: a new one.",
    )
    freeze_module_prefix: str | None = Field(
        default=None,
        description="Parts of the model that are not trained: names of modules or parameters as in the checkpoint "
        "(model.embed_tokens, model.layers.0), separated by commas. They have no gradient and no optimizer state; "
        "checkpoints and the generator's weights stay complete. For actor_train and critic, without an adapter.",
    )
    ulysses_size: int = Field(
        default=1,
        ge=1,
        description="Workers that share every sequence in attention, each with part of the heads (Ulysses sequence "
        "parallelism; fsdp2 and deepspeed strategies). Must divide the workers and the attention heads.",
    )
    use_liger_kernel: bool = Field(
        default=False, description="Fused kernels of liger-kernel, on GPUs (fsdp2 and deepspeed strategies)."
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python files that come with the model (auto_map in its config.json): they can do anything "
        "that the run can. Only for files that you have read; a warning at the start names role and folder. Set "
        "it for each role; actor_train's also applies to the policy's tokenizer. Megatron has its own model code.",
    )
    model_config_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Entries that override the checkpoint's config.json before loading."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        expected = "no dropout: models are trained as they generate, without"
        yield from [
            ConfigProblem(f"model_config_kwargs.{key}", value, expected)
            for key, value in self.model_config_kwargs.items()
            if value and ("dropout" in key or key.endswith("pdrop"))
        ]
        if self.lora_target is not None and self.freeze_module_prefix is not None:
            expected = "null beside lora_target, which freezes all but the adapter"
            yield self.problem("freeze_module_prefix", expected, "lora_target")
        if self.lora_targets:
            if self.lora_exclude is not None and "all-linear" not in self.lora_targets:
                expected = "null where lora_target names its layers: it leaves some of all-linear out"
                yield self.problem("lora_exclude", expected, "lora_target")
            return
        if self.lora_target is not None:
            yield self.problem("lora_target", "names of layers, all-linear, or null")
            return
        unset = ModelArguments()
        yield from [
            self.problem(key, "lora_target (all-linear …) beside it, or no such key", "lora_target")
            for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_exclude", "adapter_name_or_path")
            if getattr(self, key) != getattr(unset, key)
        ]
