"""Optimal token baselines against loops over nested lists in float64."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import compute_advantages
from roll.configs.algorithm import ADV_ESTIMATORS, AlgorithmConfig
from roll.data.batch import Batch
from tests.support.algorithms_batches import Episode, assert_close, by_token, random_episodes, to_batch
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)

TOKEN_BASELINES = [name for name, each in ADV_ESTIMATORS.items() if each.sums_squares]


def with_probabilities(batch: Batch, seed: int) -> Batch:
    """Probabilities of the old policy, and sums of squares that some distribution has."""
    generator = torch.Generator().manual_seed(seed)
    probability_T = torch.rand(batch.num_tokens, generator=generator) * 0.98 + 0.01
    rest_T = (1 - probability_T).square() * torch.rand(batch.num_tokens, generator=generator)
    mask_T = batch.loss_mask_T
    return batch.replace(
        old_logprobs_T=probability_T.log() * mask_T,
        prob_square_sum_T=(probability_T.square() + rest_T) * mask_T,
        rollout_logprobs_T=(probability_T.log() - 0.3 * torch.randn(batch.num_tokens, generator=generator)) * mask_T,
    )


def oracle(episodes: list[Episode], batch: Batch, lone_tail: bool, bound: float | None) -> dict[int, float]:
    """Place by place over the episodes of a group."""
    old, squares, rollout = (
        by_token(batch, column) for column in (batch.old_logprobs_T, batch.prob_square_sum_T, batch.rollout_logprobs_T)
    )
    groups, advantages = defaultdict(list), {}
    for e in episodes:
        returns, to_come, energies, energy = [], 0.0, [], 0.0
        for turn in reversed(e.turns):
            to_come += turn.reward if turn.sampled else 0.0
            returns = [to_come] * len(turn.sampled) + returns
        tokens = [token.id for turn in e.turns for token in turn.sampled]
        for token in tokens:
            weight = 1.0 if bound is None else min(math.exp(old[token] - rollout[token]), bound)
            energy += weight**2 * (1 - 2 * math.exp(old[token]) + squares[token])
            energies.append(energy)
        if tokens:
            groups[e.group].append((tokens, returns, energies))
    for members in groups.values():
        for tokens, returns, _ in members:
            for place, token in enumerate(tokens):
                there = [(g[place], w[place]) for _, g, w in members if len(g) > place]
                alone = len(members) == 1 or (lone_tail and len(there) == 1)
                baseline = 0.0 if alone else sum(g * w for g, w in there) / sum(w for _, w in there)
                advantages[token] = returns[place] - baseline
    return advantages


@examples(80)
@given(
    seed=seeds, history=st.booleans(), bound=st.sampled_from([None, 1.1, 10.0]), name=st.sampled_from(TOKEN_BASELINES)
)
def test_the_baseline_is_weighted_by_the_gradient_so_far(
    seed: int, history: bool, bound: float | None, name: str
) -> None:
    episodes = random_episodes(seed)
    batch = with_probabilities(to_batch(episodes, history, seed), seed)
    correction = {} if bound is None else {"is_weight": {"enabled": True, "upper_bound": bound}}
    config = AlgorithmConfig(adv_estimator=name, train_infer_correction=correction)
    out = compute_advantages(batch, config)
    assert_close(out, out.advantages_T, oracle(episodes, batch, name.startswith("tir_"), bound))


@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_equal_rewards_teach_nothing_where_there_is_somebody_to_compare_with(name: str) -> None:
    episodes = list(random_episodes(3, max_episodes=7, empty_masks=False))
    for e in episodes:
        e.group, e.turns = 0, e.turns[:1]
        e.turns[0].reward = 0.1 if e.turns[0].sampled else 0.0
        for token in e.turns[0].tokens:
            token.sampled = True
        e.turns[0].reward = 0.1
    batch = with_probabilities(to_batch(episodes, True), 0)
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=name))
    lengths = sorted(len(e.turns[0].tokens) for e in episodes)
    lone = lengths[-1] - lengths[-2] if name.startswith("tir_") else 0
    assert int(out.advantages_T.count_nonzero()) == lone


def test_certain_tokens_are_compared_by_the_plain_mean() -> None:
    """Where no token could have been another one, nothing has a gradient to weigh by."""
    batch = Batch(
        torch.tensor([1, 1]),
        torch.tensor([0, 1]),
        torch.tensor([True, True]),
        rewards_T=torch.tensor([1.0, 0.0]),
        group_B=torch.tensor([0, 0]),
        old_logprobs_T=torch.zeros(2),
        prob_square_sum_T=torch.ones(2),
    )
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator="optimal_token_baseline"))
    assert out.advantages_T.tolist() == [0.5, -0.5]
    with pytest.raises(ValueError, match="prob_square_sum_T"):
        compute_advantages(
            batch.replace(prob_square_sum_T=None), AlgorithmConfig(adv_estimator="optimal_token_baseline")
        )


def test_without_scoring_there_is_nothing_to_weigh_by() -> None:
    config = AlgorithmConfig(adv_estimator="optimal_token_baseline", train_infer_correction={"bypass": True})
    assert [problem.path for problem in config.problems()] == ["adv_estimator"]
    assert AlgorithmConfig(adv_estimator="optimal_token_baseline").wants_old_logprobs
