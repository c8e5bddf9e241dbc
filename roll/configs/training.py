"""``training_args``: optimizer and learning-rate schedule of a trained role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem


class Muon(Config):
    """Orthogonalised momentum."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of Muon's running mean of the gradient.")


class Falling(Config):
    """Learning rates that fall to the end of the run, or sooner."""

    lr_decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps, those of the warm-up included, after which min_lr_ratio is reached, and stays. "
        "null: all of the run.",
    )


class Cosine(Falling):
    """Half a cosine, or several."""

    num_cycles: float = Field(
        default=0.5, gt=0, description="Periods of the cosine: 0.5 falls once, 1.5 falls, rises and falls again."
    )


class Wsd(Falling):
    """Warm-up, stable, decay."""

    lr_wsd_decay_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps of wsd's fall. null: a tenth of all, rounded up."
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="linear",
        description="wsd's fall, r from 0 to 1: 1 - r, half a cosine, 2 / 2^r - 1, or 1 - sqrt(r).",
    )


SCHEDULES: dict[str, type[Config]] = {
    "constant": Config,
    "constant_with_warmup": Config,
    "linear": Falling,
    "cosine": Cosine,
    "inverse_sqrt": Config,
    "wsd": Wsd,
}
"""By ``lr_scheduler_type``: the keys that it reads."""


class TrainingArguments(Wsd, Cosine, Muon):
    """The optimizer, its schedule, and how many samples make one optimizer step."""

    choices: ClassVar = {"optimizer": {"adamw": Config, "muon": Muon}, "lr_scheduler_type": SCHEDULES}

    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="What takes the steps. muon: orthogonalised momentum for the matrices of the decoder layers, with "
        "updates as large as AdamW's, and AdamW for everything else (embeddings, heads, norms, biases, experts).",
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate, reached after the warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices.")
    weight_decay_end: float | None = Field(
        default=None, ge=0, description="Weight decay that is reached at the run's end; null: it is constant."
    )
    weight_decay_incr_style: Literal["linear", "cosine"] = Field(
        default="linear", description="Course from weight_decay to weight_decay_end: a line, or half a cosine."
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
        default=0.0, ge=0, le=1, description="Learning rate that the warm-up rises from, as a share of the peak."
    )
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        default="linear",
        description="Course after the warm-up: level (constant has no warm-up at all), a straight line or half a "
        "cosine down to min_lr_ratio; inverse_sqrt falls as 1 / sqrt(steps since the start), in units of the warm-up; "
        "wsd (warm-up, stable, decay; Hu et al. 2024) is level and falls in the last lr_wsd_decay_steps.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Least learning rate after the warm-up, as a share of the peak."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.warmup_steps and self.warmup_ratio:
            expected = f"0 beside warmup_steps {self.warmup_steps}: one of the two"
            yield self.problem("warmup_ratio", expected, "warmup_steps")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            expected = "constant_with_warmup, since there is a warm-up"
            yield self.problem("lr_scheduler_type", expected, "warmup_steps", "warmup_ratio")
        if self.warmup_init_ratio and not (self.warmup_steps or self.warmup_ratio):
            yield self.problem("warmup_init_ratio", "0 without a warm-up", "warmup_steps", "warmup_ratio")
        if self.weight_decay_incr_style != "linear" and self.weight_decay_end is None:
            yield self.problem("weight_decay_incr_style", "nothing without weight_decay_end", "weight_decay_end")
