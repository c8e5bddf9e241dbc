"""``training_args``: optimizer and learning-rate schedule of a trained role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

_ONLY_OF: dict[str, tuple[str, ...]] = {
    "lr_decay_steps": ("linear", "cosine", "wsd"),
    "num_cycles": ("cosine",),
    "lr_wsd_decay_steps": ("wsd",),
    "lr_wsd_decay_style": ("wsd",),
}
"""Keys that some schedules alone read."""


class TrainingArguments(Config):
    """The optimizer, its schedule, and how many samples make one optimizer step."""

    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="The optimizer. muon: orthogonalised momentum for the matrices of the decoder layers, with "
        "updates as large as AdamW's, and AdamW for everything else (embeddings, heads, norms, biases, experts).",
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of Muon's running mean of the gradient.")
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate, reached after the warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices.")
    weight_decay_end: float | None = Field(
        default=None, ge=0, description="Weight decay at the end of the run; null: constant."
    )
    weight_decay_incr_style: Literal["linear", "cosine"] = Field(
        default="linear", description="Shape from weight_decay to weight_decay_end: linear, or half a cosine."
    )
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
    warmup_init_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the start of the warm-up, as a share of the peak."
    )
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        default="linear",
        description="Shape after the warm-up: constant (which has no warm-up) and constant_with_warmup stay at the "
        "peak; linear and cosine (half a period) fall to min_lr_ratio; inverse_sqrt falls as 1 / sqrt(steps since "
        "the start), in units of the warm-up; wsd (warm-up, stable, decay; Hu et al. 2024) is constant and falls "
        "in the last lr_wsd_decay_steps.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Lowest learning rate after the warm-up, as a share of the peak."
    )
    lr_decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps, including the warm-up, after which min_lr_ratio is reached and kept. null: all "
        "of the run.",
    )
    num_cycles: float = Field(
        default=0.5, gt=0, description="Periods of the cosine: 0.5 falls once, 1.5 falls, rises and falls again."
    )
    lr_wsd_decay_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps of wsd's decay. null: a tenth of all, rounded up."
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="linear",
        description="wsd's decay, r from 0 to 1: 1 - r, half a cosine, 2 / 2^r - 1, or 1 - sqrt(r).",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.warmup_steps and self.warmup_ratio:
            expected = f"0 beside warmup_steps {self.warmup_steps}: one of the two"
            yield self.problem("warmup_ratio", expected, "warmup_steps")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            expected = "constant_with_warmup, since there is a warm-up"
            yield self.problem("lr_scheduler_type", expected, "warmup_steps", "warmup_ratio")
        if self.warmup_init_ratio and not (self.warmup_steps or self.warmup_ratio):
            yield self.problem("warmup_init_ratio", "0 without a warm-up", "warmup_steps", "warmup_ratio")
        schedule = self.lr_scheduler_type
        for key, schedules in self.unread(_ONLY_OF, schedule):
            expected = f"no such key with lr_scheduler_type {schedule}: read by {', '.join(schedules)}"
            yield self.problem(key, expected, "lr_scheduler_type")
        for key, _ in self.unread({"muon_momentum": ("muon",)}, self.optimizer):
            yield self.problem(key, f"no such key with optimizer {self.optimizer}", "optimizer")
        if self.weight_decay_incr_style != "linear" and self.weight_decay_end is None:
            yield self.problem("weight_decay_incr_style", "nothing without weight_decay_end", "weight_decay_end")
