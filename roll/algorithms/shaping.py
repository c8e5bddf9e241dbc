"""From a scored rollout to its advantages: masks, reward shaping, KL, a teacher's opinion, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from roll.algorithms.advantages import advantage_metrics, compute_advantages
from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.distillation import (
    clip_metrics,
    no_advantages,
    teacher_advantages,
    teacher_metrics,
    teacher_rewards,
)
from roll.algorithms.kl import KlController
from roll.algorithms.rewards import apply_kl_penalty, mean_kl, shape_rewards, whiten_token_rewards
from roll.algorithms.selection import drop_masked_episodes
from roll.algorithms.statistics import RunningStats
from roll.configs.algorithm import AlgorithmParts
from roll.data.batch import Batch


class Shaping:
    """Shapes the batch of each step, and keeps what goes on from step to step: statistics and coefficients.

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
        # With bypass both columns are the sampler's.
        metrics = {} if parts.correction.bypass else mismatch_metrics(with_old_policy(batch))
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
    return batch if batch.fresh_B is None else batch.select((~batch.fresh_B).nonzero()[:, 0])
