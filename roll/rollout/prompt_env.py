"""A prompt as an environment of one turn: the answer is the action, and a verifier somewhere else is the reward."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from roll.agentic.env.base import StepResult, step_result
from roll.configs.env import CustomEnvConfig
from roll.data.asked import CONVERSATION
from roll.data.columns import IntArray
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer, Message
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.rewards.types import Sample, Verdict
from roll.rollout.env_manager import EnvManager, Limits
from roll.rollout.types import OVER_BUDGET, VALID_UNKNOWN, Turn

ScoreFn = Callable[[Sample], Awaitable[Verdict]]


class PromptEnv:
    """One prompt that is answered once (an ``AsyncEnv``).

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
    """Plays ``PromptEnv``s: the policy sees the dataset's messages as they are."""

    history = True

    def __init__(self, renderer: ChatRenderer, params: SamplingParams, limits: Limits) -> None:
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
