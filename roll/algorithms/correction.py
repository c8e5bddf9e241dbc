"""The mismatch between the generating and the training engine's log-probs, and its correction.

Axes: B rows, T tokens, M sampled tokens, in batch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from roll.algorithms.kl import EXPONENT_BOUND, k3
from roll.algorithms.reductions import mean, sums
from roll.algorithms.types import require_columns, require_finite
from roll.configs.algorithm import (
    AggregationLevel,
    IsWeightConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
)
from roll.data.batch import Batch
from roll.data.stored import Stored, scaled

MISMATCH_MAX = "mismatch/logprob_diff_max"
MISMATCH = ("mismatch/logprob_diff_mean", MISMATCH_MAX, "mismatch/k3")
"""Metrics of ``mismatch_metrics``."""


class Compared(IntEnum):
    """What K counts in ``mismatch_BVK``: figures of sampled tokens of a row that one version has sampled."""

    VERSION = 0
    """0 without ``rollout_versions_T``."""
    TOKENS = 1
    GAPS = 2
    """Sum of |log p training - log p sampling|."""
    LARGEST_GAP = 3
    KL = 4
    """Sum of the estimated KL."""
    WEIGHTS = 5
    """Sum of the importance weights, cut to ``upper_bound``; from here on only where weights are on."""
    AT_BOUND = 6
    """Tokens whose weight is ``upper_bound`` after cutting."""
    ABOVE_BOUND = 7
    """Tokens whose weight was larger before."""
    UNIT_WEIGHTS = 8
    """Sum of the weights, each token, turn or row that has one of its own once; from here on only where weights are to
    be divided by their mean."""
    UNITS = 9
    """Number of these; of one that several versions have sampled each has its part."""


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
        return (values_M / self.sizes(level)).sum() / (torch.bincount(self._units(level)) > 0).sum()

    def sizes(self, level: AggregationLevel) -> Tensor:
        """int64 [M]: tokens that share a value with each token."""
        if level == "token":
            return torch.ones_like(self.row_M)
        index_M = self._units(level)
        return torch.bincount(index_M)[index_M]

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


def passes_filters(batch: Batch, filters: Sequence[TrainInferFilterConfig], user: str) -> Tensor:
    """bool [M]: the sampled tokens that all of the filters pass, as the ranks have found if they were asked.

    Raises:
        ValueError: as ``engine_logprobs``.
    """
    if batch.rejected_T is not None and _scored_by_ranks(batch) is not None:
        require_finite(batch, "old_logprobs_T", "rollout_logprobs_T")
        return ~batch.rejected_T[batch.loss_mask_T]
    engines = engine_logprobs(batch, user)
    levels = Levels.of(batch, batch.loss_mask_T.nonzero().squeeze(1))
    return torch.stack([passes_filter(*engines, levels, each) for each in filters]).all(0)


def engine_logprobs(batch: Batch, user: str) -> tuple[Tensor, Tensor]:
    """float64 [M] each: log-probabilities of the sampled tokens under the training and the generating engine.

    Raises:
        ValueError: a column is missing or holds NaN or infinity.
    """
    trained_T, generated_T = require_columns(batch, user, "old_logprobs_T", "rollout_logprobs_T")
    require_finite(batch, "old_logprobs_T", "rollout_logprobs_T")
    return trained_T[batch.loss_mask_T].double(), generated_T[batch.loss_mask_T].double()


def compared(batch: Batch, config: TrainInferCorrectionConfig | None = None) -> Batch:
    """The batch with ``mismatch_BVK``, where weights are on ``importance_T``, and where filters are ``rejected_T``.

    The same batch where either of the log-probs is missing. Nothing of a row depends on another, so it does not matter
    which rank has which. V counts the runs of a row's sampled tokens that one version has sampled, in their order, K
    their figures (``Compared``). Rows of fewer runs than others have runs of 0 tokens behind. NaN where a log-prob is
    not finite.
    """
    if batch.rollout_logprobs_T is None or batch.old_logprobs_T is None:
        return batch
    mask_T, versions_T = batch.loss_mask_T, batch.rollout_versions_T
    row_M = batch.rows_T[mask_T]
    version_M = torch.zeros_like(row_M) if versions_T is None else versions_T[mask_T]
    starts_M = torch.ones(len(row_M), dtype=torch.bool)
    starts_M[1:] = (row_M[1:] != row_M[:-1]) | (version_M[1:] != version_M[:-1])
    run_M = torch.cumsum(starts_M, 0) - 1
    row_N = row_M[starts_M]  # N: runs
    count = len(row_N)
    place_N = torch.arange(count) - torch.searchsorted(row_N, row_N)
    d_M = batch.rollout_logprobs_T[mask_T].double() - batch.old_logprobs_T[mask_T].double()
    most_N = torch.zeros(count, dtype=torch.float64).scatter_reduce(0, run_M, d_M.abs(), "amax")
    figures = [version_M[starts_M].double(), _counts(run_M, count), sums(d_M.abs(), run_M, count), most_N]
    figures.append(sums(k3(d_M), run_M, count))
    importance_T = rejected_T = None
    is_weight = None if config is None else config.is_weight
    levels = Levels.of(batch, mask_T.nonzero().squeeze(1))
    if is_weight is not None and is_weight.enabled:
        bound = torch.inf if is_weight.upper_bound is None else is_weight.upper_bound
        ratio_M = importance_ratio(-d_M, levels, is_weight.weight_type)
        cut_M = ratio_M.clamp(max=bound)
        importance_T = torch.zeros(batch.num_tokens, dtype=torch.float32)
        importance_T[mask_T] = cut_M.float()
        figures += [sums(cut_M, run_M, count), _counts(run_M[cut_M == bound], count)]
        figures.append(_counts(run_M[ratio_M > bound], count))
        if is_weight.batch_normalize:
            share_M = 1 / levels.sizes(is_weight.weight_type).double()
            figures += [sums(cut_M * share_M, run_M, count), sums(share_M, run_M, count)]
    if config is not None and (filters := config.enabled_filters):
        engines = batch.old_logprobs_T[mask_T].double(), batch.rollout_logprobs_T[mask_T].double()
        rejected_T = torch.zeros_like(mask_T)
        rejected_T[mask_T] = ~torch.stack([passes_filter(*engines, levels, each) for each in filters]).all(0)
    most = int(place_N.max()) + 1 if count else 1
    found_BVK = torch.zeros(batch.num_sequences, most, len(figures), dtype=torch.float64)
    found_BVK[row_N, place_N] = torch.stack(figures, 1)
    return batch.replace(mismatch_BVK=found_BVK, importance_T=importance_T, rejected_T=rejected_T)


def _counts(index_M: Tensor, size: int) -> Tensor:
    return torch.bincount(index_M, minlength=size).double()


def mismatch_of_rows(batch: Batch) -> Tensor | None:
    """``mismatch_BVK``, computed where it is not set; ``None`` where one of the two columns is absent."""
    return compared(batch).mismatch_BVK if batch.mismatch_BVK is None else batch.mismatch_BVK


def _scored_by_ranks(batch: Batch) -> Tensor | None:
    """float64 [K]: figures of the sampled tokens; ``None`` where rows were not scored, or a token was masked since."""
    if batch.mismatch_BVK is None:
        return None
    totals_K = batch.mismatch_BVK.sum(1)[batch.rows_with_loss].sum(0)
    num_tokens = int(batch.loss_mask_T.sum())
    return totals_K if num_tokens and int(totals_K[Compared.TOKENS]) == num_tokens else None


@dataclass(frozen=True)
class RankWeights:
    """Importance weights that ranks have computed."""

    weights_T: Tensor | Stored
    """As they count in the loss."""
    mean: float
    """Of the sampled tokens, before a division by a mean."""
    capped: float
    """Share of the sampled tokens with the weight ``upper_bound``."""
    divisor: float
    """1, or the mean that ``weights_T`` are divided by."""


def weights_of_ranks(batch: Batch, config: IsWeightConfig) -> RankWeights | None:
    """``importance_T``, if those are the weights of the sampled tokens; else ``None``, and they are computed."""
    importance_T, totals_K = vars(batch)["importance_T"], _scored_by_ranks(batch)
    if importance_T is None or totals_K is None:
        return None
    mean, capped = (float(totals_K[each] / totals_K[Compared.TOKENS]) for each in (Compared.WEIGHTS, Compared.AT_BOUND))
    divisor = float(totals_K[Compared.UNIT_WEIGHTS] / totals_K[Compared.UNITS]) if config.batch_normalize else 1.0
    return RankWeights(scaled(importance_T, 1 / divisor), mean, capped, divisor)


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Differences between ``rollout_logprobs_T`` and ``old_logprobs_T`` over sampled tokens.

    Returns:
        ``mismatch/logprob_diff_mean`` and ``mismatch/logprob_diff_max`` of the absolute difference, and
        ``mismatch/k3``, the estimated KL of the rollout engine's distribution to the training engine's. All are 0 when
        the engines agree; empty when either column is absent or nothing was sampled.
    """
    require_finite(batch, "old_logprobs_T", "rollout_logprobs_T")
    found_BVK = mismatch_of_rows(batch)
    num_tokens = int(batch.loss_mask_T.sum())
    if found_BVK is None or not num_tokens:
        return {}
    total, kl = (found_BVK[:, :, figure].sum() for figure in (Compared.GAPS, Compared.KL))
    largest = found_BVK[:, :, Compared.LARGEST_GAP].max()
    figures = float(total / num_tokens), float(largest), float(kl / num_tokens)
    return dict(zip(MISMATCH, figures, strict=True))


def mismatch_by_lag(batch: Batch, version: int, config: TrainInferCorrectionConfig) -> dict[str, float]:
    """Measures how far the policy has moved from the versions that sampled the tokens, and the cost, by their age.

    Args:
        batch: With ``rollout_versions_T``, which ``mismatch_BVK`` was computed with if it is set.
        version: Of the weights that ``old_logprobs_T`` come from.
        config: Reads ``is_weight`` and ``filters``.

    Returns:
        For every lag n (steps) of a sampled token: ``async/log_ratio_mean_<n>`` and ``async/log_ratio_max_<n>`` of
        |log p training - log p sampling|; ``async/truncated_<n>``, the share of the tokens whose importance weight was
        cut to ``upper_bound``; ``async/rejected_<n>``, the share that a filter turned down. The latter two where they
        are switched on; nothing without ``old_logprobs_T``, or if nothing was sampled. All but ``rejected`` are sums of
        ``compared``, and log-probs are not read for them.
    """
    require_finite(batch, "old_logprobs_T", "rollout_logprobs_T")
    if (versions_T := batch.rollout_versions_T) is None:
        return {}
    is_weight, filters = config.is_weight, config.enabled_filters
    if batch.mismatch_BVK is None or (is_weight.enabled and batch.mismatch_BVK.shape[2] <= Compared.ABOVE_BOUND):
        batch = compared(batch, config)
    if (found_BVK := batch.mismatch_BVK) is None:
        return {}
    runs_NK = found_BVK[found_BVK[:, :, Compared.TOKENS] > 0]
    lag_N, lag_M = version - runs_NK[:, Compared.VERSION].long(), torch.empty(0)
    rejected_M = None
    if filters:
        lag_M = version - versions_T[batch.loss_mask_T]
        rejected_M = ~passes_filters(batch, filters, "mismatch_by_lag")
    metrics: dict[str, float] = {}
    for lag in lag_N.unique().tolist():
        of_lag_NK = runs_NK[lag_N == lag]
        totals = of_lag_NK.sum(0).tolist()
        metrics[f"async/log_ratio_mean_{lag}"] = totals[Compared.GAPS] / totals[Compared.TOKENS]
        metrics[f"async/log_ratio_max_{lag}"] = float(of_lag_NK[:, Compared.LARGEST_GAP].max())
        if is_weight.enabled and is_weight.upper_bound is not None:
            metrics[f"async/truncated_{lag}"] = totals[Compared.ABOVE_BOUND] / totals[Compared.TOKENS]
        if rejected_M is not None:
            metrics[f"async/rejected_{lag}"] = mean(rejected_M[lag_M == lag])
    return metrics


def replay_metrics(batch: Batch) -> dict[str, float]:
    """``router_replay/share``: the part of the tokens that go through experts chosen before.

    A sequence's last token is not counted: nothing is predicted from it.
    """
    experts = vars(batch)["experts_TE"]
    if isinstance(experts, Stored) and experts.sums_B is not None:
        entries = int((batch.lengths_B - 1).sum()) * experts.width[0]
        return {"router_replay/share": float(experts.sums_B.sum()) / max(1, entries)}
    read_T = batch.positions_T < batch.lengths_B[batch.rows_T] - 1
    return {"router_replay/share": mean((experts[read_T] >= 0).flatten())}
