"""``warm_start``: the supervised start of the tiny model, as far as all pipelines share it."""

from __future__ import annotations

from pydantic import Field

from roll.configs.base import Config


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

    def problems(self) -> list[str]:
        if self.min_success >= self.max_success:
            return [f"min_success: seen {self.min_success}, expected less than max_success = {self.max_success}"]
        return []
