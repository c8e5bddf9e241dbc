"""Reward normalisation, clipping, KL in the reward and running statistics against loops in float64."""

import json
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import compute_advantages
from roll.algorithms.reductions import RunningStats, whiten
from roll.algorithms.shaping import apply_kl_penalty, shape_rewards, whiten_token_rewards
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.preflight.choices import check_reward_parts
from tests.support.algorithms_batches import Episode, Token, Turn, assert_close, by_token, random_episodes, to_batch
from tests.support.examples import examples
from tests.unit.algorithms.test_kl import oracle as estimated_kl

seeds = st.integers(0, 2**32 - 1)


def lone_turns(scores: list[float], groups: list[int] | None = None, tags: list[int] | None = None) -> Batch:
    """One-token episodes, whose reward is their score."""
    groups, tags = groups or [0] * len(scores), tags or [0] * len(scores)
    columns = zip(scores, groups, tags, strict=True)
    return to_batch(
        [Episode(g, tag, [Turn([Token(i, True, 0, 0, 0, 0)], s, 0)]) for i, (s, g, tag) in enumerate(columns)],
        history=False,
    )


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
    live = [e for e in episodes if any(turn.sampled for turn in e.turns)]

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


@pytest.mark.parametrize("keys", [{"reward_norm": "running"}, {"use_reward_scaling": True, "use_reward_norm": True}])
def test_running_normalisation_uses_all_scores_so_far(keys):
    running = RunningStats()
    config = AlgorithmConfig(**keys)
    shape_rewards(lone_turns([1.0, 2.0, 6.0]), config.reward, running)
    out, _ = shape_rewards(lone_turns([3.0, 8.0]), config.reward, running)
    seen = [1.0, 2.0, 6.0, 3.0, 8.0]
    expected = [(x - statistics.mean(seen)) / (statistics.stdev(seen) + 1e-6) for x in (3.0, 8.0)]
    assert out.rewards_T.tolist() == pytest.approx(expected)


def test_reward_scaling_alone_keeps_the_mean():
    scores = [1.0, 2.0, 6.0]
    expected = [x / (statistics.stdev(scores) + 1e-6) for x in scores]
    assert shaped(lone_turns(scores), use_reward_scaling=True) == pytest.approx(expected)


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
    rows = [
        kl_T[batch.token_index([row])][batch.loss_mask_T[batch.token_index([row])]]
        for row in range(len(batch.lengths_B))
    ]
    assert metrics["reward/kl"] == pytest.approx(statistics.mean(float(row.mean()) for row in rows if len(row)))
    with pytest.raises(ValueError, match=r"kl_penalty 'full'.*kl_T"):
        apply_kl_penalty(batch, config.kl_penalty, 0.3)
    with pytest.raises(ValueError, match=r"kl_T: .* not finite"):
        apply_kl_penalty(batch.replace(kl_T=kl_T * torch.nan), config.kl_penalty, 0.3)


def test_kl_falls_back_on_the_rollout_engine_and_needs_a_reference():
    batch = to_batch(random_episodes(3), history=False)
    fallback, _ = apply_kl_penalty(batch.replace(old_logprobs_T=None), AlgorithmConfig().kl_penalty, 0.1)
    named, _ = apply_kl_penalty(
        batch.replace(old_logprobs_T=batch.rollout_logprobs_T), AlgorithmConfig().kl_penalty, 0.1
    )
    assert torch.equal(fallback.rewards_T, named.rewards_T)
    with pytest.raises(ValueError, match="ref_logprobs_T"):
        apply_kl_penalty(batch.replace(ref_logprobs_T=None), AlgorithmConfig().kl_penalty, 0.1)


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
            "enable": True, "len": buffer[0], "max_length": buffer[1], "penalty_factor": buffer[2]
        }  # fmt: skip
    if coef is not None:
        keys |= {"add_len_reward": True, "len_reward_coef": coef}
    config = AlgorithmConfig(**keys)
    assert not list(config.problems())
    out, metrics = shape_rewards(batch, config.reward, RunningStats())
    live = [e for e in episodes if any(turn.sampled for turn in e.turns)]
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
    got = {}
    for token, reward in by_token(out, out.rewards_T).items():
        got[token] = reward
    for e, score in zip(live, scores, strict=True):
        total = sum(got[token.id] for turn in e.turns for token in turn.tokens)
        assert total == pytest.approx(score - (statistics.mean(scores) if norm else 0.0), abs=1e-4)
    assert torch.equal(out.scores_B, batch.scores_B)
    if live and buffer is not None:
        assert metrics["reward/overlong_penalty"] == pytest.approx(statistics.mean(penalties))
        assert metrics["reward/overlong_frac"] == pytest.approx(statistics.mean(x < 0 for x in penalties))
    if live and coef is not None:
        assert metrics["reward/len_reward"] == pytest.approx(statistics.mean(rewards))
    if live:
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


def test_log_probabilities_of_unsampled_tokens_cost_nothing():
    batch = to_batch(random_episodes(3), history=False)
    noise = torch.where(batch.loss_mask_T, 0.0, -5.0)
    clean, clean_metrics = apply_kl_penalty(batch, AlgorithmConfig().kl_penalty, 0.1)
    noisy, noisy_metrics = apply_kl_penalty(
        batch.replace(ref_logprobs_T=batch.ref_logprobs_T + noise), AlgorithmConfig().kl_penalty, 0.1
    )
    assert torch.equal(clean.rewards_T, noisy.rewards_T) and clean_metrics == noisy_metrics


KEYS = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]}


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), history=st.booleans(), weights=st.sampled_from([None, [1.0, 0.25], [0.0, 2.0]]))
def test_rewards_are_normalised_apart_and_summed(seed, history, weights):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    generator = torch.Generator().manual_seed(seed % 2**31)
    parts = torch.randn(len(episodes), 2, generator=generator).round(decimals=1)
    batch = batch.replace(parts_BK=parts[batch.traj_B])
    out = compute_advantages(batch, AlgorithmConfig(**KEYS, gdpo_reward_weights=weights))
    tokens = [[token.id for turn in e.turns for token in turn.sampled] for e in episodes]
    groups = defaultdict(list)
    for index, e in enumerate(episodes):
        if tokens[index]:
            groups[e.group].append(index)
    plain, returns = {}, {}
    for members in groups.values():
        for index in members:
            total = 0.0
            for k, weight in enumerate(weights or [1.0, 1.0]):
                values = [float(parts[i, k]) for i in members]
                mean, std = (0.0, 1.0) if len(values) == 1 else (statistics.mean(values), statistics.stdev(values))
                total += weight * (float(parts[index, k]) - mean) / (std + 1e-6)
            worth = sum(w * float(parts[index, k]) for k, w in enumerate(weights or [1.0, 1.0]))
            plain |= dict.fromkeys(tokens[index], total)
            returns |= dict.fromkeys(tokens[index], worth)
    mean = statistics.mean(plain.values()) if plain else 0.0
    spread = statistics.variance(plain.values()) if len(plain) > 1 else 0.0
    if spread > 1e-6:
        assert_close(out, out.advantages_T, {i: (x - mean) / (spread + 1e-8) ** 0.5 for i, x in plain.items()}, 1e-4)
    assert_close(out, out.returns_T, returns)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"adv_estimator": "grpo"}, "gdpo_reward_keys"),
        ({"gdpo_reward_keys": []}, "gdpo_reward_keys"),
        ({"gdpo_reward_keys": ["a", "a"]}, "gdpo_reward_keys"),
        ({"gdpo_reward_weights": [1.0]}, "gdpo_reward_weights"),
        ({"norm_mean_type": "group"}, "norm_mean_type"),
        ({"overlong_buffer": {"enable": True, "len": 2}}, "overlong_buffer.enable"),
    ],
)
def test_what_gdpo_does_not_read_is_refused(keys, path):
    config = AlgorithmConfig.model_validate(KEYS | keys)
    assert [problem.path for problem in config.problems()] == [path]


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
