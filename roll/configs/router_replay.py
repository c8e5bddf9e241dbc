"""Experts of a mixture of experts, chosen once and taken again where the policy trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.base import Config

ReplayMode = Literal["disable", "R2", "R3"]


class RouterReplayConfig(Config):
    """Replay of a router's choice."""

    mode: ReplayMode = Field(
        default="disable",
        description="Experts of each token when the policy is trained. disable: the routers choose in every pass; R2: "
        "those chosen when the trainer computed the old log-probs; R3: those that the generator chose, for old "
        "log-probs and training. The weights of the experts are always the trainer's.",
    )
