"""The vocabulary of rollouts: what an engine, an environment and an environment manager say to each other.

A worked example: one Sokoban episode of two turns. The manager renders the board to ``prompt_ids``; the engine answers
with a ``Completion`` (its token ids and their log-probabilities); the environment steps; the two form a ``Turn``. Both
turns make a ``Trajectory``; the eight trajectories that started from the same board make a ``RolloutGroup``.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from roll.data.arrays import FloatArray, IntArray


class FinishReason(enum.StrEnum):
    """Why the engine stopped one completion."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_new_tokens or the context is used up
    ABORT = "abort"  # the caller cancelled the request


class EpisodeEnd(enum.StrEnum):
    """Why an episode stopped."""

    TERMINATED = "terminated"  # the environment reached a final state
    TRUNCATED = "truncated"  # the environment's or the manager's turn limit
    CONTEXT_FULL = "context_full"  # the next prompt would not fit in sequence_length


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled."""

    max_new_tokens: int = 64
    """Upper bound on sampled tokens."""
    temperature: float = 1.0
    """Softmax temperature; 0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps everything."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or less keeps everything."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already seen (CTRL, Keskar et al. 2019); 1 is off."""
    stop: tuple[str, ...] = ()
    """Generation ends once the decoded text contains one of these; the tokens that completed it are kept."""
    seed: int | None = None
    """Same seed, prompt and weights give the same tokens, whatever else is in the batch."""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt for the generation engine."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_ids: IntArray
    """Token ids, shape [prompt_len]; never re-tokenised."""
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    request_id: str
    token_ids: IntArray
    """Sampled ids, shape [n], the end-of-sequence token included."""
    logprobs: FloatArray
    """log p of each sampled id, shape [n], under the temperature-scaled full distribution (before top-p and top-k);
    under temperature 0, that of temperature 1."""
    finish_reason: FinishReason
    weight_version: int
    """The weight version that sampled the first token."""


GenerateFn = Callable[[GenerateRequest], Awaitable[Completion]]


@dataclass(frozen=True)
class Turn:
    """One exchange: what the policy saw, what it said, what the environment answered."""

    prompt_ids: IntArray
    """Everything the policy saw, shape [prompt_len]. When history is kept, a later turn's prompt starts with the
    earlier turn's ``prompt_ids + completion.token_ids``."""
    completion: Completion
    text: str
    """The decoded completion, special tokens removed."""
    observation: str
    """The environment's text before this turn."""
    action: str | None
    """The parsed action's name; ``None`` when the text holds no valid action."""
    task_reward: float
    """What the task paid for this step, penalties not included."""
    penalty: float
    """Format penalty (zero or negative), kept apart from the task reward."""
    state_key: str
    """Hash of the state before the action: equal keys within a group mean the same state."""

    @property
    def reward(self) -> float:
        """Task reward plus penalty: what the policy is trained on."""
        return self.task_reward + self.penalty


@dataclass(frozen=True)
class Trajectory:
    """One whole episode."""

    tag: str
    """Environment tag (a key of ``custom_envs``)."""
    group_id: int
    """Running number of the group; members share environment configuration and seed."""
    member: int
    """Index within the group."""
    seed: int
    """Environment seed."""
    turns: tuple[Turn, ...]
    end: EpisodeEnd
    success: bool
    """The environment's own word (``info["success"]``)."""
    final_observation: str
    """The environment's text after the last turn."""
    history: bool
    """True: the turns form one growing conversation (one training sample). False: each turn is its own sample."""
    info: dict[str, Any] = field(default_factory=dict)
    """Scalars of the last step's info, for metrics (numbers and strings only)."""

    @property
    def score(self) -> float:
        """Undiscounted sum of rewards, penalties included."""
        return sum(turn.reward for turn in self.turns)


@dataclass(frozen=True)
class RolloutGroup:
    """The trajectories that started from the same environment configuration and seed."""

    group_id: int
    tag: str
    trajectories: tuple[Trajectory, ...]
    dropped: int = 0
    """Members lost to environment failures after retries (counted, never silently zero)."""
    errors: tuple[str, ...] = ()
    """One line per failed attempt: which environment, which step, what was raised."""
    baseline: Trajectory | None = None
    """One more member, played greedily, whose score the others are compared with (``adv_estimator: remax``). Nobody
    learns from it."""
