"""Tools beside an environment: turns that call are answered by the tools, all others by the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from roll.agentic.env.base import StepResult
from roll.agentic.tools.types import AssistantTurn, ToolSchema
from roll.data.columns import IntArray
from roll.data.requests import Completion, GenerateFn, GenerateRequest
from roll.rollout.env_manager import SAID, TOOL_TURNS, AsyncEnv
from roll.rollout.errors import EnvError
from roll.rollout.tool_box import ToolBox
from roll.rollout.types import Frame

COUNTS = ("tool_calls", "failed_calls", "call_timeouts", "malformed_calls")
"""Keys of a step's ``info``: what the episode has called so far."""


class ToolEnv:
    """An environment or a prompt with tools (an ``AsyncEnv``), for one episode."""

    def __init__(self, env: AsyncEnv, box: ToolBox, schemas: Sequence[ToolSchema]) -> None:
        self._env = env
        self._box = box
        self._schemas = schemas
        self._names = [schema.name for schema in schemas]
        self._states: dict[str, dict[str, Any]] = {}
        self._counts: Counter[str] = Counter()
        self._turns = 0
        self._ids: IntArray | None = None
        self._info: dict[str, Any] = {}

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools as the chat template is told of them."""
        return [schema.as_openai() for schema in self._schemas]

    def watch(self, generate: GenerateFn) -> GenerateFn:
        """The same ``generate``, noting the ids: calls are read with the special tokens, which texts lack."""

        async def watched(request: GenerateRequest) -> Completion:
            completion = await generate(request)
            self._ids = completion.token_ids
            return completion

        return watched

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        observation, self._info = await self._env.reset(seed)
        return observation, self._info | {"tools": self.tools}

    async def step(self, text: str) -> StepResult:
        """Answers a turn; ``info["messages"]`` is what the tools say, where they were called."""
        assert self._ids is not None, "watch"
        turn = self._box.parse(self._ids, self._schemas)
        penalty = self._box.config.malformed_call_penalty * len(turn.errors)
        if (turn.calls or turn.errors) and self._turns < self._box.config.max_turns:
            self._turns += 1
            return await self._answer(turn, text, penalty)
        said = {SAID: self._box.message(turn, text), "tools": self.tools}
        self._counts["malformed_calls"] += len(turn.errors)
        observation, reward, terminated, truncated, info = await self._env.step(text)
        self._info = info
        info = info | self._counts_so_far() | {"penalty": float(info.get("penalty", 0.0)) + penalty}
        info.setdefault("task_reward", float(reward) - float(self._info.get("penalty", 0.0)))
        return observation, float(reward) + penalty, terminated, truncated, info | said

    async def render(self) -> Frame | None:
        return await self._env.render()

    async def _answer(self, turn: AssistantTurn, text: str, penalty: float) -> StepResult:
        answers = await self._box.answer(turn, self._names, self._states)
        self._counts.update(answers.counts)
        info = {
            **self._info,
            **self._counts_so_far(),
            "messages": answers.messages,
            SAID: self._box.message(turn, text),
            "tools": self.tools,
            "action": ", ".join(call.name for call in turn.calls) or None,
            "task_reward": 0.0,
            "penalty": penalty,
            "success": False,
        }
        return "\n".join(message["content"] for message in answers.messages), penalty, False, False, info

    def _counts_so_far(self) -> dict[str, int]:
        return {name: self._counts[name] for name in COUNTS} | {TOOL_TURNS: self._turns}


async def with_tools(env: AsyncEnv, tag: str, box: ToolBox | None, generate: GenerateFn) -> tuple[AsyncEnv, GenerateFn]:
    """An episode's environment and its way to the engine, with the tools that its tag has.

    Raises:
        EnvError: a tool cannot be made, or a server of tools not be reached.
    """
    if box is None or not box.config.reaches(tag):
        return env, generate
    try:
        schemas = await box.schemas(tag)
    except ValueError as error:
        raise EnvError(str(error)) from error
    tools = ToolEnv(env, box, schemas)
    return tools, tools.watch(generate)
