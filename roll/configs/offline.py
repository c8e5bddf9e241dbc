"""Keys that the pipelines share which train on a fixed set of samples: SFT, preferences, reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.prompts import PromptsConfig, ValidationConfig


class HeldOutConfig(ValidationConfig):
    """The held-out samples; with ``actor_infer``, their last questions are also answered."""

    num_answers: int = Field(default=64, ge=1, description="Most held-out questions answered in an evaluation.")
    solution: str = Field(
        default="solution", min_length=1, description="Column with the reference answer that rewards compare with."
    )


class OfflineConfig(PromptsConfig):
    """Samples that are there before the run, how often they are met, and how the result is measured."""

    num_train_epochs: int | None = Field(
        default=None, ge=1, description="Passes over the training data; replaces max_steps."
    )
    sample_overflow: Literal["error", "truncate", "drop"] = Field(
        default="error",
        description="A conversation of more than sequence_length tokens stops the run (error), loses its end "
        "(truncate) or is dropped (with the other side of its pair, if it has one).",
    )
    validation: HeldOutConfig | None = Field(default=None, description="Held-out samples; null: no evaluation.")

    @property
    def sample(self) -> str:
        """Noun for a sample."""
        return "conversation"

    @property
    def sequences_per_sample(self) -> int:
        return 1
