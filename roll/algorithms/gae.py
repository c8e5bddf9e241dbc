"""Advantages with a critic: generalised advantage estimation over tokens or turns, and what the critic learns.

Axes: B rows, T tokens, M sampled tokens in episode order, K turns, J episodes, N tokens or turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.checks import require_columns
from roll.algorithms.episodes import find_episodes, reverse_recurrence, turn_rewards
from roll.configs.algorithm import AdvantageConfig, Gae
from roll.data.batch import Batch


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
