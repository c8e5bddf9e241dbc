"""Trajectories to rows of the training batch: here the loss mask is born."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from roll.data.batch import Batch
from roll.data.requests import FinishReason
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory, Turn
from roll.utils.seeding import derive_seed


@dataclass
class _Columns:
    """Rows collected so far."""

    lengths: list[int] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    turn: list[np.ndarray] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    baselines: list[float] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)


def groups_to_batch(groups: Sequence[RolloutGroup], tags: Sequence[str]) -> Batch:
    """The training batch of some rollout groups, rows in the order of groups, members and turns.

    Args:
        groups: finished groups; trajectories and turns in which nothing was sampled are left out. So are groups without
            a ``baseline`` where others have one (``rollout/no_baseline`` counts them): 0 would be a wrong one.
        tags: all tags; ``tag_B`` indexes into it.

    Raises:
        ValueError: there is no turn at all.
    """
    columns = _Columns()
    trajectory_index = 0
    has_baselines = any(group.baseline is not None for group in groups)
    for group in groups:
        if has_baselines and group.baseline is None:
            continue
        for trajectory in group.trajectories:
            if not any(len(turn.completion.token_ids) for turn in trajectory.turns):
                continue
            num_rows = _append(columns, trajectory, trajectory_index, tags.index(trajectory.tag))
            if group.baseline is not None:
                columns.baselines += [group.baseline.score] * num_rows
            trajectory_index += 1
    if not columns.lengths:
        raise ValueError("no trajectory to train on: every episode of this step was dropped")
    group_B, traj_B, turn_B, state_B, tag_B = torch.tensor(columns.rows, dtype=torch.int64).unbind(1)
    return Batch(
        lengths_B=torch.tensor(columns.lengths, dtype=torch.int64),
        tokens_T=_join(columns.tokens),
        loss_mask_T=_join(columns.mask),
        turn_T=_join(columns.turn),
        rewards_T=_join(columns.rewards),
        group_B=group_B.contiguous(),
        traj_B=traj_B.contiguous(),
        turn_B=turn_B.contiguous(),
        state_B=state_B.contiguous(),
        tag_B=tag_B.contiguous(),
        scores_B=torch.tensor(columns.scores, dtype=torch.float32),
        baseline_B=torch.tensor(columns.baselines, dtype=torch.float32) if has_baselines else None,
        truncated_B=torch.tensor(columns.truncated),
        rollout_logprobs_T=_join(columns.logprobs),
        rollout_versions_T=_join(columns.versions),
    )


def _append(columns: _Columns, trajectory: Trajectory, traj: int, tag: int) -> int:
    """Adds the episode's rows; returns how many."""
    sampled = [turn for turn in trajectory.turns if len(turn.completion.token_ids)]
    spans = [sampled] if trajectory.history else [[turn] for turn in sampled]
    first_turn = 0
    for row, turns in enumerate(spans):
        _append_row(columns, turns, first_turn)
        state = derive_seed(turns[0].state_key)
        columns.rows.append((trajectory.group_id, traj, row, state, tag))
        columns.scores.append(trajectory.score)
        cut_off = turns[-1].completion.finish_reason is FinishReason.LENGTH
        columns.truncated.append(cut_off or trajectory.end is EpisodeEnd.CONTEXT_FULL)
        first_turn += len(turns)
    return len(spans)


def _append_row(columns: _Columns, turns: Sequence[Turn], first_turn: int) -> None:
    """One training sample: the last turn's prompt holds all that came before it, so only the new part is added."""
    length = 0
    for index, turn in enumerate(turns):
        prompt, sampled = turn.prompt_ids[length:], turn.completion.token_ids
        n, m = len(prompt), len(sampled)
        columns.tokens += [prompt, sampled]
        columns.mask += [np.zeros(n, dtype=bool), np.ones(m, dtype=bool)]
        columns.turn.append(np.full(n + m, first_turn + index, dtype=np.int64))
        columns.logprobs += [np.zeros(n, dtype=np.float32), turn.completion.logprobs.astype(np.float32)]
        columns.versions += [np.zeros(n, dtype=np.int64), turn.completion.versions.astype(np.int64)]
        rewards = np.zeros(n + m, dtype=np.float32)
        rewards[-1] = turn.reward
        columns.rewards.append(rewards)
        length += n + m
    columns.lengths.append(length)


def _join(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))
