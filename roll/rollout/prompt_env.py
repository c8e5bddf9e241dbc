"""A prompt as an environment, of one turn or with a simulated user; a verifier elsewhere computes the reward."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from roll.agentic.env.base import StepResult, step_result
from roll.configs.env import CustomEnvConfig
from roll.configs.rlvr import UserConfig
from roll.data.columns import IntArray
from roll.data.prompts import Prompt
from roll.data.questions import CONVERSATION
from roll.data.renderer import ChatRenderer, Message
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.rewards.types import RewardResult, Sample
from roll.rollout.env_manager import TOOL_TURNS, EnvManager, LengthLimits
from roll.rollout.errors import EnvError, contained
from roll.rollout.types import OVER_BUDGET, VALID_UNKNOWN, Turn
from roll.utils.foreign import clean_text, describe_error
from roll.utils.registry import import_path

ScoreFn = Callable[[Sample], Awaitable[RewardResult]]


class PromptEnv:
    """One prompt with one response (an ``AsyncEnv``).

    Args:
        score: judges the answer; what it raises ends the episode.
    """

    def __init__(self, prompt: Prompt, score: ScoreFn) -> None:
        self.prompt = prompt
        self._score = score
        truth = "" if prompt.ground_truth is None else str(prompt.ground_truth)
        self._known: dict[str, Any] = {"prompt_id": prompt.id, "ground_truth": truth}
        """Of every ``info``: an episode that is cut short is of this prompt too."""
        if len(prompt.messages) > 1:  # the observation is the last alone
            self._known[CONVERSATION] = json.dumps([dict(message) for message in prompt.messages])
        if prompt.tools:
            self._known["tools"] = list(prompt.tools)
        self._completion: Completion | None = None
        self.heard = prompt.messages
        """The conversation that the answer ends."""

    def watch(self, generate: GenerateFn) -> GenerateFn:
        """The same ``generate``, noting how long the answer was and why it ended."""

        async def watched(request: GenerateRequest) -> Completion:
            self._completion = await generate(request)
            return self._completion

        return watched

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self.question, {"prompt": self.prompt, "state_key": self.prompt.id, **self._known}

    async def step(self, text: str) -> StepResult:
        """Scores the answer; ``action`` is what the verifier found in it."""
        completion = self._completion
        verdict = await self._score(
            Sample(
                prompt=self.question,
                response=text,
                ground_truth=self.prompt.ground_truth,
                data_source=self.prompt.tag,
                extra_info=self.prompt.extra_info,
                messages=self.heard,
                num_tokens=0 if completion is None else len(completion.token_ids),
                truncated=completion is not None and completion.finish_reason is FinishReason.LENGTH,
            )
        )
        observation, reward, terminated, truncated, info = step_result(
            "",
            task_reward=verdict.score,
            penalty=0.0,
            terminated=True,
            truncated=False,
            action=verdict.answer,
            action_is_effective=True,
            success=verdict.correct,
            state_key=self.prompt.id,
        )
        info |= {**self._known, **verdict.parts, **verdict.notes}
        if verdict.over_budget:
            info[OVER_BUDGET] = verdict.over_budget
        if verdict.valid is None:
            info[VALID_UNKNOWN] = True
        return observation, reward, terminated, truncated, info

    async def render(self) -> None:
        """No picture: the prompt is all there is to see."""

    @property
    def question(self) -> str:
        """Text of the last message."""
        return self.prompt.messages[-1]["content"]


class PromptManager(EnvManager):
    """Runs ``PromptEnv``s: the policy gets the dataset's messages unchanged."""

    history = True

    def __init__(self, renderer: ChatRenderer, params: SamplingParams, limits: LengthLimits) -> None:
        super().__init__(CustomEnvConfig(env_type="prompt", max_steps=1), renderer, params, limits)

    def prompt(self, observation: str, info: Mapping[str, Any], turns: list[Turn]) -> IntArray:
        if turns:
            return self.continued(turns[-1], info["messages"], info)
        prompt: Prompt = info["prompt"]
        if prompt.prompt_ids is None:
            return self.renderer.prompt(prompt.messages, info.get("tools"))
        return prompt.prompt_ids

    def said(self, observation: str, info: Mapping[str, Any], turns: list[Turn]) -> Sequence[Message] | None:
        if turns:
            messages: Sequence[Message] = info["messages"]
            return messages
        prompt: Prompt = info["prompt"]
        return prompt.messages if prompt.prompt_ids is None else None


class UserError(EnvError):
    """The user raised, took too long or returned something invalid."""


class User(Protocol):
    """A user-defined class; one object serves all conversations of a rollout worker, so it keeps no state of one."""

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
    """A prompt with a user (an ``AsyncEnv``), for one episode. The last response is scored."""

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
