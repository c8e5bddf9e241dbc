"""``/v1/reward``: an episode's program says what its reward is, where the configuration lets it."""

from __future__ import annotations

from pydantic import BaseModel, Field

from roll.rollout.endpoint.errors import ApiError
from roll.rollout.endpoint.session import Session
from roll.rollout.env_protocol import MAX_REWARD


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
