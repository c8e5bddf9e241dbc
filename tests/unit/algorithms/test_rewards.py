"""Rewards against loops in float64: normalisation, clipping, the KL and its coefficient, running statistics."""

import json
import math
import statistics
from collections import defaultdict
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import compute_advantages
from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.kl import KL_ESTIMATORS, KlController, kl_divergence
from roll.algorithms.reductions import RunningStats, whiten
from roll.algorithms.shaping import apply_kl_penalty, shape_rewards, whiten_token_rewards
from roll.configs.algorithm import AlgorithmConfig, KlPenalty
from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.preflight.choices import check_reward_parts
from tests.support.algorithms_batches import (
    Episode,
    assert_close,
    by_group,
    by_token,
    lone,
    played,
    random_episodes,
    to_batch,
    to_tokens,
)
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)


def lone_turns(scores: list[float], groups: list[int] | None = None) -> Batch:
    """One-token episodes, whose reward is their score."""
    columns = zip(scores, groups or [0] * len(scores), strict=True)
    return to_batch([lone(group, i, score) for i, (score, group) in enumerate(columns)], history=False)


def shaped(batch: Batch, **keys: Any) -> list[float]:
    config = AlgorithmConfig(**keys)
    assert not list(config.problems())
    return shape_rewards(batch, config.reward, RunningStats())[0].rewards_T.tolist()


@examples(60)
@given(
    seed=seeds,
    history=st.booleans(),
    grouping=st.sampled_from(["state", "batch", "inductive"]),
    method=st.sampled_from(["asym_clip", "identity", "mean", "mean_std"]),
    clip=st.sampled_from([None, 0.5]),
)
def test_normalised_scores_are_the_new_sums_of_rewards(seed, history, grouping, method, clip):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    config = AlgorithmConfig(reward_normalization={"grouping": grouping, "method": method}, reward_clip=clip)
    out, metrics = shape_rewards(batch, config.reward, RunningStats())
    live = played(episodes)

    def key(e: Episode) -> int:
        return {"state": e.group, "inductive": e.tag, "batch": 0}[grouping]

    members = defaultdict(list)
    for e in live:
        members[key(e)].append(e.score)
    expected = {}
    for e in live:
        peers = members[key(e)]
        mean, scale = 0.0, 1.0
        if method != "identity":
            spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
            mean, scale = statistics.mean(peers), spread + 1e-6 if spread > 1e-12 and method != "mean" else 1.0
        score = (e.score - mean) / scale
        score = min(max(score, -1.0), 3.0) if method == "asym_clip" else score
        score = min(max(score, -clip), clip) if clip else score
        turns = [turn for turn in e.turns if turn.sampled]
        for turn in turns:
            expected[turn.sampled[-1].id] = turn.reward / scale
        expected[turns[-1].sampled[-1].id] += score - e.score / scale
    assert_close(out, out.rewards_T, expected, 1e-4)
    assert torch.equal(out.scores_B, batch.scores_B)
    if live:
        assert metrics["reward/score_mean"] == pytest.approx(statistics.mean(e.score for e in live), abs=1e-6)


def test_reward_norm_shift_and_scale_do_only_their_half():
    batch = lone_turns([1.0, 3.0, 5.0, 9.0], groups=[1, 1, 2, 2])
    assert shaped(batch, reward_norm="group", reward_shift=True) == pytest.approx([-1, 1, -2, 2])
    std = statistics.stdev([1, 3]), statistics.stdev([5, 9])
    assert shaped(batch, reward_norm="group", reward_scale=True) == pytest.approx(
        [1 / std[0], 3 / std[0], 5 / std[1], 9 / std[1]], rel=1e-5
    )
    whole = statistics.stdev([1, 3, 5, 9])
    assert shaped(batch, reward_norm="batch") == pytest.approx([(x - 4.5) / whole for x in (1, 3, 5, 9)], rel=1e-5)


NORM_TYPES = st.sampled_from([None, "batch", "group", "running"])


@examples(80)
@given(mean_type=NORM_TYPES, std_type=NORM_TYPES, scores=st.lists(st.integers(-9, 9), min_size=1, max_size=8))
def test_mean_and_spread_may_come_from_different_peers(mean_type, std_type, scores):
    groups = [i % 3 for i in range(len(scores))]
    earlier = [2.0, 7.0, -4.0]
    running = RunningStats()
    running.update(torch.tensor(earlier))
    config = AlgorithmConfig(norm_mean_type=mean_type, norm_std_type=std_type)
    assert not list(config.problems())
    out, _ = shape_rewards(lone_turns([float(x) for x in scores], groups), config.reward, running)

    def peers(scope: str, group: int) -> list[float]:
        if scope == "running":
            return [*earlier, *scores]
        return [x for x, g in zip(scores, groups, strict=True) if scope == "batch" or g == group]

    for got, score, group in zip(out.rewards_T.tolist(), scores, groups, strict=True):
        mean = statistics.mean(peers(mean_type, group)) if mean_type else 0.0
        members = peers(std_type, group) if std_type else []
        spread = statistics.stdev(members) if len(members) > 1 else 0.0
        assert got == pytest.approx((score - mean) / (spread + 1e-6 if spread else 1.0), rel=1e-5, abs=1e-6)
    used = "running" in (mean_type, std_type)
    assert running.count == len(earlier) + (len(scores) if used else 0)


SCALING = {"use_reward_scaling": True}


@pytest.mark.parametrize("keys", [{"reward_norm": "running"}, {**SCALING, "use_reward_norm": True}, SCALING])
def test_running_normalisation_uses_all_scores_so_far_and_reward_scaling_alone_keeps_the_mean(keys):
    running = RunningStats()
    config = AlgorithmConfig(**keys)
    shape_rewards(lone_turns([1.0, 2.0, 6.0]), config.reward, running)
    out, _ = shape_rewards(lone_turns([3.0, 8.0]), config.reward, running)
    seen = [1.0, 2.0, 6.0, 3.0, 8.0]
    mean = 0.0 if keys == SCALING else statistics.mean(seen)
    assert out.rewards_T.tolist() == pytest.approx([(x - mean) / (statistics.stdev(seen) + 1e-6) for x in (3.0, 8.0)])


@pytest.mark.parametrize("keys", [{"reward_norm": "group", "reward_scale": True}, {"use_reward_scaling": True}])
def test_equal_scores_are_not_divided_by_nothing(keys):
    assert shaped(lone_turns([0.1] * 7), **keys) == pytest.approx([0.1] * 7)


@given(score=st.floats(-10, 10), sizes=st.lists(st.integers(1, 130), min_size=1, max_size=4))
def test_equal_scores_of_several_steps_have_no_spread(score, sizes):
    stats = RunningStats()
    for size in [*sizes, 86, 87]:
        stats.update(torch.full((size,), score, dtype=torch.float64))
    assert (stats.mean, stats.std) == (score, 0.0)


@examples(40)
@given(st.lists(st.lists(st.floats(-100, 100), max_size=6), min_size=1, max_size=5))
def test_running_stats_equal_those_of_all_values_and_survive_a_checkpoint(parts):
    stats = RunningStats()
    for part in parts:
        stats.update(torch.tensor(part, dtype=torch.float64))
        restored = RunningStats()
        restored.load_state_dict(json.loads(json.dumps(stats.state_dict())))
        stats = restored
    values = [x for part in parts for x in part]
    assert stats.mean == pytest.approx(statistics.mean(values) if values else 0.0, abs=1e-9)
    assert stats.std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-6)


def estimated_kl(kind: str, d: float) -> float:
    kind = kind.removesuffix("+")
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return d * d / 2
    return min(max(math.exp(min(max(-d, -20.0), 20.0)) + d - 1, -10.0), 10.0)


@pytest.mark.parametrize("kind", KL_ESTIMATORS.names())
def test_estimators_follow_their_formula_also_far_out(kind):
    d = torch.tensor([-1e4, -25.0, -3.0, -0.1, 0.0, 0.1, 3.0, 9.0, 25.0, 1e4], dtype=torch.float64)
    got = kl_divergence(d - 1.5, torch.full_like(d, -1.5), kind)
    assert got.tolist() == pytest.approx([estimated_kl(kind, x) for x in d.tolist()], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KL_ESTIMATORS.names())
def test_gradients_are_the_estimators_own_or_with_a_plus_that_of_k2(kind):
    logprobs = torch.tensor([-0.3, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, -0.4, -9.5 if kind.endswith("+") else -2.5], dtype=torch.float64)
    if kind.endswith("+"):
        kl_divergence(logprobs, ref, kind).sum().backward()
        torch.testing.assert_close(logprobs.grad, logprobs.detach() - ref)
    else:
        assert torch.autograd.gradcheck(lambda x: kl_divergence(x, ref, kind), (logprobs,))


def test_k1_and_k3_estimate_the_true_divergence_and_every_documented_name_is_registered():
    torch.manual_seed(0)
    p, q = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    true = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):  # their expectation under p, taken exactly
        assert (p.exp() * kl_divergence(p, q, kind)).sum().item() == pytest.approx(true.item(), rel=1e-9)
    # "full" is no estimate from one token: the strategy computes it.
    assert {*KL_ESTIMATORS.names(), "full"} == set(get_args(KlPenalty))


def test_a_fixed_coefficient_stays_that_of_the_configuration_also_in_a_resumed_run():
    controller = KlController.of(AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.3).kl.reward)
    controller.update(100.0, 10_000)
    assert controller.coef == 0.3
    saved = KlController.of(AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.3).kl.reward).state_dict()
    controller = KlController.of(AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.1).kl.reward)
    controller.load_state_dict(saved)
    assert controller.coef == 0.1


def test_an_adaptive_coefficient_moves_towards_its_own_target_by_bounded_steps_a_fifth_at_most():
    config = AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.1, target_kl=2.0, kl_horizon=100)
    controller = KlController.of(config.kl.reward)
    controller.update(2.2, 50)  # 10 % above
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    controller.update(1000.0, 50)  # bounded at 20 %
    assert controller.coef == pytest.approx(0.105 * (1 + 0.2 * 0.5))
    controller.update(0.0, 50)
    assert controller.coef == pytest.approx(0.105 * 1.1 * 0.9)
    restored = KlController.of(config.kl.reward)
    restored.load_state_dict(controller.state_dict())
    assert restored.coef == controller.coef
    # More sequences than the horizon.
    controller = KlController(0.1, target=0.1, horizon=100)
    for kl, coef in ((0.01, 0.08), (5.0, 0.096), (0.1, 0.096)):
        controller.update(kl, 1024)
        assert controller.coef == pytest.approx(coef)
    # That of the loss.
    config = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_target=2.0, kl_horizon=100)
    controller = KlController.of(config.kl.loss)
    controller.update(2.2, 50)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    fixed = KlController.of(config.kl.reward)
    fixed.update(2.2, 50)
    assert config.kl.reward is None and fixed.coef == 0


def test_mismatch_compares_the_two_engines_on_sampled_tokens():
    batch = to_batch(random_episodes(7, max_episodes=10), history=False)
    d = (batch.rollout_logprobs_T.double() - batch.old_logprobs_T.double())[batch.loss_mask_T].tolist()
    metrics = mismatch_metrics(batch)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(sum(map(abs, d)) / len(d))
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(max(map(abs, d)))
    assert metrics["mismatch/k3"] == pytest.approx(sum(estimated_kl("k3", x) for x in d) / len(d))
    batch = to_batch(random_episodes(7), history=False)
    assert set(mismatch_metrics(batch.replace(old_logprobs_T=batch.rollout_logprobs_T)).values()) == {0.0}
    assert mismatch_metrics(batch.replace(old_logprobs_T=None)) == {}


@examples(40)
@given(seed=seeds, kind=st.sampled_from(["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]))
def test_kl_is_taken_from_each_sampled_token(seed, kind):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, False, seed)
    out, metrics = apply_kl_penalty(batch, AlgorithmConfig(kl_penalty=kind).kl_penalty, 0.3)
    before, expected, row_means = by_token(batch, batch.rewards_T), {}, []
    for turn in (turn for e in episodes for turn in e.turns):
        kls = [estimated_kl(kind, token.old_logprob - token.ref_logprob) for token in turn.sampled]
        expected |= {token.id: before[token.id] - 0.3 * kl for token, kl in zip(turn.sampled, kls, strict=True)}
        row_means += [statistics.mean(kls)] if kls else []
    assert_close(out, out.rewards_T, expected)
    assert metrics["reward/kl"] == pytest.approx(statistics.mean(row_means) if row_means else 0.0, abs=1e-5)
    assert metrics["reward/kl_coef"] == 0.3


def test_the_kl_over_the_vocabulary_comes_from_the_training_engine():
    batch = to_batch(random_episodes(3), history=False)
    kl_T = torch.rand(batch.num_tokens) * batch.loss_mask_T
    config = AlgorithmConfig(kl_penalty="full", add_token_level_kl=True)
    out, metrics = apply_kl_penalty(batch.replace(kl_T=kl_T, ref_logprobs_T=None), config.kl_penalty, 0.3)
    torch.testing.assert_close(out.rewards_T, batch.rewards_T - 0.3 * kl_T)
    lengths = batch.lengths_B.tolist()
    rows = [kl[mask] for kl, mask in zip(kl_T.split(lengths), batch.loss_mask_T.split(lengths), strict=True)]
    assert metrics["reward/kl"] == pytest.approx(statistics.mean(float(row.mean()) for row in rows if len(row)))
    with pytest.raises(ValueError, match=r"kl_penalty 'full'.*kl_T"):
        apply_kl_penalty(batch, config.kl_penalty, 0.3)
    with pytest.raises(ValueError, match=r"kl_T: .* not finite"):
        apply_kl_penalty(batch.replace(kl_T=kl_T * torch.nan), config.kl_penalty, 0.3)


def test_kl_falls_back_on_the_rollout_engine_needs_a_reference_and_counts_sampled_tokens_alone():
    batch, penalty = to_batch(random_episodes(3), history=False), AlgorithmConfig().kl_penalty
    fallback, _ = apply_kl_penalty(batch.replace(old_logprobs_T=None), penalty, 0.1)
    named, _ = apply_kl_penalty(batch.replace(old_logprobs_T=batch.rollout_logprobs_T), penalty, 0.1)
    assert torch.equal(fallback.rewards_T, named.rewards_T)
    with pytest.raises(ValueError, match="ref_logprobs_T"):
        apply_kl_penalty(batch.replace(ref_logprobs_T=None), penalty, 0.1)
    noise = torch.where(batch.loss_mask_T, 0.0, -5.0)
    clean, clean_metrics = apply_kl_penalty(batch, penalty, 0.1)
    noisy, noisy_metrics = apply_kl_penalty(batch.replace(ref_logprobs_T=batch.ref_logprobs_T + noise), penalty, 0.1)
    assert torch.equal(clean.rewards_T, noisy.rewards_T) and clean_metrics == noisy_metrics


@examples(80)
@given(
    seed=seeds,
    history=st.booleans(),
    buffer=st.sampled_from([None, (1, 2, 1.0), (3, 4, 0.5), (2, 2, 2.0)]),
    coef=st.sampled_from([None, 1.0, 0.3]),
    norm=st.booleans(),
)
def test_lengths_change_the_score_before_it_is_normalised(seed, history, buffer, coef, norm):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    keys: dict[str, Any] = {"reward_norm": "batch" if norm else None, "reward_shift": norm}
    if buffer is not None:
        keys["overlong_buffer"] = {
            "enable": True,
            **dict(zip(("len", "max_length", "penalty_factor"), buffer, strict=True)),
        }
    if coef is not None:
        keys |= {"add_len_reward": True, "len_reward_coef": coef}
    config = AlgorithmConfig(**keys)
    assert not list(config.problems())
    out, metrics = shape_rewards(batch, config.reward, RunningStats())
    live = played(episodes)
    lengths = {id(e): sum(len(turn.sampled) for turn in e.turns) for e in live}
    penalties, rewards, scores = [], [], []
    for e in live:
        penalty = 0.0
        for turn in (turn for turn in e.turns if turn.sampled and buffer is not None):
            size, limit, factor = buffer
            penalty += min(-(len(turn.sampled) - (limit - size)) / size * factor, 0.0)
        peers = [lengths[id(peer)] for peer in live if peer.group == e.group]
        reward = 0.0
        if coef is not None and max(peers) > min(peers):
            reward = 0.5 - (lengths[id(e)] - min(peers)) / (max(peers) - min(peers))
            reward = coef * (reward if e.score > 0 else min(0.0, reward))
        penalties.append(penalty)
        rewards.append(reward)
        scores.append(e.score + penalty + reward)
    got = by_token(out, out.rewards_T)
    for e, score in zip(live, scores, strict=True):
        total = sum(got[token.id] for turn in e.turns for token in turn.tokens)
        assert total == pytest.approx(score - (statistics.mean(scores) if norm else 0.0), abs=1e-4)
    assert torch.equal(out.scores_B, batch.scores_B)
    if not live:
        return
    if buffer is not None:
        assert metrics["reward/overlong_penalty"] == pytest.approx(statistics.mean(penalties))
        assert metrics["reward/overlong_frac"] == pytest.approx(statistics.mean(x < 0 for x in penalties))
    if coef is not None:
        assert metrics["reward/len_reward"] == pytest.approx(statistics.mean(rewards))
    assert metrics["reward/score_mean"] == pytest.approx(statistics.mean(e.score for e in live), abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"overlong_buffer": {"enable": True, "len": 4}}, "overlong_buffer: got max_length None"),
        ({"add_len_reward": True}, r"add_len_reward.*group_B"),
    ],
)
def test_lengths_without_a_limit_or_a_group_are_refused(keys, told):
    batch = lone_turns([0.0, 1.0]).replace(group_B=None)
    with pytest.raises(ValueError, match=told):
        shape_rewards(batch, AlgorithmConfig(**keys).reward, RunningStats())


def test_the_greedy_score_is_normalised_like_those_it_is_compared_with():
    batch = lone_turns([1.0, 3.0, 5.0, 9.0], groups=[1, 1, 2, 2]).replace(baseline_B=torch.tensor([3.0, 3.0, 9.0, 9.0]))
    for keys in ({"reward_norm": "group"}, {"reward_norm": "batch", "reward_clip": 0.5}, {"use_reward_scaling": True}):
        out, _ = shape_rewards(batch, AlgorithmConfig(**keys).reward, RunningStats())
        assert out.baseline_B[1] == out.rewards_T[1] and out.baseline_B[3] == out.rewards_T[3]
        assert out.baseline_B[0] == out.baseline_B[1]
    with pytest.raises(ValueError, match=r"baseline_B: .* nan in sequence 0"):
        shape_rewards(batch.replace(baseline_B=batch.baseline_B * torch.nan), AlgorithmConfig().reward, RunningStats())


def test_rewards_are_whitened_over_sampled_tokens_and_one_alone_becomes_zero():
    batch = to_batch(random_episodes(9, max_episodes=20), history=False)
    out = whiten_token_rewards(batch)
    values = batch.rewards_T[batch.loss_mask_T].double()
    expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    torch.testing.assert_close(out.rewards_T[batch.loss_mask_T].double(), expected, rtol=1e-5, atol=1e-6)
    assert not out.rewards_T[~batch.loss_mask_T].any()
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten(torch.zeros(0)).tolist() == []


def test_rewards_that_are_not_finite_are_refused():
    batch = lone_turns([1.0, float("nan")])
    with pytest.raises(ValueError, match="nan at token 0 of sequence 1"):
        shape_rewards(batch, AlgorithmConfig().reward, RunningStats())


@examples(60)
@given(seed=seeds, history=st.booleans(), weights=st.sampled_from([None, [1.0, 0.25], [0.0, 2.0]]))
def test_rewards_are_normalised_apart_and_summed(seed, history, weights):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    generator = torch.Generator().manual_seed(seed % 2**31)
    parts = torch.randn(len(episodes), 2, generator=generator).round(decimals=1)
    batch = batch.replace(parts_BK=parts[batch.traj_B])
    keys = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": weights}
    out = compute_advantages(batch, AlgorithmConfig(**keys))
    of = {id(e): own for e, own in zip(episodes, parts.tolist(), strict=True)}
    plain, returns = {}, {}
    for members in by_group(played(episodes)).values():
        for e in members:
            total = worth = 0.0
            for k, weight in enumerate(weights or [1.0, 1.0]):
                values = [of[id(peer)][k] for peer in members]
                mean, std = (0.0, 1.0) if len(values) == 1 else (statistics.mean(values), statistics.stdev(values))
                total += weight * (of[id(e)][k] - mean) / (std + 1e-6)
                worth += weight * of[id(e)][k]
            plain |= to_tokens([e], [total])
            returns |= to_tokens([e], [worth])
    mean = statistics.mean(plain.values()) if plain else 0.0
    spread = statistics.variance(plain.values()) if len(plain) > 1 else 0.0
    if spread > 1e-6:
        assert_close(out, out.advantages_T, {i: (x - mean) / (spread + 1e-8) ** 0.5 for i, x in plain.items()}, 1e-4)
    assert_close(out, out.returns_T, returns)


def test_every_domain_has_the_verifiers_that_are_named():
    rewards = {
        "maths": {"tag_included": ["m"], "verifiers": [{"name": "math"}, {"name": "format"}]},
        "other": {"tag_included": ["o"], "verifiers": [{"name": "format"}]},
    }
    config = RLVRConfig.model_validate(
        {"rewards": rewards, "adv_estimator": "gdpo", "gdpo_reward_keys": ["format/score", "math/score", "format"]}
    )
    found = {problem.path: problem.expected for problem in check_reward_parts(config)}
    assert found.keys() == {"gdpo_reward_keys.1", "gdpo_reward_keys.2"}
    assert "one of format" in found["gdpo_reward_keys.1"]
