"""An episode that branched into several rows learns what it would as one row: same advantages, same weight."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import ADVANTAGES, compute_advantages
from roll.algorithms.gae import value_mask
from roll.algorithms.losses import build_policy_loss, build_sft_loss, build_value_loss
from roll.algorithms.selection import select_for_policy
from roll.algorithms.types import LossFn, TokenScores
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.policy_loss import LossAggMode
from roll.data.batch import Batch
from tests.support.algorithms_batches import (
    assert_any_split_adds_up,
    assert_close,
    by_token,
    context,
    gradient,
    random_episodes,
    to_batch,
)
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)
# They compare the states in which rows begin, and refuse rows of several turns.
BY_ROW = {"gigpo", "step_reinforce"}


def whole_and_branched(seed: int) -> tuple[Batch, Batch]:
    episodes = random_episodes(seed, empty_masks=False)
    return to_batch(episodes, history=True), to_batch(episodes, True, seed, branch_seed=seed)


@examples(25)
@given(seed=seeds)
@pytest.mark.parametrize("estimator", sorted(set(ADVANTAGES.names()) - BY_ROW))
def test_advantages_and_returns_are_those_of_one_row(estimator: str, seed: int) -> None:
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lambd=0.8)
    batches = whole_and_branched(seed)
    if estimator == "maxrl":  # takes no rewards below 0
        batches = tuple(batch.replace(rewards_T=batch.rewards_T.abs()) for batch in batches)
    whole, branched = (compute_advantages(batch, config) for batch in batches)
    assert whole.advantages_T is not None and whole.returns_T is not None
    assert_close(branched, branched.advantages_T, by_token(whole, whole.advantages_T), 1e-5)
    assert_close(branched, branched.returns_T, by_token(whole, whole.returns_T), 1e-5)


def scores_of(batch: Batch) -> TokenScores:
    """A number for each token id, wherever it stands."""
    return TokenScores(torch.sin(batch.tokens_T.double() + 1) - 1.5)


def loss_of(mode: LossAggMode, sft: bool) -> LossFn:
    return build_sft_loss(mode) if sft else build_policy_loss(AlgorithmConfig(loss_agg_mode=mode))


@examples(25)
@given(seed=seeds, sft=st.booleans())
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_the_gradient_is_that_of_one_row_in_every_aggregation(mode: LossAggMode, sft: bool, seed: int) -> None:
    whole, branched = (
        batch.replace(advantages_T=torch.cos(batch.tokens_T.double()), old_logprobs_T=None)
        for batch in whole_and_branched(seed)
    )
    if not whole.loss_mask_T.any():
        return
    got, expected = (
        gradient(loss_of(mode, sft), TokenScores(scores.logprobs_T, *[scores.logprobs_T] * 3), batch, context(batch))
        for batch, scores in ((batch, scores_of(batch)) for batch in (branched, whole))
    )
    assert got[0].loss.item() == pytest.approx(expected[0].loss.item(), rel=1e-9, abs=1e-12)
    slopes, wanted = by_token(branched, got[1][0]), by_token(whole, expected[1][0])
    assert slopes == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def assert_same_gradient(loss_fn: LossFn, whole: Batch, branched: Batch) -> None:
    if not whole.loss_mask_T.any():
        return
    found = []
    for batch in (branched, whole):
        logprobs_T = scores_of(batch).logprobs_T
        _, slopes = gradient(loss_fn, TokenScores(*[logprobs_T] * 4), batch, context(batch))
        found.append(by_token(batch, slopes.sum(0)))
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-12)


@examples(25)
@given(seed=seeds)
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_masked_tokens_leave_the_branches_the_weight_of_one_row(mode: LossAggMode, seed: int) -> None:
    rejecting = {"filters": [{"enabled": True, "agg_type": "token", "ratio_enabled": True, "ratio_high": 1.0}]}
    config = AlgorithmConfig.model_validate({"loss_agg_mode": mode, "train_infer_correction": rejecting})
    whole, branched = (
        select_for_policy(batch.replace(advantages_T=torch.cos(batch.tokens_T) * batch.loss_mask_T), config.parts, 0)[0]
        for batch in whole_and_branched(seed)
    )
    assert_same_gradient(build_policy_loss(config), whole, branched)


@examples(25)
@given(seed=seeds)
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_value_targets_of_turns_have_the_weight_of_one_row(mode: LossAggMode, seed: int) -> None:
    config = AlgorithmConfig(adv_estimator="gae", turn_level_gae=True, loss_agg_mode=mode)
    whole, branched = (
        batch.replace(returns_T=torch.cos(batch.tokens_T)).with_loss_mask(value_mask(batch, config))
        for batch in whole_and_branched(seed)
    )
    assert_same_gradient(build_value_loss(config), whole, branched)


@examples(25)
@given(seed=seeds, parts=st.integers(1, 5))
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_the_branches_of_an_episode_may_lie_in_different_micro_batches(
    mode: LossAggMode, seed: int, parts: int
) -> None:
    branched = whole_and_branched(seed)[1].replace(old_logprobs_T=None)
    if not branched.loss_mask_T.any():
        return
    branched = branched.replace(advantages_T=torch.cos(branched.tokens_T.double()))
    logprobs_T = scores_of(branched).logprobs_T
    assert_any_split_adds_up(loss_of(mode, False), TokenScores(*[logprobs_T] * 4), branched, parts, seed)
