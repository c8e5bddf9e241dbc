"""Handling of rollout groups: collected in view of the user, refused when empty, some kept to look at."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll.configs.rewards import RewardFilterConfig
from roll.distributed.strategy.base import Metrics
from roll.pipeline.session import RunFailedError, RunSession
from roll.report.trajectories import answer_row, trajectory_record, write_trajectories
from roll.rollout.admission import Admission
from roll.rollout.metrics import rollout_metrics
from roll.rollout.saved_groups import load_groups, save_groups
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, RolloutGroup, Trajectory
from roll.tracking.files import to_json, write_atomic
from roll.utils.registry import import_path

logger = logging.getLogger(__name__)

MAX_SHOWN = 64
"""Answers of an evaluation that a page shows."""


def collect(
    session: RunSession,
    scheduler: RolloutScheduler,
    num_groups: int,
    version: int,
    check: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
) -> list[RolloutGroup]:
    """The first groups of an evaluation's scheduler, see ``take``.

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


def play_held_out(
    session: RunSession,
    name: str,
    step: int,
    num_groups: int,
    sampled: RolloutScheduler,
    greedy: RolloutScheduler | None,
    check: Callable[[Sequence[RolloutGroup]], None],
) -> tuple[list[RolloutGroup], Metrics]:
    """Plays held-out episodes: the same ones each time, sampled; and greedily before and after.

    Args:
        greedy: ``None``: those that are sampled are greedy.

    Returns:
        The sampled groups and their metrics, ``eval/…``; of the greedy ones ``eval_greedy/success`` and the rewards.
    """
    with session.phase("eval"):
        groups = played = collect(session, sampled, num_groups, step, check)
    metrics = rollout_metrics(groups, "eval")
    if name != "step":
        if greedy is not None:
            with session.phase("eval greedy"):
                played = collect(session, greedy, num_groups, step, check)
        found = rollout_metrics(played, "eval_greedy")
        metrics |= {key: value for key, value in found.items() if key.endswith(("success", "reward"))}
    return groups, metrics


def take(
    session: RunSession,
    scheduler: RolloutScheduler,
    admission: Admission,
    step: int,
    what: str,
    check: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    **options: Any,
) -> Collected:
    """Takes a step's groups, shows how many have come in, and tells of failed episodes and late tools.

    Args:
        what: what they are for, to complete "no episode to …".
        check: called with all finished groups, the rejected ones included; may raise.
        **options: further arguments of ``RolloutScheduler.take``, as ``admission`` and ``step`` are.

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
    infos = [trajectory.info for group in finished for trajectory in group.trajectories]
    if late := sum(info.get("call_timeouts", 0) for info in infos):
        calls = sum(info.get("tool_calls", 0) for info in infos)
        logger.warning("%d of %d tool calls took longer than their timeout, which the policy was told", late, calls)
    return collected


def passes_filter(group: RolloutGroup, limits: RewardFilterConfig) -> bool:
    """Tells whether dynamic sampling keeps a group; one without any answer it never does.

    Raises:
        RunFailedError: the function of ``path`` raised, or returned something else than True or False.
    """
    if limits.keeps_all:
        return True
    scores = [trajectory.score for trajectory in group.trajectories]
    if not scores:
        return False
    if limits.type != "no_filter":
        # Exact: rounding would give equal scores a spread above 0.
        value = statistics.pstdev(scores) if limits.type == "std_filter" else statistics.mean(scores)
        if value <= limits.low or (limits.high is not None and value >= limits.high):
            return False
    return limits.path is None or _is_wanted(group, limits.path)


def _is_wanted(group: RolloutGroup, path: str) -> bool:
    keep: Any = import_path(path, "filter of groups")
    who = f"query_filter_config.path {path}, asked of group {group.group_id} of {group.tag},"
    try:
        wanted = keep(group)
    except Exception as error:  # a user's function may raise anything
        raise RunFailedError(f"{who} raised {type(error).__name__}: {error}") from error
    if not isinstance(wanted, bool | np.bool_):
        raise RunFailedError(f"{who} returned {wanted!r}, expected True or False")
    return bool(wanted)


def keep_episodes(session: RunSession, step: int, groups: Sequence[RolloutGroup]) -> list[Trajectory]:
    """Writes episodes of an evaluation in full (``num_written_episodes``), for whoever wants to look; returns all."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    written = trajectories[: session.config.num_written_episodes]
    write_trajectories(session.folder, f"eval-{step:05d}", written)
    session.log_answers(step, [answer_row(trajectory) for trajectory in written])
    return trajectories


def write_rollouts(folder: str, step: int, collected: Collected) -> None:
    """Keeps a step's groups, those that were turned down too: ``episodes.jsonl`` to read, the rest to take again."""
    path = _of_step(folder, step)
    save_groups(path, collected)
    episodes = (trajectory for group in collected.groups for trajectory in group.trajectories)
    write_atomic(path / "episodes.jsonl", "".join(to_json(trajectory_record(each)) + "\n" for each in episodes))


def read_rollouts(folder: str, step: int) -> Collected:
    """Rollouts of a step that ``write_rollouts`` has kept.

    Raises:
        RunFailedError: there is nothing.
    """
    collected = load_groups(_of_step(folder, step))
    if not collected.groups:
        raise RunFailedError(
            f"rollout_replay_dir: no rollouts of step {step} in {folder}; write it with rollout_dump_dir"
        )
    return collected


def _of_step(folder: str, step: int) -> Path:
    return Path(folder).expanduser() / f"step-{step:05d}"
