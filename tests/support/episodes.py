"""Turns and episodes for tests of what is told, written and shown of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from roll.data.requests import Completion, FinishReason
from roll.rollout.types import EpisodeEnd, Trajectory, Turn


def make_turn(
    text: str = "text",
    observation: str = "asked",
    action: str | None = None,
    reward: float = 0.0,
    penalty: float = 0.0,
    *,
    ids: Sequence[int] | np.ndarray = (1,),
    prompt: Sequence[int] = (0,),
    **completion: Any,
) -> Turn:
    """A turn in which these ids are sampled; ``completion``: what else is known of them."""
    sampled = np.array(ids, dtype=np.int64)
    values = {
        "logprobs": np.zeros(len(sampled), np.float32),
        "finish_reason": FinishReason.STOP,
        "versions": np.zeros(len(sampled), np.int64),
        **completion,
    }
    said = Completion("r", sampled, **values)
    return Turn(np.array(prompt, dtype=np.int64), said, text, observation, action, reward, penalty, "s")


def make_episode(*turns: Turn, tag: str = "t", group: int = 0, member: int = 0, **values: Any) -> Trajectory:
    plain = {"seed": 0, "end": EpisodeEnd.TERMINATED, "success": False, "final_observation": "", "history": True}
    return Trajectory(tag=tag, group_id=group, member=member, turns=turns, **(plain | values))
