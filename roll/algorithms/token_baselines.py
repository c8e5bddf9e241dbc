"""Baselines of single tokens: what the group got from a place on, weighted by how large each episode's gradient is.

Axes: M sampled tokens in episode order, J episodes, C cells: the tokens of a group's episodes at the same place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.checks import require_columns, require_finite
from roll.algorithms.correction import batch_weights
from roll.algorithms.episodes import Episodes, reward_to_go
from roll.algorithms.statistics import sums
from roll.configs.algorithm import Estimator
from roll.data.batch import Batch


def optimal_token_baseline(batch: Batch, config: Estimator) -> Batch:
    """Optimal token baseline (Li et al. 2026): ``A_t = G_t - sum(W_t G_t) / sum(W_t)`` over the group's episodes.

    ``G`` is the undiscounted reward-to-go, ``t`` counts the episode's sampled tokens, whatever lies between them.
    ``W_t = sum_{j <= t} w_j² (1 - 2 p_j + sum_v p_j(v)²)`` is the squared norm of the gradient of the sampled tokens'
    log-probabilities with respect to their logits so far, ``w`` the token's importance weight, where there is one.
    Where an episode is the longest of its group its baseline is its own return: 0. A group of one keeps ``G``.
    Needs ``group_B``, ``old_logprobs_T`` and ``prob_square_sum_T``.
    """
    return _with_token_baseline(batch, config, lone_tail=False)


def tir_optimal_token_baseline(batch: Batch, config: Estimator) -> Batch:
    """The form for several turns (tool-integrated reasoning): where an episode is the longest of its group it keeps G.

    Otherwise as ``optimal_token_baseline``.
    """
    return _with_token_baseline(batch, config, lone_tail=True)


def _with_token_baseline(batch: Batch, config: Estimator, *, lone_tail: bool) -> Batch:
    user, names = f"adv_estimator {config.adv_estimator!r}", ("group_B", "old_logprobs_T", "prob_square_sum_T")
    group_B, *_ = require_columns(batch, user, *names)
    require_finite(batch, "old_logprobs_T", "prob_square_sum_T")
    episodes, return_M = reward_to_go(batch)
    weight_M = _so_far(_energies(batch, episodes, config), episodes)
    baseline_M = _baseline(return_M, weight_M, *_cells(episodes, episodes.of_episode(group_B)), lone_tail)
    return episodes.with_estimates(batch, return_M - baseline_M, return_M)


def _energies(batch: Batch, episodes: Episodes, config: Estimator) -> Tensor:
    """[M]: squared norm of the gradient of log p with respect to the logits, ``|1_token - p|²``, weighted."""
    assert batch.old_logprobs_T is not None and batch.prob_square_sum_T is not None
    probability_M = episodes.gather(batch.old_logprobs_T).exp()
    energy_M = (1 - 2 * probability_M + episodes.gather(batch.prob_square_sum_T)).clamp(min=0)
    is_weight = config.train_infer_correction.is_weight
    if is_weight.enabled and is_weight.detach:
        weight_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
        weight_T[batch.loss_mask_T] = batch_weights(batch, is_weight)[1]
        energy_M = energy_M * episodes.gather(weight_T).square()
    return energy_M


def _so_far(values_M: Tensor, episodes: Episodes) -> Tensor:
    """[M]: sums over the episode's tokens up to each."""
    sums_M = torch.cumsum(values_M, 0)
    first_J = episodes.first_K[episodes.first_turn_J]
    return sums_M - (sums_M - values_M)[first_J][episodes.episode_M]


def _cells(episodes: Episodes, group_J: Tensor) -> tuple[Tensor, Tensor]:
    """Running number of each token's cell, and the number of episodes in its group; int64 [M] each."""
    _, index_J, count_G = torch.unique(group_J, return_inverse=True, return_counts=True)
    episode_M = episodes.episode_M
    place_M = torch.arange(episodes.num_tokens) - episodes.first_K[episodes.first_turn_J][episode_M]
    longest = int(place_M.max()) + 1 if len(place_M) else 1
    _, cell_M = torch.unique(index_J[episode_M] * longest + place_M, return_inverse=True)
    return cell_M, count_G[index_J][episode_M]


def _baseline(return_M: Tensor, weight_M: Tensor, cell_M: Tensor, members_M: Tensor, lone_tail: bool) -> Tensor:
    """[M]: weighted mean of the cell's returns, the plain one where all weights are 0; 0 where nobody is to compare."""
    num_cells = int(cell_M.max()) + 1 if len(cell_M) else 0

    def total(values_M: Tensor) -> Tensor:
        return sums(values_M, cell_M, num_cells)

    count_C, weight_C = total(torch.ones_like(return_M)), total(weight_M)
    # Relative to the cell's least: rounding cannot make equal returns differ from their baseline.
    low_C = torch.full((num_cells,), torch.inf, dtype=torch.float64).scatter_reduce_(0, cell_M, return_M, "amin")
    above_M = return_M - low_C[cell_M]
    mean_C = torch.where(weight_C > 0, total(weight_M * above_M) / weight_C, total(above_M) / count_C)
    alone_M = (members_M == 1) | ((count_C[cell_M] == 1) & lone_tail)
    return torch.where(alone_M, 0.0, (low_C + mean_C)[cell_M])
