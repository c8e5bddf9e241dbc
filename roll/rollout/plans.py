"""Groups of a rollout: a group's number determines its tag, seeds and size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

from roll.configs.env import Mixture
from roll.data.requests import GenerateFn, Runs
from roll.rollout.types import RolloutGroup
from roll.utils.hashing import derive_seed

if TYPE_CHECKING:
    from roll.data.renderer import ChatRenderer
    from roll.rollout.env_runner import EnvRunner

Player: TypeAlias = "Callable[[EnvRunner, ChatRenderer], GenerateFn]"
"""Makes what answers an episode's requests in place of the engines; it travels between processes."""


@dataclass(frozen=True)
class GroupSpec:
    """One rollout group; equal specs give equal groups."""

    group_id: int
    tag: str
    env_seed: int
    group_size: int
    redundancy: int = 0
    greedy: bool = False
    baseline: bool = False
    """Run one more member, decoded greedily, whose score is the others' baseline (``adv_estimator: remax``)."""
    record: bool = False
    """Keep the first member's pictures, for people to look at."""
    recorded: Mapping[int, tuple[Runs, ...]] = field(default_factory=dict)
    """By member and turn, what sampled the group in the run that is repeated (``GenerateRequest.recorded``)."""
    player: Player | None = None
    """Of episodes of an environment that no engine plays."""

    def describes(self, group: RolloutGroup) -> bool:
        """Tells whether a group that was played once is what would be played now."""
        played = (group.tag, len(group.trajectories) + group.dropped, group.baseline is not None)
        return played == (self.tag, self.group_size, self.baseline)


class RolloutPlan(Protocol):
    """Maps an id to a group."""

    @property
    def num_slots(self) -> int:
        """Number of groups that run at the same time."""

    def spec(self, group_id: int) -> GroupSpec: ...


@dataclass(frozen=True)
class GroupPlan:
    """A plan for environments: slot ``i`` runs groups ``i``, ``i + num_slots``, …"""

    tags: tuple[str, ...]
    slots_per_tag: tuple[int, ...]
    """Number of environment slots of each tag."""
    group_size: int
    redundancy: int
    seed: int
    name: str
    """``train`` or ``val``: part of the seeds."""
    weights: tuple[float, ...] | None = None
    """Frequency with which each tag is drawn; slots then belong to no tag."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""
    baseline: bool = False
    """See ``GroupSpec``."""
    num_recorded: int = 0
    """Groups below this number are recorded."""
    player: Player | None = None
    """See ``GroupSpec``."""

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_tag)

    def tag(self, group_id: int) -> str:
        """Tag that a group plays."""
        if self.weights is not None:
            return self.tags[_mixture(self.weights, self.seed, self.name)[group_id]]
        slot = group_id % self.num_slots
        return next(
            tag for tag, end in zip(self.tags, itertools.accumulate(self.slots_per_tag), strict=True) if slot < end
        )

    def spec(self, group_id: int) -> GroupSpec:
        env_seed = derive_seed(self.seed, self.name, group_id)
        return GroupSpec(
            group_id,
            self.tag(group_id),
            env_seed,
            self.group_size,
            self.redundancy,
            self.greedy,
            self.baseline,
            record=group_id < self.num_recorded,
            player=self.player,
        )


@lru_cache(maxsize=8)
def _mixture(weights: tuple[float, ...], seed: int, name: str) -> Mixture:
    """That of a plan, which grows with the groups that are asked for."""
    return Mixture(weights, derive_seed(seed, name, "tags"))
