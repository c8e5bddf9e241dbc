"""Losses of the policy, the critic and supervised warm-up, on log-probabilities and values of flat tokens.

Every term is a weighted sum over sampled tokens, and the weights come from counts over the *whole* optimizer step
(``LossContext``). So one micro-batch's loss is its exact share, and micro-batching, packing and data parallelism cannot
change the gradient. Metrics are sums of the same kind.

A policy loss is a pure function ``(tokens, config) -> (loss_M, clipped_M)`` in ``POLICY_LOSSES``, or a user's own by
``package.module:function``: what one sampled token costs, before weights, aggregation and the other terms. ``config``
holds the keys of this loss, and all keys for a user's function. It may use a token's own row, which a micro-batch
always holds whole, but no other row and no count of the batch.

Axes: B rows, T tokens, M sampled tokens of the micro-batch, in batch order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.advantages import value_mask
from roll.algorithms.correction import MISMATCH, Levels, importance_weights
from roll.algorithms.kl import EXPONENT_BOUND, k3, kl_divergence
from roll.algorithms.quantities import KlToReference, Quantity, entropy, logprobs, prob_square_sum, top1
from roll.algorithms.reductions import sums
from roll.algorithms.types import LossContext, LossFn, LossOutput, TokenScores, require_columns, require_scores
from roll.configs.algorithm import AdvantageConfig, AlgorithmConfig, AlgorithmParts, IsWeightConfig, KlTerm
from roll.configs.policy_loss import (
    Cispo,
    Kimi15,
    KlCov,
    LossAggMode,
    PolicyLossConfig,
    PolicyVariant,
    Ppo,
    Sapo,
    Tis,
    Topr,
    WithRatio,
)
from roll.data.batch import Batch
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


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that a loss sums over, with the two kinds of weights; on the device of the scores."""

    token_M: Tensor
    """int64: index into T."""
    row_M: Tensor
    """int64: the row of each."""
    mean_M: Tensor
    """Weights of a mean over all tokens of the optimizer step (metrics)."""
    loss_M: Tensor
    """Weights of the chosen ``loss_agg_mode``."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        mask_T: Tensor,
        mode: LossAggMode,
        ctx: LossContext,
        like: Tensor,
        norm: float | None = None,
    ) -> SampledTokens:
        """Finds the tokens and weighs them.

        Args:
            batch: One micro-batch, on the CPU.
            mode: ``token-mean``: sum / tokens. ``token-sum``: sum / norm. ``seq-mean-token-sum``: sum / sequences.
                ``seq-mean-token-mean``: mean over sequences of their mean. ``seq-mean-token-sum-norm``: sum /
                (sequences * longest). A sequence is a row of the batch, or all rows of an episode that branched
                (``sample_weight_B``).
            like: Scores; gives device and dtype.
            norm: Divisor of ``token-sum`` (else 1), and of ``seq-mean-token-sum-norm`` in place of the longest.

        Raises:
            ValueError: the optimizer step has no token or no sequence to divide by.
        """
        if ctx.num_tokens <= 0 or ctx.num_sequences <= 0 or ctx.max_length <= 0:
            raise ValueError(
                f"LossContext: {ctx.num_tokens} loss tokens in {ctx.num_sequences} sequences, longest "
                f"{ctx.max_length}; expected at least one token in the optimizer step"
            )
        token_M = mask_T.nonzero().squeeze(1)
        row_M = batch.rows_T[token_M]
        mean_M = torch.full((len(token_M),), 1.0 / ctx.num_tokens, dtype=like.dtype)
        if mode == "token-mean":
            loss_M = mean_M
        elif mode == "seq-mean-token-mean":
            count_B = torch.bincount(row_M, minlength=batch.num_sequences)
            if batch.sample_weight_B is not None:
                count_B = count_B / batch.sample_weight_B  # those of the whole sequence
            loss_M = 1.0 / (ctx.num_sequences * count_B[row_M].to(like.dtype))
        elif mode == "token-sum":
            loss_M = torch.full_like(mean_M, 1.0 / (norm or 1.0))
        else:
            longest = (norm or ctx.max_length) if mode == "seq-mean-token-sum-norm" else 1.0
            loss_M = torch.full_like(mean_M, 1.0 / (ctx.num_sequences * longest))
        return cls(*(t.to(like.device) for t in (token_M, row_M, mean_M, loss_M)))

    def take(self, column_T: Tensor) -> Tensor:
        """[M]: a token column at these tokens, on the scores' device; differentiable."""
        return column_T.to(self.token_M.device)[self.token_M]

    def take_rows(self, column_B: Tensor) -> Tensor:
        """[M]: a row column at each token's row."""
        return column_B.to(self.row_M.device)[self.row_M]

    def loss(self, values_M: Tensor) -> Tensor:
        """Scalar: this micro-batch's share of the aggregated loss."""
        return (self.loss_M * values_M).sum()

    def mean(self, values_M: Tensor) -> Tensor:
        """Scalar without gradient: this micro-batch's share of the mean over tokens."""
        return (self.mean_M * values_M.detach()).sum()


def policy_loss(
    scores: TokenScores,
    batch: Batch,
    ctx: LossContext,
    parts: AlgorithmParts,
    total_optimizer_steps: int | None = None,
) -> LossOutput:
    """``rl_loss_coef * PG + kl_loss_coef * KL + sft_loss_coef * SFT - entropy_coef * entropy + opd_kl_coef * D``.

    D is the divergence from a teacher (``opd_form: loss``).

    PG is the loss that ``pg_variant`` names in ``POLICY_LOSSES``, times ``weights_T`` where the batch has them.
    Without ``old_logprobs_T``, and in the rows of ``on_policy_B``, the old policy is the current one (the first step on
    fresh samples): ratios are 1 and PPO's gradient is that of REINFORCE.

    Args:
        scores: ``logprobs_T``; ``entropy_T`` if there is an entropy bonus; ``kl_T`` if ``use_kl_loss`` takes the KL
            over the vocabulary; ``divergence_T`` (D) with ``opd_form: loss``.
        batch: One micro-batch with ``advantages_T``; ``ref_logprobs_T`` with ``use_kl_loss`` by an estimator;
            ``scores_B`` with ``sft_loss_coef``; ``marked_T`` with ``pg_variant: kl_cov``.
        total_optimizer_steps: Horizon over which the entropy coefficient decays.

    Raises:
        ValueError: a column or score is missing, or the optimizer step has no loss token.
    """
    config, variant = parts.policy_loss, parts.policy_loss.variant
    (advantages_T,) = require_columns(batch, "policy_loss", "advantages_T")
    logprobs_T = require_scores(scores.logprobs_T, "policy_loss", "logprobs_T")
    tokens = SampledTokens.of(batch, batch.loss_mask_T, config.loss_agg_mode, ctx, logprobs_T, config.loss_agg_norm)
    logprobs_M = tokens.take(logprobs_T)
    old_M = logprobs_M.detach() if batch.old_logprobs_T is None else tokens.take(batch.old_logprobs_T)
    if batch.on_policy_B is not None:
        old_M = torch.where(tokens.take_rows(batch.on_policy_B), logprobs_M.detach(), old_M)
    by_turn = isinstance(variant, WithRatio) and variant.importance_sampling == "segment"
    policy = PolicyTokens(
        logprobs_M,
        old_M,
        tokens.take(advantages_T).to(logprobs_M.dtype),
        tokens.row_M,
        None if batch.marked_T is None else tokens.take(batch.marked_T),
        _levels(batch, tokens, logprobs_M.device).segment_M if by_turn else None,
    )
    pg_M, clipped_M = POLICY_LOSSES.get(config.loss_name)(policy, variant)
    if batch.weights_T is not None:
        pg_M = pg_M * tokens.take(batch.weights_T)
    is_weight = parts.correction.is_weight
    if is_weight.enabled and not is_weight.detach:
        pg_M = pg_M * _live_importance_weights(batch, tokens, logprobs_M, is_weight)

    pg_loss = tokens.loss(pg_M)
    loss = config.rl_loss_coef * pg_loss
    metrics: dict[str, Tensor | float] = {
        "actor/pg_loss": pg_loss.detach(),
        "actor/clip_frac": tokens.mean(clipped_M.to(logprobs_M.dtype)),
        "actor/approx_kl": tokens.mean(k3(-policy.log_ratio_M.detach())),
        "actor/ratio_mean": tokens.mean(policy.ratio(variant)),
    }
    for name, coef, term in _auxiliary_terms(scores, batch, ctx, parts, tokens, logprobs_M, total_optimizer_steps):
        loss = loss + coef * term
        metrics[name] = term.detach()
    if scores.entropy_T is not None:
        metrics["actor/entropy"] = tokens.mean(tokens.take(scores.entropy_T))
    metrics |= _mismatch(batch, tokens, logprobs_M.detach())
    metrics["actor/loss"] = loss.detach()
    return LossOutput(loss, metrics)


def _mismatch(batch: Batch, tokens: SampledTokens, logprobs_M: Tensor) -> dict[str, Tensor | float]:
    """``mismatch_metrics`` by the log-probabilities of the training pass, where nobody scored the rollouts before."""
    if batch.rollout_logprobs_T is None or batch.old_logprobs_T is not None:
        return {}
    d_M = (tokens.take(batch.rollout_logprobs_T) - logprobs_M).double()
    largest = d_M.abs().max() if len(d_M) else d_M.sum()
    return dict(zip(MISMATCH, (tokens.mean(d_M.abs()), largest, tokens.mean(k3(d_M))), strict=True))


def build_policy_loss(config: AlgorithmConfig, total_optimizer_steps: int | None = None) -> LossFn:
    """``policy_loss`` with its settings; travels between processes.

    Raises:
        ValueError: ``entropy_loss_coef_end`` is set, but no horizon to decay over is given.
    """
    if config.entropy_loss_coef_end is not None and total_optimizer_steps is None:
        raise ValueError("entropy_loss_coef_end is set; build_policy_loss then needs total_optimizer_steps")
    return partial(policy_loss, parts=config.parts, total_optimizer_steps=total_optimizer_steps)


def policy_needs(config: AlgorithmConfig) -> tuple[Quantity, ...]:
    """What the policy's loss, the KL in rewards and the advantages take from the trained model."""
    needs: list[Quantity] = [logprobs, entropy]
    if config.estimator.sums_squares:
        needs.append(prob_square_sum)
    if config.uses_full_kl:
        needs.append(KlToReference())
    return tuple(needs)


def policy_reads(parts: AlgorithmParts) -> set[str]:
    """Columns of the batch per token that ``policy_loss`` reads; others need not travel to a trainer."""
    reads = {"advantages_T", "old_logprobs_T", "ref_logprobs_T", "rollout_logprobs_T", "weights_T", "marked_T"}
    variant, is_weight = parts.policy_loss.variant, parts.correction.is_weight
    by_turn = isinstance(variant, WithRatio) and variant.importance_sampling == "segment"
    return reads | {"turn_T"} if by_turn or (is_weight.enabled and not is_weight.detach) else reads


VALUE_READS = frozenset({"values_T", "returns_T", "turn_T"})
"""Those that ``value_loss`` reads."""


def value_loss(
    scores: TokenScores, batch: Batch, ctx: LossContext, critic: AdvantageConfig, policy: PolicyLossConfig
) -> LossOutput:
    """``value_loss_coef * 0.5 * max((v - R)^2, (clip(v, old - c, old + c) - R)^2)``, aggregated like the policy's loss.

    Args:
        scores: ``values_T``.
        batch: One micro-batch with ``returns_T``; ``values_T`` (before the update) with ``value_clip``. With
            ``turn_level_gae`` only each turn's first sampled token has a target (``advantages.value_mask``).
    """
    (returns_T,) = require_columns(batch, "value_loss", "returns_T")
    values_T = require_scores(scores.values_T, "value_loss", "values_T")
    mode, norm = policy.loss_agg_mode, policy.loss_agg_norm
    tokens = SampledTokens.of(batch, value_mask(batch, critic), mode, ctx, values_T, norm)
    value_M, return_M = tokens.take(values_T), tokens.take(returns_T)
    error_M = (value_M - return_M).square()
    metrics: dict[str, Tensor | float] = {"critic/value_error": tokens.mean(error_M)}
    if critic.value_clip is not None:
        (old_T,) = require_columns(batch, "value_clip", "values_T")
        old_M = tokens.take(old_T)
        near_M = old_M + (value_M - old_M).clamp(-critic.value_clip, critic.value_clip)
        clipped_error_M = (near_M - return_M).square()
        metrics["critic/clip_frac"] = tokens.mean((clipped_error_M > error_M).to(value_M.dtype))
        error_M = torch.maximum(error_M, clipped_error_M)
    loss = critic.value_loss_coef * 0.5 * tokens.loss(error_M)
    return LossOutput(loss, {"critic/value_loss": loss.detach(), **metrics})


def build_value_loss(config: AlgorithmConfig) -> LossFn:
    """``value_loss`` with its settings; travels between processes."""
    parts = config.parts
    return partial(value_loss, critic=parts.advantage, policy=parts.policy_loss)


SFT_NEEDS: tuple[Quantity, ...] = (logprobs, top1)
"""What ``sft_loss`` takes from the trained model."""


def sft_loss(
    scores: TokenScores, batch: Batch, ctx: LossContext, loss_agg_mode: LossAggMode = "token-mean"
) -> LossOutput:
    """Mean negative log-likelihood (nats) of the tokens with loss mask 1, over tokens or first over each row's.

    With ``top1_T`` among the scores, ``sft/token_accuracy`` is the share of these tokens that are the model's first
    choice.
    """
    logprobs_T = require_scores(scores.logprobs_T, "sft_loss", "logprobs_T")
    tokens = SampledTokens.of(batch, batch.loss_mask_T, loss_agg_mode, ctx, logprobs_T)
    loss = -tokens.loss(tokens.take(logprobs_T))
    metrics: dict[str, Tensor | float] = {"sft/loss": loss.detach()}
    if scores.top1_T is not None:
        metrics["sft/token_accuracy"] = tokens.mean(tokens.take(scores.top1_T))
    return LossOutput(loss, metrics)


def build_sft_loss(loss_agg_mode: LossAggMode = "token-mean") -> LossFn:
    """``sft_loss`` with its settings; travels between processes."""
    return partial(sft_loss, loss_agg_mode=loss_agg_mode)


def entropy_coef(config: PolicyLossConfig, optimizer_step: int, total_optimizer_steps: int | None) -> float:
    """The entropy coefficient: constant, or linear from ``entropy_loss_coef`` (first step) to its end (last step)."""
    if config.entropy_loss_coef_end is None or total_optimizer_steps is None:
        return config.entropy_loss_coef
    done = min(optimizer_step / max(total_optimizer_steps - 1, 1), 1.0)
    return config.entropy_loss_coef + done * (config.entropy_loss_coef_end - config.entropy_loss_coef)


def _live_importance_weights(batch: Batch, tokens: SampledTokens, logprobs_M: Tensor, config: IsWeightConfig) -> Tensor:
    """[M]: truncated importance weights of the policy being trained, with gradient (``detach: false``)."""
    (generated_T,) = require_columns(batch, "train_infer_correction.is_weight", "rollout_logprobs_T")
    levels = _levels(batch, tokens, logprobs_M.device)
    return importance_weights(logprobs_M - tokens.take(generated_T), levels, config)


def _levels(batch: Batch, tokens: SampledTokens, device: torch.device) -> Levels:
    return Levels.of(batch, tokens.token_M.cpu()).to(device)


def _auxiliary_terms(
    scores: TokenScores,
    batch: Batch,
    ctx: LossContext,
    parts: AlgorithmParts,
    tokens: SampledTokens,
    logprobs_M: Tensor,
    total_optimizer_steps: int | None,
) -> list[tuple[str, float, Tensor]]:
    """The terms beside the policy gradient that are switched on: metric name, coefficient, scalar."""
    terms, config = [], parts.policy_loss
    if (kl := parts.kl.loss) is not None:
        kl_M = _kl_to_reference(scores, batch, kl, tokens, logprobs_M)
        terms.append(("actor/kl_loss", kl.coef, tokens.loss(kl_M)))
    if config.sft_loss_coef:
        (scores_B,) = require_columns(batch, "sft_loss_coef", "scores_B")
        positive_M = tokens.take_rows(scores_B > 0)
        terms.append(("actor/sft_loss", config.sft_loss_coef, tokens.loss(-logprobs_M * positive_M)))
    if (teacher := parts.teacher) is not None and teacher.form == "loss":
        divergence_T = require_scores(scores.divergence_T, "opd_form 'loss'", "divergence_T")
        terms.append(("actor/distill_loss", teacher.coefficient, tokens.loss(tokens.take(divergence_T))))
    if coef := entropy_coef(config, ctx.optimizer_step, total_optimizer_steps):
        entropy_T = require_scores(scores.entropy_T, "entropy_loss_coef", "entropy_T")
        terms.append(("actor/entropy_loss", coef, -tokens.loss(tokens.take(entropy_T))))
    return terms


def _kl_to_reference(
    scores: TokenScores, batch: Batch, kl: KlTerm, tokens: SampledTokens, logprobs_M: Tensor
) -> Tensor:
    """[M]: the estimate, or the KL over the vocabulary as the strategy computed it."""
    if kl.penalty == "full":
        return tokens.take(require_scores(scores.kl_T, "kl_penalty 'full' in use_kl_loss", "kl_T"))
    (reference_T,) = require_columns(batch, "use_kl_loss", "ref_logprobs_T")
    return kl_divergence(logprobs_M, tokens.take(reference_T), kl.penalty)
