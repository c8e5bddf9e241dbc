"""Pairs of a rollout's groups, and that a step on them is DPO on these pairs, in float64 and without the library."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.preferences import build_preference_loss
from roll.algorithms.selection import best_and_worst, informative_pairs
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.preference import PreferenceConfig
from roll.data.batch import Batch

GROUPS = [7, 3, 7, 3, 7, 5, 5, 9, 2, 2]
SCORES = [0.5, 1.0, 0.0, 0.25, 1.0, 0.5, 0.5, 1.0, 1.0, 0.0]
ANSWERS = [[4, 5], [6], [7, 8, 9], [5, 5], [4], [6, 7], [7], [8], [4, 4], [4, 4]]
"""By hand: group 2 answers twice the same, 3 has rows 1 and 3, 5 is tied, 7 has rows 4 and 2, 9 has one answer."""


def rollout() -> Batch:
    lengths = torch.tensor([2 + len(answer) for answer in ANSWERS])
    return Batch(
        lengths,
        torch.cat([torch.tensor([1, 2, *answer]) for answer in ANSWERS]),
        torch.cat([torch.arange(2 + len(answer)) >= 2 for answer in ANSWERS]),
        group_B=torch.tensor(GROUPS),
        scores_B=torch.tensor(SCORES),
        ref_logprobs_T=-torch.arange(int(lengths.sum()), dtype=torch.float64) / 10,
    )


def test_the_best_and_the_worst_of_each_group_are_a_pair() -> None:
    whole = rollout()
    batch, metrics = best_and_worst(whole.replace(rewards_T=whole.loss_mask_T.float()))
    assert batch.rewards_T is not None and torch.equal(batch.rewards_T > 0, batch.loss_mask_T)
    answers = [batch.select([row]).tokens_T[2:].tolist() for row in range(batch.num_sequences)]
    assert answers == [[4, 4], [4, 4], [6], [5, 5], [6, 7], [7], [4], [7, 8, 9]]
    assert batch.pair_B is not None and batch.pair_B.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.preferred_B is not None and batch.preferred_B.tolist() == [True, False] * 4
    assert informative_pairs(batch).tolist() == [[2, 3], [6, 7]]
    assert metrics == {"dpo/pair_frac": 0.5, "dpo/score_gap": pytest.approx((1 + 0.75 + 0 + 1) / 4)}


def test_a_step_on_the_pairs_is_dpo_in_float64() -> None:
    whole = rollout()
    assert whole.ref_logprobs_T is not None
    generator = torch.Generator().manual_seed(0)
    policy_T = -torch.rand(whole.num_tokens, generator=generator, dtype=torch.float64)
    batch, _ = best_and_worst(whole.replace(rollout_logprobs_T=policy_T))  # travels with its rows
    batch = batch.select(informative_pairs(batch).flatten())
    assert batch.rollout_logprobs_T is not None
    logprobs_T = batch.rollout_logprobs_T.clone().requires_grad_()
    beta = 0.3
    found = build_preference_loss(PreferenceConfig(beta=beta))(
        TokenScores(logprobs_T=logprobs_T), batch, LossContext.of(batch)
    )
    found.loss.backward()

    def ratio(row: int) -> float:
        first = sum(2 + len(answer) for answer in ANSWERS[:row]) + 2
        own = range(first, first + len(ANSWERS[row]))
        return sum(float(policy_T[i]) - float(whole.ref_logprobs_T[i]) for i in own)  # type: ignore[index]

    leads = [beta * (ratio(best) - ratio(worst)) for best, worst in ((1, 3), (4, 2))]
    assert found.loss.item() == pytest.approx(sum(math.log1p(math.exp(-lead)) for lead in leads) / 2, rel=1e-12)
    slopes = [beta / 2 / (1 + math.exp(lead)) for lead in leads]
    expected = [0, 0, -slopes[0], 0, 0, *[slopes[0]] * 2, 0, 0, -slopes[1], 0, 0, *[slopes[1]] * 3]
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_what_has_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="two answers in one group"):
        best_and_worst(rollout().select([0, 1, 7]))
    with pytest.raises(ValueError, match="scores_B"):
        best_and_worst(rollout().replace(scores_B=None))
