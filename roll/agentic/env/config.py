"""Keys that the built-in environments share, and the words for mistakes in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from roll.agentic.env.actions import ANSWER_PATTERN
from roll.configs.base import Config


class EnvConfig(Config):
    """Keys of ``env_config`` that every built-in environment understands."""

    format_penalty: float = Field(-0.5, le=0, description="Added to the reward when the text holds no valid action.")
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


ConfigT = TypeVar("ConfigT", bound=Config)


def parse_config(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Builds the configuration.

    Raises:
        ValueError: all that is wrong with ``values``, one problem per line.
    """
    problems = config_problems(cls, values)
    if problems:
        raise ValueError("\n".join(problems))
    return cls(**values)


def config_problems(cls: type[Config], values: Mapping[str, Any]) -> list[str]:
    """All that is wrong with ``values``, as ``key: what was seen, what was expected``."""
    try:
        config = cls.model_validate(dict(values))
    except ValidationError as error:
        return [_describe(cls, detail) for detail in error.errors(include_url=False)]
    return config.problems()


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The problem line for a key that nothing reads."""
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known) or 'none'}"
    return f"{key}: unknown key; {hint}"


def _describe(cls: type[Config], detail: Any) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        return unknown_key(path, cls.model_fields)
    message = str(detail["msg"]).replace("Input should be", "expected").removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{path}: missing, but required"
    return f"{path}: got {detail['input']!r}, {message[0].lower()}{message[1:]}"
