"""``model_args``: how a role loads its model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config


class ModelArguments(Config):
    """How the weights are loaded and run."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Number format of the weights. null takes the one the checkpoint names."
    )
    disable_gradient_checkpointing: bool = Field(
        default=False,
        description="Keep all activations for the backward pass instead of computing them again: faster, more memory.",
    )
    attn_implementation: Literal["sdpa", "eager", "fa2", "auto"] = Field(
        default="auto", description="Attention kernel. auto lets Transformers choose; fa2 is FlashAttention 2."
    )
    model_config_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Entries written over the checkpoint's own config.json before loading."
    )
