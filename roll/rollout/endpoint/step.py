"""``/v1/step`` and ``/v1/reward``: an episode's program acts in its environment, or posts its reward."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from roll.agentic.env.base import StepResult
from roll.rollout.endpoint.errors import ApiError
from roll.rollout.endpoint.session import Session
from roll.rollout.env_manager import AsyncEnv
from roll.rollout.env_runner import MAX_REWARD
from roll.rollout.observations import for_programs, in_words
from roll.rollout.types import EpisodeEnd


@dataclass(frozen=True)
class Step:
    """Outcome of an action."""

    turn: int
    """Answers of the policy that had been given before it."""
    observation: str
    task_reward: float
    penalty: float
    info: dict[str, Any]


class Steps:
    """An episode's environment, after its reset, and the steps taken in it.

    Args:
        most: steps after which the episode is truncated.
    """

    def __init__(self, env: AsyncEnv, session: Session, most: int) -> None:
        self.taken: list[Step] = []
        self.end: EpisodeEnd | None = None
        """Reason why no further step can be taken."""
        self._env = env
        self._session = session
        self._most = most
        self._lock = asyncio.Lock()

    async def take(self, action: str) -> StepResult:
        """Steps the environment; ``truncated`` also where that was the last step there may be.

        Raises:
            ApiError: there is no further step.
            EnvError: the environment failed.
        """
        async with self._lock:
            if self.end is not None:  # of the environment, or of the program
                raise ApiError(409, "the environment has come to its end", code="environment_ended")
            return await self._take(action)

    async def settle(self, words: str | None) -> None:
        """Waits for the step under way, and lets no other begin.

        Args:
            words: taken as a step where there was none.

        Raises:
            EnvError: the environment failed, in a step for which the program did not wait too.
        """
        async with self._lock:
            if self._session.failure.done():
                self._session.failure.result()
            if words is not None and not self.taken:
                await self._take(words)
            self.end = self.end or EpisodeEnd.TERMINATED

    async def _take(self, action: str) -> StepResult:
        turn = len(self._session.turns)
        observation, reward, terminated, truncated, info = await self._env.step(action)
        penalty = float(info.get("penalty", 0.0))
        task_reward = float(info.get("task_reward", float(reward) - penalty))
        self.taken.append(Step(turn, in_words(observation), task_reward, penalty, info))
        truncated = truncated or len(self.taken) >= self._most
        if terminated or truncated:
            self.end = EpisodeEnd.TERMINATED if terminated else EpisodeEnd.TRUNCATED
        return observation, reward, terminated, truncated, info


class StepRequest(BaseModel):
    action: str

    async def take(self, session: Session) -> dict[str, Any]:
        """Acts in the environment; an environment that fails ends the episode.

        Raises:
            ApiError: there is none, it has come to its end, or it failed.
        """
        if session.act is None:
            raise ApiError(403, "the task of this key has no environment", code="no_environment")
        try:
            observation, reward, terminated, truncated, _info = await session.act(self.action)
        except ApiError:
            raise
        except Exception as error:  # a user's environment may raise anything
            session.fail(error)
            raise ApiError(500, "the environment failed; the episode is over", code="environment_failed") from error
        seen = for_programs(observation)
        return {"observation": seen, "reward": reward, "terminated": terminated, "truncated": truncated}


class RewardRequest(BaseModel):
    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD)
    success: bool | None = None

    def post(self, session: Session) -> None:
        """Notes the reward; the last one counts.

        Raises:
            ApiError: the reward of this run comes from somewhere else.
        """
        if session.config.reward != "call":
            raise ApiError(403, "rewards are not the program's: agent.reward is not call", code="reward_not_allowed")
        session.reward, session.success = self.reward, self.success
