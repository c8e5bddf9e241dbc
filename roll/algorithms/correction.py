"""The mismatch between the generating and the training engine's log-probs, and its correction.

Axes: B rows, T tokens, M sampled tokens, in batch order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.kl import EXPONENT_BOUND, k3
from roll.algorithms.reductions import sums
from roll.algorithms.types import require_columns, require_finite
from roll.configs.algorithm import (
    AggregationLevel,
    IsWeightConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
)
from roll.data.batch import Batch

MISMATCH_MAX = "mismatch/logprob_diff_max"
MISMATCH = ("mismatch/logprob_diff_mean", MISMATCH_MAX, "mismatch/k3")
"""Metrics of ``mismatch_metrics``."""


@dataclass(frozen=True)
class Levels:
    """Groups of sampled tokens that belong together, by row and by turn; all on one device."""

    row_M: Tensor
    """int64: the row of each token."""
    segment_M: Tensor
    """int64: running number of the turn within its row that each token belongs to; rows do not share any."""

    @classmethod
    def of(cls, batch: Batch, token_M: Tensor) -> Levels:
        """Of the tokens at ``token_M`` (ascending). Without ``turn_T`` a row is one segment."""
        row_M = batch.rows_T[token_M]
        starts_M = torch.ones(len(token_M), dtype=torch.bool)
        starts_M[1:] = row_M[1:] != row_M[:-1]
        if batch.turn_T is not None:
            turn_M = batch.turn_T[token_M]
            starts_M[1:] |= turn_M[1:] != turn_M[:-1]
        return cls(row_M, torch.cumsum(starts_M, 0) - 1)

    def to(self, device: torch.device) -> Levels:
        return Levels(self.row_M.to(device), self.segment_M.to(device))

    def aggregate(self, values_M: Tensor, level: AggregationLevel) -> Tensor:
        """[M]: the value itself, its mean over the segment or the row, or its sum over the row; differentiable."""
        if level == "token":
            return values_M
        index_M = self._units(level)
        count_N = torch.bincount(index_M)
        sum_N = sums(values_M, index_M, len(count_N))
        return sum_N[index_M] if level == "sequence" else (sum_N / count_N.clamp(min=1))[index_M]

    def mean(self, values_M: Tensor, level: AggregationLevel) -> Tensor:
        """Scalar: mean over tokens, segments or rows of values that the tokens of each share."""
        if level == "token":
            return values_M.mean()
        index_M = self._units(level)
        count_N = torch.bincount(index_M)
        return (values_M / count_N[index_M]).sum() / (count_N > 0).sum()

    def _units(self, level: AggregationLevel) -> Tensor:
        return self.segment_M if level == "segment" else self.row_M


def importance_ratio(log_ratio_M: Tensor, levels: Levels, level: AggregationLevel) -> Tensor:
    """[M]: exponential of the aggregated log ratio, which is clamped to [-20, 20] first; differentiable."""
    return levels.aggregate(log_ratio_M, level).clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def importance_weights(log_ratio_M: Tensor, levels: Levels, config: IsWeightConfig) -> Tensor:
    """[M]: truncated importance weights ``min(ratio, upper_bound)`` (Ionides 2008; Yao et al. 2025).

    Args:
        log_ratio_M: log p of the training engine minus that of the generating one.
        config: Reads ``weight_type`` and ``upper_bound``.
    """
    ratio_M = importance_ratio(log_ratio_M, levels, config.weight_type)
    return ratio_M if config.upper_bound is None else ratio_M.clamp(max=config.upper_bound)


def batch_weights(batch: Batch, config: IsWeightConfig) -> tuple[Tensor, Tensor]:
    """float64 [M] each: the importance weights of the sampled tokens, cut, and the same as they count in the loss.

    The latter are divided by their mean with ``batch_normalize``.

    Raises:
        ValueError: log-probabilities are missing or not finite.
    """
    trained_M, generated_M = engine_logprobs(batch, "train_infer_correction.is_weight")
    levels = Levels.of(batch, batch.loss_mask_T.nonzero().squeeze(1))
    cut_M = importance_weights(trained_M - generated_M, levels, config)
    return cut_M, cut_M / levels.mean(cut_M, config.weight_type) if config.batch_normalize else cut_M


def passes_filter(trained_M: Tensor, generated_M: Tensor, levels: Levels, config: TrainInferFilterConfig) -> Tensor:
    """bool [M]: the tokens whose engines agree well enough; both bounds belong to the interval.

    Args:
        trained_M: log p under the training engine.
        generated_M: log p as the generating engine reported it.
        config: Reads all but ``enabled``.
    """
    keep_M = torch.ones(len(trained_M), dtype=torch.bool)
    if config.ratio_enabled:
        ratio_M = importance_ratio(trained_M - generated_M, levels, config.agg_type)
        keep_M &= (ratio_M >= config.ratio_low) & (ratio_M <= config.ratio_high)
    if config.diff_enabled:
        diff_M = levels.aggregate(trained_M.exp() - generated_M.exp(), config.agg_type)
        keep_M &= (diff_M >= config.diff_low) & (diff_M <= config.diff_high)
    if config.whole_rows:
        keep_M = ~torch.isin(levels.row_M, levels.row_M[~keep_M])
    return keep_M


def engine_logprobs(batch: Batch, user: str) -> tuple[Tensor, Tensor]:
    """float64 [M] each: log-probabilities of the sampled tokens under the training and the generating engine.

    Raises:
        ValueError: a column is missing or holds NaN or infinity.
    """
    trained_T, generated_T = require_columns(batch, user, "old_logprobs_T", "rollout_logprobs_T")
    require_finite(batch, "old_logprobs_T", "rollout_logprobs_T")
    return trained_T[batch.loss_mask_T].double(), generated_T[batch.loss_mask_T].double()


def mismatch_of_rows(batch: Batch) -> Tensor | None:
    """``mismatch_BK``, computed where it is not set; ``None`` where one of the two columns is absent.

    Sums of rows, so that it does not matter which rank has which row. NaN where a log-prob is not finite.
    """
    if batch.mismatch_BK is not None:
        return batch.mismatch_BK
    if batch.rollout_logprobs_T is None or batch.old_logprobs_T is None:
        return None
    mask_T, count = batch.loss_mask_T, batch.num_sequences
    row_M = batch.rows_T[mask_T]
    d_M = batch.rollout_logprobs_T[mask_T].double() - batch.old_logprobs_T[mask_T].double()
    most_B = torch.zeros(count, dtype=torch.float64).scatter_reduce(0, row_M, d_M.abs(), "amax")
    return torch.stack([sums(d_M.abs(), row_M, count), most_B, sums(k3(d_M), row_M, count)], 1)


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Differences between ``rollout_logprobs_T`` and ``old_logprobs_T`` over sampled tokens.

    Returns:
        ``mismatch/logprob_diff_mean`` and ``mismatch/logprob_diff_max`` of the absolute difference, and
        ``mismatch/k3``, the estimated KL of the rollout engine's distribution to the training engine's. All are 0 when
        the engines agree; empty when either column is absent or nothing was sampled.
    """
    require_finite(batch, "old_logprobs_T", "rollout_logprobs_T")
    found_BK = mismatch_of_rows(batch)
    num_tokens = int(batch.loss_mask_T.sum())
    if found_BK is None or not num_tokens:
        return {}
    total, largest, kl = found_BK[:, 0].sum(), found_BK[:, 1].max(), found_BK[:, 2].sum()
    return dict(zip(MISMATCH, (float(total / num_tokens), float(largest), float(kl / num_tokens)), strict=True))


def mismatch_by_lag(batch: Batch, version: int, config: TrainInferCorrectionConfig) -> dict[str, float]:
    """Measures how far the policy has moved from the versions that sampled the tokens, and the cost, by their age.

    Args:
        batch: With ``rollout_versions_T``.
        version: Of the weights that ``old_logprobs_T`` come from.
        config: Reads ``is_weight`` and ``filters``.

    Returns:
        For every lag n (steps) of a sampled token: ``async/log_ratio_mean_<n>`` and ``async/log_ratio_max_<n>`` of
        |log p training - log p sampling|; ``async/truncated_<n>``, the share of the tokens whose importance weight was
        cut to ``upper_bound``; ``async/rejected_<n>``, the share that a filter turned down. The latter two where they
        are switched on; nothing without ``old_logprobs_T``, or if nothing was sampled.
    """
    if batch.rollout_versions_T is None or batch.rollout_logprobs_T is None or batch.old_logprobs_T is None:
        return {}
    trained_M, generated_M = engine_logprobs(batch, "mismatch_by_lag")
    token_M = batch.loss_mask_T.nonzero().squeeze(1)
    levels = Levels.of(batch, token_M)
    shares: dict[str, Tensor] = {}
    if config.is_weight.enabled and config.is_weight.upper_bound is not None:
        ratio_M = importance_ratio(trained_M - generated_M, levels, config.is_weight.weight_type)
        shares["truncated"] = ratio_M > config.is_weight.upper_bound
    if filters := [each for each in config.filters if each.enabled]:
        kept = [passes_filter(trained_M, generated_M, levels, each) for each in filters]
        shares["rejected"] = ~torch.stack(kept).all(0)
    distance_M = (trained_M - generated_M).abs()
    lag_M = version - batch.rollout_versions_T[token_M]
    metrics: dict[str, float] = {}
    for lag in lag_M.unique().tolist():
        of_lag_M = lag_M == lag
        metrics[f"async/log_ratio_mean_{lag}"] = float(distance_M[of_lag_M].mean())
        metrics[f"async/log_ratio_max_{lag}"] = float(distance_M[of_lag_M].max())
        metrics |= {f"async/{name}_{lag}": float(share_M[of_lag_M].double().mean()) for name, share_M in shares.items()}
    return metrics


def replay_metrics(batch: Batch) -> dict[str, float]:
    """``router_replay/share``: the part of the tokens that go through experts chosen before, where any do.

    A sequence's last token is not counted: nothing is predicted from it.
    """
    if batch.experts_TE is None:
        return {}
    read_T = batch.positions_T < batch.lengths_B[batch.rows_T] - 1
    return {"router_replay/share": float((batch.experts_TE[read_T] >= 0).float().mean())}
