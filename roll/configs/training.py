"""``training_args``: optimizer and learning-rate schedule of a trained role."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem


class TrainingArguments(Config):
    """AdamW, its schedule, and how many samples make one optimizer step."""

    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate, reached after the warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of AdamW.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the squared gradient's running mean.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="Added to AdamW's denominator.")
    per_device_train_batch_size: int = Field(
        default=1, ge=1, description="Samples of one forward and backward pass on one data-parallel rank."
    )
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, description="Passes whose gradients are summed before one optimizer step."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps during which the learning rate rises linearly from 0."
    )
    warmup_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The warm-up as a share of all optimizer steps; used when warmup_steps is 0.",
    )
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        default="linear",
        description="Course after the warm-up: level (constant has no warm-up at all), a straight line or half a "
        "cosine down to min_lr_ratio.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Final learning rate as a share of the peak (linear and cosine)."
    )

    def problems(self) -> list[ConfigProblem]:
        found = []
        if self.warmup_steps and self.warmup_ratio:
            expected = f"0 beside warmup_steps {self.warmup_steps}: one of the two"
            found.append(self.problem("warmup_ratio", expected, "warmup_steps"))
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            expected = "constant_with_warmup, since there is a warm-up"
            found.append(self.problem("lr_scheduler_type", expected, "warmup_steps", "warmup_ratio"))
        return found
