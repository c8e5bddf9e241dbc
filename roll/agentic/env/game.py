"""Shared parts of the environments: configuration, seeds, step limits, return values."""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import Field

from roll.agentic.env.base import Observation, StepLimit, StepResult, TextEnv, step_result
from roll.configs.base import Config
from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem, pattern_problems
from roll.configs.schema import did_you_mean

ANSWER_PATTERN = r"<answer>(.*?)</answer>"

MAX_PARSED_CHARS = 8192
"""Only this much of a text's end is searched, which bounds what a slow pattern can cost."""


class ActionParser:
    """Finds the action that a text names.

    The last match of ``pattern`` counts, because models think aloud before they commit; an earlier match is never a
    fallback. Its first group, stripped of surrounding white space, must be an action's name; upper and lower case are
    the same. ``.`` matches line breaks too. Only the last ``MAX_PARSED_CHARS`` characters are searched, so a pattern
    anchored with ``^`` does not match a longer text.

    Args:
        actions: their names.
        pattern: regular expression with at least one group.

    Raises:
        ValueError: the pattern does not compile, has no group, or two names differ only in case.
    """

    def __init__(self, actions: Iterable[str], pattern: str = ANSWER_PATTERN) -> None:
        if problems := list(pattern_problems("action_pattern", pattern)):
            raise ConfigErrors(problems)
        names = tuple(actions)
        self.pattern = re.compile(pattern, re.DOTALL)
        self._names = {name.casefold(): name for name in names}
        if len(self._names) < len(names):
            raise ValueError(f"actions: got {', '.join(names)}, expected names that differ in more than case")

    def parse(self, text: str) -> str | None:
        """The name of the action in ``text``, spelled as it is known; ``None`` if it holds no valid one."""
        answer = self.answer(text)
        return None if answer is None else self._names.get(answer.casefold())

    def answer(self, text: str) -> str | None:
        """Last match's first group, stripped; ``None`` without a match."""
        last = None
        for match in self.pattern.finditer(text, max(0, len(text) - MAX_PARSED_CHARS)):
            last = match[1]
        return None if last is None else last.strip()


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


class Played(NamedTuple):
    """The effect of one turn of the policy."""

    action: str | None
    """Its name; ``None``: the text holds none, which costs ``format_penalty``."""
    reward: float
    """Reward of the task, times ``reward_scale``."""
    effective: bool
    """The state is another one."""
    terminated: bool
    success: bool
    truncated: bool = False
    """By a limit that is not ``max_steps``."""


class Game(TextEnv):
    """An environment that is configured by the keys of an ``EnvConfig``; one step long without ``max_steps``.

    A subclass implements ``begin`` and ``play``, which set ``_text`` and ``_key``, or ``observation`` and
    ``state_key`` too.

    Raises:
        ConfigErrors: all that is wrong with them.
    """

    config_class: ClassVar[type[EnvConfig]] = EnvConfig
    num_seeds: ClassVar[int] = 2**62
    """Exclusive upper bound of the seed that is drawn if ``reset`` gets none."""
    config: EnvConfig

    def __init__(self, **env_config: Any) -> None:
        self.config = parse_config(self.config_class, env_config)
        self.env_instruction = self.config.env_instruction or ""
        self._limit = StepLimit(getattr(self.config, "max_steps", 1))
        self._text = self._key = ""

    @abstractmethod
    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Sets up the seed's episode."""

    @abstractmethod
    def play(self, text: str) -> Played:
        """Does what the text says."""

    def observation(self) -> Observation:
        """What the policy gets now."""
        return self._text

    def state_key(self) -> str:
        """Hash of the state; equal keys mean equal states."""
        return self._key

    def more_info(self) -> dict[str, Any]:
        """Further entries of ``info``."""
        return {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self.begin(int(self.np_random.integers(self.num_seeds)) if seed is None else seed, options or {})
        self._limit.start()
        return self.observation(), {"state_key": self.state_key(), "success": False, **self.more_info()}

    def step(self, action: str) -> StepResult:
        """Plays a turn; a text without an action changes nothing."""
        limit_reached = self._limit.count()
        played = self.play(action)
        truncated = not played.terminated and (played.truncated or limit_reached)
        if played.terminated or truncated:
            self._limit.stop()
        text, reward, terminated, truncated, info = step_result(
            self.observation(),
            task_reward=played.reward,
            penalty=self.config.reward_scale * self.config.format_penalty if played.action is None else 0.0,
            terminated=played.terminated,
            truncated=truncated,
            action=played.action,
            action_is_effective=played.effective,
            success=played.success,
            state_key=self.state_key(),
        )
        return text, reward, terminated, truncated, info | self.more_info()


class AdaptedGame(Game):
    """An environment of another library, which gets all or a part of the policy's text."""

    config: AdaptedEnvConfig
    num_seeds = 2**31

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        pattern = self.config.action_pattern
        self._parser = None if pattern is None else ActionParser((), pattern)

    def said(self, text: str) -> str | None:
        """Text that the environment is told; ``None``: the pattern finds nothing."""
        return text if self._parser is None else self._parser.answer(text)
