"""``warm_start``: the supervised start of the tiny model, as far as all pipelines share it."""

from __future__ import annotations

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem


class SupervisedStartConfig(Config):
    """How long to imitate demonstrations before reinforcement learning begins."""

    min_success: float = Field(default=0.15, ge=0, le=1, description="Training goes on until success reaches this …")
    max_success: float = Field(
        default=0.40, ge=0, le=1, description="… and a start beyond this is an error: nothing to learn."
    )
    learning_rate: float = Field(default=2e-3, gt=0, description="Peak learning rate.")
    batch_size: int = Field(default=32, ge=1, description="Samples per optimizer step.")
    max_steps: int = Field(default=220, ge=1, description="Most optimizer steps.")
    eval_steps: int = Field(default=20, ge=1, description="Optimizer steps between two measurements of success.")
    eval_episodes: int = Field(default=256, ge=1, description="Episodes of one measurement.")

    def problems(self) -> list[ConfigProblem]:
        if self.min_success < self.max_success:
            return []
        return [self.problem("min_success", f"less than max_success = {self.max_success}", "max_success")]
