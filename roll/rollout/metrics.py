"""Metrics of the policy from a set of rollout groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from roll.data.batch import Batch
from roll.data.kept_sets import KeptFigures
from roll.data.requests import FinishReason
from roll.rollout.admission import Admission
from roll.rollout.tokenization_audit import COMPARED, REASONS, TOKENS, key_of
from roll.rollout.tool_box import COUNTS
from roll.rollout.types import AGENT, Collected, EpisodeEnd, RolloutGroup, Trajectory, figures_of

REPETITIONS = 64
"""Turns of which ``repetition`` is the mean, at most."""


def rollout_metrics(groups: Sequence[RolloutGroup], prefix: str) -> dict[str, float]:
    """Means over episodes (success, reward …) and over turns (valid_rate …), named ``prefix/what``.

    ``cut_off`` is the share of the turns that a length limit ended; ``repetition`` is the mean ``repeated`` share of up
    to 64 responses, evenly chosen. Without
    ``valid_rate`` where nobody looks for an action or answer. Episodes with tools add the means of what they called
    (``COUNTS``), those of agent programs ``prefix/agent/what`` of their requests; where rows were compared with
    their conversations, ``prefix/tokens/why`` are the shares of those that differ. With several environment tags,
    ``episodes``, ``success``, ``reward``, ``turns``, ``valid_rate`` and ``cut_off`` of each are added as
    ``prefix/<tag>/what``.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = {
        f"{prefix}/episodes": float(len(trajectories)),
        f"{prefix}/dropped": float(sum(group.dropped for group in groups)),
        f"{prefix}/env_errors": float(sum(len(group.errors) for group in groups)),
    }
    if baselines := [group.baseline.score for group in groups if group.baseline is not None]:
        metrics[f"{prefix}/baseline"] = mean(baselines)
        metrics[f"{prefix}/no_baseline"] = float(len(groups) - len(baselines))
    if not trajectories:
        return metrics
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    metrics |= _means(trajectories, prefix)
    metrics |= {
        f"{prefix}/task_reward": mean(sum(turn.task_reward for turn in t.turns) for t in trajectories),
        f"{prefix}/penalty": mean(sum(turn.penalty for turn in t.turns) for t in trajectories),
        f"{prefix}/response_tokens": mean(turn.completion.num_tokens for turn in turns),
        f"{prefix}/prompt_tokens": mean(turn.num_prompt_tokens for turn in turns),
        f"{prefix}/cut_off": mean(turn.completion.finish_reason is FinishReason.LENGTH for turn in turns),
        f"{prefix}/repetition": mean(
            figures_of(turn).repeated for turn in turns[:: -(-len(turns) // REPETITIONS) or 1]
        ),
        f"{prefix}/context_full": mean(t.end is EpisodeEnd.CONTEXT_FULL for t in trajectories),
    }
    metrics |= {f"{prefix}/{name}": mean(counts) for name in COUNTS if (counts := _numbers(trajectories, name))}
    metrics |= _token_metrics(trajectories, prefix)
    names = dict.fromkeys(name for t in trajectories for name in t.info if name.startswith(AGENT))
    metrics |= {
        f"{prefix}/agent/{name.removeprefix(AGENT)}": mean(counts)
        for name in names
        if (counts := _numbers(trajectories, name))
    }
    tags = sorted({trajectory.tag for trajectory in trajectories})
    if len(tags) > 1:
        for tag in tags:
            of_tag = [trajectory for trajectory in trajectories if trajectory.tag == tag]
            metrics |= {f"{prefix}/{tag}/episodes": float(len(of_tag))} | _means(of_tag, f"{prefix}/{tag}")
            answers = [turn.completion for trajectory in of_tag for turn in trajectory.turns]
            metrics[f"{prefix}/{tag}/cut_off"] = mean(each.finish_reason is FinishReason.LENGTH for each in answers)
    return metrics


def step_metrics(collected: Collected, *, filters: bool) -> dict[str, float]:
    """Metrics of a step's training rollouts: ``rollout/…`` of all that was sampled, ``kept/…`` of what is trained on.

    Args:
        filters: dynamic sampling turns groups down; else the two are the same, and there is no ``kept/…``.

    Returns:
        Beside ``rollout_metrics``: ``rollout/tokens``, all sampled ones; ``rollout/filtered``, the groups that were
        turned down; of the groups with more than one episode ``rollout/no_spread``, the share whose episodes all score
        the same, ``rollout/all_right`` and ``rollout/all_wrong``, those of them in which all episodes were a success
        and none was (with several tags, of each too); ``kept_metrics``; ``kept/groups``, ``kept/episodes``,
        ``kept/success``, ``kept/reward`` and ``kept/response_tokens``.
    """
    kept = collected.groups
    finished = [*kept, *collected.rejected]
    metrics = rollout_metrics(finished, "rollout") | spread_metrics(finished, "rollout")
    if len(tags := sorted({group.tag for group in finished})) > 1:
        for tag in tags:
            metrics |= spread_metrics([group for group in finished if group.tag == tag], f"rollout/{tag}")
    metrics["rollout/tokens"] = float(sampled_tokens(finished))
    metrics["rollout/filtered"] = float(len(collected.rejected))
    metrics |= kept_metrics(finished)
    if filters:
        found = rollout_metrics(kept, "kept")
        names = ("episodes", "success", "reward", "response_tokens")
        metrics |= {f"kept/{name}": found[f"kept/{name}"] for name in names if f"kept/{name}" in found}
        metrics["kept/groups"] = float(len(kept))
    return metrics


def spread_metrics(groups: Sequence[RolloutGroup], prefix: str) -> dict[str, float]:
    """``no_spread``, ``all_right`` and ``all_wrong`` of ``step_metrics``; nothing where no group has two episodes."""
    several = [group.trajectories for group in groups if len(group.trajectories) > 1]
    if not several:
        return {}
    equal = [episodes for episodes in several if len({episode.score for episode in episodes}) == 1]
    return {
        f"{prefix}/no_spread": len(equal) / len(several),
        f"{prefix}/all_right": sum(all(each.success for each in episodes) for episodes in equal) / len(several),
        f"{prefix}/all_wrong": sum(not any(each.success for each in episodes) for episodes in equal) / len(several),
    }


def kept_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Figures of the kept sets; none without any.

    Returns:
        ``rollout/kept_tokens``, mean size of the sets; ``rollout/kept_overflow``, the share of the tokens whose sets
        were larger than ``replay_kept_sets`` allows; ``rollout/kept_set_bytes`` for a token.
    """
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    items = [item for turn in turns for item in turn.completion.kept]
    if not items:
        return {}
    ids, sets, tokens, num_bytes = map(sum, zip(*map(KeptFigures.of, items), strict=True))
    return {
        "rollout/kept_tokens": ids / max(1, sets),
        "rollout/kept_overflow": 1 - sets / tokens,
        "rollout/kept_set_bytes": num_bytes / tokens,
    }


def sampled_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Tokens that the policy sampled, those of greedy baselines included."""
    return sum(t.completion.num_tokens for group in groups for episode in group.episodes for t in episode.turns)


def overlap_metrics(batch: Batch, admission: Admission, version: int) -> dict[str, float]:
    """Age of a step's rollouts, and what waits behind it.

    Args:
        admission: after the step has taken its groups.
        version: of the weights that are trained next.

    Returns:
        ``async/lag_mean`` and ``async/lag_max`` over the groups: steps since the oldest token of each was sampled;
        ``async/token_lag``, the mean over the sampled tokens, and ``async/lag_<n>``, the share of those that are n
        steps old; ``async/mixed``, the share of rows that several versions sampled; ``async/buffer_groups`` and
        ``async/running_groups``.
    """
    assert batch.rollout_versions_T is not None and batch.group_B is not None
    mask_T, rows_T = batch.loss_mask_T, batch.rows_T
    versions_M, rows_M = batch.rollout_versions_T[mask_T], rows_T[mask_T]
    lag_M = version - versions_M
    groups_G, group_M = batch.group_B[rows_M].unique(return_inverse=True)
    lag_G = torch.zeros_like(groups_G).scatter_reduce(0, group_M, lag_M, "amax")
    changes_M = (versions_M[1:] != versions_M[:-1]) & (rows_M[1:] == rows_M[:-1])
    counts = torch.bincount(lag_M)
    return {
        "async/lag_mean": float(lag_G.double().mean()),
        "async/lag_max": float(lag_G.max()),
        "async/token_lag": float(lag_M.double().mean()),
        **{f"async/lag_{lag}": int(count) / len(lag_M) for lag, count in enumerate(counts.tolist())},
        "async/mixed": len(rows_M[1:][changes_M].unique()) / batch.num_sequences,
        "async/buffer_groups": float(len(admission.ready)),
        "async/running_groups": float(len(admission.running)),
    }


def _token_metrics(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Shares of the rows that were compared with their conversations (``TokenizationAudit``), none if none were."""
    rows = sum(_numbers(trajectories, COMPARED))
    if not rows:
        return {}
    keys = [key_of(reason) for reason in REASONS]
    shares = {key.removeprefix(TOKENS): sum(_numbers(trajectories, key)) / rows for key in keys}
    return {f"{prefix}/tokens/{name}": share for name, share in {"differ": sum(shares.values()), **shares}.items()}


def _numbers(trajectories: Sequence[Trajectory], name: str) -> list[float]:
    """An entry of the infos where it is a number: an environment may have anything of that name."""
    values = [trajectory.info[name] for trajectory in trajectories if name in trajectory.info]
    return [float(value) for value in values if isinstance(value, bool | int | float) and math.isfinite(value)]


def _means(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    metrics = {
        f"{prefix}/success": mean(trajectory.success for trajectory in trajectories),
        f"{prefix}/reward": mean(trajectory.score for trajectory in trajectories),
        f"{prefix}/turns": mean(len(trajectory.turns) for trajectory in trajectories),
    }
    if known := [turn for t in trajectories if t.knows_actions for turn in t.turns]:
        metrics[f"{prefix}/valid_rate"] = mean(turn.action is not None for turn in known)
    return metrics


def mean(values: Iterable[float]) -> float:
    """Of numbers or truth values; 0 of none."""
    collected = [float(value) for value in values]
    return sum(collected) / len(collected) if collected else 0.0
