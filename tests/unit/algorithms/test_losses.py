"""Losses against loops in float64, by finite differences, and under every way of splitting a batch."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.gae import value_mask
from roll.algorithms.losses import build_policy_loss, build_sft_loss, build_value_loss, entropy_coef
from roll.algorithms.types import LossContext, TokenScores, add_metrics
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.policy_loss import LossAggMode
from roll.data.batch import Batch
from tests.support.algorithms_batches import (
    aggregate,
    assert_any_split_adds_up,
    columns_of,
    context,
    gradient,
    make_batch,
    rows_of,
)
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)
MODES = list(LossAggMode.__args__)  # type: ignore[attr-defined]
EVERYTHING: dict[str, Any] = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "kl_penalty": "k3",
    "entropy_loss_coef": 0.2,
    "sft_loss_coef": 0.4,
    "rl_loss_coef": 0.9,
    "dual_clip_loss": True,
    "dual_clip_c": 1.5,
    "use_pg_clip_range": True,
    "pg_clip_low": 0.1,
    "pg_clip_high": 0.3,
}


def oracle_policy_loss(scores: TokenScores, batch: Batch, config: AlgorithmConfig) -> float:
    low, high = (config.pg_clip_low, config.pg_clip_high) if config.use_pg_clip_range else (config.pg_clip,) * 2
    rows = rows_of(batch, batch.loss_mask_T)
    pg, kl, sft, entropy = {}, {}, {}, {}
    for row, members in enumerate(rows):
        for i in members:
            lp, adv = scores.logprobs_T[i].item(), batch.advantages_T[i].item()
            ratio = math.exp(min(max(lp - batch.old_logprobs_T[i].item(), -20), 20))
            pg[i] = max(-adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high))
            if config.dual_clip_loss and adv < 0:
                pg[i] = min(pg[i], -config.dual_clip_c * adv)
            d = lp - batch.ref_logprobs_T[i].item()
            kl[i] = min(max(math.exp(-d) + d - 1, -10), 10)
            if config.kl_penalty == "full":
                kl[i] = scores.kl_T[i].item()
            sft[i] = -lp if batch.scores_B[row] > 0 else 0.0
            entropy[i] = scores.entropy_T[i].item()
    mode = config.loss_agg_mode
    total = config.rl_loss_coef * aggregate(pg, rows, mode)
    total += config.kl_loss_coef * aggregate(kl, rows, mode) if config.use_kl_loss else 0.0
    total += config.sft_loss_coef * aggregate(sft, rows, mode)
    return total - config.entropy_loss_coef * aggregate(entropy, rows, mode)


@examples(60)
@given(seed=seeds, mode=st.sampled_from(MODES), history=st.booleans(), plain=st.booleans(), full=st.booleans())
def test_policy_loss_is_the_loop(seed: int, mode: LossAggMode, history: bool, plain: bool, full: bool) -> None:
    batch, scores = make_batch(seed, history)
    if not batch.loss_mask_T.any():
        return
    keys = {} if plain else EVERYTHING | ({"kl_penalty": "full"} if full else {})
    config = AlgorithmConfig(loss_agg_mode=mode, **keys)
    got = build_policy_loss(config)(scores, batch, context(batch)).loss.item()
    assert got == pytest.approx(oracle_policy_loss(scores, batch, config), rel=1e-9, abs=1e-9)


@examples(60)
@given(seed=seeds, mode=st.sampled_from(MODES), turns=st.booleans(), clip=st.sampled_from([None, 0.5]))
def test_value_loss_is_the_loop(seed: int, mode: LossAggMode, turns: bool, clip: float | None) -> None:
    batch, scores = make_batch(seed)
    if not batch.loss_mask_T.any():
        return
    config = AlgorithmConfig(loss_agg_mode=mode, turn_level_gae=turns, value_clip=clip, value_loss_coef=0.7)
    mask_T = value_mask(batch, config)
    rows, per_token = rows_of(batch, mask_T), {}
    for i in (i for row in rows for i in row):
        v, old, target = scores.values_T[i].item(), batch.values_T[i].item(), batch.returns_T[i].item()
        per_token[i] = (v - target) ** 2
        if clip:
            per_token[i] = max(per_token[i], (min(max(v, old - clip), old + clip) - target) ** 2)
    got = build_value_loss(config)(scores, batch.replace(loss_mask_T=mask_T), context(batch, mask_T)).loss.item()
    assert got == pytest.approx(0.7 * 0.5 * aggregate(per_token, rows, mode), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_with_turn_level_gae_only_first_tokens_of_turns_teach_the_critic(mode: LossAggMode) -> None:
    batch, scores = make_batch(1, max_episodes=20)
    config = AlgorithmConfig(turn_level_gae=True, loss_agg_mode=mode)
    _, grads = gradient(build_value_loss(config), scores, batch, context(batch))
    learned = value_mask(batch, config)
    assert learned.sum() < batch.loss_mask_T.sum()
    assert torch.equal(grads[2] != 0, learned)


def test_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    batch, scores = make_batch(5)
    out = build_sft_loss()(scores, batch, context(batch))
    assert out.loss.item() == pytest.approx(-scores.logprobs_T[batch.loss_mask_T].mean().item())
    assert out.metrics["sft/loss"].item() == out.loss.item()


@examples(40)
@given(seed=seeds, mode=st.sampled_from(MODES), parts=st.integers(1, 6), critic=st.booleans(), turns=st.booleans())
def test_any_split_adds_up_to_the_same_loss_gradient_and_metrics(
    seed: int, mode: LossAggMode, parts: int, critic: bool, turns: bool
) -> None:
    batch, scores = make_batch(seed, history=False)  # rows of one trajectory land in different parts
    if not batch.loss_mask_T.any():
        return
    if critic:
        config = AlgorithmConfig(loss_agg_mode=mode, value_clip=0.5, turn_level_gae=turns)
        loss_fn = build_value_loss(config)
    else:
        keys = EVERYTHING | ({"kl_penalty": "full"} if turns else {})
        loss_fn = build_policy_loss(AlgorithmConfig(loss_agg_mode=mode, **keys))
    assert_any_split_adds_up(loss_fn, scores, batch, parts, seed)


@pytest.mark.parametrize("mode", MODES)
def test_policy_gradients_agree_with_finite_differences(mode: LossAggMode) -> None:
    batch, scores = make_batch(8)
    loss_fn = build_policy_loss(AlgorithmConfig(loss_agg_mode=mode, **EVERYTHING | {"kl_penalty": "full"}))
    _, exact = gradient(loss_fn, scores, batch, context(batch))
    step = 1e-6
    for column, name in ((0, "logprobs_T"), (1, "entropy_T"), (3, "kl_T")):
        for i in batch.loss_mask_T.nonzero().squeeze(1).tolist():
            ends = []
            for sign in (1, -1):
                moved = getattr(scores, name).clone()
                moved[i] += sign * step
                ends.append(loss_fn(replace(scores, **{name: moved}), batch, context(batch)).loss.item())
            assert exact[column, i].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-8)


def test_value_gradients_agree_with_finite_differences() -> None:
    batch, scores = make_batch(8)
    loss_fn = build_value_loss(AlgorithmConfig(value_clip=0.5))

    def loss(values_T: Tensor) -> Tensor:
        return loss_fn(TokenScores(values_T=values_T), batch, context(batch)).loss

    assert torch.autograd.gradcheck(loss, (scores.values_T.clone().requires_grad_(),))


def test_on_fresh_samples_the_gradient_is_that_of_reinforce() -> None:
    batch, scores = make_batch(4)
    _, got = gradient(
        build_policy_loss(AlgorithmConfig(loss_agg_mode="token-mean", dual_clip_loss=True)),
        scores,
        batch.replace(old_logprobs_T=None),
        context(batch),
    )
    torch.testing.assert_close(got[0], -batch.advantages_T / batch.loss_mask_T.sum())


def test_the_old_policy_of_fresh_rows_is_the_current_one() -> None:
    batch, scores = make_batch(4, max_episodes=20)
    on_policy_B = torch.arange(batch.num_sequences) % 2 == 0
    fresh_T = on_policy_B[batch.rows_T]
    as_scored = torch.where(fresh_T, scores.logprobs_T.float(), batch.old_logprobs_T)
    unscored = batch.replace(old_logprobs_T=batch.old_logprobs_T.masked_fill(fresh_T, 0.0), on_policy_B=on_policy_B)
    loss_fn = build_policy_loss(AlgorithmConfig(pg_clip=0.05))
    wanted = gradient(loss_fn, scores, batch.replace(old_logprobs_T=as_scored), context(batch))
    got = gradient(loss_fn, scores, unscored, context(batch))
    torch.testing.assert_close(got[0].loss, wanted[0].loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=1e-6)


def loss_of(batch: Batch, scores: TokenScores, **keys: Any) -> float:
    return build_policy_loss(AlgorithmConfig(**keys))(scores, batch, context(batch)).loss.item()


@pytest.mark.parametrize(
    "keys",
    [
        {"pg_clip": 0.05},
        {"use_pg_clip_range": True, "pg_clip_low": 0.05},
        {"use_pg_clip_range": True, "pg_clip_high": 0.05},
        {"dual_clip_loss": True, "dual_clip_c": 1.1},
        {"rl_loss_coef": 0.5},
        {"entropy_loss_coef": 0.1},
        {"sft_loss_coef": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        *[
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_penalty": kind}
            for kind in ("abs", "mse", "low_var_kl", "full")
        ],
        *[
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_penalty": kind}
            for kind in ("abs", "mse", "low_var_kl", "full")
        ],
        *[{"loss_agg_mode": mode} for mode in MODES if mode != "seq-mean-token-mean"],
    ],
    ids=str,
)
def test_each_option_changes_the_loss(keys: dict[str, Any]) -> None:
    batch, scores = make_batch(0, max_episodes=20)
    assert (batch.scores_B > 0).any() and batch.num_sequences > 4
    assert abs(loss_of(batch, scores, **keys) - loss_of(batch, scores)) > 1e-4


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum-norm"])
def test_a_constant_divides_in_place_of_the_longest(mode: LossAggMode) -> None:
    batch, scores = make_batch(0, max_episodes=20)
    undivided = loss_of(batch, scores, loss_agg_mode={"token-sum": mode}.get(mode, "seq-mean-token-sum"))
    assert loss_of(batch, scores, loss_agg_mode=mode, loss_agg_norm=40) == pytest.approx(undivided / 40)


def test_the_loss_has_its_own_estimator_beside_that_of_the_reward() -> None:
    batch, scores = make_batch(0, max_episodes=20)
    on = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    assert loss_of(batch, scores, **on, kl_loss_penalty="k3", kl_penalty="full") == loss_of(
        batch, scores, **on, kl_penalty="k3"
    )
    full = AlgorithmConfig(**on, kl_loss_penalty="full", add_token_level_kl=True)
    assert full.uses_full_kl and not AlgorithmConfig(**on, kl_penalty="full", kl_loss_penalty="k3").uses_full_kl


def test_the_cap_bounds_every_token_of_ppo_from_above() -> None:
    batch, scores = make_batch(0, max_episodes=20)
    keys = {"loss_agg_mode": "token-sum", "pg_loss_cap": 0.6}
    oracle = AlgorithmConfig(pg_clip=0.2)
    bounded = 0.0
    for i in batch.loss_mask_T.nonzero().squeeze(1).tolist():
        adv = batch.advantages_T[i].item()
        ratio = math.exp(scores.logprobs_T[i].item() - batch.old_logprobs_T[i].item())
        low, high = 1 - oracle.pg_clip, 1 + oracle.pg_clip
        bounded += min(0.6, max(-adv * ratio, -adv * min(max(ratio, low), high)))
    assert loss_of(batch, scores, **keys) == pytest.approx(bounded)
    out = build_policy_loss(AlgorithmConfig(**keys))(scores, batch, context(batch))
    assert (
        out.metrics["actor/clip_frac"]
        > build_policy_loss(oracle)(scores, batch, context(batch)).metrics["actor/clip_frac"]
    )


def test_dual_clip_bounds_only_the_loss_of_bad_actions() -> None:
    batch = Batch(
        lengths_B=torch.tensor([2]),
        tokens_T=torch.tensor([0, 1]),
        loss_mask_T=torch.tensor([True, True]),
        advantages_T=torch.tensor([-2.0, 2.0]),
        old_logprobs_T=torch.tensor([-9.0, -9.0]),
    )
    scores = TokenScores(logprobs_T=torch.tensor([0.0, 0.0]))  # ratios e^9
    ctx = LossContext(2, 1, 2)
    out = build_policy_loss(AlgorithmConfig(dual_clip_loss=True, loss_agg_mode="token-mean"))(scores, batch, ctx)
    assert out.loss.item() == pytest.approx((3.0 * 2.0 - 1.2 * 2.0) / 2)
    assert out.metrics["actor/clip_frac"].item() == 1.0


def test_metrics_of_the_policy() -> None:
    batch, scores = make_batch(6)
    metrics = build_policy_loss(AlgorithmConfig())(scores, batch, context(batch)).metrics
    on = batch.loss_mask_T
    ratio = (scores.logprobs_T - batch.old_logprobs_T)[on].exp()
    adv = batch.advantages_T[on]
    clipped = ((ratio > 1.2) & (adv > 0)) | ((ratio < 0.8) & (adv < 0))
    assert metrics["actor/ratio_mean"].item() == pytest.approx(ratio.mean().item())
    assert metrics["actor/clip_frac"].item() == pytest.approx(clipped.double().mean().item())
    assert metrics["actor/approx_kl"].item() == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    assert metrics["actor/entropy"].item() == pytest.approx(scores.entropy_T[on].mean().item())
    assert not any(isinstance(v, Tensor) and v.requires_grad for v in metrics.values())


def test_the_training_pass_measures_the_mismatch_where_nobody_scored_the_rollouts() -> None:
    batch, scores = make_batch(6)
    generated = scores.logprobs_T.detach().float() + 0.1 * torch.randn(batch.num_tokens)
    fresh = batch.replace(old_logprobs_T=None, rollout_logprobs_T=generated)
    loss_fn, ctx = build_policy_loss(AlgorithmConfig()), context(batch)
    scored = batch.replace(old_logprobs_T=scores.logprobs_T.detach().float(), rollout_logprobs_T=generated)
    expected = mismatch_metrics(scored)
    assert len(expected) == 3

    totals: dict[str, Any] = {}
    for rows in torch.arange(batch.num_sequences).tensor_split(3):
        part = fresh.select(rows)
        columns = {f: getattr(scores, f)[batch.token_index(rows)] for f in ("logprobs_T", "entropy_T")}
        add_metrics(totals, loss_fn(TokenScores(**columns), part, ctx).metrics)
    assert {name: float(totals[name]) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert not [name for name in loss_fn(scores, scored, ctx).metrics if name.startswith("mismatch")]
    with_it, without = (loss_fn(scores, fresh.replace(rollout_logprobs_T=each), ctx) for each in (generated, None))
    assert with_it.loss.item() == without.loss.item()


def test_scores_where_nothing_was_sampled_are_never_read() -> None:
    batch, scores = make_batch(3)
    noise = torch.where(batch.loss_mask_T, 0.0, torch.nan).double()
    dirty = TokenScores(*(column_T + noise for column_T in columns_of(scores)))
    loss_fn = build_policy_loss(AlgorithmConfig(**EVERYTHING))
    clean_out, clean_gradient = gradient(loss_fn, scores, batch, context(batch))
    dirty_out, dirty_gradient = gradient(loss_fn, dirty, batch, context(batch))
    assert torch.equal(clean_out.loss, dirty_out.loss) and torch.equal(clean_gradient, dirty_gradient)


def test_a_micro_batch_without_sampled_tokens_adds_a_differentiable_zero() -> None:
    batch, scores = make_batch(3)
    empty = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    out, grads = gradient(build_policy_loss(AlgorithmConfig(**EVERYTHING)), scores, empty, context(batch))
    assert out.loss.item() == 0.0 and not grads.any()


def test_entropy_coefficient_decays_over_the_run() -> None:
    config = AlgorithmConfig(entropy_loss_coef=0.4, entropy_loss_coef_end=0.1)
    assert [entropy_coef(config, step, 4) for step in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])
    assert entropy_coef(AlgorithmConfig(entropy_loss_coef=0.4), 3, 4) == 0.4
    batch, scores = make_batch(2)
    loss_fn = build_policy_loss(config, total_optimizer_steps=4)
    counts = context(batch)
    last = LossContext(counts.num_tokens, counts.num_sequences, counts.max_length, optimizer_step=3)
    assert loss_fn(scores, batch, last).loss.item() == pytest.approx(loss_of(batch, scores, entropy_loss_coef=0.1))
    with pytest.raises(ValueError, match="total_optimizer_steps"):
        build_policy_loss(config)


def test_loss_functions_travel_between_processes() -> None:
    batch, scores = make_batch(2)
    config = AlgorithmConfig(entropy_loss_coef_end=0.0, **EVERYTHING)
    for loss_fn in (build_policy_loss(config, 10), build_value_loss(config), build_sft_loss()):
        travelled = pickle.loads(pickle.dumps(loss_fn))
        assert torch.equal(travelled(scores, batch, context(batch)).loss, loss_fn(scores, batch, context(batch)).loss)


def test_what_is_missing_is_named() -> None:
    batch, scores = make_batch(2)
    ctx = context(batch)
    with pytest.raises(ValueError, match="advantages_T"):
        build_policy_loss(AlgorithmConfig())(scores, batch.replace(advantages_T=None), ctx)
    with pytest.raises(ValueError, match="ref_logprobs_T"):
        build_policy_loss(AlgorithmConfig(use_kl_loss=True))(scores, batch.replace(ref_logprobs_T=None), ctx)
    with pytest.raises(ValueError, match=r"kl_penalty 'full'.*kl_T"):
        build_policy_loss(AlgorithmConfig(use_kl_loss=True, kl_penalty="full"))(replace(scores, kl_T=None), batch, ctx)
    with pytest.raises(ValueError, match="scores_B"):
        build_policy_loss(AlgorithmConfig(sft_loss_coef=1.0))(scores, batch.replace(scores_B=None), ctx)
    with pytest.raises(ValueError, match="entropy_T"):
        build_policy_loss(AlgorithmConfig(entropy_loss_coef=1.0))(TokenScores(scores.logprobs_T), batch, ctx)
    with pytest.raises(ValueError, match=r"value_loss needs TokenScores\.values_T"):
        build_value_loss(AlgorithmConfig())(TokenScores(scores.logprobs_T), batch, ctx)
    with pytest.raises(ValueError, match="at least one token"):
        build_policy_loss(AlgorithmConfig())(scores, batch, LossContext(0, 0, 0))
