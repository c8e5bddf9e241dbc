"""What the steps of an asynchronous run took, and which weights sampled it: the lines of ``schedule.jsonl``.

One line per step: ``taken`` has the groups of its batch and ``settled`` those that dynamic sampling turned down before
it, both by their draws, with the versions of every episode that was kept, by its number in the group: for each turn
``[[version, tokens], …]``. The first version of a turn is that under which it was dispatched.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from roll.data.arrays import IntArray
from roll.rollout.types import Collected, RolloutGroup

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Weight versions of a completion's tokens, in order: (version, how many tokens it sampled)."""


def runs_of(versions: IntArray) -> Runs:
    """The versions of single tokens, shape [n], as runs of equal ones."""
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    lengths = np.diff(starts, append=len(versions))
    return tuple(zip(versions[starts].tolist(), lengths.tolist(), strict=True))


def step_record(collected: Collected) -> dict[str, Any]:
    """A step's line, but for its number."""
    return {
        "taken": {str(group.group_id): _episodes(group) for group in collected.groups},
        "settled": {str(group.group_id): _episodes(group) for group in collected.rejected},
    }


def _episodes(group: RolloutGroup) -> dict[str, list[Runs]]:
    baseline = () if group.baseline is None else (group.baseline,)
    return {
        str(trajectory.member): [runs_of(turn.completion.versions) for turn in trajectory.turns]
        for trajectory in (*group.trajectories, *baseline)
    }
