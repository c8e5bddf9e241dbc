"""The keys that the configurations of the built-in environments share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import Field

from roll.agentic.env.actions import ANSWER_PATTERN
from roll.configs.base import Config
from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem, pattern_problems
from roll.configs.schema import did_you_mean


class EnvConfig(Config):
    """Keys of ``env_config`` that every built-in environment understands."""

    format_penalty: float = Field(-0.5, le=0, description="Added to the reward when the text contains no valid action.")
    reward_scale: float = Field(1.0, gt=0, description="Multiplies every reward and penalty.")
    env_instruction: str | None = Field(
        None, description="Text for the system message; null lets the environment explain itself."
    )


class ActionEnvConfig(EnvConfig):
    """Adds the keys of environments with named actions and several turns."""

    max_steps: int = Field(10, ge=1, description="Steps after which the episode is truncated.")
    action_pattern: str = Field(
        ANSWER_PATTERN, description="Regular expression that finds the answer; its first group is the action's name."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """A pattern that is none."""
        yield from pattern_problems("action_pattern", self.action_pattern)


class AdaptedEnvConfig(EnvConfig):
    """Adds the keys of other libraries' environments, which read the answer themselves."""

    action_pattern: str | None = Field(
        None, description="Regular expression whose first group is sent to the environment; null: the whole text."
    )
    max_steps: int = Field(100, ge=1, description="Steps after which the episode is truncated.")

    def problems(self) -> Iterator[ConfigProblem]:
        """A pattern that is none."""
        yield from pattern_problems("action_pattern", self.action_pattern)

    def id_problems(self, env_id: str, package: str, what: str) -> Iterator[ConfigProblem]:
        """A package that is not installed, or an environment that its registry lacks."""
        try:
            registry = importlib.import_module(f"{package}.envs.registration").ENV_REGISTRY
        except ModuleNotFoundError as error:
            hint = f"pip install 'roll-rl[{package}]'"
            yield self.problem("env_id", f"the package {error.name} to be installed", hint=hint)
            return
        if env_id not in registry:
            yield self.problem("env_id", what, hint=did_you_mean(env_id, registry))


ConfigT = TypeVar("ConfigT", bound=Config)


def parse_config(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Builds the configuration.

    Raises:
        ConfigErrors: all that is wrong with ``values``.
    """
    if problems := section_problems(cls, values, strict=False):
        raise ConfigErrors(problems)
    return cls(**values)
