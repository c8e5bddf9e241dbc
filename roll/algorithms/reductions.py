"""Order, recurrences, means and spreads: over an episode's tokens, a group, a batch, all steps so far.

Axes: B rows, T tokens of the batch, M sampled tokens (loss mask 1) in episode order, K turns, J episodes
(trajectories). Everything that is not sampled (prompts, observations, tool output) is absent from M, so recurrences
pass over it unchanged. Episodes and turns without a sampled token do not exist here. Arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roll.data.batch import Batch, repeated

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


_BLOCK = 64  # elements per block of a recurrence: the fastest of 32 … 1024 on 128 x 8192 tokens


@dataclass(frozen=True)
class Episodes:
    """Bounds of turns and episodes: turn k has the tokens ``token_M[first_K[k] : last_K[k] + 1]``."""

    token_M: Tensor
    """int64: index into T. Episodes follow one another; within one, turns and tokens are in order of time."""
    first_K: Tensor
    """int64: index into M of each turn's first token."""
    last_K: Tensor
    """int64: index into M of each turn's last token."""
    row_K: Tensor
    """int64: the batch row that holds each turn."""
    episode_K: Tensor
    """int64: running number of the episode."""
    first_turn_J: Tensor
    """int64: index into K of each episode's first turn."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_M)

    @property
    def num_turns(self) -> int:
        return len(self.first_K)

    @property
    def num_episodes(self) -> int:
        return len(self.first_turn_J)

    @property
    def turn_M(self) -> Tensor:
        """int64: running number of the turn that each token belongs to."""
        return repeated(torch.arange(self.num_turns), self.last_K - self.first_K + 1)

    @property
    def episode_M(self) -> Tensor:
        """int64: running number of the episode that each token belongs to."""
        return self.episode_K[self.turn_M]

    @property
    def last_turn_J(self) -> Tensor:
        """int64: index into K of each episode's last turn."""
        return torch.cat([self.first_turn_J[1:], torch.tensor([self.num_turns])[: self.num_episodes]]) - 1

    @property
    def last_token_J(self) -> Tensor:
        """int64: index into M of each episode's last sampled token."""
        return self.last_K[self.last_turn_J]

    def gather(self, column_T: Tensor) -> Tensor:
        """float64 [M]: a token column in episode order."""
        return column_T.index_select(0, self.token_M).double()

    def scatter(self, values_M: Tensor, like_T: Tensor) -> Tensor:
        """Values back in batch order: shape [T], float32, 0 on tokens that were not sampled."""
        return torch.zeros(len(like_T), dtype=torch.float32).index_copy_(0, self.token_M, values_M.float())

    def with_estimates(self, batch: Batch, advantage_M: Tensor, return_M: Tensor) -> Batch:
        """The batch with advantages and returns of its sampled tokens."""
        return batch.replace(
            advantages_T=self.scatter(advantage_M, batch.loss_mask_T),
            returns_T=self.scatter(return_M, batch.loss_mask_T),
        )

    def of_episode(self, column_B: Tensor) -> Tensor:
        """[J]: a row column read at each episode's first row."""
        return column_B[self.row_K[self.first_turn_J]]

    def sum_turns(self, values_M: Tensor) -> Tensor:
        """float64 [K]: sums over each turn's tokens."""
        return sums(values_M.double(), self.turn_M, self.num_turns)

    def sum_episodes(self, values_K: Tensor) -> Tensor:
        """float64 [J]: sums over each episode's turns."""
        return sums(values_K.double(), self.episode_K, self.num_episodes)


def find_episodes(batch: Batch) -> Episodes:
    """Sorts a batch's sampled tokens into turns and episodes.

    A turn ends where the row ends or ``turn_T`` changes. Rows with the same ``traj_B`` are one episode, in the order of
    ``turn_B``, or of ``turn_T`` where rows are branches whose turns alternate; without ``traj_B`` every row is an
    episode.
    """
    sampled = batch.loss_mask_T.nonzero().squeeze(1)
    first_B = torch.searchsorted(sampled, batch.offsets_B)
    count_B = torch.diff(first_B, append=torch.tensor([len(sampled)]))
    rows = _rows_in_episode_order(batch)
    count_R = count_B[rows]  # R: rows in episode order
    start_R = torch.cumsum(count_R, 0) - count_R
    if torch.equal(rows, torch.arange(len(rows))):
        token_M = sampled
    else:
        token_M = sampled[torch.arange(len(sampled)) + repeated(first_B[rows] - start_R, count_R)]
    row_M = repeated(rows, count_R)
    turn_of_M = torch.zeros_like(token_M) if batch.turn_T is None else batch.turn_T.index_select(0, token_M)
    if batch.sample_weight_B is not None and batch.traj_B is not None:
        order = torch.from_numpy(np.lexsort((turn_of_M.numpy(), batch.traj_B[row_M].numpy())))  # stable
        token_M, row_M, turn_of_M = token_M[order], row_M[order], turn_of_M[order]
    is_start_M = torch.ones(len(token_M), dtype=torch.bool)
    is_start_M[1:] = (row_M[1:] != row_M[:-1]) | (turn_of_M[1:] != turn_of_M[:-1])
    first_K = is_start_M.nonzero().squeeze(1)
    last_K = torch.cat([first_K[1:], torch.tensor([len(token_M)])[: len(first_K)]]) - 1
    row_K = row_M[first_K]
    name_K = row_K if batch.traj_B is None else batch.traj_B[row_K]
    starts_episode_K = torch.ones(len(first_K), dtype=torch.bool)
    starts_episode_K[1:] = name_K[1:] != name_K[:-1]
    return Episodes(
        token_M=token_M,
        first_K=first_K,
        last_K=last_K,
        row_K=row_K,
        episode_K=torch.cumsum(starts_episode_K, 0) - 1,
        first_turn_J=starts_episode_K.nonzero().squeeze(1),
    )


def _rows_in_episode_order(batch: Batch) -> Tensor:
    """int64 [B]: rows sorted by episode and place within it."""
    if batch.traj_B is None:
        return torch.arange(batch.num_sequences)
    within_B = np.zeros(batch.num_sequences) if batch.turn_B is None else batch.turn_B.numpy()
    return torch.from_numpy(np.lexsort((within_B, batch.traj_B.numpy())))


def reverse_recurrence(inputs_N: Tensor, carry_N: Tensor) -> Tensor:
    """Solves ``x[i] = inputs[i] + carry[i] * x[i + 1]`` from the right, ``x[N] = 0``; float64 [N].

    All sequences of a batch run in one call, end to end, with ``carry`` 0 at each one's last element. The vector is cut
    into blocks of 64 that advance side by side, so the loop has 64 steps instead of N: a block's solution is linear in
    the value that enters it from the right, and those values obey a recurrence of the same form, N / 64 long.
    """
    solution = _solve(inputs_N.double().numpy(), carry_N.double().numpy())
    return torch.from_numpy(solution)


def _solve(inputs: np.ndarray, carry: np.ndarray) -> np.ndarray:
    size = len(inputs)
    if size <= _BLOCK:
        out = np.empty(size)
        x = 0.0
        for i in range(size - 1, -1, -1):
            x = inputs[i] + carry[i] * x
            out[i] = x
        return out
    blocks = -(-size // _BLOCK)
    # Transposed, so that one step of every block lies side by side in memory; zero padding on the right is inert.
    own = _as_columns(inputs, blocks)
    slope = _as_columns(carry, blocks)
    product = np.empty(blocks)
    for i in range(_BLOCK - 2, -1, -1):
        own[i] += np.multiply(slope[i], own[i + 1], out=product)
        slope[i] *= slope[i + 1]
    entry = np.zeros(blocks)
    entry[:-1] = _solve(own[0], slope[0])[1:]
    own += np.multiply(slope, entry, out=slope)
    return own.T.reshape(-1)[:size]


def _as_columns(values: np.ndarray, blocks: int) -> np.ndarray:
    if len(values) < blocks * _BLOCK:
        values = np.concatenate([values, np.zeros(blocks * _BLOCK - len(values))])
    # torch transposes in tiles, six times faster than numpy.
    return torch.from_numpy(values).view(blocks, _BLOCK).t().clone(memory_format=torch.contiguous_format).numpy()


def reward_to_go(batch: Batch, gamma: float = 1.0, turn_gamma: float | None = None) -> tuple[Episodes, Tensor]:
    """The batch's episodes and what they got from each sampled token on, float64 [M].

    Args:
        gamma: Discount from a sampled token to the next one of the episode, in whichever turn or row.
        turn_gamma: That from a turn's last token; ``None``: as any other.
    """
    assert batch.rewards_T is not None
    episodes = find_episodes(batch)
    discount_M = torch.full((episodes.num_tokens,), gamma, dtype=torch.float64)
    if turn_gamma is not None:
        discount_M[episodes.last_K] = turn_gamma
    discount_M[episodes.last_token_J] = 0.0
    return episodes, reverse_recurrence(episodes.gather(batch.rewards_T), discount_M)


def turn_rewards(batch: Batch) -> tuple[Episodes, Tensor]:
    """The batch's episodes and the reward of each of their turns, [K]."""
    assert batch.rewards_T is not None
    episodes = find_episodes(batch)
    return episodes, episodes.sum_turns(episodes.gather(batch.rewards_T))
