"""Handling of rollout groups: collected in view of the user, refused when empty, some kept to look at."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from roll.pipeline.session import RunSession
from roll.report.trajectories import write_trajectories
from roll.rollout.admission import Admission
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, RolloutGroup, Trajectory

logger = logging.getLogger(__name__)

MAX_WRITTEN = 64
"""Episodes of an evaluation that are written in full."""


def collect(
    session: RunSession,
    scheduler: RolloutScheduler,
    num_groups: int,
    version: int,
    check: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
) -> list[RolloutGroup]:
    """The first groups of an evaluation's scheduler, see ``take``.

    Args:
        session: see ``take``.
        scheduler: see ``take``.
        num_groups: so many.
        version: of the weights that are evaluated.
        check: see ``take``.

    Raises:
        RuntimeError: some token was sampled with another version.
    """
    groups = take(session, scheduler, Admission(num_groups), 1, "evaluate", check).groups
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    versions = {int(version) for turn in turns for version in turn.completion.versions}
    if versions - {version}:
        raise RuntimeError(
            f"an evaluation was sampled with weights of the versions {sorted(versions)}, expected {version} alone"
        )
    return groups


def take(
    session: RunSession,
    scheduler: RolloutScheduler,
    admission: Admission,
    step: int,
    what: str,
    check: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    **options: Any,
) -> Collected:
    """Takes a step's groups, shows how many have come in, and tells of failed episodes.

    Args:
        session: shows the progress.
        scheduler: plays the groups.
        admission: see ``RolloutScheduler.take``.
        step: see there.
        what: what they are for, to complete "no episode to …".
        check: called with all finished groups, the rejected ones included; may raise.
        **options: further arguments of ``RolloutScheduler.take``.

    Raises:
        ValueError: nothing is left of the whole batch.
    """
    num_groups, progress = admission.batch_size, session.display.progress
    arrived = itertools.count(len(admission.ready) + 1)
    collected = scheduler.take(
        admission, step, lambda _: progress(min(next(arrived), num_groups), num_groups, "groups"), **options
    )
    groups = collected.groups
    finished = [*groups, *collected.rejected]
    check(finished)
    last_errors = {group.tag: group.errors[-1] for group in finished if group.errors}
    summary = "\n".join(last_errors.values())
    if not any(group.trajectories for group in groups):
        raise ValueError(f"no episode to {what}: all {len(groups)} groups were dropped; last errors:\n{summary}")
    if last_errors:
        logger.warning("episodes failed (rollout/env_errors counts them); last errors:\n%s", summary)
    return collected


def keep_episodes(session: RunSession, step: int, groups: Sequence[RolloutGroup]) -> list[Trajectory]:
    """Writes some episodes of an evaluation in full, for whoever wants to look; returns all of them."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    write_trajectories(session.folder, f"eval-{step:05d}", trajectories[:MAX_WRITTEN])
    return trajectories
