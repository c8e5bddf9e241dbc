"""``warm_start``: the supervised start of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem


class SupervisedStartConfig(Config):
    """Supervised start: how long to imitate demonstrations before reinforcement learning begins."""

    min_success: float = Field(default=0.15, ge=0, le=1, description="Training continues until success reaches this …")
    max_success: float = Field(
        default=0.40, ge=0, le=1, description="… and starting above this is an error: nothing to learn."
    )
    learning_rate: float = Field(default=2e-3, gt=0, description="Peak learning rate.")
    batch_size: int = Field(default=32, ge=1, description="Samples per optimizer step.")
    max_steps: int = Field(default=220, ge=1, description="Most optimizer steps.")
    eval_steps: int = Field(default=20, ge=1, description="Optimizer steps between two measurements of success.")
    eval_episodes: int = Field(default=256, ge=1, description="Episodes of one measurement.")

    def problems(self) -> Iterator[ConfigProblem]:
        if self.min_success >= self.max_success:
            yield self.problem("min_success", f"less than max_success = {self.max_success}", "max_success")


class WarmStartConfig(SupervisedStartConfig):
    """Supervised start of the tiny model on generated demonstrations, before any reinforcement learning."""

    demonstrations: int = Field(default=2000, ge=1, description="Turns of scripted play to imitate.")
    expert_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of them chosen by the solver; the others are random but valid."
    )
    min_valid: float = Field(default=0.90, ge=0, le=1, description="Least share of turns with a valid action.")


class PromptWarmStartConfig(SupervisedStartConfig):
    """Supervised start of the tiny model on demonstrations from a file."""

    file_name: str = Field(
        default="", description="JSON lines with a prompt and a response to imitate; needed when pretrain is tiny."
    )
    prompt: str = Field(default="prompt", min_length=1, description="Column of the prompt.")
    response: str = Field(default="response", min_length=1, description="Column of the response.")
    messages: str | None = Field(
        default=None, min_length=1, description="Column of whole conversations, instead of prompt and response."
    )
    tools: list[str] = Field(
        default_factory=list,
        description="Tools described in the demonstrations' prompts if an agent program provides them, as in "
        "tools.use.<name>.tool. Default: those of the section tools.",
    )
