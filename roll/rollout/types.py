"""Types of rollouts: turns, episodes and groups.

A worked example: one Sokoban episode of two turns. The manager renders the board to ``prompt_ids``; the engine answers
with a ``Completion`` (its token ids and their log-probabilities); the environment steps; the two form a ``Turn``. Both
turns make a ``Trajectory``; the eight trajectories that started from the same board make a ``RolloutGroup``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from roll.data import columns
from roll.data.columns import Axis, Column, IntArray, Item
from roll.data.identity import digest, identity
from roll.data.requests import Completion
from roll.data.stored import Block, Piece, hold, may_be_stored

TOKENS, LOGPROBS, EXPERTS, KEPT = "tokens_T", "rollout_logprobs_T", "experts_TE", "kept_I"
"""Columns of ``Batch`` that workers leave in blocks, beside texts."""

VALID_UNKNOWN = "valid_unknown"
"""Key of ``Trajectory.info``: true where nobody looked for an action or answer, so that ``None`` does not mean none."""

OVER_BUDGET = "over_budget"
"""Key of ``Trajectory.info``: why an answer that costs too much to judge counts as a wrong one."""

AGENT = "agent_"
"""Start of the keys of ``Trajectory.info`` that count what an agent program asked."""

_RUN = 8
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(1, _RUN + 1)], dtype=np.uint64)
"""Of a hash that wraps around."""

Frame: TypeAlias = bytes | str
"""View of a state for people: a PNG, or a text."""


class EpisodeEnd(enum.StrEnum):
    """Reason why an episode stopped."""

    TERMINATED = "terminated"  # the environment reached a final state
    TRUNCATED = "truncated"  # the environment's or the manager's turn limit
    CONTEXT_FULL = "context_full"  # the next prompt would not fit in sequence_length


@may_be_stored("prompt_ids", "text", "observation")
@dataclass(frozen=True)
class Turn:
    """One exchange: the prompt, the response, and the environment's reply."""

    prompt_ids: Annotated[IntArray, Column(Axis.PROMPT, np.int64)]
    """The whole prompt, shape [prompt_len]."""
    completion: Completion
    text: str
    """The decoded completion, special tokens removed."""
    observation: str
    """The environment's text before this turn."""
    action: str | None
    """The parsed action's name; ``None`` when the text holds no valid action."""
    task_reward: float
    """Pay of the task for this step, penalties not included."""
    penalty: float
    """Format penalty (zero or negative), kept apart from the task reward."""
    state_key: str
    """Hash of the state before the action: equal keys within a group mean the same state."""
    row: int = 0
    """Row of the episode that this turn is in, where history is kept; its prompt begins with all ids of that row's
    earlier turns (``roll.rollout.env_manager``)."""
    items: Annotated[tuple[Item, ...], Column(Axis.ITEM, batch="items_I")] = ()
    """The pictures of the prompt, each once, as ``GenerateRequest.items``."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(vars(self)["prompt_ids"])

    @property
    def reward(self) -> float:
        """Task reward plus penalty: what the policy is trained on."""
        return self.task_reward + self.penalty


@may_be_stored("final_observation")
@dataclass(frozen=True)
class Trajectory:
    """One whole episode."""

    tag: str
    """Environment tag (a key of ``custom_envs``)."""
    group_id: Annotated[int, Column(dtype=np.int64, batch="group_B")]
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
    """True: the episode is one sample: a growing conversation, in more than one row where it branched. False: each turn
    is its own sample."""
    info: dict[str, Any] = field(default_factory=dict)
    """Scalars of the last step's info, for metrics (numbers and strings only)."""
    frames: tuple[Frame, ...] = ()
    """The environment's pictures, one before each turn and one of the end; of recorded episodes only."""

    @property
    def knows_actions(self) -> bool:
        """False where nobody looked for an action: a turn without one is then not invalid (``VALID_UNKNOWN``)."""
        return not self.info.get(VALID_UNKNOWN)

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
    """One more member, decoded greedily, whose score is the others' baseline (``adv_estimator: remax``). Nobody
    learns from it."""

    @property
    def episodes(self) -> tuple[Trajectory, ...]:
        """All of them."""
        return self.trajectories if self.baseline is None else (*self.trajectories, self.baseline)

    @property
    def blocks(self) -> set[Block]:
        """Where tokens, texts and pictures of its turns lie, if not here."""
        parts = [vars(episode)["final_observation"] for episode in self.episodes]
        parts += [vars(item)["data"] for item in self.items]
        return {part.block for part in parts if isinstance(part, Piece)}

    @property
    def items(self) -> Iterator[Item]:
        """The pictures of all turns."""
        return (item for episode in self.episodes for turn in episode.turns for item in turn.items)


def hold_episodes(episodes: Iterable[Trajectory]) -> None:
    """Fetches all that lies elsewhere of some episodes at once, but for pictures."""
    records: list[Trajectory | Turn | Completion] = []
    for episode in episodes:
        records += (episode, *episode.turns, *(turn.completion for turn in episode.turns))
    hold(records)


class Figures(NamedTuple):
    """What the worker that has a turn's tokens computes of them, so that the driver need not read any."""

    prompt: bytes
    """Equal for equal prompts."""
    largest_id: int
    """Of the sampled ones; -1 of none."""
    repeated: float
    """See ``repeated``."""
    logprob_sum: float
    """Of the log-probs; not finite, if one is not."""

    @classmethod
    def of(cls, turn: Turn) -> Figures:
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs
        total = float(np.sum(logprobs, dtype=np.float64))
        return cls(digest(identity(turn.prompt_ids), size=8), int(ids.max(initial=-1)), repeated(ids), total)


class Routed(NamedTuple):
    """What is told of a turn's column of experts without a look at it."""

    known: int
    """Entries of its row up to this turn that are known, but for the last token's."""
    width: int
    """Entries of a token."""


def figures_of(turn: Turn) -> Figures:
    """Those that came with the turn, if its tokens lie elsewhere."""
    prompt = vars(turn)["prompt_ids"]
    return prompt.figures if isinstance(prompt, Piece) else Figures.of(turn)


def repeated(ids: IntArray) -> float:
    """Share of the runs of 8 tokens that were in the same response before."""
    if len(ids) <= _RUN:
        return 0.0
    runs = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(ids, dtype=np.int64), _RUN)
    hashes = runs.astype(np.uint64) @ _FACTORS
    return 1 - len(np.unique(hashes)) / len(hashes)


@dataclass(frozen=True)
class Collected:
    """Result of one ``RolloutScheduler.take``."""

    groups: list[RolloutGroup]
    """In the order of their ids."""
    rejected: list[RolloutGroup]
    """Finished since the last batch, but turned down by ``accept``; in the order of their ids."""

    def save(self, folder: Path) -> None:
        """Writes the groups into ``folder``, which is made: ``rollouts.safetensors`` and ``rollouts.json``."""
        groups = [*self.groups, *self.rejected]
        hold_episodes(episode for group in groups for episode in group.episodes)
        hold(item for group in groups for item in group.items)
        turns = (turn for group in groups for episode in group.episodes for turn in episode.turns)
        hold(item for turn in turns for item in turn.completion.kept)
        columns.save(folder, "rollouts", self)

    @classmethod
    def load(cls, folder: Path) -> Collected:
        """Groups that ``save`` has written, equal in every field; none where it has written nothing."""
        return columns.load(folder, "rollouts", cls) or cls([], [])


def step_folder(folder: Path | str, step: int) -> Path:
    """Where the rollouts of a step are kept below a ``rollout_dump_dir``."""
    return Path(folder).expanduser() / f"step-{step:05d}"


def kept_steps(folder: Path) -> dict[int, Path]:
    """The folders of the steps that are kept, by step in ascending order."""
    found = {path.name.removeprefix("step-"): path for path in folder.glob("step-*")}
    return dict(sorted((int(step), path) for step, path in found.items() if step.isdigit()))
