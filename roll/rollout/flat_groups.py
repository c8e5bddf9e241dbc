"""Finished groups as one value: three arrays for all their turns, and lists of the rest.

A conversation is there once: the prompts of its earlier turns are its beginnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from roll.data.arrays import FloatArray, IntArray
from roll.data.flat_requests import join
from roll.data.requests import Completion
from roll.rollout.types import RolloutGroup, Trajectory, Turn

_Episode: TypeAlias = tuple[Trajectory, list[tuple[Any, ...]]]
"""An episode without its turns, and of each turn where its tokens lie in the group's and what else there is."""


@dataclass(frozen=True)
class FlatGroups:
    """Groups on their way to the driver."""

    groups: list[tuple[RolloutGroup, list[_Episode], _Episode | None]]
    """Without their episodes; these; and the baseline."""
    num_tokens: list[tuple[int, int]]
    """Of each group, and how many of them were sampled."""
    token_ids: IntArray
    """Prompts and answers, one group after the other."""
    logprobs: FloatArray
    """Of the sampled tokens."""
    versions: IntArray
    """Of the sampled tokens."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> FlatGroups:
        tokens: list[IntArray] = []
        completions: list[Completion] = []
        flat, num_tokens = [], []
        for group in groups:
            writer = _Writer(tokens, completions)
            episodes = [writer.add(trajectory) for trajectory in group.trajectories]
            baseline = None if group.baseline is None else writer.add(group.baseline)
            flat.append((replace(group, trajectories=(), baseline=None), episodes, baseline))
            num_tokens.append((writer.length, writer.num_sampled))
        return cls(
            groups=flat,
            num_tokens=num_tokens,
            token_ids=join(tokens, np.int64),
            logprobs=join([completion.logprobs for completion in completions], np.float32),
            versions=join([completion.versions for completion in completions], np.int64),
        )

    def __iter__(self) -> Iterator[RolloutGroup]:
        first = first_sampled = 0
        for (group, episodes, baseline), (length, num_sampled) in zip(self.groups, self.num_tokens, strict=True):
            end, end_sampled = first + length, first_sampled + num_sampled
            sampled = slice(first_sampled, end_sampled)
            # Copied: a group that is kept for long must not keep the others.
            reader = _Reader(
                self.token_ids[first:end].copy(), self.logprobs[sampled].copy(), self.versions[sampled].copy()
            )
            yield replace(
                group,
                trajectories=tuple(map(reader.episode, episodes)),
                baseline=None if baseline is None else reader.episode(baseline),
            )
            first, first_sampled = end, end_sampled


class _Writer:
    """Adds the arrays of one group."""

    def __init__(self, tokens: list[IntArray], completions: list[Completion]) -> None:
        self._tokens, self._completions = tokens, completions
        self.length = self.num_sampled = 0

    def add(self, trajectory: Trajectory) -> _Episode:
        turns: list[tuple[Any, ...]] = [()] * len(trajectory.turns)
        start, known = self.length, b""
        # Row by row, so that what a row's turns share lies together.
        for number in sorted(range(len(turns)), key=lambda number: trajectory.turns[number].row):
            turn = trajectory.turns[number]
            prompt = np.asarray(turn.prompt_ids, dtype=np.int64)
            answer = np.asarray(turn.completion.token_ids, dtype=np.int64)
            if not known or prompt[: self.length - start].tobytes() != known:
                start = self.length
            self._tokens += (prompt[self.length - start :], answer)
            self._completions.append(turn.completion)
            self.length = start + len(prompt) + len(answer)
            self.num_sampled += len(answer)
            known = prompt.tobytes() + answer.tobytes() if trajectory.history else b""
            first = self.num_sampled - len(answer)
            sampling = (turn.completion.request_id, turn.completion.finish_reason)
            rest = (turn.text, turn.observation, turn.action, turn.task_reward, turn.penalty, turn.state_key, turn.row)
            turns[number] = (start, start + len(prompt), self.length, first, sampling, rest)
        return replace(trajectory, turns=()), turns


class _Reader:
    """Takes episodes out of the arrays of one group."""

    def __init__(self, token_ids: IntArray, logprobs: FloatArray, versions: IntArray) -> None:
        self._token_ids, self._logprobs, self._versions = token_ids, logprobs, versions

    def episode(self, flat: _Episode) -> Trajectory:
        trajectory, places = flat
        turns = []
        for start, middle, end, first, (request_id, reason), rest in places:
            sampled = slice(first, first + end - middle)
            completion = Completion(
                request_id, self._token_ids[middle:end], self._logprobs[sampled], reason, self._versions[sampled]
            )
            turns.append(Turn(self._token_ids[start:middle], completion, *rest))
        return replace(trajectory, turns=tuple(turns))
