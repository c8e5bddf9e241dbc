"""Losses against loops in float64, by finite differences, and under every way of splitting a batch."""

import math
import pickle
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.advantages import value_mask
from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.losses import (
    POLICY_LOSSES,
    SFT_NEEDS,
    VALUE_READS,
    PolicyTokens,
    build_policy_loss,
    build_sft_loss,
    build_value_loss,
    entropy_coef,
    policy_reads,
)
from roll.algorithms.preferences import build_reward_loss, calibration_error
from roll.algorithms.types import LossContext, LossFn, TokenScores, add_metrics
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.policy_loss import PG_VARIANTS, LossAggMode
from roll.configs.preference import RewardLossConfig
from roll.data.batch import Batch
from roll.data.columns import is_per_token
from roll.data.packing import take_micro_batch
from roll.data.renderer import ChatRenderer
from roll.models.tiny import make_tiny_model, make_tokenizer
from tests.support.algorithms_batches import (
    aggregate,
    assert_any_split_adds_up,
    columns_of,
    context,
    gradient,
    make_batch,
    rows_of,
)
from tests.support.batches import batch_of
from tests.support.examples import examples
from tests.support.imitation import Imitator, Talk, talk
from tests.support.trainers import make_trainer, step_and_gradient

seeds = st.integers(0, 2**32 - 1)
MODES = get_args(LossAggMode)
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
def test_policy_loss_is_the_loop(seed, mode, history, plain, full):
    batch, scores = make_batch(seed, history)
    assume(batch.loss_mask_T.any())
    keys = {} if plain else EVERYTHING | ({"kl_penalty": "full"} if full else {})
    config = AlgorithmConfig(loss_agg_mode=mode, **keys)
    got = build_policy_loss(config)(scores, batch, context(batch)).loss.item()
    assert got == pytest.approx(oracle_policy_loss(scores, batch, config), rel=1e-9, abs=1e-9)


@examples(60)
@given(seed=seeds, mode=st.sampled_from(MODES), turns=st.booleans(), clip=st.sampled_from([None, 0.5]))
def test_value_loss_is_the_loop(seed, mode, turns, clip):
    batch, scores = make_batch(seed)
    assume(batch.loss_mask_T.any())
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
def test_with_turn_level_gae_only_first_tokens_of_turns_teach_the_critic(mode):
    batch, scores = make_batch(1, max_episodes=20)
    config = AlgorithmConfig(turn_level_gae=True, loss_agg_mode=mode)
    _, grads = gradient(build_value_loss(config), scores, batch, context(batch))
    learned = value_mask(batch, config)
    assert learned.sum() < batch.loss_mask_T.sum()
    assert torch.equal(grads[2] != 0, learned)


def columns_read(loss_fn: LossFn, batch: Batch, scores: TokenScores) -> set[str]:
    """Columns per token, besides ids and mask, that a loss asks the batch for, whether they are there or not."""
    known = {f.name for f in fields(Batch) if is_per_token(f.name)} - {"tokens_T", "loss_mask_T"}
    read: set[str] = set()

    class Watched(Batch):
        def __getattribute__(self, name: str) -> Any:
            read.update({name} & known)
            return super().__getattribute__(name)

    watched = Watched(**{f.name: getattr(batch, f.name) for f in fields(Batch)})
    read.clear()
    loss_fn(scores, watched, context(batch))
    return read


LIVE_WEIGHTS = {"train_infer_correction": {"is_weight": {"enabled": True, "detach": False}}}


@pytest.mark.parametrize(
    "keys", [{}, EVERYTHING, EVERYTHING | LIVE_WEIGHTS, {"importance_sampling": "segment"}, {"pg_variant": "kl_cov"}]
)
def test_what_the_policy_loss_reads_travels_to_the_trainer(keys):
    batch, scores = make_batch(3)
    config = AlgorithmConfig(**keys)
    assert columns_read(build_policy_loss(config), batch, scores) <= policy_reads(config.parts)
    assert ("turn_T" in policy_reads(config.parts)) == (keys not in ({}, EVERYTHING, {"pg_variant": "kl_cov"}))


def test_what_the_value_loss_reads_travels_to_the_critic():
    batch, scores = make_batch(3)
    for turns in (False, True):
        loss_fn = build_value_loss(AlgorithmConfig(value_clip=0.5, turn_level_gae=turns))
        assert columns_read(loss_fn, batch, scores) <= VALUE_READS


@examples(40)
@given(seed=seeds, mode=st.sampled_from(MODES), parts=st.integers(1, 6))
@pytest.mark.parametrize(
    ("build", "keys"),
    [
        (build_policy_loss, EVERYTHING),
        (build_policy_loss, EVERYTHING | {"kl_penalty": "full"}),
        *((build_value_loss, {"value_clip": 0.5, "turn_level_gae": turns}) for turns in (False, True)),
    ],
)
def test_any_split_adds_up_to_the_same_loss_gradient_and_metrics(build, keys, seed, mode, parts):
    batch, scores = make_batch(seed, history=False)  # rows of one trajectory land in different parts
    assume(batch.loss_mask_T.any())
    assert_any_split_adds_up(build(AlgorithmConfig(loss_agg_mode=mode, **keys)), scores, batch, parts, seed)


@pytest.mark.parametrize("mode", MODES)
def test_policy_gradients_agree_with_finite_differences(mode):
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


def test_value_gradients_agree_with_finite_differences():
    batch, scores = make_batch(8)
    loss_fn = build_value_loss(AlgorithmConfig(value_clip=0.5))

    def loss(values_T: Tensor) -> Tensor:
        return loss_fn(TokenScores(values_T=values_T), batch, context(batch)).loss

    assert torch.autograd.gradcheck(loss, (scores.values_T.clone().requires_grad_(),))


def test_on_fresh_samples_the_gradient_is_that_of_reinforce():
    batch, scores = make_batch(4)
    loss_fn = build_policy_loss(AlgorithmConfig(loss_agg_mode="token-mean", dual_clip_loss=True))
    _, got = gradient(loss_fn, scores, batch.replace(old_logprobs_T=None), context(batch))
    torch.testing.assert_close(got[0], -batch.advantages_T / batch.loss_mask_T.sum())


def test_the_old_policy_of_fresh_rows_is_the_current_one():
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


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum-norm"])
def test_a_constant_divides_in_place_of_the_longest(mode):
    batch, scores = make_batch(0, max_episodes=20)
    undivided = loss_of(batch, scores, loss_agg_mode={"token-sum": mode}.get(mode, "seq-mean-token-sum"))
    assert loss_of(batch, scores, loss_agg_mode=mode, loss_agg_norm=40) == pytest.approx(undivided / 40)


def test_the_loss_has_its_own_estimator_beside_that_of_the_reward():
    batch, scores = make_batch(0, max_episodes=20)
    on = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    own = loss_of(batch, scores, **on, kl_loss_penalty="k3", kl_penalty="full")
    assert own == loss_of(batch, scores, **on, kl_penalty="k3")
    full = AlgorithmConfig(**on, kl_loss_penalty="full", add_token_level_kl=True)
    assert full.uses_full_kl and not AlgorithmConfig(**on, kl_penalty="full", kl_loss_penalty="k3").uses_full_kl


def test_the_cap_bounds_every_token_of_ppo_from_above():
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
    capped, plain = (
        build_policy_loss(config)(scores, batch, context(batch)) for config in (AlgorithmConfig(**keys), oracle)
    )
    assert capped.metrics["actor/clip_frac"] > plain.metrics["actor/clip_frac"]


def test_metrics_of_the_policy():
    batch, scores = make_batch(6)
    metrics = build_policy_loss(AlgorithmConfig())(scores, batch, context(batch)).metrics
    on = batch.loss_mask_T
    ratio = (scores.logprobs_T - batch.old_logprobs_T)[on].exp()
    adv = batch.advantages_T[on]
    clipped = ((ratio > 1.2) & (adv > 0)) | ((ratio < 0.8) & (adv < 0))
    means = {"ratio_mean": ratio, "clip_frac": clipped.double(), "approx_kl": ratio - 1 - ratio.log()}
    means |= {"entropy": scores.entropy_T[on]}
    expected = {name: each.mean().item() for name, each in means.items()}
    assert {name: metrics[f"actor/{name}"].item() for name in expected} == pytest.approx(expected)
    assert not any(isinstance(v, Tensor) and v.requires_grad for v in metrics.values())


def test_the_training_pass_measures_the_mismatch_where_nobody_scored_the_rollouts():
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


def test_scores_where_nothing_was_sampled_are_never_read():
    batch, scores = make_batch(3)
    noise = torch.where(batch.loss_mask_T, 0.0, torch.nan).double()
    dirty = TokenScores(*(column_T + noise for column_T in columns_of(scores)))
    loss_fn = build_policy_loss(AlgorithmConfig(**EVERYTHING))
    clean_out, clean_gradient = gradient(loss_fn, scores, batch, context(batch))
    dirty_out, dirty_gradient = gradient(loss_fn, dirty, batch, context(batch))
    assert torch.equal(clean_out.loss, dirty_out.loss) and torch.equal(clean_gradient, dirty_gradient)


def test_entropy_coefficient_decays_over_the_run():
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


def test_loss_functions_travel_between_processes():
    batch, scores = make_batch(2)
    config = AlgorithmConfig(entropy_loss_coef_end=0.0, **EVERYTHING)
    for loss_fn in (build_policy_loss(config, 10), build_value_loss(config), build_sft_loss()):
        travelled = pickle.loads(pickle.dumps(loss_fn))
        assert torch.equal(travelled(scores, batch, context(batch)).loss, loss_fn(scores, batch, context(batch)).loss)


@pytest.mark.parametrize(
    ("keys", "column", "words"),
    [
        ({}, "advantages_T", "advantages_T"),
        ({"use_kl_loss": True}, "ref_logprobs_T", "ref_logprobs_T"),
        ({"use_kl_loss": True, "kl_penalty": "full"}, "kl_T", r"kl_penalty 'full'.*kl_T"),
        ({"sft_loss_coef": 1.0}, "scores_B", "scores_B"),
        ({"entropy_loss_coef": 1.0}, "entropy_T", "entropy_T"),
        ({"pg_variant": "kl_cov"}, "marked_T", r"kl_cov.*marked_T"),
    ],
)
def test_what_is_missing_is_named(keys, column, words):
    batch, scores = make_batch(2)
    if hasattr(scores, column):
        scores = replace(scores, **{column: None})
    else:
        batch = batch.replace(**{column: None})
    with pytest.raises(ValueError, match=words):
        loss_of(batch, scores, **keys)


def test_a_critic_without_values_and_a_batch_without_tokens_are_refused():
    batch, scores = make_batch(2)
    ctx = context(batch)
    with pytest.raises(ValueError, match=r"value_loss needs TokenScores\.values_T"):
        build_value_loss(AlgorithmConfig())(TokenScores(scores.logprobs_T), batch, ctx)
    with pytest.raises(ValueError, match="at least one token"):
        build_policy_loss(AlgorithmConfig())(scores, batch, LossContext(0, 0, 0))


PARAMETERS: dict[str, dict[str, Any]] = {
    "cispo": {"cispo_epsilon_low": 0.3, "cispo_epsilon_high": 0.2, "cispo_use_unified_mask": True},
    "clip_cov": {"pg_clip": 0.3, "dual_clip_loss": True, "dual_clip_c": 1.5},
    "dppo_kl": {"use_pg_clip_range": True, "pg_clip_low": 0.05, "pg_clip_high": 0.1},
    "dppo_tv": {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3},
    "gmpo": {"use_pg_clip_range": True, "pg_clip_low": 0.3, "pg_clip_high": 0.5},
    "kimi15": {"kimi15_tau": 0.7},
    "kl_cov": {"ppo_kl_coef": 0.3},
    "ppo": {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3},
    "sapo": {"sapo_tau_pos": 0.8, "sapo_tau_neg": 1.7},
    "tis": {"tis_lower_bound": 0.6, "tis_upper_bound": 1.3},
    "topr": {"topr_positive_weight": 0.7, "topr_negative_weight": 0.4},
    "vanilla": {},
}
WITH_RATIO = ["cispo", "clip_cov", "kl_cov", "ppo", "sapo", "tis", "topr"]
CASES = [(name, "token") for name in PG_VARIANTS] + [(name, unit) for unit in ("segment", "seq") for name in WITH_RATIO]


def keys_of(name: str, sampling: str, **more: Any) -> dict[str, Any]:
    return {"pg_variant": name, "importance_sampling": sampling, **PARAMETERS[name], **more}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def oracle_token(name: str, lp: float, old: float, adv: float, ratio: float) -> tuple[float, float]:
    """Loss of one token and its derivative by log p."""
    weight = None
    if name == "vanilla":
        weight = 1.0
    if name == "tis":
        weight = clip(ratio, 0.6, 1.3)
    if name == "topr":
        weight = 0.7 if adv > 0 else 0.4 * min(ratio, 1.0)
    if name == "cispo":
        weight = clip(ratio, 0.7, 1.2)
        if (adv > 0 and ratio > 1.2) or (adv <= 0 and ratio < 0.7):
            weight = 0.0
    if weight is not None:
        return -weight * adv * lp, -weight * adv
    if name == "kimi15":
        return -adv * lp + 0.35 * (lp - old) ** 2, -adv + 0.7 * (lp - old)
    if name.startswith("dppo"):
        p, q = math.exp(lp), math.exp(old)
        if name == "dppo_tv":
            distance, low, high = abs(p - q), 0.1, 0.3
        else:
            other_p, other_q = -math.expm1(min(lp, -1e-7)), -math.expm1(min(old, -1e-7))
            distance = q * (old - lp) + (1 - q) * math.log(other_q / other_p)
            low, high = 0.05, 0.1
        too_far = (ratio > 1 and distance > high) if adv > 0 else (ratio < 1 and distance > low)
        return (0.0, 0.0) if too_far else (-adv * ratio, -adv * ratio)
    if name == "sapo":
        tau = 0.8 if adv > 0 else 1.7
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -adv * 4 / tau * gate, -adv * 4 * gate * (1 - gate) * ratio
    low, high = (0.3, 0.3) if name == "clip_cov" else (0.1, 0.3)
    loss, slope = -adv * ratio, -adv * ratio
    if -adv * clip(ratio, 1 - low, 1 + high) > loss:
        loss, slope = -adv * clip(ratio, 1 - low, 1 + high), 0.0
    if name == "clip_cov" and adv < 0 and loss > -1.5 * adv:
        loss, slope = -1.5 * adv, 0.0
    return loss, slope


def turns_of(batch: Batch) -> list[list[int]]:
    """Token indices of each turn of each row that count."""
    turns: dict[tuple[int, int], list[int]] = {}
    for i in batch.loss_mask_T.nonzero().flatten().tolist():
        turns.setdefault((int(batch.rows_T[i]), int(batch.turn_T[i])), []).append(i)
    return list(turns.values())


def oracle(
    name: str, sampling: str, scores: TokenScores, batch: Batch, rows: list[list[int]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Losses of all tokens, and the derivative of their plain sum by each log p."""
    losses, slopes = {}, {}
    for row in rows:
        lp, old, adv = (
            [column[i].item() for i in row] for column in (scores.logprobs_T, batch.old_logprobs_T, batch.advantages_T)
        )
        d = [x - y for x, y in zip(lp, old, strict=True)]
        if name == "gmpo" and row:
            mean_adv = sum(adv) / len(row)
            kept = [min(x, 0.5) if mean_adv > 0 else max(x, -0.3) for x in d]
            loss = -mean_adv * math.exp(sum(kept) / len(row))
            for i, x, y in zip(row, d, kept, strict=True):
                losses[i], slopes[i] = loss, loss if x == y else 0.0  # n tokens share it, each with a slope of 1 / n
            continue
        for k, i in enumerate(row):
            ratio = math.exp(d[k] if sampling == "token" else sum(d) / len(d))
            if name == "kl_cov":
                marked = bool(batch.marked_T[i])
                losses[i] = -adv[k] * ratio + 0.3 * abs(d[k]) * marked
                slopes[i] = -adv[k] * ratio + 0.3 * math.copysign(1.0, d[k]) * marked
                continue
            losses[i], slopes[i] = oracle_token(name, lp[k], old[k], adv[k], ratio)
    return losses, slopes


@examples(15)
@example(seed=3, mode="token-mean", history=False)  # sums of probabilities beyond a bound, not differences
@given(seed=seeds, mode=st.sampled_from(MODES), history=st.booleans())
@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_loss_and_gradient_are_their_definition(name, sampling, seed, mode, history):
    batch, scores = make_batch(seed, history)
    assume(batch.loss_mask_T.any())
    config = AlgorithmConfig(loss_agg_mode=mode, **keys_of(name, sampling))
    assert not list(config.problems())
    rows = rows_of(batch, batch.loss_mask_T)
    losses, slopes = oracle(name, sampling, scores, batch, turns_of(batch) if sampling == "segment" else rows)
    got = build_policy_loss(config)(scores, batch, context(batch)).loss.item()
    assert got == pytest.approx(aggregate(losses, rows, mode), rel=1e-9, abs=1e-9)
    config = AlgorithmConfig(loss_agg_mode="token-mean", **keys_of(name, sampling))
    _, exact = gradient(build_policy_loss(config), scores, batch, context(batch))
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for i, slope in slopes.items():
        expected[i] = slope / len(slopes)
    torch.testing.assert_close(exact[0], expected, rtol=1e-8, atol=1e-10)


@examples(10)
@given(seed=seeds, parts=st.integers(1, 6), weighted=st.booleans())
@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_any_split_adds_up(name, sampling, seed, parts, weighted):
    batch, scores = make_batch(seed, history=False)
    assume(batch.loss_mask_T.any())
    if weighted:
        batch = batch.replace(weights_T=torch.rand(batch.num_tokens) + 0.5)
    assert_any_split_adds_up(build_policy_loss(AlgorithmConfig(**keys_of(name, sampling))), scores, batch, parts, seed)


@pytest.mark.parametrize("name", PG_VARIANTS)
def test_on_fresh_samples_every_loss_starts_as_the_plain_policy_gradient(name):
    batch, scores = make_batch(4, history=False)
    fresh = batch.replace(old_logprobs_T=scores.logprobs_T, advantages_T=(batch.rows_T - 1.5) * batch.loss_mask_T)
    defaults = AlgorithmConfig(pg_variant=name)
    _, got = gradient(build_policy_loss(defaults), scores, fresh, context(fresh))
    _, plain = gradient(build_policy_loss(AlgorithmConfig(pg_variant="vanilla")), scores, fresh, context(fresh))
    torch.testing.assert_close(got[0], plain[0])


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_enormous_ratios_stay_finite(name, sampling):
    batch, scores = make_batch(3)
    far = batch.replace(old_logprobs_T=batch.old_logprobs_T - 1e4)
    out, grads = gradient(build_policy_loss(AlgorithmConfig(**keys_of(name, sampling))), scores, far, context(far))
    assert math.isfinite(out.loss.item()) and torch.isfinite(grads).all()


@pytest.mark.parametrize("keys", [EVERYTHING, *(keys_of(name, sampling) for name, sampling in CASES)], ids=str)
def test_a_micro_batch_without_sampled_tokens_adds_a_differentiable_zero(keys):
    batch, scores = make_batch(3)
    empty = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    out, grads = gradient(build_policy_loss(AlgorithmConfig(**keys)), scores, empty, context(batch))
    assert out.loss.item() == 0.0 and not grads.any()


def test_clip_frac_counts_tokens_beyond_a_bound():
    batch = Batch(
        lengths_B=torch.tensor([3]),
        tokens_T=torch.tensor([0, 1, 2]),
        loss_mask_T=torch.tensor([True, True, True]),
        advantages_T=torch.tensor([1.0, 1.0, -1.0]),
        old_logprobs_T=torch.tensor([-1.0, 0.0, -1.0]),
    )
    scores = TokenScores(torch.zeros(3))  # ratios e, 1, e
    for name, expected in {"tis": 2, "cispo": 2, "topr": 1, "gmpo": 2, "ppo": 1, "vanilla": 0}.items():
        out = build_policy_loss(AlgorithmConfig(pg_variant=name))(scores, batch, LossContext(3, 1, 3))
        assert float(out.metrics["actor/clip_frac"]) == pytest.approx(expected / 3), name


def test_token_weights_multiply_the_policy_gradient_alone():
    batch, scores = make_batch(0, max_episodes=20)
    weights_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    others = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_loss_coef": 0.2, "sft_loss_coef": 0.4}
    weighted = batch.replace(weights_T=weights_T)
    scaled = batch.replace(advantages_T=batch.advantages_T * weights_T)
    assert loss_of(weighted, scores) == pytest.approx(loss_of(scaled, scores))
    assert loss_of(weighted, scores, rl_loss_coef=0.0, **others) == loss_of(batch, scores, rl_loss_coef=0.0, **others)


def halved(tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return -0.5 * tokens.advantage_M * tokens.logprobs_M, torch.zeros_like(tokens.row_M, dtype=torch.bool)


def test_losses_have_the_names_of_the_configuration_or_are_reached_by_path_and_travel():
    batch, scores = make_batch(2)
    loss_fn = pickle.loads(pickle.dumps(build_policy_loss(AlgorithmConfig(pg_variant=f"{__name__}:halved"))))
    got = loss_fn(scores, batch, context(batch)).loss.item()
    assert got == pytest.approx(0.5 * loss_of(batch, scores, pg_variant="vanilla"))
    assert loss_of(batch, scores, use_topr_loss=True) == loss_of(batch, scores, pg_variant="topr")
    assert tuple(POLICY_LOSSES.names()) == tuple(PG_VARIANTS)


TALKS: list[Talk] = [
    *map(talk, range(3)),
    [("user", "a"), ("assistant", "an answer of many tokens, so that means differ")],
    [("system", "S"), ("user", "a longer question than the others"), ("assistant", "yes")],
]


def by_tokens(most: int, **more: bool) -> dict[str, Any]:
    return {"worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": most, **more}}


CUTTINGS: dict[str, dict[str, Any]] = {
    "one by one": {"training_args": {"per_device_train_batch_size": 1}},
    "all at once": {"training_args": {"per_device_train_batch_size": 8}},
    "by tokens": by_tokens(80),
    "packed": by_tokens(120, use_sequence_packing=True),
}


def batch_of_talks() -> Batch:
    renderer = ChatRenderer(make_tokenizer())
    rows = [renderer.conversation([{"role": role, "content": text} for role, text in spoken]) for spoken in TALKS]
    mask_T = torch.cat([torch.from_numpy(mask) for _, mask in rows])
    return batch_of([ids for ids, _ in rows]).replace(loss_mask_T=mask_T)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_step_is_that_of_float64_however_the_conversations_are_cut(tmp_path, mode):
    make_tiny_model(tmp_path, seed=3)
    oracle, batch = Imitator(tmp_path), batch_of_talks()
    loss = oracle.loss(TALKS, per_row=mode != "token-mean")
    loss.backward()
    for name, cutting in CUTTINGS.items():
        options = {"temperature": 1.0, "max_grad_norm": 1e9, "needs": SFT_NEEDS, **cutting}
        trainer = make_trainer(tmp_path, "fsdp2_train", **options)
        scores = trainer.logprobs(batch)
        assert float(scores.top1_T[batch.loss_mask_T].mean()) == pytest.approx(oracle.accuracy(TALKS)), name
        metrics, gradient = step_and_gradient(trainer, batch, build_sft_loss(mode))
        assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=2e-6), name
        assert metrics["sft/token_accuracy"] == pytest.approx(oracle.accuracy(TALKS)), name
        for weight, parameter in oracle.model.named_parameters():
            torch.testing.assert_close(gradient[weight].double(), parameter.grad, rtol=2e-4, atol=2e-6)


VALUES = torch.tensor([9.0, 9, 1.5, 9, 0.5, 9, 9, -1.0, 9, 2.0]).double()
BATCH = Batch(
    torch.tensor([3, 2, 3, 2]),
    torch.arange(10),
    torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0, 1]).bool(),
    pair_B=torch.tensor([4, 4, 7, 7]),
    preferred_B=torch.tensor([True, False, True, False]),
    target_B=torch.tensor([0.25, 0.25, 0.0, 0.0]),
    returns_T=torch.tensor([0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0.5]),
)


def run(batch: Batch, **keys: float | str) -> dict[str, float]:
    context = LossContext.of(BATCH)
    found = build_reward_loss(RewardLossConfig(**keys))(TokenScores(values_T=VALUES), batch, context)
    return {"total": float(found.loss)} | {name: float(value) for name, value in found.metrics.items()}


def test_pairs_lead_by_their_margin():
    found = run(BATCH, reward_loss="bradley_terry", center_coef=0.1)
    leads = (1.5 - 0.5 - 0.25, -1.0 - 2.0)
    expected = sum(math.log1p(math.exp(-lead)) for lead in leads) / 2 + 0.1 * (2.0**2 + 1.0**2) / 2
    assert found["total"] == pytest.approx(expected)
    assert found["rm/accuracy"] == 0.5 and found["rm/margin"] == pytest.approx((1.0 - 3.0) / 2)
    assert found["rm/chosen_score"] == pytest.approx(0.25)


def test_ends_meet_their_targets():
    errors = (0.5, 0.5, -1.0, 1.5)
    found = run(BATCH, reward_loss="regression")
    assert found["total"] == pytest.approx(sum(error**2 for error in errors) / 4)
    assert found["rm/absolute_error"] == pytest.approx(3.5 / 4)
    labels = ((1.5, 1.0), (0.5, 0.0), (-1.0, 0.0), (2.0, 0.5))
    expected = sum(y * math.log1p(math.exp(-r)) + (1 - y) * math.log1p(math.exp(r)) for r, y in labels) / 4
    found = run(BATCH, reward_loss="process")
    assert found["total"] == pytest.approx(expected) and found["rm/accuracy"] == 0.5


@pytest.mark.parametrize("loss", ["bradley_terry", "regression", "process"])
def test_a_placeholder_adds_nothing(loss):
    blank = take_micro_batch(BATCH, [], 0)
    values = torch.ones(2, requires_grad=True)
    found = build_reward_loss(RewardLossConfig(reward_loss=loss))(
        TokenScores(values_T=values), blank, LossContext.of(BATCH)
    )
    found.loss.backward()
    assert found.loss == 0 and not values.grad.any()


def test_calibration_is_the_distance_of_shares_and_probabilities():
    stated = torch.tensor([0.05, 0.05, 0.95, 0.95, 0.95, 0.95, 1.0, 0.61])
    right = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]).bool()
    expected = (abs(0.1 - 0) + abs(4 * 0.95 + 1 - 4) + abs(0.61 - 1)) / 8
    assert calibration_error(stated, right) == pytest.approx(expected)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([1, 0])) == 0
