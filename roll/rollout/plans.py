"""Which groups a rollout plays: a group's number stands for its tag, seeds and size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from roll.data.requests import Runs
from roll.utils.seeding import derive_seed


@dataclass(frozen=True)
class GroupSpec:
    """One rollout group to play; equal specs give equal groups."""

    group_id: int
    tag: str
    env_seed: int
    group_size: int
    redundancy: int = 0
    greedy: bool = False
    baseline: bool = False
    """Play one more member greedily, whose score is the others' baseline (``adv_estimator: remax``)."""
    record: bool = False
    """Keep the first member's pictures, for people to look at."""
    recorded: Mapping[int, tuple[Runs, ...]] = field(default_factory=dict)
    """By member and turn, what sampled the group in the run that is repeated (``GenerateRequest.recorded``)."""


class RolloutPlan(Protocol):
    """Says what group an id stands for."""

    @property
    def num_slots(self) -> int:
        """Number of groups that run at the same time."""

    def spec(self, group_id: int) -> GroupSpec: ...


@dataclass(frozen=True)
class GroupPlan:
    """A plan for environments: slot ``i`` plays groups ``i``, ``i + num_slots``, …"""

    tags: tuple[str, ...]
    slots_per_tag: tuple[int, ...]
    """Number of environment slots of each tag."""
    group_size: int
    redundancy: int
    seed: int
    name: str
    """``train`` or ``val``: part of the seeds."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""
    baseline: bool = False
    """See ``GroupSpec``."""
    num_recorded: int = 0
    """Groups below this number are recorded."""

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_tag)

    def spec(self, group_id: int) -> GroupSpec:
        slot = group_id % self.num_slots
        tag = next(
            tag for tag, end in zip(self.tags, itertools.accumulate(self.slots_per_tag), strict=True) if slot < end
        )
        env_seed = derive_seed(self.seed, self.name, group_id)
        return GroupSpec(
            group_id,
            tag,
            env_seed,
            self.group_size,
            self.redundancy,
            self.greedy,
            self.baseline,
            record=group_id < self.num_recorded,
        )
