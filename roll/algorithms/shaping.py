"""From a rollout's rewards to its advantages: masks, lengths, normalising, clipping, KL, a teacher's term, whitening.

Normalising and clipping act on an episode's score, the sum of its rewards: each of its rewards is divided by the spread
and what is left of the change goes to its last sampled token, so that the rewards again add up to the new score. For
one-turn episodes that is the textbook formula; for longer ones the rewards keep their place and proportion. The score
of a greedy episode (``baseline_B``) moves with those of its group. The batch's ``scores_B`` stay as the environment
gave them.

Axes: B rows, T tokens, M sampled tokens in episode order, K turns, J episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import advantage_metrics, compute_advantages
from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.distillation import (
    clip_metrics,
    no_advantages,
    teacher_advantages,
    teacher_metrics,
    teacher_rewards,
)
from roll.algorithms.kl import KlController, kl_divergence
from roll.algorithms.reductions import STD_EPS, Episodes, RunningStats, find_episodes, group_moments, mean, sums, whiten
from roll.algorithms.selection import drop_masked_episodes
from roll.algorithms.types import require_columns, require_finite, require_rewards
from roll.configs.algorithm import AlgorithmParts, KlPenalty, Normalisation, Overlong, RewardShaping, Scope
from roll.data.batch import Batch


def shape_rewards(batch: Batch, shaping: RewardShaping, running: RunningStats) -> tuple[Batch, dict[str, float]]:
    """Adds length terms to episode scores, normalises and clips them, and moves ``rewards_T`` accordingly.

    Args:
        batch: With ``rewards_T``, and ``group_B`` or ``tag_B`` if the configuration groups by them.
        running: Statistics of the scores so far; takes in this batch first if the configuration uses them.

    Returns:
        The batch with new rewards, and metrics ``reward/score_mean``, ``reward/score_std`` (before),
        ``reward/shaped_mean``, ``reward/clip_frac`` (share of episodes whose score was clipped); where they are on,
        means over episodes ``reward/overlong_penalty``, ``reward/overlong_frac`` and ``reward/len_reward``.

    Raises:
        ValueError: rewards are missing, not finite, or on tokens that were not sampled; a needed column is missing;
            ``overlong_buffer`` knows no limit.
    """
    rewards_T = require_rewards(batch, "reward shaping")
    episodes = find_episodes(batch)
    rewards_M = episodes.gather(rewards_T)
    given_J = episodes.sum_episodes(episodes.sum_turns(rewards_M))
    rewards_M, length_metrics = _add_length_terms(rewards_M, given_J, batch, episodes, shaping)
    score_J = episodes.sum_episodes(episodes.sum_turns(rewards_M))
    normaliser = shaping.normalisation
    if "running" in (normaliser.mean_over, normaliser.std_over):
        running.update(score_J)

    mean_J, divisor_J = _location_and_scale(score_J, normaliser, batch, episodes, running)
    normalised_J = (score_J - mean_J) / divisor_J
    bounds = _tighter(normaliser.bounds, shaping.clip)
    shaped_J = normalised_J.clamp(*bounds)
    rewards_M = rewards_M / divisor_J[episodes.episode_M]
    rewards_M[episodes.last_token_J] += shaped_J - score_J / divisor_J
    if batch.baseline_B is not None:
        require_finite(batch, "baseline_B")
        baseline_J = (episodes.of_episode(batch.baseline_B).double() - mean_J) / divisor_J
        batch = batch.replace(baseline_B=_to_rows(baseline_J.clamp(*bounds), batch, episodes))
    metrics = length_metrics | {
        "reward/score_mean": mean(given_J),
        "reward/score_std": float(given_J.std()) if len(given_J) > 1 else 0.0,
        "reward/shaped_mean": mean(shaped_J),
        "reward/clip_frac": mean((shaped_J != normalised_J).double()),
    }
    return batch.replace(rewards_T=episodes.scatter(rewards_M, batch.loss_mask_T)), metrics


def overlong_penalties(lengths: Tensor, overlong: Overlong) -> Tensor:
    """float64: ``min(0, -(n - (max - len)) / len * penalty_factor)`` for lengths n (DAPO, Yu et al. 2025).

    Raises:
        ValueError: neither ``overlong_buffer.max_length`` nor the run says how long an answer may be.
    """
    limit, buffer = overlong.limit, overlong.buffer
    if limit is None or buffer < 1:
        raise ValueError(
            f"overlong_buffer: got max_length {limit} and len {buffer}, expected a limit and at least 1 token before it"
        )
    return -(lengths.double() - (limit - buffer)).clamp(min=0) / buffer * overlong.factor


def length_rewards(length_J: Tensor, score_J: Tensor, group_J: Tensor) -> Tensor:
    """float64 [J]: ``w = 0.5 - (n - min n) / (max n - min n)`` within the group (Kimi k1.5, Kimi Team 2025).

    A success (score above 0) gets w, another episode ``min(0, w)``; all get 0 where all are equally long.
    """
    _, index_J = torch.unique(group_J, return_inverse=True)
    length_J = length_J.double()
    zeros_G = torch.zeros(int(index_J.max()) + 1 if len(index_J) else 0, dtype=torch.float64)
    least_J, most_J = (
        zeros_G.scatter_reduce(0, index_J, length_J, kind, include_self=False)[index_J] for kind in ("amin", "amax")
    )
    spread_J = most_J - least_J
    reward_J = 0.5 - (length_J - least_J) / spread_J.clamp(min=1)
    reward_J = torch.where(score_J > 0, reward_J, reward_J.clamp(max=0))
    return torch.where(spread_J > 0, reward_J, torch.zeros_like(reward_J))


def _add_length_terms(
    rewards_M: Tensor, score_J: Tensor, batch: Batch, episodes: Episodes, shaping: RewardShaping
) -> tuple[Tensor, dict[str, float]]:
    """Rewards with the overlong penalty of each turn on its last token, the length reward on that of the episode."""
    metrics: dict[str, float] = {}
    length_K = episodes.last_K - episodes.first_K + 1
    if shaping.overlong is not None:
        penalty_K = overlong_penalties(length_K, shaping.overlong)
        rewards_M = rewards_M.index_add(0, episodes.last_K, penalty_K)
        penalty_J = episodes.sum_episodes(penalty_K)
        metrics["reward/overlong_penalty"] = mean(penalty_J)
        metrics["reward/overlong_frac"] = mean((penalty_J < 0).double())
    if shaping.length_coef is not None:
        (group_B,) = require_columns(batch, "add_len_reward", "group_B")
        length_J = episodes.sum_episodes(length_K)
        reward_J = shaping.length_coef * length_rewards(length_J, score_J, episodes.of_episode(group_B))
        rewards_M = rewards_M.index_add(0, episodes.last_token_J, reward_J)
        metrics["reward/len_reward"] = mean(reward_J)
    return rewards_M, metrics


def _tighter(bounds: tuple[float, float] | None, clip: float | None) -> tuple[float, float]:
    """Bounds that the normaliser and ``reward_clip`` leave of the real numbers."""
    low, high = bounds or (-torch.inf, torch.inf)
    return (low, high) if clip is None else (max(low, -clip), min(high, clip))


def _to_rows(values_J: Tensor, batch: Batch, episodes: Episodes) -> Tensor:
    """float32 [B]: each episode's value on all of its rows; 0 on rows of no episode."""
    values_B = torch.zeros(batch.num_sequences, dtype=torch.float32)
    values_B[episodes.row_K] = values_J[episodes.episode_K].float()
    return values_B


def _location_and_scale(
    score_J: Tensor, normaliser: Normalisation, batch: Batch, episodes: Episodes, running: RunningStats
) -> tuple[Tensor, Tensor]:
    """Centre to subtract from each score and scale to divide it by; float64 [J] each."""

    def moments(scope: Scope) -> tuple[Tensor, Tensor]:
        if scope == "running":
            return torch.full_like(score_J, running.mean), torch.full_like(score_J, running.std)
        if scope == "batch":
            members_J = torch.zeros(len(score_J), dtype=torch.int64)
        else:
            column = {"group": "group_B", "tag": "tag_B"}[scope]
            (members_B,) = require_columns(batch, f"reward normalisation by {scope}", column)
            members_J = episodes.of_episode(members_B)
        mean_J, std_J, _ = group_moments(score_J, members_J)
        return mean_J, std_J

    mean_J = torch.zeros_like(score_J) if normaliser.mean_over is None else moments(normaliser.mean_over)[0]
    std_J = torch.zeros_like(score_J) if normaliser.std_over is None else moments(normaliser.std_over)[1]
    return mean_J, torch.where(std_J > 0, std_J + STD_EPS, torch.ones_like(std_J))


def apply_kl_penalty(batch: Batch, penalty: KlPenalty, coef: float) -> tuple[Batch, dict[str, float]]:
    """Subtracts ``coef`` times the KL to the reference from each sampled token's reward (``add_token_level_kl``).

    Args:
        batch: With ``rewards_T``, and ``ref_logprobs_T`` and ``old_logprobs_T`` (else ``rollout_logprobs_T``); with
            ``full``, ``kl_T``.

    Returns:
        The batch with new rewards, and metrics ``reward/kl`` (mean over sequences of their mean over sampled tokens:
        what ``KlController.update`` wants) and ``reward/kl_coef``.
    """
    (rewards_T,) = require_columns(batch, "add_token_level_kl", "rewards_T")
    require_finite(batch, "rewards_T")
    kl_T = _old_kl(batch, penalty)
    batch = batch.replace(rewards_T=(rewards_T.double() - coef * kl_T).float())
    return batch, {"reward/kl": _sequence_mean(kl_T, batch), "reward/kl_coef": coef}


def mean_kl(batch: Batch, kind: KlPenalty) -> float:
    """KL of the policy before the update to the reference: the mean over sequences of their mean over sampled tokens.

    Args:
        batch: With ``ref_logprobs_T`` and ``old_logprobs_T`` (else ``rollout_logprobs_T``); ``full``: ``kl_T``.
    """
    return _sequence_mean(_old_kl(batch, kind), batch)


def _sequence_mean(values_T: Tensor, batch: Batch) -> float:
    sums_B = sums(values_T, batch.rows_T, batch.num_sequences)
    counts_B = batch.loss_tokens_B.double()
    return mean((sums_B / counts_B)[counts_B > 0])


def _old_kl(batch: Batch, kind: KlPenalty) -> Tensor:
    """float64 [T]: KL of the policy before the update to the reference; 0 where nothing was sampled."""
    if kind == "full":
        (kl_T,) = require_columns(batch, "add_token_level_kl with kl_penalty 'full'", "kl_T")
        require_finite(batch, "kl_T")
        kl_T = kl_T.double()
    else:
        policy = "rollout_logprobs_T" if batch.old_logprobs_T is None else "old_logprobs_T"
        reference_T, policy_T = require_columns(batch, "the KL before the update", "ref_logprobs_T", policy)
        require_finite(batch, "ref_logprobs_T", policy)
        kl_T = kl_divergence(policy_T.double(), reference_T.double(), kind)
    return torch.where(batch.loss_mask_T, kl_T, torch.zeros_like(kl_T))


def whiten_token_rewards(batch: Batch) -> Batch:
    """Rewards to mean 0 and variance 1 over all sampled tokens (``whiten_rewards``)."""
    assert batch.rewards_T is not None
    rewards_T = torch.zeros_like(batch.rewards_T)
    rewards_T[batch.loss_mask_T] = whiten(batch.rewards_T[batch.loss_mask_T].double()).float()
    return batch.replace(rewards_T=rewards_T)


class Shaping:
    """Shapes the batch of each step, and keeps what lasts from step to step: statistics and coefficients.

    Args:
        parts: the algorithm.
    """

    def __init__(self, parts: AlgorithmParts) -> None:
        self.parts = parts
        self.score_stats = RunningStats()
        self.kl_reward = KlController.of(parts.kl.reward)
        self.kl_loss = KlController.of(parts.kl.loss)

    def __call__(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with ``advantages_T`` and ``returns_T``, and metrics; an error on the way changes no state."""
        parts, score_stats = self.parts, copy(self.score_stats)
        metrics: dict[str, float] = {}
        if vars(batch)["old_logprobs_T"] is None:  # the training pass will compare its own
            require_finite(batch, "rollout_logprobs_T")
        elif not parts.correction.bypass:  # else both columns are the sampler's
            metrics = mismatch_metrics(with_old_policy(batch.only(("rollout_logprobs_T", "old_logprobs_T"))))
        batch, found = drop_masked_episodes(batch, parts.selection)
        metrics |= found
        batch, found = shape_rewards(batch, parts.reward, score_stats)
        metrics |= found
        if parts.kl.reward is not None:
            batch, found = apply_kl_penalty(batch, parts.kl.reward.penalty, self.kl_reward.coef)
            metrics |= found
        if (teacher := parts.teacher) is not None:
            metrics |= clip_metrics(batch, teacher)
            if teacher.comparable:
                metrics |= teacher_metrics(batch)
            if teacher.form == "reward":
                batch = teacher_rewards(batch, teacher)
        if parts.reward.whiten:
            batch = whiten_token_rewards(batch)
        if teacher is not None and teacher.replaces_advantages:
            batch = no_advantages(batch)
        else:
            batch = compute_advantages(batch, parts.advantage)
        if teacher is not None and teacher.form == "advantage":
            batch = teacher_advantages(batch, teacher)
        metrics |= advantage_metrics(batch, parts.advantage)
        self.score_stats = score_stats
        if parts.kl.reward is not None:
            self.kl_reward.update(metrics["reward/kl"], len(batch.rows_with_loss))
        return batch, metrics

    def steer_kl_loss(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """The coefficient of the KL loss for this step, and metrics; it is then adapted to the KL before the step."""
        assert self.parts.kl.loss is not None
        coef, kl = self.kl_loss.coef, mean_kl(with_old_policy(batch), self.parts.kl.loss.penalty)
        self.kl_loss.update(kl, len(batch.rows_with_loss))
        return coef, {"actor/kl": kl, "actor/kl_loss_coef": coef}

    def state_dict(self) -> dict[str, Any]:
        return {
            "score_stats": self.score_stats.state_dict(),
            "kl_controller": self.kl_reward.state_dict(),
            "kl_loss_controller": self.kl_loss.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.score_stats.load_state_dict(state["score_stats"])
        self.kl_reward.load_state_dict(state["kl_controller"])
        self.kl_loss.load_state_dict(state.get("kl_loss_controller", self.kl_loss.state_dict()))


def with_old_policy(batch: Batch) -> Batch:
    """The rows whose ``old_logprobs_T`` are known."""
    return batch if batch.on_policy_B is None else batch.select((~batch.on_policy_B).nonzero()[:, 0])
