"""The policy-gradient losses of one sampled token, before weights, aggregation and the other terms.

A loss is a pure function ``(tokens, config) -> (loss_M, clipped_M)`` in ``POLICY_LOSSES``, or anybody's by
``package.module:function``; ``config`` holds the keys of this loss, and all keys for a function of the user's own. It
divides by no count of the batch: ``roll.algorithms.losses`` aggregates. It may use a token's own row, which a
micro-batch always holds whole, but no other row.

Axes: B rows, M sampled tokens of the micro-batch, in batch order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.kl import EXPONENT_BOUND
from roll.algorithms.statistics import sums
from roll.configs.policy_loss import Cispo, Kimi15, KlCov, PolicyVariant, Ppo, Sapo, Tis, Topr, WithRatio
from roll.utils.registry import Registry

SEQUENCE_EXPONENT_BOUND = 10.0
"""The log of a sequence ratio is clamped to at most this before the exponential."""


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss gets of the sampled tokens; all [M], on one device."""

    logprobs_M: Tensor
    """log p under the policy being trained; gradients flow through it."""
    old_M: Tensor
    """log p under the old policy; constant."""
    advantage_M: Tensor
    row_M: Tensor
    """int64: the row of each token."""
    marked_M: Tensor | None = None
    """bool: the tokens that ``roll.algorithms.selection`` picked for ``kl_cov``."""
    segment_M: Tensor | None = None
    """int64: the turn of each token, numbered over the rows (``importance_sampling: segment``)."""

    @property
    def log_ratio_M(self) -> Tensor:
        """Log ratio of each token, clamped to [-20, 20]."""
        return (self.logprobs_M - self.old_M).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)

    def ratio(self, config: PolicyVariant) -> Tensor:
        """[M]: probability ratio, per token or by ``importance_sampling`` shared by the tokens of a turn or a row.

        A shared one is that of the mean log ratio, at most 10; each token's gradient is that of its own log p
        (GSPO-token). So a row's mean loss has the gradient of the sequence's loss.
        """
        if not isinstance(config, WithRatio) or config.importance_sampling == "token":
            return self.log_ratio_M.exp()
        unit_M = self.row_M if config.importance_sampling == "seq" else self.segment_M
        assert unit_M is not None
        mean_M = _mean_of(self.logprobs_M.detach() - self.old_M, unit_M)
        return (self.logprobs_M - self.logprobs_M.detach() + mean_M).clamp(max=SEQUENCE_EXPONENT_BOUND).exp()

    def row_mean(self, values_M: Tensor) -> Tensor:
        """[M]: mean over the sampled tokens of each token's row; differentiable."""
        return _mean_of(values_M, self.row_M)


def _mean_of(values_M: Tensor, unit_M: Tensor) -> Tensor:
    """[M]: mean over the tokens of each token's unit; differentiable."""
    count_N = torch.bincount(unit_M)
    return (sums(values_M, unit_M, len(count_N)) / count_N.clamp(min=1))[unit_M]


PolicyLossFn: TypeAlias = Callable[[PolicyTokens, Any], tuple[Tensor, Tensor]]
"""Gives each token's loss and where a clip bounds it (bool, for the metric alone)."""

POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")


def vanilla(tokens: PolicyTokens, config: PolicyVariant) -> tuple[Tensor, Tensor]:
    """``-A log p``: the policy gradient as it is, without correction for old samples (Williams 1992)."""
    return -tokens.advantage_M * tokens.logprobs_M, _nowhere(tokens)


def ppo(tokens: PolicyTokens, config: Ppo) -> tuple[Tensor, Tensor]:
    """The clipped surrogate (Schulman et al. 2017), with dual clip (Ye et al. 2020) if ``dual_clip_loss``.

    With ``importance_sampling: seq`` this is GSPO (Zheng et al. 2025).
    """
    low, high = config.clip_range
    ratio_M = tokens.ratio(config)
    free_M = -tokens.advantage_M * ratio_M
    bounded_M = -tokens.advantage_M * ratio_M.clamp(1 - low, 1 + high)
    loss_M, clipped_M = torch.maximum(free_M, bounded_M), bounded_M > free_M
    if config.dual_clip_loss:
        ceiling_M = -config.dual_clip_c * tokens.advantage_M
        capped_M = (tokens.advantage_M < 0) & (ceiling_M < loss_M)
        loss_M, clipped_M = torch.where(capped_M, ceiling_M, loss_M), clipped_M | capped_M
    if config.pg_loss_cap is not None:
        clipped_M = clipped_M | (loss_M > config.pg_loss_cap)
        loss_M = loss_M.clamp(max=config.pg_loss_cap)
    return loss_M, clipped_M


def dppo_tv(tokens: PolicyTokens, config: PolicyVariant) -> tuple[Tensor, Tensor]:
    """DPPO (Qi et al. 2026) with the total variation of "this token or another": ``|p - p_old|``."""
    return _dppo(tokens, config, (tokens.logprobs_M.detach().exp() - tokens.old_M.exp()).abs())


def dppo_kl(tokens: PolicyTokens, config: PolicyVariant) -> tuple[Tensor, Tensor]:
    """DPPO (Qi et al. 2026) with the KL of "this token or another", of the old policy to the new."""
    new_M, old_M = tokens.logprobs_M.detach(), tokens.old_M
    other_M = _log_of_another(old_M) - _log_of_another(new_M)
    return _dppo(tokens, config, old_M.exp() * (old_M - new_M) - torch.expm1(old_M) * other_M)


def _dppo(tokens: PolicyTokens, config: PolicyVariant, divergence_M: Tensor) -> tuple[Tensor, Tensor]:
    """``-A * ratio``, and 0 for tokens that have gone too far the way that they would go on, by the clip range."""
    low, high = config.clip_range
    ratio_M = tokens.ratio(config)
    too_far_M = torch.where(
        tokens.advantage_M > 0, (ratio_M > 1) & (divergence_M > high), (ratio_M < 1) & (divergence_M > low)
    )
    return (-tokens.advantage_M * ratio_M).masked_fill(too_far_M, 0.0), too_far_M


def _log_of_another(logprobs_M: Tensor) -> Tensor:
    """log (1 - p), finite where p rounds to 1."""
    return torch.log(-torch.expm1(logprobs_M.clamp(max=-1e-7)))


def kl_cov(tokens: PolicyTokens, config: KlCov) -> tuple[Tensor, Tensor]:
    """KL-Cov (Cui et al. 2025): ``-A * ratio``, and ``+ ppo_kl_coef * |log ratio|`` on the marked tokens.

    Raises:
        ValueError: no tokens were marked, which ``select_for_policy`` does.
    """
    if tokens.marked_M is None:
        raise ValueError("pg_variant 'kl_cov' needs Batch.marked_T, which is not set")
    stay_M = config.ppo_kl_coef * tokens.log_ratio_M.abs() * tokens.marked_M
    return -tokens.advantage_M * tokens.ratio(config) + stay_M, _nowhere(tokens)


def topr(tokens: PolicyTokens, config: Topr) -> tuple[Tensor, Tensor]:
    """Tapered off-policy REINFORCE (Le Roux et al. 2025): good tokens at full weight, bad ones by min(ratio, 1)."""
    ratio_M = tokens.ratio(config).detach()
    good_M = tokens.advantage_M > 0
    weight_M = torch.where(good_M, config.topr_positive_weight, config.topr_negative_weight * ratio_M.clamp(0.0, 1.0))
    return -weight_M * tokens.advantage_M * tokens.logprobs_M, ~good_M & (ratio_M > 1)


def tis(tokens: PolicyTokens, config: Tis) -> tuple[Tensor, Tensor]:
    """REINFORCE with truncated importance sampling (Ionides 2008): the ratio is a constant weight within bounds."""
    ratio_M = tokens.ratio(config).detach()
    weight_M = ratio_M.clamp(config.tis_lower_bound, config.tis_upper_bound)
    return -weight_M * tokens.advantage_M * tokens.logprobs_M, weight_M != ratio_M


def cispo(tokens: PolicyTokens, config: Cispo) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax 2025): as ``tis`` with bounds around 1, so that every token keeps a gradient.

    With ``cispo_use_unified_mask`` tokens that PPO's clip would stop get none.
    """
    low, high = 1 - config.cispo_epsilon_low, 1 + config.cispo_epsilon_high
    ratio_M = tokens.ratio(config).detach()
    weight_M = ratio_M.clamp(low, high)
    if config.cispo_use_unified_mask:
        outside_M = torch.where(tokens.advantage_M > 0, ratio_M > high, ratio_M < low)
        weight_M = weight_M.masked_fill(outside_M, 0.0)
    return -weight_M * tokens.advantage_M * tokens.logprobs_M, weight_M != ratio_M


def kimi15(tokens: PolicyTokens, config: Kimi15) -> tuple[Tensor, Tensor]:
    """Kimi k1.5 (Kimi Team 2025): ``-A log p + tau / 2 * (log ratio)^2``, which keeps near the old policy."""
    stay_M = 0.5 * config.kimi15_tau * tokens.log_ratio_M.square()
    return -tokens.advantage_M * tokens.logprobs_M + stay_M, _nowhere(tokens)


def gmpo(tokens: PolicyTokens, config: PolicyVariant) -> tuple[Tensor, Tensor]:
    """Geometric-mean policy optimisation (Zhao et al. 2025): ``-A * geometric mean of the row's clipped ratios``.

    A is the mean of the row's advantages. Clipping is pessimistic per token and in the log: to [-low, high] of the log
    ratio. Every token of a row has the row's loss.
    """
    low, high = config.clip_range
    advantage_M = tokens.row_mean(tokens.advantage_M)
    log_ratio_M = tokens.log_ratio_M
    bounded_M = log_ratio_M.clamp(-low, high)
    kept_M = torch.where(advantage_M > 0, torch.minimum(log_ratio_M, bounded_M), torch.maximum(log_ratio_M, bounded_M))
    return -advantage_M * tokens.row_mean(kept_M).exp(), kept_M != log_ratio_M


def sapo(tokens: PolicyTokens, config: Sapo) -> tuple[Tensor, Tensor]:
    """Soft adaptive policy optimisation (Gao et al. 2025): ``-A * 4 / tau * sigmoid(tau * (ratio - 1))``.

    The gate fades a token's gradient out instead of cutting it; tau is larger for bad tokens.
    """
    tau_M = torch.full_like(tokens.advantage_M, config.sapo_tau_neg)
    tau_M = tau_M.masked_fill(tokens.advantage_M > 0, config.sapo_tau_pos)
    gate_M = torch.sigmoid(tau_M * (tokens.ratio(config) - 1)) * 4 / tau_M
    return -tokens.advantage_M * gate_M, _nowhere(tokens)


def _nowhere(tokens: PolicyTokens) -> Tensor:
    return torch.zeros_like(tokens.advantage_M, dtype=torch.bool)


for _loss in (cispo, dppo_kl, dppo_tv, gmpo, kimi15, kl_cov, ppo, sapo, tis, topr, vanilla):
    POLICY_LOSSES.register(_loss.__name__, _loss)
# Clip-Cov is PPO's loss without the tokens that ``roll.algorithms.selection`` picks, over the whole rollout.
POLICY_LOSSES.register("clip_cov", ppo)
