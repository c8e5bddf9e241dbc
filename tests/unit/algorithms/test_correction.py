"""Train/infer mismatch: weights and rejection against loops over nested lists, and their way into the loss."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.correction import mismatch_by_lag
from roll.algorithms.losses import build_policy_loss
from roll.algorithms.selection import select_for_policy
from roll.configs.algorithm import AlgorithmConfig
from roll.data.batch import Batch
from tests.support.algorithms_batches import (
    Episode,
    Token,
    aggregate,
    assert_any_split_adds_up,
    by_token,
    context,
    gradient,
    make_batch,
    random_episodes,
    rows_of,
    to_batch,
)
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)
LEVELS = ["token", "segment", "geometric", "sequence"]
levels = st.sampled_from(LEVELS)


def corrected(**keys: Any) -> AlgorithmConfig:
    config = AlgorithmConfig(train_infer_correction=keys)
    assert not list(config.train_infer_correction.problems())
    return config


def at_level(episodes: list[Episode], history: bool, level: str, value: Any) -> dict[int, float]:
    """``value`` of each sampled token, taken together as the level says."""
    out: dict[int, float] = {}
    for episode in episodes:
        rows = [episode.turns] if history else [[turn] for turn in episode.turns]
        for row in rows:
            in_row = [token for turn in row for token in turn.sampled]
            for turn in row:
                members: dict[str, list[Token]] = {"segment": turn.sampled, "geometric": in_row, "sequence": in_row}
                for token in turn.sampled:
                    values = [value(t) for t in members.get(level, [token])]
                    out[token.id] = sum(values) / (1 if level == "sequence" else len(values))
    return out


@examples(60)
@given(seed=seeds, history=st.booleans(), level=levels, bound=st.sampled_from([None, 0.7, 1.2]))
def test_importance_weights_are_their_definition(seed, history, level, bound):
    episodes = random_episodes(seed)
    config = corrected(is_weight={"enabled": True, "weight_type": level, "upper_bound": bound})
    batch = to_batch(episodes, history, seed).replace(advantages_T=None)
    out, metrics = select_for_policy(batch, config.parts, seed=0)
    log_ratios = at_level(episodes, history, level, lambda t: t.old_logprob - t.rollout_logprob)
    expected = {i: min(math.exp(d), bound or math.inf) for i, d in log_ratios.items()}
    got = by_token(out, out.weights_T)
    assert {i: got[i] for i in expected} == pytest.approx(expected, rel=1e-5)
    assert torch.equal(out.loss_mask_T, batch.loss_mask_T)
    if expected:
        assert metrics["mismatch/is_weight_mean"] == pytest.approx(sum(expected.values()) / len(expected), rel=1e-5)
        capped = sum(x == bound for x in expected.values()) / len(expected)
        assert metrics["mismatch/is_weight_capped_frac"] == pytest.approx(capped)


@examples(30)
@given(seed=seeds, history=st.booleans(), level=levels)
def test_normalised_weights_have_mean_one_over_what_they_are_of(seed, history, level):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    if not batch.loss_mask_T.any():
        return
    keys = {"enabled": True, "weight_type": level}
    plain, _ = select_for_policy(batch, corrected(is_weight=keys).parts, seed=0)
    scaled, _ = select_for_policy(batch, corrected(is_weight={**keys, "batch_normalize": True}).parts, seed=0)
    weights = by_token(plain, plain.weights_T)
    units: list[list[Token]] = []
    for episode in episodes:
        rows = [episode.turns] if history else [[turn] for turn in episode.turns]
        if level in ("geometric", "sequence"):
            units += [[token for turn in row for token in turn.sampled] for row in rows]
        else:
            turns = [turn.sampled for row in rows for turn in row]
            units += [[token] for turn in turns for token in turn] if level == "token" else turns
    means = [sum(weights[token.id] for token in unit) / len(unit) for unit in units if unit]
    mean = sum(means) / len(means)
    got = by_token(scaled, scaled.weights_T)
    assert got == pytest.approx({i: weight / mean for i, weight in weights.items()}, rel=1e-4)


def test_a_bypass_wants_no_scores_of_the_trainer():
    config = corrected(bypass=True)
    assert not config.wants_old_logprobs and config.bypasses_old_logprobs
    config.add_token_level_kl = True
    assert not config.wants_old_logprobs
    for other in ({"is_weight": {"enabled": True}}, {"filters": [{"enabled": True}]}):
        (problem,) = AlgorithmConfig(train_infer_correction={"bypass": True, **other}).train_infer_correction.problems()
        assert "with bypass" in problem.expected


@examples(40)
@given(seed=seeds, history=st.booleans())
def test_a_veto_rejects_the_rows_of_impossible_tokens(seed, history):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    veto = {"enabled": True, "ratio_low": 0.4, "ratio_high": 1e9, "whole_rows": True}
    out, _ = select_for_policy(batch, corrected(filters=[veto]).parts, seed=0)
    rows = [e.turns if history else [turn] for e in episodes for turn in (e.turns[:1] if history else e.turns)]
    expected = set()
    for row in rows:
        tokens = [token for turn in row for token in turn.sampled]
        if all(math.exp(token.old_logprob - token.rollout_logprob) >= 0.4 for token in tokens):
            expected |= {token.id for token in tokens}
    assert {i for i, on in by_token(out, out.loss_mask_T).items() if on} == expected


@examples(60)
@given(seed=seeds, history=st.booleans(), level=levels, ratio=st.booleans(), other=levels)
def test_filters_keep_what_lies_within_all_their_bounds(seed, history, level, ratio, other):
    episodes = random_episodes(seed)
    for token in (t for e in episodes for turn in e.turns for t in turn.sampled):
        token.old_logprob, token.rollout_logprob = -abs(token.old_logprob), -abs(token.rollout_logprob)
    filters = [
        {"enabled": True, "agg_type": level, "ratio_enabled": ratio, "diff_enabled": not ratio, "ratio_high": 1.5},
        {"enabled": True, "agg_type": other, "ratio_low": 0.3, "ratio_high": 4.0},
        {"enabled": False, "ratio_low": 1.0, "ratio_high": 1.0},
    ]
    batch = to_batch(episodes, history, seed)
    out, metrics = select_for_policy(batch, corrected(filters=filters).parts, seed=0)
    ratios = {
        name: at_level(episodes, history, name, lambda t: t.old_logprob - t.rollout_logprob) for name in (level, other)
    }
    diffs = at_level(episodes, history, level, lambda t: math.exp(t.old_logprob) - math.exp(t.rollout_logprob))
    kept = {
        i
        for i in diffs
        if (0.8 <= math.exp(ratios[level][i]) <= 1.5 if ratio else -0.2 <= diffs[i] <= 0.2)
        and 0.3 <= math.exp(ratios[other][i]) <= 4.0
    }
    assert {i for i, on in by_token(out, out.loss_mask_T).items() if on} == kept
    assert out.weights_T is None
    if diffs:
        assert metrics["mismatch/rejected_frac"] == pytest.approx(1 - len(kept) / len(diffs))


@examples(30)
@given(seed=seeds, level=levels, parts=st.integers(1, 5))
def test_weights_with_gradient_are_computed_in_the_loss(seed, level, parts):
    batch, scores = make_batch(seed)
    if not batch.loss_mask_T.any():
        return
    batch = batch.replace(rollout_logprobs_T=batch.ref_logprobs_T)
    is_weight = {"enabled": True, "weight_type": level, "upper_bound": 2.5, "detach": False}
    config = corrected(is_weight=is_weight)
    config.pg_variant = "vanilla"
    assert not config.wants_old_logprobs
    assert select_for_policy(batch, config.parts, seed=0)[0].weights_T is None
    loss_fn = build_policy_loss(config)
    losses = {}
    for row in rows_of(batch, batch.loss_mask_T):
        d = {i: (scores.logprobs_T[i] - batch.rollout_logprobs_T[i]).item() for i in row}
        for i in row:
            turn = [j for j in row if batch.turn_T[j] == batch.turn_T[i]]
            members = {"token": [i], "segment": turn}.get(level, row)
            log_weight = sum(d[j] for j in members) / (1 if level == "sequence" else len(members))
            weight = min(math.exp(log_weight), 2.5)
            losses[i] = -weight * (batch.advantages_T[i] * scores.logprobs_T[i]).item()
    expected = aggregate(losses, rows_of(batch, batch.loss_mask_T), "seq-mean-token-mean")
    assert loss_fn(scores, batch, context(batch)).loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert_any_split_adds_up(loss_fn, scores, batch, parts, seed)


def test_detached_weights_are_constants_and_the_others_are_not():
    batch, scores = make_batch(8)
    batch = batch.replace(rollout_logprobs_T=batch.ref_logprobs_T, old_logprobs_T=scores.logprobs_T)
    gradients = []
    for detach in (True, False):
        config = corrected(is_weight={"enabled": True, "upper_bound": None, "detach": detach})
        config.pg_variant = "vanilla"
        chosen, _ = select_for_policy(batch, config.parts, seed=0)
        out, exact = gradient(build_policy_loss(config), scores, chosen, context(chosen))
        gradients.append((out.loss.item(), exact[0]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-6)  # weights_T is float32
    assert not torch.allclose(gradients[0][1], gradients[1][1], atol=1e-3)


def test_log_probabilities_that_are_missing_or_not_finite_are_refused_by_name():
    batch = to_batch(random_episodes(3), history=False).replace(old_logprobs_T=None)
    for keys in ({"is_weight": {"enabled": True}}, {"filters": [{"enabled": True}]}):
        config = corrected(**keys)
        assert config.wants_old_logprobs
        with pytest.raises(ValueError, match=r"train_infer_correction\..*old_logprobs_T"):
            select_for_policy(batch, config.parts, seed=0)
    assert not corrected(filters=[{"enabled": False}]).wants_old_logprobs
    batch = to_batch(random_episodes(3, empty_masks=False), history=False)
    bad = batch.replace(rollout_logprobs_T=batch.rollout_logprobs_T - torch.inf)
    with pytest.raises(ValueError, match=r"rollout_logprobs_T: .* not finite"):
        select_for_policy(bad, corrected(is_weight={"enabled": True}).parts, seed=0)


VERSION = 7
"""Of the weights that train next, in the tests of rows that several versions sampled."""


def with_versions(batch: Batch, seed: int) -> Batch:
    """The same with tokens of the versions 5, 6 and 7, old ones first in each row."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    versions_T = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for row in rows_of(batch, batch.loss_mask_T):
        versions_T[row] = torch.randint(VERSION - 2, VERSION + 1, (len(row),), generator=generator).sort().values
    return batch.replace(rollout_versions_T=versions_T)


def sampled_by(batch: Batch, seed: int) -> Tensor:
    """float64 [T]: log-probabilities under the version of each token; the further from the newest, the older it is."""
    assert batch.old_logprobs_T is not None and batch.rollout_versions_T is not None
    generator = torch.Generator().manual_seed(seed % 2**31 + 1)
    noise_T = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    return (batch.old_logprobs_T + 0.4 * (VERSION - batch.rollout_versions_T) * noise_T) * batch.loss_mask_T


@examples(60)
@given(seed=seeds, bound=st.sampled_from([0.7, 1.2, 5.0]), parts=st.integers(1, 4))
def test_the_loss_on_rows_that_several_versions_sampled_is_that_of_decoupled_ppo(seed, bound, parts):
    """The clipped ratio new to proximal policy, times the truncated ratio of the latter to the one that sampled."""
    batch, scores = make_batch(seed)
    if not batch.loss_mask_T.any():
        return
    batch = with_versions(batch, seed)
    batch = batch.replace(rollout_logprobs_T=sampled_by(batch, seed))
    config = corrected(is_weight={"enabled": True, "upper_bound": bound})
    config.pg_variant, config.dual_clip_loss, config.pg_clip = "ppo", False, 0.2
    chosen, _ = select_for_policy(batch, config.parts, seed=0)
    loss_fn = build_policy_loss(config)
    out, slopes = gradient(loss_fn, scores, chosen, context(chosen))

    rows = rows_of(batch, batch.loss_mask_T)
    losses, expected_slopes = {}, torch.zeros(batch.num_tokens, dtype=torch.float64)
    for row in rows:
        for i in row:
            new, proximal = float(scores.logprobs_T[i]), float(batch.old_logprobs_T[i])
            weight = min(math.exp(proximal - float(batch.rollout_logprobs_T[i])), bound)
            ratio, advantage = math.exp(new - proximal), float(batch.advantages_T[i])
            free, clipped = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
            losses[i] = -weight * min(free, clipped)
            if free <= clipped:
                expected_slopes[i] = -weight * free / (len(row) * sum(map(bool, rows)))
    expected = aggregate(losses, rows, "seq-mean-token-mean")
    assert out.loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)  # weights_T is float32
    torch.testing.assert_close(slopes[0], expected_slopes, rtol=1e-5, atol=1e-6)
    assert_any_split_adds_up(loss_fn, scores, chosen, parts, seed)


@examples(40)
@given(seed=seeds, history=st.booleans(), level=levels)
def test_the_distance_to_the_sampler_is_told_by_age(seed, history, level):
    episodes = random_episodes(seed)
    batch = with_versions(to_batch(episodes, history, seed), seed)
    keys = {"enabled": True, "agg_type": level, "ratio_low": 0.5, "ratio_high": 2.0}
    config = corrected(is_weight={"enabled": True, "weight_type": level, "upper_bound": 1.2}, filters=[keys])

    metrics = mismatch_by_lag(batch, VERSION, config.train_infer_correction)

    own = at_level(episodes, history, "token", lambda t: t.old_logprob - t.rollout_logprob)
    together = at_level(episodes, history, level, lambda t: t.old_logprob - t.rollout_logprob)
    lags = {i: VERSION - int(v) for i, v in by_token(batch, batch.rollout_versions_T).items() if i in own}
    expected = {}
    for lag in set(lags.values()):
        tokens = [i for i in own if lags[i] == lag]
        expected[f"async/log_ratio_mean_{lag}"] = sum(abs(own[i]) for i in tokens) / len(tokens)
        expected[f"async/log_ratio_max_{lag}"] = max(abs(own[i]) for i in tokens)
        expected[f"async/truncated_{lag}"] = sum(math.exp(together[i]) > 1.2 for i in tokens) / len(tokens)
        outside = [not 0.5 <= math.exp(together[i]) <= 2.0 for i in tokens]
        expected[f"async/rejected_{lag}"] = sum(outside) / len(tokens)
    assert metrics == pytest.approx(expected)


def test_shares_by_age_are_told_of_what_is_switched_on():
    batch = with_versions(to_batch(random_episodes(3, empty_masks=False), history=True), 3)
    plain = mismatch_by_lag(batch, VERSION, corrected().train_infer_correction)
    assert plain and {name.rpartition("_")[0] for name in plain} == {"async/log_ratio_mean", "async/log_ratio_max"}
    assert mismatch_by_lag(batch.replace(old_logprobs_T=None), VERSION, corrected().train_infer_correction) == {}
