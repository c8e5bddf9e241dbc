"""The whole configuration of a supervised run (SFT): conversations to imitate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.offline import OfflineConfig


class SFTConfig(OfflineConfig):
    """Everything that ``examples/start_sft_pipeline.py`` reads."""

    train_on: Literal["all", "last"] = Field(
        default="all",
        description="Which responses of a conversation are trained on: all of the assistant's, or its last.",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="token-mean",
        description="The loss of an optimizer step: the mean over all trained tokens, or the mean over conversations "
        "of their means.",
    )
