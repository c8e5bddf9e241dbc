"""Finished groups as one value on their way to the driver: an array for each column of theirs, lists of the rest.

A conversation is there once: the prompts of its earlier turns are its beginnings, and what a column tells of each of
its tokens is that of its earliest turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from roll.data.columns import Axis, IntArray, Records, columns_along, columns_of, continued, join
from roll.data.identity import identity
from roll.data.requests import Completion
from roll.rollout.types import RolloutGroup, Trajectory, Turn

Range: TypeAlias = tuple[int, int]

_PER_TOKEN = columns_along(Completion, Axis.TOKEN)


@dataclass(frozen=True)
class FlatGroups:
    """Groups on their way to the driver."""

    groups: Records[RolloutGroup]
    """Without their episodes."""
    members: list[tuple[int, bool]]
    """Number of trajectories of each, and whether a baseline follows them."""
    episodes: Records[Trajectory]
    """Without their turns."""
    num_turns: list[int]
    turns: Records[Turn]
    """Without what the model was given, and what it answered."""
    completions: Records[Completion]
    """Of each turn, without tokens and what is told of each."""
    places: list[tuple[int, int, int]]
    """Where each turn's row, answer and end lie in its group's tokens."""
    num_tokens: list[int]
    """Of each group."""
    tokens: IntArray
    """Prompts and answers, one group after the other."""
    per_token: dict[str, tuple[np.ndarray, list[Range | None]]]
    """Columns along tokens, by name, and which rows of them each turn adds to its row."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> FlatGroups:
        members = [(len(group.trajectories), group.baseline is not None) for group in groups]
        episodes: list[Trajectory] = []
        num_tokens = []
        layout = _Layout()
        for group in groups:
            layout.length = 0
            of_group = [*group.trajectories] if group.baseline is None else [*group.trajectories, group.baseline]
            for trajectory in of_group:
                layout.add(trajectory)
            num_tokens.append(layout.length)
            episodes += of_group
        turns = [turn for trajectory in episodes for turn in trajectory.turns]
        completions = [turn.completion for turn in turns]
        declared = columns_of(Completion)
        return cls(
            groups=Records.of(RolloutGroup, groups, leave=("trajectories", "baseline")),
            members=members,
            episodes=Records.of(Trajectory, episodes, leave=("turns",)),
            num_turns=[len(trajectory.turns) for trajectory in episodes],
            turns=Records.of(Turn, turns, leave=("prompt_ids", "completion")),
            completions=Records.of(Completion, completions, leave=("token_ids", *_PER_TOKEN)),
            places=layout.places,
            num_tokens=num_tokens,
            tokens=join(layout.tokens, declared["token_ids"]),
            per_token={
                name: (join(layout.per_token[name], declared[name]), layout.added[name])
                for name in _PER_TOKEN
                if layout.per_token[name]
            },
        )

    def __iter__(self) -> Iterator[RolloutGroup]:
        prompts, answers, per_token = self._token_columns()
        completions = self.completions.read(token_ids=answers, **per_token)
        turns = self.turns.read(prompt_ids=prompts, completion=completions)
        episodes = self.episodes.read(turns=(tuple(islice(turns, count)) for count in self.num_turns))
        trajectories, baselines = [], []
        for count, has_baseline in self.members:
            trajectories.append(tuple(islice(episodes, count)))
            baselines.append(next(episodes) if has_baseline else None)
        return self.groups.read(trajectories=trajectories, baseline=baselines)

    def _token_columns(self) -> tuple[list[IntArray], list[IntArray], dict[str, list[np.ndarray | None]]]:
        """Of each turn the prompt, the answer, and the columns along both."""
        prompts: list[IntArray] = []
        answers: list[IntArray] = []
        rows: list[tuple[int, int, int]] = []
        """Group, start and length of each turn's row up to its end."""
        turns, counts = iter(self.places), iter(self.num_turns)
        first = 0
        for number, ((count, has_baseline), length) in enumerate(zip(self.members, self.num_tokens, strict=True)):
            # Copied: a group that is kept for long must not keep the others.
            tokens = self.tokens[first : first + length].copy()
            first += length
            for start, middle, end in islice(turns, sum(islice(counts, count + has_baseline))):
                prompts.append(tokens[start:middle])
                answers.append(tokens[middle:end])
                rows.append((number, start, end - start))
        per_token: dict[str, list[np.ndarray | None]] = dict.fromkeys(_PER_TOKEN, [None] * len(rows))
        per_token |= {name: [*_grown(name, rows, *self.per_token[name])] for name in self.per_token}
        return prompts, answers, per_token


class _Layout:
    """Lays the tokens of episodes end to end, row by row, so that what a row's turns share is there once."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.places: list[tuple[int, int, int]] = []
        self.per_token: dict[str, list[np.ndarray]] = {name: [] for name in _PER_TOKEN}
        self.added: dict[str, list[Range | None]] = {name: [] for name in _PER_TOKEN}
        self.length = 0
        """Tokens of the group so far."""
        self._num_added = dict.fromkeys(_PER_TOKEN, 0)

    def add(self, trajectory: Trajectory) -> None:
        turns = trajectory.turns
        order: Sequence[int] = range(len(turns))
        if any(turn.row for turn in turns):
            order = sorted(order, key=lambda number: turns[number].row)
        base = len(self.places)
        self.places += [(0, 0, 0)] * len(turns)
        for ranges in self.added.values():
            ranges += [None] * len(turns)
        start, known, told = self.length, b"", dict.fromkeys(_PER_TOKEN, False)
        for number in order:
            prompt = np.asarray(turns[number].prompt_ids, dtype=np.int64)
            completion = turns[number].completion
            answer = np.asarray(completion.token_ids, dtype=np.int64)
            if not known or identity(prompt[: self.length - start]) != known:
                start, told = self.length, dict.fromkeys(_PER_TOKEN, False)
            for name in _PER_TOKEN:
                values = getattr(completion, name)
                # What a turn could not know of its last token, which nothing was predicted from, the next turn does.
                after = self.length - start - 1 if told[name] else 0
                self.added[name][base + number] = self._add(name, values, after)
                told[name] = values is not None
            self.tokens += (prompt[self.length - start :], answer)
            middle = start + len(prompt)
            self.length = middle + len(answer)
            self.places[base + number] = (start, middle, self.length)
            known = identity(prompt) + identity(answer) if trajectory.history else b""

    def _add(self, name: str, values: np.ndarray | None, after: int) -> Range | None:
        if values is None:
            return None
        self.per_token[name].append(values[after:])
        first = self._num_added[name]
        self._num_added[name] += len(values) - after
        return first, self._num_added[name]


def _grown(
    name: str, rows: Sequence[tuple[int, int, int]], values: np.ndarray, added: Sequence[Range | None]
) -> Iterator[np.ndarray | None]:
    """The column of each turn, for all tokens of its row so far."""
    known: dict[tuple[int, int], np.ndarray] = {}
    for (group, start, length), place in zip(rows, added, strict=True):
        if place is None:
            yield None
            continue
        own = values[slice(*place)].copy()
        earlier = known.get((group, start))
        if earlier is not None:
            own = np.concatenate([earlier[: length - len(own)], own])
        known[group, start] = continued(earlier, own, columns_of(Completion)[name])
        yield known[group, start]
