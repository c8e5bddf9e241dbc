"""Means and spreads: of groups, of a whole batch, of all steps so far. Arithmetic is float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Added to a standard deviation that scores are divided by."""
WHITEN_EPS = 1e-8
"""Added to the variance in ``whiten``."""


def sums(values_N: Tensor, index_N: Tensor, count: int) -> Tensor:
    """[count]: the sum of the values at each index; differentiable."""
    return values_N.new_zeros(count).index_add(0, index_N, values_N)


def mean(values_N: Tensor) -> float:
    """Their mean; 0 of none."""
    return float(values_N.double().mean()) if len(values_N) else 0.0


def group_moments(values_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and size of the group that each value belongs to; float64 [N] each.

    Groups of one have standard deviation 0. Equal values give exactly their mean and exactly 0.
    """
    _, index_N = torch.unique(group_N, return_inverse=True)
    num_groups = int(index_N.max()) + 1 if len(index_N) else 0
    values_N = values_N.double()
    count_G = sums(torch.ones_like(values_N), index_N, num_groups)
    # Sums relative to the group's smallest value: rounding cannot make equal values differ from their mean.
    low_G = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, index_N, values_N, "amin")
    mean_G = low_G + sums(values_N - low_G[index_N], index_N, num_groups) / count_G
    squares_G = sums((values_N - mean_G[index_N]).square(), index_N, num_groups)
    std_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    return mean_G[index_N], std_G[index_N], count_G[index_N]


def group_mean(values_N: Tensor, group_N: Tensor) -> Tensor:
    """float64 [N]: mean of each value's group, 0 for a value alone in it: nothing to compare with."""
    mean_N, _, count_N = group_moments(values_N, group_N)
    return torch.where(count_N == 1, torch.zeros_like(mean_N), mean_N)


def group_normalised(values_N: Tensor, group_N: Tensor) -> Tensor:
    """float64 [N]: (x - mean) / (std + 1e-6) within groups; a group of one has mean 0 and standard deviation 1."""
    _, std_N, count_N = group_moments(values_N, group_N)
    std_N = torch.where(count_N == 1, torch.ones_like(std_N), std_N)
    return (values_N - group_mean(values_N, group_N)) / (std_N + STD_EPS)


def whiten(values_N: Tensor) -> Tensor:
    """Values to mean 0 and (unbiased) variance 1: ``(x - mean) / sqrt(var + 1e-8)``. A lone value becomes 0."""
    centred_N = values_N - values_N.mean() if len(values_N) else values_N
    variance = centred_N.square().sum() / max(len(values_N) - 1, 1)
    return centred_N * torch.rsqrt(variance + WHITEN_EPS)


class RunningStats:
    """Mean and unbiased standard deviation of all values so far, updated by batches (Welford 1962; Chan et al. 1983).

    Its state is three plain numbers, so it goes into a checkpoint as it is.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values_N: Tensor) -> None:
        """Takes in one batch of values."""
        if len(values_N) == 0:
            return
        values_N = values_N.double()
        low = values_N.min()  # sums relative to it leave equal values without spread
        size, mean = float(len(values_N)), float(low + (values_N - low).mean())
        shift, total = mean - self.mean, self.count + size
        self._squares += float((values_N - mean).square().sum()) + shift * shift * self.count * size / total
        self.mean += shift * (size / total)  # exactly theirs, where they are the first
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self._squares = float(state["count"]), float(state["mean"]), float(state["squares"])
