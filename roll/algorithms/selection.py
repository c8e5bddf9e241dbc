"""What the policy is trained on, and with which weight: masks, rejection, token weights, resampling, pairs.

All of it is decided once per rollout, after the advantages and over the whole batch, so no way of cutting the batch
into optimizer steps, micro-batches or ranks can change it. What is masked leaves ``loss_mask_T`` and with it the loss's
denominators; it was part of the baselines. ``weights_T`` multiplies the policy-gradient term alone and leaves the
denominators. The critic learns from everything.

Axes: B rows, T tokens, M sampled tokens in batch order, J episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.correction import batch_weights, passes_filters, weights_of_ranks
from roll.algorithms.reductions import find_episodes, group_moments, mean
from roll.algorithms.types import require_columns, require_finite
from roll.configs.algorithm import AlgorithmParts, SelectionConfig
from roll.configs.policy_loss import ClipCov, KlCov, PolicyVariant
from roll.data.batch import Batch
from roll.data.stored import Stored

RESAMPLE_EPS = 1e-8
"""Added to the weights that PF-PPO draws rows by, so that they never add up to 0."""


def select_for_policy(batch: Batch, parts: AlgorithmParts, seed: int) -> tuple[Batch, dict[str, float]]:
    """The batch as the policy's loss should see it; the same batch if nothing is switched on.

    Args:
        batch: With ``advantages_T`` and what the chosen options need (their functions say).
        parts: Reads ``selection`` and ``correction``, and the loss where that is ``clip_cov`` or ``kl_cov``.
        seed: Of the draws of ``clip_cov`` and PF-PPO.

    Returns:
        A batch of as many rows with ``loss_mask_T``, ``weights_T`` and ``marked_T``, and metrics: shares of masked,
        rejected, uncounted and marked tokens or rows.

    Raises:
        ValueError: a needed column is missing or not finite.
    """
    require_finite(batch, "advantages_T", "old_logprobs_T", "ref_logprobs_T", "scores_B")  # what the losses read
    generator = torch.Generator().manual_seed(seed)
    config, variant = parts.selection, parts.policy_loss.variant
    weights_T, metrics = _token_weights(batch, parts, variant, generator)
    if parts.policy_loss.loss_name == "kl_cov":
        assert isinstance(variant, KlCov)
        marked_T = torch.zeros_like(batch.loss_mask_T)
        marked_T[batch.loss_mask_T] = largest_covariances(batch, variant)
        metrics["actor/kl_cov_frac"] = mean(marked_T[batch.loss_mask_T])
        batch = batch.replace(marked_T=marked_T)
    rows = None
    if config.use_pf_ppo:
        rows = pf_ppo_rows(batch, config, generator)
        drawn = rows[batch.rows_with_loss]
        metrics["actor/pf_ppo_distinct_frac"] = len(drawn.unique()) / max(len(drawn), 1)
    keep_T, keep_metrics = _kept_tokens(batch, parts)
    batch = batch.replace(weights_T=weights_T).with_loss_mask(batch.loss_mask_T & keep_T)
    metrics |= keep_metrics
    return batch if rows is None else batch.select(rows), metrics


def drop_masked_episodes(batch: Batch, config: SelectionConfig) -> tuple[Batch, dict[str, float]]:
    """With ``mask_type: all``, takes episodes out of the whole step, before reward shaping; else the same batch.

    An episode goes, with all of its rows, if any of them is masked: nothing of it counts as sampled any more, and its
    rewards are 0.
    """
    if config.mask_type != "all":
        return batch, {}
    keep_B, metrics = _kept_rows(batch, config)
    if batch.traj_B is not None:
        names, index_B = torch.unique(batch.traj_B, return_inverse=True)
        lost_J = torch.zeros(len(names), dtype=torch.int64).index_add_(0, index_B, (~keep_B).long())
        keep_B = lost_J[index_B] == 0
    keep_T = keep_B[batch.rows_T]
    metrics["actor/dropped_frac"] = mean(~keep_T[batch.loss_mask_T])
    rewards_T = None if batch.rewards_T is None else batch.rewards_T * keep_T
    return batch.replace(loss_mask_T=batch.loss_mask_T & keep_T, rewards_T=rewards_T), metrics


def _token_weights(
    batch: Batch, parts: AlgorithmParts, variant: PolicyVariant, generator: torch.Generator
) -> tuple[Tensor | Stored | None, dict[str, float]]:
    """Product of all weights that are switched on, float32 [T] (``None`` if none is), and metrics."""
    mask_T, config = batch.loss_mask_T, parts.selection
    metrics: dict[str, float] = {}
    factors: list[Tensor] = []  # float64 [M]
    is_weight = parts.correction.is_weight
    weighs_rows = config.difficulty_loss_weight or config.length_loss_weight
    if is_weight.enabled and is_weight.detach:
        alone = not (weighs_rows or parts.policy_loss.loss_name == "clip_cov")
        if alone and (found := weights_of_ranks(batch, is_weight)):
            metrics |= {
                "mismatch/is_weight_mean": found.mean,
                "mismatch/is_weight_capped_frac": found.capped,
                "actor/weight_mean": found.mean / found.divisor,
            }
            return found.weights_T, metrics
        cut_M, weight_M = batch_weights(batch, is_weight)
        capped_M = cut_M == (torch.inf if is_weight.upper_bound is None else is_weight.upper_bound)
        metrics["mismatch/is_weight_mean"] = mean(cut_M)
        metrics["mismatch/is_weight_capped_frac"] = mean(capped_M)
        factors.append(weight_M)
    if config.difficulty_loss_weight:
        factors.append(difficulty_weights(batch)[batch.rows_T[mask_T]])
    if config.length_loss_weight:
        factors.append(length_weights(batch)[batch.rows_T[mask_T]])
    if parts.policy_loss.loss_name == "clip_cov":
        assert isinstance(variant, ClipCov)
        outlier_M = covariance_outliers(batch, variant, generator)
        metrics["actor/clip_cov_frac"] = mean(outlier_M)
        factors.append((~outlier_M).double())
    if not factors:
        return None, metrics
    weights_T = torch.zeros(batch.num_tokens, dtype=torch.float32)
    weights_T[mask_T] = torch.stack(factors).prod(0).float()
    metrics["actor/weight_mean"] = mean(weights_T[mask_T])
    return weights_T, metrics


def _kept_tokens(batch: Batch, parts: AlgorithmParts) -> tuple[Tensor, dict[str, float]]:
    """bool [T], True where nothing was sampled; and the share of sampled tokens that each kind of mask takes out."""
    mask_T, metrics, config = batch.loss_mask_T, {}, parts.selection
    keep_T = torch.ones_like(mask_T)
    if filters := parts.correction.enabled_filters:
        keep_M = passes_filters(batch, filters, "train_infer_correction.filters")
        metrics["mismatch/rejected_frac"] = mean(~keep_M)
        keep_T[mask_T] = keep_M
    if config.mask_type == "loss":
        keep_B, row_metrics = _kept_rows(batch, config)
        keep_T &= keep_B[batch.rows_T]
        metrics |= row_metrics
    return keep_T, metrics


def _kept_rows(batch: Batch, config: SelectionConfig) -> tuple[Tensor, dict[str, float]]:
    """bool [B]: the samples that no mask takes out; and the share of sampled tokens that each kind of mask does."""
    mask_T, metrics = batch.loss_mask_T, {}
    all_keep_B = torch.ones(batch.num_sequences, dtype=torch.bool)
    for name, is_on, kept_rows in (
        ("max_len", config.max_len_mask, rows_not_cut_off),
        ("difficulty", config.difficulty_mask, rows_of_medium_difficulty),
        ("error_max_len", config.error_max_len_clip, rows_without_long_errors),
    ):
        if is_on:
            keep_B = kept_rows(batch, config)
            metrics[f"actor/{name}_masked_frac"] = mean(~keep_B[batch.rows_T][mask_T])
            all_keep_B &= keep_B
    return all_keep_B, metrics


def difficulty_weights(batch: Batch) -> Tensor:
    """float64 [B]: 0.5 for the easiest group of the batch to 1.5 for the hardest, linear in the group's mean score.

    1 where all groups score the same. Needs ``group_B`` and ``scores_B``.
    """
    mean_B = group_scores(batch, "difficulty_loss_weight")
    return 1.5 - _position(mean_B, mean_B.isfinite())


def length_weights(batch: Batch) -> Tensor:
    """float64 [B]: 1.5 for the row with the fewest sampled tokens to 0.5 for that with the most; 1 if all are equal."""
    length_B = _sampled_lengths(batch)
    return 1.5 - _position(length_B, length_B > 0)


def rows_not_cut_off(batch: Batch, config: SelectionConfig) -> Tensor:
    """bool [B]: rows that ended by themselves, not at a length limit (DAPO's overlong filtering, Yu et al. 2025).

    Needs ``truncated_B``.
    """
    (truncated_B,) = require_columns(batch, "max_len_mask", "truncated_B")
    return ~truncated_B


def rows_of_medium_difficulty(batch: Batch, config: SelectionConfig) -> Tensor:
    """bool [B]: rows whose group's mean score lies strictly between ``difficulty_low_threshold`` and ``…_high_…``.

    At or below the low one a group is too hard to learn from, at or above the high one too easy. Needs ``group_B`` and
    ``scores_B``.
    """
    mean_B = group_scores(batch, "difficulty_mask")
    return (mean_B > config.difficulty_low_threshold) & (mean_B < config.difficulty_high_threshold)


def rows_without_long_errors(batch: Batch, config: SelectionConfig) -> Tensor:
    """bool [B]: all rows but those of failed episodes (score at most 0) that are longer than allowed.

    Length counts the row's sampled tokens, the limit is ``error_max_len_threshold``. Needs ``scores_B``.
    """
    (scores_B,) = require_columns(batch, "error_max_len_clip", "scores_B")
    return (scores_B > 0) | (_sampled_lengths(batch) <= config.error_max_len_threshold)


def covariance_outliers(batch: Batch, config: ClipCov, generator: torch.Generator) -> Tensor:
    """bool [M]: the tokens that Clip-Cov takes out of the policy gradient (Cui et al. 2025).

    ``max(1, floor(clip_cov_ratio * M))`` tokens, drawn from those with ``clip_cov_lb < cov < clip_cov_ub``, where
    ``cov = (A - mean A) * (log p - mean log p)`` over the sampled tokens of the rollout and p is the policy before the
    update (``old_logprobs_T``, else ``rollout_logprobs_T``).
    """
    covariance_M = _covariances(batch, "clip_cov")
    outlier_M = torch.zeros(len(covariance_M), dtype=torch.bool)
    if len(covariance_M) == 0:
        return outlier_M
    candidates = ((covariance_M > config.clip_cov_lb) & (covariance_M < config.clip_cov_ub)).nonzero().squeeze(1)
    wanted = max(1, int(config.clip_cov_ratio * len(covariance_M)))
    outlier_M[candidates[torch.randperm(len(candidates), generator=generator)[:wanted]]] = True
    return outlier_M


def largest_covariances(batch: Batch, config: KlCov) -> Tensor:
    """bool [M]: the ``max(1, floor(kl_cov_ratio * M))`` tokens of the largest covariance (KL-Cov, Cui et al. 2025).

    The covariance is that of ``covariance_outliers``.
    """
    covariance_M = _covariances(batch, "kl_cov")
    largest_M = torch.zeros(len(covariance_M), dtype=torch.bool)
    if len(covariance_M):
        largest_M[covariance_M.topk(max(1, int(config.kl_cov_ratio * len(covariance_M)))).indices] = True
    return largest_M


def _covariances(batch: Batch, variant: str) -> Tensor:
    """float64 [M]: ``(A - mean A) * (log p - mean log p)`` of the policy before the update."""
    column = "rollout_logprobs_T" if batch.old_logprobs_T is None else "old_logprobs_T"
    columns = require_columns(batch, f"pg_variant {variant!r}", "advantages_T", column)
    require_finite(batch, "advantages_T", column)
    advantage_M, logprobs_M = (column_T[batch.loss_mask_T].double() for column_T in columns)
    return (advantage_M - advantage_M.mean()) * (logprobs_M - logprobs_M.mean())


def pf_ppo_rows(batch: Batch, config: SelectionConfig, generator: torch.Generator) -> Tensor:
    """int64 [B]: rows drawn with replacement by what their score is worth (PF-PPO, Shen and Zhang 2024).

    The weight of score s is ``|s| ** weight_pow`` (``pow``), 1 for the batch's highest and lowest scores and else 0
    (``max_min``), or 0.4 for the highest and else 0.1 (``max_random``); 1e-8 is added to each. Rows without sampled
    tokens, which ``drop_masked_episodes`` leaves, stay where they are and are not drawn. Needs ``scores_B``.
    """
    (scores_B,) = require_columns(batch, "use_pf_ppo", "scores_B")
    require_finite(batch, "scores_B")
    rows = torch.arange(batch.num_sequences)
    drawn = batch.rows_with_loss  # R: some of the rows
    score_R = scores_B[drawn].double()
    if len(drawn) == 0:
        return rows
    highest_R, lowest_R = score_R == score_R.max(), score_R == score_R.min()
    if config.pf_ppo.reweight_method == "pow":
        weight_R = score_R.abs() ** config.pf_ppo.weight_pow
    elif config.pf_ppo.reweight_method == "max_min":
        weight_R = (highest_R | lowest_R).double()
    else:
        weight_R = torch.where(highest_R, 0.4, 0.1).double()
    choice_R = torch.multinomial(weight_R + RESAMPLE_EPS, len(drawn), replacement=True, generator=generator)
    rows[drawn] = drawn[choice_R]
    return rows


def group_scores(batch: Batch, user: str) -> Tensor:
    """float64 [B]: mean score of the episodes in each row's group, each once; NaN where none has a sampled token."""
    group_B, scores_B = require_columns(batch, user, "group_B", "scores_B")
    require_finite(batch, "scores_B")
    episodes = find_episodes(batch)
    mean_J, _, _ = group_moments(episodes.of_episode(scores_B), group_J := episodes.of_episode(group_B))
    names, number_B = torch.unique(group_B, return_inverse=True)
    mean_G = torch.full((len(names),), torch.nan, dtype=torch.float64)
    mean_G[torch.searchsorted(names, group_J)] = mean_J
    return mean_G[number_B]


def _sampled_lengths(batch: Batch) -> Tensor:
    """float64 [B]: sampled tokens per row."""
    return batch.loss_tokens_B.double()


def _position(values_B: Tensor, counts_B: Tensor) -> Tensor:
    """Place of each value between the least (0) and the greatest (1) of those that count; 0.5 if all are equal."""
    counted = values_B[counts_B]
    if len(counted) == 0 or counted.max() == counted.min():
        return torch.full_like(values_B, 0.5)
    return (values_B - counted.min()) / (counted.max() - counted.min())


def best_and_worst(batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The answers with the highest and the lowest score of each group, as pairs (online DPO).

    Guo et al. 2024, *Direct Language Model Alignment from Online AI Feedback*; best and worst of more than two: Dong et
    al. 2024, *RLHF Workflow: From Reward Modeling to Online RLHF*.

    Of equal scores the first row counts as the best and the last as the worst. A group whose scores are all equal, or
    whose two answers are the same tokens, has nothing to tell: its loss mask and its rewards are 0.

    Args:
        batch: Answers, a row each, with ``group_B`` and ``scores_B``.

    Returns:
        A batch with ``pair_B`` and ``preferred_B``, the better row first, groups in ascending order; and metrics:
        ``dpo/pair_frac``, the share of pairs that have something to tell, ``dpo/score_gap``, the mean difference of
        scores in all.

    Raises:
        ValueError: a column is missing or not finite, or no group has two answers.
    """
    group_B, scores_B = require_columns(batch, "online_dpo", "group_B", "scores_B")
    require_finite(batch, "scores_B")
    pairs = []
    for group in group_B.unique():
        rows = (group_B == group).nonzero().squeeze(1)
        if len(rows) > 1:
            ranked = rows[scores_B[rows].argsort(descending=True, stable=True)]
            pairs.append(ranked[[0, -1]])
    if not pairs:
        raise ValueError(f"online_dpo: got {batch.num_sequences} rows, expected a group with at least two responses")
    found = batch.select(torch.cat(pairs))
    preferred_B = torch.arange(found.num_sequences) % 2 == 0
    found = found.replace(pair_B=torch.arange(found.num_sequences) // 2, preferred_B=preferred_B)
    assert found.scores_B is not None
    gap_P = found.scores_B[0::2] - found.scores_B[1::2]
    tells_P = (gap_P > 0) & torch.tensor([not _same(found, row) for row in range(0, found.num_sequences, 2)])
    tells_T = tells_P[found.rows_T // 2]
    rewards_T = None if found.rewards_T is None else found.rewards_T * tells_T  # none on tokens that do not count
    found = found.replace(loss_mask_T=found.loss_mask_T & tells_T, rewards_T=rewards_T)
    return found, {"dpo/pair_frac": float(tells_P.double().mean()), "dpo/score_gap": float(gap_P.double().mean())}


def informative_pairs(batch: Batch) -> Tensor:
    """int64 [pairs, 2]: the rows of each pair that has something to tell, see ``best_and_worst``."""
    pairs_P2 = batch.samples
    return pairs_P2[(batch.loss_tokens_B[pairs_P2] > 0).all(1)]


def _same(batch: Batch, row: int) -> bool:
    """Tells whether a row and the next have the same tokens."""
    first, second = (batch.tokens_T[batch.token_index([number])] for number in (row, row + 1))
    return torch.equal(first, second)
