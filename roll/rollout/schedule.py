"""Records which groups an asynchronous run's steps took and what weights sampled them (``schedule.jsonl``); repeats it.

One line per step: its number, ``groups``, ``ahead`` and ``window`` (B, A and W of ``Admission``), the groups of its
batch (``taken``) and those that dynamic sampling turned down before it (``settled``), both by their draws, with every
episode that was kept by its number in the group: for each turn ``[[version, tokens], …]``. The first version is that
under which the turn was dispatched, the others begin at the tokens at which weights came.

A run is repeated by what its groups were sampled with, whatever finishes when: each step takes what it took, each
token waits for its version (``GenerateRequest.recorded``), and new weights wait for the tokens of the old ones. Draws
are started as ``Admission`` lets them; earlier than then does no harm.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from roll.data.requests import Runs
from roll.rollout.admission import Admission
from roll.rollout.types import Collected, RolloutGroup

Episodes: TypeAlias = Mapping[int, tuple[Runs, ...]]
"""The turns of a group's episodes, by member."""


def step_record(admission: Admission, collected: Collected) -> dict[str, Any]:
    """The line of the open step."""
    return {
        "step": admission.step,
        "groups": admission.batch_size,
        "ahead": admission.ahead,
        "window": admission.window,
        "taken": {str(group.group_id): _episodes(group) for group in collected.groups},
        "settled": {str(group.group_id): _episodes(group) for group in collected.rejected},
    }


def _episodes(group: RolloutGroup) -> dict[str, list[Runs]]:
    return {
        str(trajectory.member): [turn.completion.runs for turn in trajectory.turns] for trajectory in group.episodes
    }


@dataclass(frozen=True)
class StepDraws:
    """Draws that a step used."""

    taken: frozenset[int]
    settled: frozenset[int]


@dataclass(frozen=True)
class Schedule:
    """A recorded run."""

    limits: frozenset[tuple[int, int, int]]
    """B, A and W of its steps."""
    steps: Mapping[int, StepDraws]
    """By number."""
    draws: Mapping[int, Episodes]

    @cached_property
    def settled(self) -> frozenset[int]:
        """The draws that were turned down."""
        return frozenset().union(*(step.settled for step in self.steps.values()))

    @classmethod
    def read(cls, path: Path) -> Schedule:
        """Reads a ``schedule.jsonl``.

        Raises:
            OSError: there is no such file.
            ValueError: it is not of the form above.
        """
        limits, steps, draws = set(), {}, dict[int, Episodes]()
        for number, line in enumerate(path.expanduser().read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                limits.add((int(record["groups"]), int(record["ahead"]), int(record["window"])))
                used = [{int(draw): _read_episodes(some) for draw, some in record[what].items()} for what in _USES]
                steps[int(record["step"])] = StepDraws(*map(frozenset, used))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"line {number} is not one of a schedule.jsonl ({error!r})") from error
            draws |= used[0] | used[1]
        return cls(frozenset(limits), steps, draws)

    def without(self, draws: Collection[int]) -> Schedule:
        """Schedule that is left to play after these."""
        return replace(self, draws={draw: episodes for draw, episodes in self.draws.items() if draw not in draws})

    def num_tokens(self, version: int) -> int:
        """Number of tokens that a version sampled."""
        return sum(tokens for runs in self._turns() for number, tokens in runs if number == version)

    @property
    def first_version(self) -> int | None:
        """The oldest that sampled a token."""
        return min((runs[0][0] for runs in self._turns() if runs), default=None)

    def _turns(self) -> list[Runs]:
        return [runs for episodes in self.draws.values() for turns in episodes.values() for runs in turns]


_USES = ("taken", "settled")


def _read_episodes(plain: Mapping[str, Any]) -> Episodes:
    return {
        int(member): tuple(tuple((int(version), int(tokens)) for version, tokens in runs) for runs in turns)
        for member, turns in plain.items()
    }
