"""Advantages from several rewards of an episode, each compared for itself."""

from __future__ import annotations

import torch

from roll.algorithms.checks import require_columns
from roll.algorithms.episodes import find_episodes
from roll.algorithms.statistics import group_normalised, whiten
from roll.configs.algorithm import AlgorithmConfig
from roll.data.batch import Batch


def gdpo(batch: Batch, config: AlgorithmConfig) -> Batch:
    """Group reward-decoupled normalisation (GDPO, Liu et al. 2026).

    ``sum_k weight_k (r_k - mean_k) / (std_k + 1e-6)`` with mean and (unbiased) standard deviation of each reward over
    the group, on all tokens of the episode, then whitened over all sampled tokens. A group of one has mean 0 and
    standard deviation 1. Returns are the weighted sum of the rewards. Needs ``group_B`` and ``parts_BK``.
    """
    group_B, parts_BK = require_columns(batch, f"adv_estimator {config.adv_estimator!r}", "group_B", "parts_BK")
    episodes = find_episodes(batch)
    parts_JP, group_J = episodes.of_episode(parts_BK).double(), episodes.of_episode(group_B)
    weight_P = torch.tensor(config.gdpo_reward_weights or [1.0] * parts_JP.shape[1], dtype=torch.float64)
    normalised_JP = torch.stack([group_normalised(part_J, group_J) for part_J in parts_JP.unbind(1)], dim=1)
    advantage_J, return_J = normalised_JP @ weight_P, parts_JP @ weight_P
    episode_M = episodes.episode_M
    return episodes.with_estimates(batch, whiten(advantage_J[episode_M]), return_J[episode_M])
