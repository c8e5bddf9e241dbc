"""From an environment's rewards to the rewards that advantages are computed from: normalise, clip, KL penalty, whiten.

Normalising and clipping act on an episode's score, the sum of its rewards: each of its rewards is divided by the spread
and what is left of the change goes to its last sampled token, so that the rewards again add up to the new score. For
one-turn episodes that is the textbook formula; for longer ones the rewards keep their place and proportion. The batch's
``scores_B`` stay as the environment gave them.

Axes: B rows, T tokens, M sampled tokens in episode order, K turns, J episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.checks import require_columns, require_finite, require_rewards
from roll.algorithms.episodes import Episodes, find_episodes
from roll.algorithms.kl import kl_divergence
from roll.algorithms.statistics import STD_EPS, RunningStats, group_moments, whiten
from roll.configs.algorithm import AlgorithmConfig
from roll.data.batch import Batch

Scope: TypeAlias = Literal["batch", "group", "tag", "running"]

ASYM_CLIP = (-1.0, 3.0)
"""Bounds of ``asym_clip``: rare successes may stand out, failures may not drag as far the other way."""

_SCOPE_OF_GROUPING: dict[str, Scope] = {"state": "group", "batch": "batch", "inductive": "tag"}


@dataclass(frozen=True)
class ScoreNormaliser:
    """Which scores give the mean that is subtracted and the standard deviation that is divided by; ``None``: neither.

    The divisor is ``std + 1e-6``, or 1 where the scores do not differ.
    """

    mean_over: Scope | None = None
    std_over: Scope | None = None
    bounds: tuple[float, float] | None = None
    """Clip after normalising."""

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> ScoreNormaliser:
        """The one normalisation that the configuration asks for (``AlgorithmConfig.problems`` rejects two)."""
        if config.use_reward_scaling:
            return cls("running" if config.use_reward_norm else None, "running")
        if config.norm_mean_type is not None or config.norm_std_type is not None:
            return cls(config.norm_mean_type, config.norm_std_type)
        if config.reward_norm is not None:
            over: Scope = config.reward_norm
            return cls(None if config.reward_scale else over, None if config.reward_shift else over)
        chosen = config.reward_normalization
        if chosen.method == "identity":
            return cls()
        over = _SCOPE_OF_GROUPING[chosen.grouping]
        return cls(over, over, ASYM_CLIP if chosen.method == "asym_clip" else None)

    def uses(self, scope: Scope) -> bool:
        return scope in (self.mean_over, self.std_over)


def shape_rewards(batch: Batch, config: AlgorithmConfig, running: RunningStats) -> tuple[Batch, dict[str, float]]:
    """Normalises and clips episode scores, and moves ``rewards_T`` accordingly.

    Args:
        batch: With ``rewards_T``, and ``group_B`` or ``tag_B`` if the configuration groups by them.
        config: Reads ``reward_normalization``, ``norm_mean_type``, ``norm_std_type``, ``reward_norm``,
            ``reward_shift``, ``reward_scale``, ``use_reward_scaling``, ``use_reward_norm`` and ``reward_clip``.
        running: Statistics of the scores so far; takes in this batch first if the configuration uses them.

    Returns:
        The batch with new rewards, and metrics ``reward/score_mean``, ``reward/score_std`` (before),
        ``reward/shaped_mean``, ``reward/clip_frac`` (share of episodes whose score was clipped).

    Raises:
        ValueError: rewards are missing, not finite, or on tokens that were not sampled.
    """
    require_rewards(batch, "reward shaping")
    assert batch.rewards_T is not None
    episodes = find_episodes(batch)
    rewards_M = episodes.gather(batch.rewards_T)
    score_J = episodes.sum_episodes(episodes.sum_turns(rewards_M))
    normaliser = ScoreNormaliser.from_config(config)
    if normaliser.uses("running"):
        running.update(score_J)

    mean_J, divisor_J = _location_and_scale(score_J, normaliser, batch, episodes, running)
    normalised_J = (score_J - mean_J) / divisor_J
    shaped_J = normalised_J if normaliser.bounds is None else normalised_J.clamp(*normaliser.bounds)
    if config.reward_clip is not None:
        shaped_J = shaped_J.clamp(-config.reward_clip, config.reward_clip)
    rewards_M = rewards_M / divisor_J[episodes.episode_K][episodes.turn_M]
    rewards_M[episodes.last_token_J] += shaped_J - score_J / divisor_J
    metrics = {
        "reward/score_mean": _mean(score_J),
        "reward/score_std": float(score_J.std()) if len(score_J) > 1 else 0.0,
        "reward/shaped_mean": _mean(shaped_J),
        "reward/clip_frac": _mean((shaped_J != normalised_J).double()),
    }
    return batch.replace(rewards_T=episodes.scatter(rewards_M, batch.rewards_T)), metrics


def _location_and_scale(
    score_J: Tensor, normaliser: ScoreNormaliser, batch: Batch, episodes: Episodes, running: RunningStats
) -> tuple[Tensor, Tensor]:
    """What to subtract from each score and what to divide it by; float64 [J] each."""

    def moments(scope: Scope) -> tuple[Tensor, Tensor]:
        if scope == "running":
            return torch.full_like(score_J, running.mean), torch.full_like(score_J, running.std)
        if scope == "batch":
            members_J = torch.zeros(len(score_J), dtype=torch.int64)
        else:
            column = {"group": "group_B", "tag": "tag_B"}[scope]
            require_columns(batch, f"reward normalisation by {scope}", column)
            members_J = episodes.of_episode(getattr(batch, column))
        mean_J, std_J, _ = group_moments(score_J, members_J)
        return mean_J, std_J

    mean_J = torch.zeros_like(score_J) if normaliser.mean_over is None else moments(normaliser.mean_over)[0]
    std_J = torch.zeros_like(score_J) if normaliser.std_over is None else moments(normaliser.std_over)[1]
    return mean_J, torch.where(std_J > 0, std_J + STD_EPS, torch.ones_like(std_J))


def apply_kl_penalty(batch: Batch, config: AlgorithmConfig, coef: float) -> tuple[Batch, dict[str, float]]:
    """Subtracts ``coef`` times the KL to the reference from each sampled token's reward (``add_token_level_kl``).

    Args:
        batch: With ``rewards_T``, ``ref_logprobs_T`` and ``old_logprobs_T`` (else ``rollout_logprobs_T``).
        config: Reads ``kl_penalty``.
        coef: The controller's current coefficient.

    Returns:
        The batch with new rewards, and metrics ``reward/kl`` (mean over sequences of their mean over sampled tokens:
        what ``KlController.update`` wants) and ``reward/kl_coef``.
    """
    policy = "rollout_logprobs_T" if batch.old_logprobs_T is None else "old_logprobs_T"
    require_columns(batch, "add_token_level_kl", "rewards_T", "ref_logprobs_T", policy)
    require_finite(batch, "rewards_T", "ref_logprobs_T", policy)
    assert batch.rewards_T is not None and batch.ref_logprobs_T is not None
    kl_T = kl_divergence(getattr(batch, policy).double(), batch.ref_logprobs_T.double(), config.kl_penalty)
    kl_T = torch.where(batch.loss_mask_T, kl_T, torch.zeros_like(kl_T))
    zeros_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
    sums_B = zeros_B.index_add(0, batch.rows_T, kl_T)
    counts_B = zeros_B.index_add(0, batch.rows_T, batch.loss_mask_T.double())
    means_B = (sums_B / counts_B)[counts_B > 0]
    rewards_T = (batch.rewards_T.double() - coef * kl_T).float()
    return batch.replace(rewards_T=rewards_T), {"reward/kl": _mean(means_B), "reward/kl_coef": coef}


def whiten_token_rewards(batch: Batch) -> Batch:
    """Rewards to mean 0 and variance 1 over all sampled tokens (``whiten_rewards``)."""
    assert batch.rewards_T is not None
    rewards_T = torch.zeros_like(batch.rewards_T)
    rewards_T[batch.loss_mask_T] = whiten(batch.rewards_T[batch.loss_mask_T].double()).float()
    return batch.replace(rewards_T=rewards_T)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
