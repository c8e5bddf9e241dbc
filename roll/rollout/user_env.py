"""A user who answers the policy: the conversation about a prompt goes on until one of them is done."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from roll.agentic.env.base import StepResult
from roll.configs.rlvr import UserConfig
from roll.data.prompts import Prompt
from roll.rollout.env_manager import TOOL_TURNS
from roll.rollout.errors import EnvError, contained
from roll.rollout.prompt_env import PromptEnv
from roll.utils.foreign import clean_text, describe_error
from roll.utils.registry import import_path


class UserError(EnvError):
    """The user failed, took too long or answered something else than was asked for."""


class User(Protocol):
    """A class of one's own; one object serves all conversations of a rollout worker, so it keeps nothing of any."""

    async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
        """Words of the user, the reward of the policy's last turn, and whether the conversation is over.

        Args:
            messages: all that has been said, the policy's turn last.
            prompt: the row.
        """


def load_user(config: UserConfig) -> User:
    """The user of a configuration.

    Raises:
        ValueError: it cannot be made, or has no ``async respond``.
    """
    expected = "a class with async respond(messages, prompt) that takes user.args"
    try:
        made: Any = import_path(config.path, "user.path")
        user: User = made(**config.args)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{describe_error(error)}; expected {expected}") from error
    if not inspect.iscoroutinefunction(getattr(user, "respond", None)):
        raise ValueError(f"{config.path} has no such method; expected {expected}")
    return user


class UserEnv:
    """A prompt with a user (an ``AsyncEnv``), for one episode. Its last answer is that of the prompt."""

    def __init__(self, env: PromptEnv, user: User, config: UserConfig) -> None:
        self._env = env
        self._user = user
        self._config = config
        self._messages: list[Mapping[str, str]] = list(env.prompt.messages)
        self._turns = 0
        self._info: dict[str, Any] = {}

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        observation, self._info = await self._env.reset(seed)
        return observation, self._info

    async def step(self, text: str) -> StepResult:
        """Has the user answer, or the answer scored where the conversation is over.

        Raises:
            UserError: see there.
        """
        told, self._messages = tuple(self._messages), [*self._messages, {"role": "assistant", "content": text}]
        reward = 0.0
        if self._turns < self._config.max_turns:
            words, reward, is_over = await self._respond()
            if not is_over:
                self._turns += 1
                said = {"role": "user", "content": words}
                self._messages.append(said)
                parts = {"task_reward": reward, "penalty": 0.0, "action": text, "success": False}
                more = {"messages": [said], TOOL_TURNS: self._turns, **parts}
                return words, reward, False, False, {**self._info, **more}
        self._env.heard = told
        observation, score, terminated, truncated, info = await self._env.step(text)
        info = {**info, "task_reward": float(info["task_reward"]) + reward, "user_turns": self._turns}
        return observation, float(score) + reward, terminated, truncated, info

    async def render(self) -> None:
        """No picture."""

    async def _respond(self) -> tuple[str, float, bool]:
        try:
            async with asyncio.timeout(self._config.timeout) as limit:
                answer: Any = await self._asked()
        except Exception as error:  # a user's class may raise anything
            if limit.expired():
                raise UserError(f"the user took longer than user.timeout={self._config.timeout:g}s") from error
            raise UserError(f"the user raised {describe_error(error)}") from error
        words: Any
        reward: Any
        is_over: Any
        words, reward, is_over = answer if isinstance(answer, tuple) and len(answer) == 3 else (None,) * 3
        right = isinstance(words, str) and isinstance(is_over, bool) and isinstance(reward, int | float)
        if not right or not math.isfinite(reward):
            raise UserError(f"the user answered {answer!r:.200}, expected (text, finite number, true or false)")
        return clean_text(words), float(reward), bool(is_over)

    async def _asked(self) -> Any:
        with contained():
            return await self._user.respond(tuple(self._messages), self._env.prompt)
