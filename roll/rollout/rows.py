"""Turns rows into the training batch, and makes the loss mask.

Which turns share a row is decided while an episode runs (``roll.rollout.env_manager``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
import torch

from roll.data.batch import Batch
from roll.data.columns import (
    UNKNOWN,
    Axis,
    Column,
    Item,
    columns_of,
    continued,
    distinct,
    unknown,
)
from roll.data.requests import Completion, FinishReason
from roll.data.stored import Piece, Places, Stored
from roll.rollout.types import EXPERTS, LOGPROBS, TOKENS, EpisodeEnd, RolloutGroup, Trajectory, Turn, figures_of
from roll.utils.hashing import derive_seed


@dataclass
class _Columns:
    """Rows collected so far. What is said of a whole prompt or answer is spread over its tokens at the end."""

    num_tokens: list[int] = field(default_factory=list)
    """Of the new part of the prompt and of the answer of each turn, one after the other."""
    sampled: list[Turn] = field(default_factory=list)
    """Of each of ``turns``."""
    num_turns: list[int] = field(default_factory=list)
    """Of each row."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Of each row."""
    turns: list[int] = field(default_factory=list)
    """Each turn's number in its episode."""
    rewards: list[float] = field(default_factory=list)
    """Of each turn."""
    lengths: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)
    baselines: list[float] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of each row in the sampled tokens of its sample."""
    states: dict[str, int] = field(default_factory=dict)
    """Numbers of the state keys met so far."""


def groups_to_batch(groups: Sequence[RolloutGroup], tags: Sequence[str], parts: Sequence[str] = ()) -> Batch:
    """The training batch of some rollout groups, rows in the order of groups, members and turns.

    An episode is a row, one for each way in which it went on (``roll.rollout.env_manager``), or one for each turn.

    Args:
        groups: finished groups; trajectories and turns in which nothing was sampled are left out. So are groups without
            a ``baseline`` where others have one (``rollout/no_baseline`` counts them): 0 would be a wrong one.
        parts: names in ``Trajectory.info`` of the numbers that ``parts_BK`` holds.

    Raises:
        ValueError: there is no turn at all, or an episode lacks one of the numbers.
    """
    columns = _Columns()
    trajectory_index = 0
    has_baselines = any(group.baseline is not None for group in groups)
    for group in groups:
        if has_baselines and group.baseline is None:
            continue
        for trajectory in group.trajectories:
            if not any(turn.completion.num_tokens for turn in trajectory.turns):
                continue
            num_rows = _append(columns, trajectory, trajectory_index, tags.index(trajectory.tag))
            if parts:
                columns.parts += [[_number(trajectory, name) for name in parts]] * num_rows
            if group.baseline is not None:
                columns.baselines += [group.baseline.score] * num_rows
            trajectory_index += 1
    if not columns.lengths:
        raise ValueError("no trajectory to train on: every episode of this step was dropped")
    tokens = _stored(columns) or {TOKENS: _tokens(columns)}
    traj_B, turn_B, state_B, tag_B = torch.from_numpy(np.array(columns.rows, dtype=np.int64)).unbind(1)
    parts_2 = np.array(columns.num_tokens, dtype=np.int64).reshape(-1, 2)
    mask_T = np.repeat(np.tile([False, True], len(parts_2)), parts_2.ravel())
    last_tokens = parts_2.sum(1).cumsum() - 1
    rewards_T = np.zeros(len(mask_T), dtype=np.float32)
    rewards_T[last_tokens] = columns.rewards
    return Batch(
        lengths_B=torch.tensor(columns.lengths, dtype=torch.int64),
        loss_mask_T=torch.from_numpy(mask_T),
        turn_T=torch.from_numpy(np.repeat(np.array(columns.turns, dtype=np.int64), parts_2.sum(1))),
        rewards_T=torch.from_numpy(rewards_T),
        traj_B=traj_B.contiguous(),
        turn_B=turn_B.contiguous(),
        state_B=state_B.contiguous(),
        tag_B=tag_B.contiguous(),
        scores_B=torch.tensor(columns.scores, dtype=torch.float32),
        parts_BK=torch.tensor(columns.parts, dtype=torch.float32) if parts else None,
        baseline_B=torch.tensor(columns.baselines, dtype=torch.float32) if has_baselines else None,
        truncated_B=torch.tensor(columns.truncated),
        sample_weight_B=torch.tensor(columns.shares, dtype=torch.float64) if min(columns.shares) < 1 else None,
        **tokens,
        **_declared(columns, mask_T, leave=tokens),
    )


def _number(trajectory: Trajectory, name: str) -> float:
    """A number of the episode's info."""
    value = trajectory.info.get(name)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    known = ", ".join(sorted(key for key, value in trajectory.info.items() if not isinstance(value, str)))
    raise ValueError(
        f"gdpo_reward_keys: {name!r} of an episode of {trajectory.tag} is {value!r}, expected a finite number; its "
        f"info has {known or 'none'}"
    )


def _append(columns: _Columns, trajectory: Trajectory, traj: int, tag: int) -> int:
    """Adds the episode's rows; returns how many."""
    sampled = [turn for turn in trajectory.turns if turn.completion.num_tokens]
    rows: dict[int, list[tuple[int, Turn]]] = {}
    for number, turn in enumerate(sampled):
        rows.setdefault(turn.row if trajectory.history else number, []).append((number, turn))
    branched = trajectory.history and len(rows) > 1
    num_sampled = sum(turn.completion.num_tokens for turn in sampled)
    score = trajectory.score
    for row, turns in enumerate(rows.values()):
        in_row = _append_row(columns, turns)
        columns.shares.append(in_row / num_sampled if branched else 1.0)
        key, last = turns[0][1].state_key, turns[-1][1]
        state = columns.states.get(key)
        if state is None:
            state = columns.states[key] = derive_seed(key)
        columns.trajectories.append(trajectory)
        columns.rows.append((traj, row, state, tag))
        columns.scores.append(score)
        cut_off = last.completion.finish_reason is FinishReason.LENGTH
        columns.truncated.append(cut_off or trajectory.end is EpisodeEnd.CONTEXT_FULL)
    return len(rows)


def _append_row(columns: _Columns, turns: Sequence[tuple[int, Turn]]) -> int:
    """Adds one row; returns how many of its tokens were sampled in it.

    The last turn's prompt holds all that came before it, so only the new part of each is added.
    """
    length = num_sampled = 0
    for number, turn in turns:
        n, m = turn.num_prompt_tokens - length, turn.completion.num_tokens
        columns.num_tokens += (n, m)
        columns.turns.append(number)
        columns.sampled.append(turn)
        columns.rewards.append(turn.reward)
        length += n + m
        num_sampled += m
    columns.lengths.append(length)
    columns.num_turns.append(len(turns))
    return num_sampled


def _join(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _tokens(columns: _Columns) -> torch.Tensor:
    """The new part of each turn's prompt, and its answer."""
    parts: list[np.ndarray] = []
    for turn, new in zip(columns.sampled, columns.num_tokens[::2], strict=True):
        parts += (turn.prompt_ids[turn.num_prompt_tokens - new :], turn.completion.token_ids)
    return _join(parts)


def _stored(columns: _Columns) -> dict[str, Any]:
    """Tokens and log-probs as columns that lie where the workers have left them; nothing, if not all rows do."""
    prompts = [vars(turn)["prompt_ids"] for turn in columns.sampled]
    firsts = np.cumsum(columns.num_turns, dtype=np.int64) - np.array(columns.num_turns, dtype=np.int64)
    if not all(isinstance(prompt, Piece) for prompt in prompts):
        return {}
    starts, row_starts = np.array([prompt.start for prompt in prompts]), [prompts[first].start for first in firsts]
    if not np.array_equal(starts, np.repeat(row_starts, columns.num_turns)):
        return {}
    blocks = {block: number for number, block in enumerate(dict.fromkeys(prompt.block for prompt in prompts))}
    block_B = np.array([blocks[prompts[first].block] for first in firsts])
    places = Places(tuple(blocks), block_B, np.array(row_starts), np.array(columns.lengths))
    sums = np.array([figures_of(turn).logprob_sum for turn in columns.sampled])
    return {
        TOKENS: Stored(TOKENS, places, np.dtype(np.int64), (), None),
        LOGPROBS: Stored(LOGPROBS, places, np.dtype(np.float32), (), np.add.reduceat(sums, firsts)),
        **_stored_experts(columns, places, firsts),
    }


def _stored_experts(columns: _Columns, places: Places, firsts: np.ndarray) -> dict[str, Stored]:
    """The same of the experts; nothing, if no turn tells any."""
    told = [vars(turn.completion)["experts"] for turn in columns.sampled]
    if not any(told):
        return {}
    routed = [None if piece is None else piece.figures for piece in told]
    known = np.array([-1 if figures is None else figures.known for figures in routed])
    width = next(figures.width for figures in routed if figures is not None)
    known_B = np.maximum.reduceat(known, firsts)  # a later turn of a row knows more
    places = replace(places, block_B=np.where(known_B < 0, -1, places.block_B))
    column = Stored(EXPERTS, places, np.dtype(np.int16), (width,), known_B.clip(min=0).astype(np.float64), UNKNOWN)
    return {EXPERTS: column}


def _declared(columns: _Columns, mask_T: np.ndarray, leave: Collection[str]) -> dict[str, Any]:
    """The other columns of the batch that episodes, turns and completions declare (``roll.data.columns``)."""
    completions = [turn.completion for turn in columns.sampled]
    ends = [end - 1 for end in itertools.accumulate(columns.num_turns)]
    found: dict[str, Any] = {}
    for kind in (Trajectory, Turn, Completion):
        for name, declared in columns_of(kind).items():
            records: list[Any] = completions if kind is Completion else columns.sampled
            if declared.batch is not None and declared.axis is Axis.ITEM:
                found[declared.batch] = _items_of_rows(map(attrgetter(name), records), columns.num_turns)
            elif declared.batch is not None and declared.axis is Axis.ROW:
                records = columns.trajectories if kind is Trajectory else [records[end] for end in ends]
                values = np.array([*map(attrgetter(name), records)], dtype=declared.dtype)
                found[declared.batch] = torch.from_numpy(values)
    for name, declared in columns_of(Completion).items():
        if declared.batch is None or declared.batch in leave or not declared.is_array:
            continue
        entries = [*map(attrgetter(name), completions)]
        kinds = set(map(type, entries))
        if kinds == {NoneType}:
            continue
        if declared.axis is Axis.SAMPLED:
            if NoneType in kinds:
                lengths = (completion.num_tokens for completion in completions)
                entries = [
                    unknown(n, (), declared) if values is None else values
                    for n, values in zip(lengths, entries, strict=True)
                ]
            values_T = np.full(len(mask_T), declared.unset, dtype=declared.dtype)
            values_T[mask_T] = np.concatenate(entries)
            found[declared.batch] = torch.from_numpy(values_T)
        elif declared.axis is Axis.TOKEN:
            found[declared.batch] = _of_rows(entries, columns, declared)
    return found


def _items_of_rows(
    entries: Iterable[tuple[Item, ...]], num_turns: Sequence[int]
) -> tuple[tuple[Item, ...], ...] | None:
    """Those of each row's turns; ``None`` where there are none at all."""
    rest, known = iter(entries), dict[str, Item]()
    rows = (itertools.chain(*itertools.islice(rest, count)) for count in num_turns)
    found = tuple(distinct(row, known) for row in rows)
    return found if known else None


def _of_rows(entries: Sequence[np.ndarray | None], columns: _Columns, declared: Column) -> torch.Tensor:
    """A column along the tokens of each row, unset where no turn of the row knows anything."""
    width = next(entry.shape[1:] for entry in entries if entry is not None)
    parts: list[np.ndarray] = []
    rest = iter(entries)
    for count, length in zip(columns.num_turns, columns.lengths, strict=True):
        known = None
        for entry in itertools.islice(rest, count):
            known = known if entry is None else continued(known, entry, declared)
        told = unknown(0, width, declared) if known is None else known
        parts += [told, unknown(length - len(told), width, declared)]
    return _join(parts)
