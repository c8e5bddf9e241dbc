"""Advantage estimators: rewards (and values) in, ``advantages_T`` and ``returns_T`` out.

An estimator is a function ``(batch, config) -> batch`` in ``ADVANTAGES``, or anybody's by ``package.module:function``;
``config`` holds the keys of this estimator, and all keys for a function of the user's own. Scores of episodes are sums
of ``rewards_T``, one per episode, however many rows or tokens it has: a long episode weighs a group's mean no more than
a short one.

Axes: B rows, T tokens, M sampled tokens in episode order, K turns, J episodes, N tokens or turns, C cells (the tokens
of a group's episodes at the same place).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.correction import batch_weights
from roll.algorithms.reductions import (
    STD_EPS,
    Episodes,
    find_episodes,
    group_mean,
    group_moments,
    group_normalised,
    reverse_recurrence,
    reward_to_go,
    sums,
    turn_rewards,
    whiten,
)
from roll.algorithms.types import require_columns, require_finite, require_rewards
from roll.configs.algorithm import AdvantageConfig, Estimator, Gae, Gdpo, Grpo, OfStates
from roll.data.batch import Batch
from roll.utils.foreign import describe_fault
from roll.utils.registry import Registry


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


def gae(batch: Batch, config: Gae) -> Batch:
    """Generalised advantage estimation (Schulman et al. 2016) with a critic; returns are advantage + value.

    Over tokens: the next state is that of the next sampled token of the episode, in whichever turn or row, so ``gamma``
    and ``lambd`` count sampled tokens only. With ``turn_level_gae``, over turns: see ``_turn_gae``. Needs ``values_T``.
    """
    require_columns(batch, "adv_estimator 'gae'", "values_T")
    if config.turn_level_gae:
        return _turn_gae(batch, config)
    assert batch.rewards_T is not None and batch.values_T is not None
    episodes = find_episodes(batch)
    value_M = episodes.gather(batch.values_T)
    rewards_M = episodes.gather(batch.rewards_T)
    advantage_M = _gae(rewards_M, value_M, episodes.last_token_J, config.gamma, config.lambd)
    return episodes.with_estimates(batch, advantage_M, advantage_M + value_M)


def _turn_gae(batch: Batch, config: Gae) -> Batch:
    """GAE with turns as steps: V at a turn's first sampled token, discount ``step_reward_gamma``.

    All tokens of a turn share its advantage; the value target stands on the first alone (``value_mask``).
    """
    assert batch.values_T is not None
    episodes, reward_K = turn_rewards(batch)
    value_K = episodes.gather(batch.values_T)[episodes.first_K]
    advantage_K = _gae(reward_K, value_K, episodes.last_turn_J, config.step_reward_gamma, config.lambd)
    target_M = torch.zeros(episodes.num_tokens, dtype=torch.float64)
    target_M[episodes.first_K] = advantage_K + value_K
    return episodes.with_estimates(batch, advantage_K[episodes.turn_M], target_M)


def value_mask(batch: Batch, config: AdvantageConfig) -> Tensor:
    """bool [T]: the tokens whose value the critic learns (all sampled ones, or each turn's first).

    The critic's train step should be given ``batch.with_loss_mask(value_mask(batch, config))``, so that the
    engine's counts are those of the value loss.
    """
    if not config.turn_level_gae:
        return batch.loss_mask_T
    episodes = find_episodes(batch)
    mask_T = torch.zeros_like(batch.loss_mask_T)
    mask_T[episodes.token_M[episodes.first_K]] = True
    return mask_T


def _gae(reward_N: Tensor, value_N: Tensor, ends_J: Tensor, gamma: float, lambd: float) -> Tensor:
    """A = delta + gamma lambda A', delta = r + gamma V' - V; the primed (next) values are 0 at the steps ``ends_J``."""
    delta_N = value_N.roll(-1)  # the next value, and in place from here on: fresh memory costs more than the arithmetic
    delta_N[ends_J] = 0.0
    delta_N.mul_(gamma).add_(reward_N).sub_(value_N)
    carry_N = torch.full_like(value_N, gamma * lambd)
    carry_N[ends_J] = 0.0
    return reverse_recurrence(delta_N, carry_N)


AdvantageFn: TypeAlias = Callable[[Batch, Any], Batch]

ADVANTAGES: Registry[AdvantageFn] = Registry("advantage estimator")


def compute_advantages(batch: Batch, config: AdvantageConfig) -> Batch:
    """Sets ``advantages_T`` and ``returns_T``: estimate, whiten, clip.

    Whitening takes its mean and variance over all sampled tokens of the batch, also where the tokens of a turn share
    one advantage, so that the loss of a token-mean is what has mean 0.

    Args:
        batch: With ``rewards_T`` and what the estimator needs (its docstring says).

    Raises:
        ValueError: a needed column is missing, holds NaN or infinity, or has rewards on tokens that were not sampled.
    """
    user = f"adv_estimator {config.adv_estimator!r}"
    estimator = ADVANTAGES.get(config.adv_estimator)
    require_rewards(batch, user)
    require_finite(batch, "values_T")
    batch = (
        _foreign(estimator, batch, config, user) if ":" in config.adv_estimator else estimator(batch, config.estimator)
    )
    estimated_T, _ = require_columns(batch, "the step after " + user, "advantages_T", "returns_T")
    require_finite(batch, "advantages_T", "returns_T")
    advantages_T = estimated_T.clone()
    if config.whiten_advantages:
        advantages_T[batch.loss_mask_T] = whiten(advantages_T[batch.loss_mask_T].double()).float()
    if config.advantage_clip is not None:
        advantages_T.clamp_(-config.advantage_clip, config.advantage_clip)
    # A foreign estimator may have left something outside the mask.
    return batch.replace(advantages_T=advantages_T.masked_fill_(~batch.loss_mask_T, 0.0))


def _foreign(estimator: AdvantageFn, batch: Batch, config: AdvantageConfig, user: str) -> Batch:
    """What a user's function returns; raises ``ValueError``, with the line, for whatever it raises or returns else."""
    try:
        found: object = estimator(batch, config.estimator)
    except Exception as error:
        raise ValueError(f"{user} raised {describe_fault(error)}") from error
    expected = "expected the batch with float32 advantages_T and returns_T: batch.replace(advantages_T=…, returns_T=…)"
    if not isinstance(found, Batch):
        raise ValueError(f"{user} returned {type(found).__name__}, {expected}")
    for name in ("advantages_T", "returns_T"):
        column = getattr(found, name)
        if column is not None and column.dtype != torch.float32:
            raise ValueError(f"{user} returned {name} of {column.dtype}, {expected}")
    return found


def grpo(batch: Batch, config: Grpo) -> Batch:
    """Group-relative scores ``(R - mean) / (std + 1e-6)``, the same for all tokens of an episode (Shao et al. 2024).

    The standard deviation is unbiased. A group of one has mean 0 and standard deviation 1. Without
    ``norm_adv_by_std_in_grpo`` nothing is divided by (Dr. GRPO, Liu et al. 2025). Needs ``group_B``.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    if config.norm_adv_by_std_in_grpo:
        advantage_J = group_normalised(score_J, group_J)
    else:
        advantage_J = score_J - group_mean(score_J, group_J)
    return _with_scores(batch, episodes, advantage_J, score_J)


def grpo_passk(batch: Batch, config: Grpo) -> Batch:
    """Only the group's best episode learns, by its lead over the second best (Tang et al. 2025).

    ``(R_best - R_second) / (std + 1e-6)``, undivided without ``norm_adv_by_std_in_grpo``; 0 when two share the first
    place. An episode alone in its group leads over 0 and is divided by 1 + 1e-6. Needs ``group_B``.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    _, std_J, count_J = group_moments(score_J, group_J)
    order = torch.from_numpy(np.lexsort((-score_J.numpy(), group_J.numpy())))  # groups together, best first
    ranked_J, in_order_J = score_J[order], group_J[order]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = in_order_J[1:] != in_order_J[:-1]
    has_second = count_J[order] > 1
    second_J = torch.where(has_second, ranked_J.roll(-1), torch.zeros_like(ranked_J))
    advantage_J = torch.zeros_like(score_J)
    advantage_J[order] = torch.where(first, ranked_J - second_J, torch.zeros_like(ranked_J))
    if config.norm_adv_by_std_in_grpo:
        advantage_J = advantage_J / (torch.where(count_J > 1, std_J, torch.ones_like(std_J)) + STD_EPS)
    return _with_scores(batch, episodes, advantage_J, score_J)


def rloo(batch: Batch, config: Estimator) -> Batch:
    """Scores against the mean of the group's *other* episodes (Kool et al. 2019; Ahmadian et al. 2024).

    ``(n R - sum of the group's R) / (n - 1)``; a group of one keeps its score. Needs ``group_B``.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    _, _, count_J = group_moments(score_J, group_J)
    # The mean is taken out first, so that equal scores give exactly 0.
    advantage_J = (score_J - group_mean(score_J, group_J)) * count_J / (count_J - 1).clamp(min=1)
    return _with_scores(batch, episodes, advantage_J, score_J)


def opo(batch: Batch, config: Estimator) -> Batch:
    """Scores against the length-weighted mean of the group, the baseline of least variance (Hao et al. 2025).

    ``R - sum(length * R) / sum(length)`` with lengths in sampled tokens; a group of one keeps its score. Needs
    ``group_B``.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    _, member_J, count_J = torch.unique(group_J, return_inverse=True, return_counts=True)
    length_J = episodes.sum_episodes((episodes.last_K - episodes.first_K + 1).double())
    mean_J, _, _ = group_moments(score_J, group_J)

    def total(values_J: Tensor) -> Tensor:
        return sums(values_J, member_J, len(count_J))[member_J]

    # Sums relative to the plain mean: rounding cannot make equal scores differ from their baseline.
    baseline_J = mean_J + total(length_J * (score_J - mean_J)) / total(length_J)
    baseline_J = torch.where(count_J[member_J] == 1, torch.zeros_like(baseline_J), baseline_J)
    return _with_scores(batch, episodes, score_J - baseline_J, score_J)


def gpg(batch: Batch, config: Estimator) -> Batch:
    """Group policy gradient (Chu et al. 2025): ``(episodes / episodes with R != 0) * (R - mean)``.

    The factor, one for the batch, makes up for episodes whose score of 0 says nothing. A group of one has mean 0.
    Needs ``group_B``.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    scale = len(score_J) / max(int(torch.count_nonzero(score_J)), 1)
    return _with_scores(batch, episodes, scale * (score_J - group_mean(score_J, group_J)), score_J)


def maxrl(batch: Batch, config: Estimator) -> Batch:
    """Maximum likelihood RL (Tajwar et al. 2026): ``(R - mean) / mean``, which weighs rare successes more.

    For scores of 0 and 1 the gradient is that of the log-likelihood of success, truncated at the order of the group's
    size. A group without success has 0; a group of one keeps its score, which is plain policy gradient. Needs
    ``group_B``.

    Raises:
        ValueError: a score is below 0, where this is no likelihood.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    if (least := min(score_J.tolist(), default=0.0)) < 0:
        raise ValueError(
            f"adv_estimator 'maxrl': got an episode whose rewards sum to {least:g}, expected 0 or more: no penalties, "
            "and no KL in the reward"
        )
    mean_J, _, count_J = group_moments(score_J, group_J)
    lead_J = score_J - group_mean(score_J, group_J)
    relative_J = torch.where(mean_J > 0, lead_J / mean_J, torch.zeros_like(score_J))
    return _with_scores(batch, episodes, torch.where(count_J > 1, relative_J, score_J), score_J)


def reinforce(batch: Batch, config: Estimator) -> Batch:
    """Discounted reward-to-go: by ``gamma`` from token to token, by ``step_reward_gamma`` from turn to turn."""
    episodes, returns_M = reward_to_go(batch, config.gamma, config.step_reward_gamma)
    return episodes.with_estimates(batch, returns_M, returns_M)


def reinforce_plus_plus(batch: Batch, config: Estimator) -> Batch:
    """REINFORCE++ (Hu 2025): the reward-to-go ``G_t = r_t + gamma G_{t+1}``, whitened over all sampled tokens.

    ``t + 1`` is the next sampled token of the episode, in whichever turn or row. Returns are G before whitening.
    """
    episodes, returns_M = reward_to_go(batch, config.gamma)
    return episodes.with_estimates(batch, whiten(returns_M), returns_M)


def reinforce_plus_plus_baseline(batch: Batch, config: Estimator) -> Batch:
    """REINFORCE++ with a group baseline (Hu 2025): ``R - mean`` on every token, then whitened over all sampled tokens.

    A group of one has mean 0. Needs ``group_B``.
    """
    episodes, score_J, group_J = _grouped_scores(batch, config)
    return _whitened(batch, episodes, score_J - group_mean(score_J, group_J), score_J)


def gdpo(batch: Batch, config: Gdpo) -> Batch:
    """Group reward-decoupled normalisation (GDPO, Liu et al. 2026): several rewards, each compared for itself.

    ``sum_k weight_k (r_k - mean_k) / (std_k + 1e-6)`` with mean and (unbiased) standard deviation of each reward over
    the group, on all tokens of the episode, then whitened over all sampled tokens. A group of one has mean 0 and
    standard deviation 1. Returns are the weighted sum of the rewards. Needs ``group_B`` and ``parts_BK``.
    """
    group_B, parts_BK = require_columns(batch, f"adv_estimator {config.adv_estimator!r}", "group_B", "parts_BK")
    episodes = find_episodes(batch)
    parts_JP, group_J = episodes.of_episode(parts_BK).double(), episodes.of_episode(group_B)
    weight_P = torch.tensor(config.gdpo_reward_weights or [1.0] * parts_JP.shape[1], dtype=torch.float64)
    normalised_JP = torch.stack([group_normalised(part_J, group_J) for part_J in parts_JP.unbind(1)], dim=1)
    return _whitened(batch, episodes, normalised_JP @ weight_P, parts_JP @ weight_P)


def remax(batch: Batch, config: Estimator) -> Batch:
    """ReMax (Li et al. 2024): the undiscounted reward-to-go less the score of the group's greedy episode.

    The sum runs over the sampled tokens of the episode, in whichever turn or row. Returns are the reward-to-go. Needs
    ``baseline_B``.
    """
    (baseline_B,) = require_columns(batch, "adv_estimator 'remax'", "baseline_B")
    require_finite(batch, "baseline_B")
    episodes, returns_M = reward_to_go(batch)
    baseline_M = episodes.of_episode(baseline_B).double()[episodes.episode_M]
    return episodes.with_estimates(batch, returns_M - baseline_M, returns_M)


def step_reinforce(batch: Batch, config: OfStates) -> Batch:
    """Returns of single turns against what the group got from the same state, without a critic.

    ``step_reward_weight * (G - mean of G over the group's turns in the same state) * n / (n - 1)
    + episode_reward_weight * (R - mean of R over the group)``, with G the turn's return discounted by
    ``step_reward_gamma`` and R the episode's score. The factor makes the baseline that of the other n - 1 turns
    (leave-one-out, Kool et al. 2019); a state that was met once has no step part. Needs ``group_B`` and ``state_B``,
    and rows of one turn.
    """
    episodes, return_K, state_K, group_J, score_J = _step_returns(batch, config)
    mean_K, _, count_K = group_moments(return_K, state_K)
    step_K = (return_K - mean_K) * count_K / (count_K - 1).clamp(min=1)
    episode_J = score_J - group_moments(score_J, group_J)[0]
    return _with_turn_columns(batch, episodes, _weighted(step_K, episode_J, episodes, config), return_K)


def gigpo(batch: Batch, config: OfStates) -> Batch:
    """Group-in-group policy optimisation (Feng et al. 2025): like ``step_reinforce``, but both parts normalised.

    ``episode_reward_weight * grpo(R) + step_reward_weight * (G - mean) / (std + 1e-6)`` over the group's turns in the
    same (anchor) state; a state that was met once has no step part. Needs ``group_B`` and ``state_B``, and rows of one
    turn.
    """
    episodes, return_K, state_K, group_J, score_J = _step_returns(batch, config)
    mean_K, std_K, _ = group_moments(return_K, state_K)
    step_K = (return_K - mean_K) / (std_K + STD_EPS)
    episode_J = group_normalised(score_J, group_J)
    return _with_turn_columns(batch, episodes, _weighted(step_K, episode_J, episodes, config), return_K)


for _estimator in (
    gae,
    gdpo,
    gigpo,
    gpg,
    maxrl,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    step_reinforce,
    tir_optimal_token_baseline,
):
    ADVANTAGES.register(_estimator.__name__, _estimator)


def advantage_metrics(batch: Batch, config: AdvantageConfig) -> dict[str, float]:
    """Mean, spread and extreme of the advantages over sampled tokens; with a critic, how well it explains the returns.

    ``critic/explained_variance`` is 1 - var(return - value) / var(return): 1 is perfect, 0 no better than a constant.
    """
    advantages_T, returns_T = require_columns(batch, "advantage_metrics", "advantages_T", "returns_T")
    advantages_M = advantages_T[batch.loss_mask_T].double()
    if len(advantages_M) == 0:
        return {}
    metrics = {
        "actor/advantage_mean": float(advantages_M.mean()),
        "actor/advantage_std": float(advantages_M.std(correction=0)),
        "actor/advantage_max": float(advantages_M.abs().max()),
    }
    if batch.values_T is not None:
        learned = value_mask(batch, config)
        returns_N, values_N = returns_T[learned].double(), batch.values_T[learned].double()
        spread = float(returns_N.var(correction=0))
        unexplained = float((returns_N - values_N).var(correction=0))
        metrics["critic/return_mean"] = float(returns_N.mean())
        metrics["critic/value_mean"] = float(values_N.mean())
        metrics["critic/explained_variance"] = 1 - unexplained / spread if spread > 0 else 0.0
    return metrics


def _step_returns(batch: Batch, config: Estimator) -> tuple[Episodes, Tensor, Tensor, Tensor, Tensor]:
    """Episodes, discounted returns [K], states within groups [K], groups [J] and scores [J]."""
    user = f"adv_estimator {config.adv_estimator!r}"
    group_B, state_B = require_columns(batch, user, "group_B", "state_B")
    episodes, reward_K = turn_rewards(batch)
    same_row = (episodes.row_K[1:] == episodes.row_K[:-1]).nonzero()
    if len(same_row):
        raise ValueError(
            f"{user}: sequence {int(episodes.row_K[same_row[0]])} holds several turns, expected one turn per sequence "
            "(env_manager_cls: step), because only a sequence's first turn has a state to compare"
        )
    discount_K = torch.full_like(reward_K, config.step_reward_gamma)
    discount_K[episodes.last_turn_J] = 0.0
    return_K = reverse_recurrence(reward_K, discount_K)
    _, state_K = torch.unique(state_B[episodes.row_K], return_inverse=True)
    _, group_K = torch.unique(group_B[episodes.row_K], return_inverse=True)
    state_in_group_K = group_K * (int(state_K.max()) + 1 if len(state_K) else 1) + state_K
    return episodes, return_K, state_in_group_K, episodes.of_episode(group_B), episodes.sum_episodes(reward_K)


def _grouped_scores(batch: Batch, config: Estimator) -> tuple[Episodes, Tensor, Tensor]:
    """Episodes, their scores [J] and their groups [J]."""
    (group_B,) = require_columns(batch, f"adv_estimator {config.adv_estimator!r}", "group_B")
    episodes, reward_K = turn_rewards(batch)
    return episodes, episodes.sum_episodes(reward_K), episodes.of_episode(group_B)


def _weighted(step_K: Tensor, episode_J: Tensor, episodes: Episodes, config: OfStates) -> Tensor:
    episode_K = episode_J[episodes.episode_K]
    return config.step_reward_weight * step_K + config.episode_reward_weight * episode_K


def _with_scores(batch: Batch, episodes: Episodes, advantage_J: Tensor, score_J: Tensor) -> Batch:
    """The batch with advantages and returns of episodes copied to their tokens."""
    return _with_turn_columns(batch, episodes, advantage_J[episodes.episode_K], score_J[episodes.episode_K])


def _whitened(batch: Batch, episodes: Episodes, advantage_J: Tensor, return_J: Tensor) -> Batch:
    """The same, with advantages whitened over all sampled tokens."""
    episode_M = episodes.episode_M
    return episodes.with_estimates(batch, whiten(advantage_J[episode_M]), return_J[episode_M])


def _with_turn_columns(batch: Batch, episodes: Episodes, advantage_K: Tensor, return_K: Tensor) -> Batch:
    """The batch with advantages and returns of turns copied to their tokens."""
    turn_M = episodes.turn_M
    return episodes.with_estimates(
        batch, advantage_K.float().index_select(0, turn_M), return_K.float().index_select(0, turn_M)
    )
