"""Finished groups as one value: three arrays for all their turns, and lists of the rest.

A conversation is there once: the prompts of its earlier turns are its beginnings, and so are the experts that these
went through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from roll.data.arrays import ExpertArray, FloatArray, IntArray
from roll.data.experts import continued, join_experts
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
    num_tokens: list[tuple[int, int, int]]
    """Of each group, how many of them were sampled, and its rows of ``experts``."""
    token_ids: IntArray
    """Prompts and answers, one group after the other."""
    logprobs: FloatArray
    """Of the sampled tokens."""
    versions: IntArray
    """Of the sampled tokens."""
    experts: ExpertArray | None
    """Of the tokens that a turn adds to its row, from the last before them on."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> FlatGroups:
        tokens: list[IntArray] = []
        completions: list[Completion] = []
        experts: list[ExpertArray] = []
        flat, num_tokens = [], []
        for group in groups:
            writer = _Writer(tokens, completions, experts)
            episodes = [writer.add(trajectory) for trajectory in group.trajectories]
            baseline = None if group.baseline is None else writer.add(group.baseline)
            flat.append((replace(group, trajectories=(), baseline=None), episodes, baseline))
            num_tokens.append((writer.length, writer.num_sampled, writer.num_routed))
        return cls(
            groups=flat,
            num_tokens=num_tokens,
            token_ids=join(tokens, np.int64),
            logprobs=join([completion.logprobs for completion in completions], np.float32),
            versions=join([completion.versions for completion in completions], np.int64),
            experts=join_experts(experts)[0],
        )

    def __iter__(self) -> Iterator[RolloutGroup]:
        first = first_sampled = first_routed = 0
        for (group, episodes, baseline), (length, num_sampled, num_routed) in zip(
            self.groups, self.num_tokens, strict=True
        ):
            end, end_sampled, end_routed = first + length, first_sampled + num_sampled, first_routed + num_routed
            sampled = slice(first_sampled, end_sampled)
            # Copied: a group that is kept for long must not keep the others.
            reader = _Reader(
                self.token_ids[first:end].copy(),
                self.logprobs[sampled].copy(),
                self.versions[sampled].copy(),
                None if self.experts is None else self.experts[first_routed:end_routed].copy(),
            )
            yield replace(
                group,
                trajectories=tuple(map(reader.episode, episodes)),
                baseline=None if baseline is None else reader.episode(baseline),
            )
            first, first_sampled, first_routed = end, end_sampled, end_routed


class _Writer:
    """Adds the arrays of one group."""

    def __init__(self, tokens: list[IntArray], completions: list[Completion], experts: list[ExpertArray]) -> None:
        self._tokens, self._completions, self._experts = tokens, completions, experts
        self.length = self.num_sampled = self.num_routed = 0

    def add(self, trajectory: Trajectory) -> _Episode:
        turns: list[tuple[Any, ...]] = [()] * len(trajectory.turns)
        start, known, told = self.length, b"", False
        # Row by row, so that what a row's turns share lies together.
        for number in sorted(range(len(turns)), key=lambda number: trajectory.turns[number].row):
            turn = trajectory.turns[number]
            prompt = np.asarray(turn.prompt_ids, dtype=np.int64)
            answer = np.asarray(turn.completion.token_ids, dtype=np.int64)
            if not known or prompt[: self.length - start].tobytes() != known:
                start, told = self.length, False
            routed = self._add_experts(turn.completion.experts, after=self.length - start - 1 if told else 0)
            told = routed is not None
            self._tokens += (prompt[self.length - start :], answer)
            self._completions.append(turn.completion)
            self.length = start + len(prompt) + len(answer)
            self.num_sampled += len(answer)
            known = prompt.tobytes() + answer.tobytes() if trajectory.history else b""
            first = self.num_sampled - len(answer)
            sampling = (turn.completion.request_id, turn.completion.finish_reason)
            rest = (turn.text, turn.observation, turn.action, turn.task_reward, turn.penalty, turn.state_key, turn.row)
            turns[number] = (start, start + len(prompt), self.length, first, routed, sampling, rest)
        return replace(trajectory, turns=()), turns

    def _add_experts(self, experts: ExpertArray | None, after: int) -> tuple[int, int] | None:
        """Adds those after so many tokens of the row; where they lie."""
        if experts is None:
            return None
        self._experts.append(experts[after:])
        first, self.num_routed = self.num_routed, self.num_routed + len(experts) - after
        return first, self.num_routed


class _Reader:
    """Takes episodes out of the arrays of one group."""

    def __init__(
        self, token_ids: IntArray, logprobs: FloatArray, versions: IntArray, experts: ExpertArray | None
    ) -> None:
        self._token_ids, self._logprobs, self._versions, self._experts = token_ids, logprobs, versions, experts
        self._rows: dict[int, ExpertArray] = {}
        """The experts of each row so far, by its start."""

    def episode(self, flat: _Episode) -> Trajectory:
        trajectory, places = flat
        turns = []
        for start, middle, end, first, routed, (request_id, reason), rest in places:
            sampled = slice(first, first + end - middle)
            completion = Completion(
                request_id,
                self._token_ids[middle:end],
                self._logprobs[sampled],
                reason,
                self._versions[sampled],
                self._row_experts(start, end - start, routed),
            )
            turns.append(Turn(self._token_ids[start:middle], completion, *rest))
        return replace(trajectory, turns=tuple(turns))

    def _row_experts(self, start: int, length: int, routed: tuple[int, int] | None) -> ExpertArray | None:
        if routed is None or self._experts is None:
            return None
        added = self._experts[slice(*routed)]
        earlier = self._rows.get(start)
        if earlier is not None:
            added = np.concatenate([earlier[: length - len(added)], added])
        self._rows[start] = continued(earlier, added)
        return self._rows[start]
