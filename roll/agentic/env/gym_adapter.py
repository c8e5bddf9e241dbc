"""Plays any gymnasium environment with discrete actions as text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.spaces import Discrete
from pydantic import Field

from roll.agentic.env.actions import ActionParser, pattern_problem
from roll.agentic.env.base import StepLimit, StepResult, TextEnv, stable_hash, step_result
from roll.agentic.env.config import ActionEnvConfig, parse_config
from roll.configs.problems import ConfigProblem
from roll.utils.registry import Registry, UnknownNameError

Formatter = Callable[[Any], str]
"""``observation -> text``."""

_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _values(observation: Any) -> str:
    """Numbers in reading order; ``name: numbers`` a line for a dictionary."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_values(value)}" for key, value in observation.items())
    if isinstance(observation, tuple | list):
        return " ".join(_values(value) for value in observation)
    if isinstance(observation, np.ndarray) and observation.ndim:
        return (" " if observation.ndim == 1 else "\n").join(_values(part) for part in observation)
    if isinstance(observation, np.ndarray | np.generic):
        observation = observation.item()
    return f"{observation:.4g}" if isinstance(observation, float) else str(observation)


FORMATTERS: Registry[Formatter] = Registry("formatter")
FORMATTERS.register("values", _values)


def find_spec(env_id: str) -> EnvSpec:
    """The registered environment that ``gymnasium.make`` would build; of ``module:Name`` the module is imported first.

    Raises:
        gymnasium.error.Error: no such environment.
        ImportError: no such module.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


class GymnasiumConfig(ActionEnvConfig):
    """Keys of ``env_config`` for ``env_type: gymnasium``."""

    env_id: str = Field(description="Name for gymnasium.make; module:Name imports the module first.")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for gymnasium.make.")
    action_names: list[str] | None = Field(
        None, description="One name per action, in the order of their numbers; null uses the numbers."
    )
    formatter: str = Field(
        "ansi", description="Text of an observation: ansi (the environment's own), values, or package.module:function."
    )
    success_key: str | None = Field(None, description="Key of the environment's info that is true on success.")
    success_return: float | None = Field(
        None, description="An episode that terminates with at least this sum of rewards (before reward_scale) succeeds."
    )

    def problems(self) -> list[ConfigProblem]:
        """Names that do not exist, and rules between keys."""
        found = [pattern_problem(self.action_pattern)]
        try:
            find_spec(self.env_id)
        except (gymnasium.error.Error, ImportError) as error:
            found.append(self.problem("env_id", "an environment of gymnasium", hint=str(error)))
        if self.formatter != "ansi":
            try:
                FORMATTERS.get(self.formatter)
            except UnknownNameError as error:
                found.append(self.problem("formatter", "ansi, values or package.module:function", hint=str(error)))
        if self.success_key is None and self.success_return is None:
            expected = "a number, or success_key, to define success"
            found.append(self.problem("success_return", expected, "success_key"))
        return [problem for problem in found if problem]


class GymnasiumEnv(TextEnv):
    """Translates both ways; the inner environment never sees a text without an action.

    Equal texts count as equal states: ``state_key`` is the hash of the observation.

    Args:
        env_config: the keys of ``GymnasiumConfig``.

    Raises:
        ValueError: the actions are not discrete, ``action_names`` has the wrong length, or there is no ansi text.
    """

    config_class = GymnasiumConfig
    own_thread = True  # whatever environment it is

    def __init__(self, **env_config: Any) -> None:
        self.config = config = parse_config(GymnasiumConfig, env_config)
        self._ansi = config.formatter == "ansi"
        self._inner = _make_inner(config)
        space = self._inner.action_space
        if not isinstance(space, Discrete):
            raise ValueError(f"env_id: {config.env_id} has the action space {space}, expected Discrete")
        names = config.action_names or [str(space.start + index) for index in range(space.n)]
        if len(names) != space.n:
            raise ValueError(f"action_names: got {len(names)} names, expected {space.n} for {config.env_id}")
        self._numbers = {name: int(space.start) + index for index, name in enumerate(names)}
        self.action_names = tuple(names)
        self._parser = ActionParser(self._numbers, config.action_pattern)
        self._limit = StepLimit(config.max_steps)
        self._text = ""
        self._return = 0.0
        self.env_instruction = (
            f"You act in the environment {config.env_id}. Answer with one of the actions {', '.join(names)}, "
            f"like this: <answer>{names[0]}</answer>"
            if config.env_instruction is None
            else config.env_instruction
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode of the inner environment, seeded alike."""
        super().reset(seed=seed)
        drawn = seed if seed is not None else int(self.np_random.integers(2**31))
        observation, _ = self._inner.reset(seed=drawn, options=options)
        self._text = self._describe(observation)
        self._return = 0.0
        self._limit.start()
        return self._text, {"state_key": self._key(), "success": False}

    def step(self, action: str) -> StepResult:
        """Plays the action that the text names; a text without one is not played."""
        limit_reached = self._limit.count()
        scale = self.config.reward_scale
        name = self._parser.parse(action)
        reward, terminated, truncated, success, before = 0.0, False, False, False, self._text
        if name is not None:
            observation, raw_reward, terminated, truncated, info = self._inner.step(self._numbers[name])
            reward = float(raw_reward)
            self._return += reward
            self._text = self._describe(observation)
            success = self._succeeded(terminated, info)
        truncated = not terminated and (truncated or limit_reached)
        if terminated or truncated:
            self._limit.stop()
        return step_result(
            self._text,
            task_reward=scale * reward,
            penalty=scale * self.config.format_penalty if name is None else 0.0,
            terminated=terminated,
            truncated=truncated,
            action=name,
            action_is_effective=name is not None and (terminated or self._text != before),
            success=success,
            state_key=self._key(),
        )

    def render(self) -> Any:
        """The inner environment's own picture, where it has one."""
        return self._inner.render() if self._inner.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Closes the inner environment."""
        self._inner.close()

    def _succeeded(self, terminated: bool, info: Mapping[str, Any]) -> bool:
        if self.config.success_key is not None:
            return bool(info.get(self.config.success_key, False))
        return terminated and self.config.success_return is not None and self._return >= self.config.success_return

    def _describe(self, observation: Any) -> str:
        if self._ansi:
            return _ANSI_COLOUR.sub("", str(self._inner.render())).strip("\n")
        return FORMATTERS.get(self.config.formatter)(observation)

    def _key(self) -> str:
        return stable_hash(self._text.encode())


def _make_inner(config: GymnasiumConfig) -> gymnasium.Env[Any, Any]:
    kwargs = dict(config.env_kwargs)
    if config.formatter == "ansi":
        kwargs["render_mode"] = "ansi"
    elif "rgb_array" in _render_modes(config.env_id):
        kwargs.setdefault("render_mode", "rgb_array")
    inner = cast("gymnasium.Env[Any, Any]", gymnasium.make(config.env_id, **kwargs))
    modes = inner.metadata.get("render_modes", [])
    if config.formatter == "ansi" and "ansi" not in modes:
        raise ValueError(
            f"formatter: got 'ansi', but {config.env_id} renders only {modes}; expected values or a function"
        )
    return inner


def _render_modes(env_id: str) -> Sequence[str]:
    """The ways in which the class can show itself; none where it is not known before it is built."""
    entry = find_spec(env_id).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    metadata = getattr(creator, "metadata", None) or {}
    return metadata.get("render_modes") or ()
