"""The whole configuration of a supervised run (SFT): conversations to imitate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.prompts import PromptsConfig, ValidationConfig


class SFTValidationConfig(ValidationConfig):
    """The held-out conversations; with ``actor_infer``, their last questions are also answered."""

    num_answers: int = Field(
        default=64, ge=1, description="Most held-out questions that are answered at an evaluation."
    )
    solution: str = Field(
        default="solution", min_length=1, description="Column with the reference answer that rewards compare with."
    )


class SFTConfig(PromptsConfig):
    """Everything that ``examples/start_sft_pipeline.py`` reads."""

    num_train_epochs: int | None = Field(
        default=None, ge=1, description="Passes over the training data; takes the place of max_steps."
    )
    train_on: Literal["all", "last"] = Field(
        default="all",
        description="The answers of a conversation that are imitated: all of the assistant's, or its last.",
    )
    sample_overflow: Literal["error", "truncate", "drop"] = Field(
        default="error",
        description="A conversation of more than sequence_length tokens stops the run, loses its end or is left out.",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="token-mean",
        description="The loss of an optimizer step: the mean over all tokens to imitate, or over conversations of the "
        "mean over theirs.",
    )
    validation: SFTValidationConfig | None = Field(
        default=None, description="Held-out conversations; null: no evaluation."
    )

    @property
    def marks_hits(self) -> bool:
        return True
