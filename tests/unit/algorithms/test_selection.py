"""What the policy's loss counts, against loops: masks, weights, Clip-Cov, PF-PPO's draw, train/infer mismatch."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.advantages import compute_advantages
from roll.algorithms.correction import mismatch_by_lag
from roll.algorithms.losses import build_policy_loss
from roll.algorithms.reductions import RunningStats
from roll.algorithms.selection import drop_masked_episodes, group_scores, pf_ppo_rows, select_for_policy
from roll.algorithms.shaping import shape_rewards
from roll.configs.algorithm import AlgorithmConfig
from roll.data.batch import Batch
from tests.support.algorithms_batches import (
    Episode,
    Token,
    Turn,
    aggregate,
    assert_any_split_adds_up,
    by_group,
    by_token,
    context,
    gradient,
    lone,
    make_batch,
    played,
    random_episodes,
    rows_of,
    to_batch,
)
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)


def turns_of_rows(episode: Episode, history: bool) -> list[list[Turn]]:
    return [episode.turns] if history else [[turn] for turn in episode.turns]


def sampled(turns: list[Turn]) -> list[Token]:
    return [token for turn in turns for token in turn.sampled]


def sampled_rows(episodes: list[Episode], history: bool) -> list[tuple[Episode, list[int]]]:
    """Each row's episode and its sampled token ids."""
    rows = [(e, [token.id for token in sampled(row)]) for e in episodes for row in turns_of_rows(e, history)]
    return [(e, ids) for e, ids in rows if ids]


def group_means(episodes: list[Episode]) -> dict[int, float]:
    groups = by_group(played(episodes)).items()
    return {group: statistics.mean(e.score for e in members) for group, members in groups}


def stretch(value: float, values: list[float]) -> float:
    low, high = min(values), max(values)
    return 1.5 - (value - low) / (high - low) if high > low else 1.0


@examples(60)
@given(seed=seeds, history=st.booleans(), difficulty=st.booleans(), length=st.booleans())
def test_sample_weights_are_their_definition(seed, history, difficulty, length):
    episodes = random_episodes(seed)
    config = AlgorithmConfig(difficulty_loss_weight=difficulty, length_loss_weight=length)
    batch = to_batch(episodes, history, seed)
    out, metrics = select_for_policy(batch, config.parts, seed=0)
    if not (difficulty or length):
        assert out.weights_T is None and metrics == {}
        return
    rows, means = sampled_rows(episodes, history), group_means(episodes)
    lengths = [float(len(ids)) for _, ids in rows]
    expected = {}
    for e, ids in rows:
        weight = stretch(means[e.group], list(means.values())) if difficulty else 1.0
        weight *= stretch(float(len(ids)), lengths) if length else 1.0
        expected |= dict.fromkeys(ids, weight)
    got = by_token(out, out.weights_T)
    assert {i: got[i] for i in expected} == pytest.approx(expected, rel=1e-4)
    assert torch.equal(out.loss_mask_T, batch.loss_mask_T)


@examples(60)
@given(seed=seeds, history=st.booleans(), low=st.sampled_from([-0.5, 0.0]), high=st.sampled_from([0.3, 1.0]))
def test_groups_outside_the_bounds_of_difficulty_are_masked(seed, history, low, high):
    episodes = random_episodes(seed)
    config = AlgorithmConfig(difficulty_mask=True, difficulty_low_threshold=low, difficulty_high_threshold=high)
    out, metrics = select_for_policy(to_batch(episodes, history, seed), config.parts, seed=0)
    means, rows = group_means(episodes), sampled_rows(episodes, history)
    kept = {i for e, ids in rows for i in ids if low < means[e.group] < high}
    assert {i for i, on in by_token(out, out.loss_mask_T).items() if on} == kept
    total = sum(len(ids) for _, ids in rows)
    assert metrics["actor/difficulty_masked_frac"] == pytest.approx(1 - len(kept) / total if total else 0.0)


def test_bounds_of_difficulty_do_not_belong_to_the_interval_and_only_failed_samples_may_be_too_long():
    batch = to_batch([lone(0, 0, 0.0), lone(1, 1, 1.0), lone(2, 2, 0.0), lone(2, 3, 1.0)], history=False)
    out, _ = select_for_policy(batch, AlgorithmConfig(difficulty_mask=True).parts, seed=0)
    assert out.loss_mask_T.tolist() == [False, False, True, True]
    episodes = [lone(0, 0, 1.0, 3), lone(0, 1, 0.0, 3), lone(0, 2, 0.0, 2), lone(0, 3, -1.0, 4)]
    batch = to_batch(episodes, history=False)
    config = AlgorithmConfig(error_max_len_clip=True, error_max_len_threshold=2)
    out, metrics = select_for_policy(batch, config.parts, seed=0)
    assert out.loss_mask_T.tolist() == [True] * 3 + [False] * 3 + [True] * 2 + [False] * 4
    assert metrics["actor/error_max_len_masked_frac"] == pytest.approx(7 / 12)
    off, _ = select_for_policy(batch, AlgorithmConfig(error_max_len_threshold=2).parts, seed=0)
    assert off.loss_mask_T.all()


def test_masked_samples_leave_the_loss_and_its_denominators():
    batch, scores = make_batch(0, max_episodes=20)
    means = sorted(group_scores(batch, "test").unique().tolist())
    bounds = {"difficulty_low_threshold": means[0], "difficulty_high_threshold": means[-1] + 1}
    out, metrics = select_for_policy(batch, AlgorithmConfig(difficulty_mask=True, **bounds).parts, seed=0)
    assert 0 < metrics["actor/difficulty_masked_frac"] < 1
    rows = torch.zeros(batch.num_sequences).index_add(0, out.rows_T, out.loss_mask_T.float()).nonzero().squeeze(1)
    index = batch.token_index(rows)
    alone = type(scores)(*(t[index] for t in (scores.logprobs_T, scores.entropy_T, scores.values_T)))
    loss_fn, part = build_policy_loss(AlgorithmConfig()), batch.select(rows)
    masked = loss_fn(scores, out, context(out)).loss.item()
    assert masked == pytest.approx(loss_fn(alone, part, context(part)).loss.item())


def test_samples_that_were_cut_off_are_masked():
    batch = to_batch([lone(0, i, 1.0, 2) for i in range(3)], history=False)
    batch = batch.replace(truncated_B=torch.tensor([False, True, False]))
    out, metrics = select_for_policy(batch, AlgorithmConfig(max_len_mask=True).parts, seed=0)
    assert out.loss_mask_T.tolist() == [True, True, False, False, True, True]
    assert metrics["actor/max_len_masked_frac"] == pytest.approx(1 / 3)
    assert select_for_policy(batch, AlgorithmConfig().parts, seed=0)[0].loss_mask_T.all()
    assert drop_masked_episodes(batch, AlgorithmConfig(max_len_mask=True)) == (batch, {})


@examples(60)
@given(seed=seeds, history=st.booleans(), difficulty=st.booleans())
def test_samples_masked_for_all_are_as_if_never_played(seed, history, difficulty):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    truncated_B = torch.rand(batch.num_sequences, generator=torch.Generator().manual_seed(seed % 2**31)) < 0.3
    batch = batch.replace(truncated_B=truncated_B)
    config = AlgorithmConfig(
        max_len_mask=True, difficulty_mask=difficulty, mask_type="all", adv_estimator="grpo", reward_norm="batch"
    )
    lost = {int(batch.traj_B[row]) for row in truncated_B.nonzero().squeeze(1)}
    means = group_means(episodes)
    if difficulty:
        lost |= {i for i, e in enumerate(episodes) if not 0.0 < means.get(e.group, -1.0) < 1.0}
    kept = [row for row in range(batch.num_sequences) if int(batch.traj_B[row]) not in lost]
    dropped, metrics = drop_masked_episodes(batch, config)
    total = int(batch.loss_mask_T.sum())
    if total:
        left = int(batch.select(kept).loss_mask_T.sum())
        assert metrics["actor/dropped_frac"] == pytest.approx(1 - left / total)

    def advantages(part: Batch) -> dict[int, float]:
        shaped, _ = shape_rewards(part, config.reward, RunningStats())
        out = compute_advantages(shaped, config)
        policy, metrics = select_for_policy(out, config.parts, seed=0)
        assert torch.equal(policy.loss_mask_T, out.loss_mask_T) and metrics == {}
        return {i: x for i, x in by_token(out, out.advantages_T).items() if x}

    assert advantages(dropped) == pytest.approx(advantages(batch.select(kept)), abs=1e-6)


COVARIANCE = {"pg_variant": "clip_cov", "clip_cov_lb": 0.2, "clip_cov_ub": 1.5}


def covariances(batch: Batch) -> dict[int, float]:
    """Of advantage and log-probability, for each sampled token."""
    on = batch.loss_mask_T.nonzero().squeeze(1).tolist()
    adv, lp = batch.advantages_T.tolist(), batch.old_logprobs_T.tolist()
    mean_adv, mean_lp = (sum(column[i] for i in on) / max(1, len(on)) for column in (adv, lp))
    return {i: (adv[i] - mean_adv) * (lp[i] - mean_lp) for i in on}


@examples(40)
@given(seed=seeds, share=st.sampled_from([0.001, 0.1, 1.0]))
def test_clip_cov_takes_out_tokens_of_high_covariance(seed, share):
    batch, _ = make_batch(seed, max_episodes=20)
    config = AlgorithmConfig(**COVARIANCE, clip_cov_ratio=share)
    out, metrics = select_for_policy(batch, config.parts, seed=1)
    on = covariances(batch)
    if not on:
        return
    candidates = {i for i in on if 0.2 < on[i] < 1.5}
    chosen = {i for i in on if out.weights_T[i] == 0}
    assert chosen <= candidates
    assert len(chosen) == min(len(candidates), max(1, int(share * len(on))))
    assert metrics["actor/clip_cov_frac"] == pytest.approx(len(chosen) / len(on))


@examples(40)
@given(seed=seeds, share=st.sampled_from([0.001, 0.1, 1.0]))
def test_kl_cov_marks_the_tokens_of_the_largest_covariance(seed, share):
    batch, _ = make_batch(seed, max_episodes=20)
    config = AlgorithmConfig(pg_variant="kl_cov", kl_cov_ratio=share)
    out, metrics = select_for_policy(batch.replace(marked_T=None), config.parts, seed=1)
    on = covariances(batch)
    if not on:
        return
    ranked = sorted(on, key=on.__getitem__, reverse=True)
    count = max(1, int(share * len(on)))
    assert set(out.marked_T.nonzero().squeeze(1).tolist()) == set(ranked[:count])
    assert metrics["actor/kl_cov_frac"] == pytest.approx(count / len(on))
    assert out.weights_T is None and torch.equal(out.loss_mask_T, batch.loss_mask_T)


def test_clip_cov_falls_back_on_the_rollout_engine():
    batch, _ = make_batch(0, max_episodes=20)
    config = AlgorithmConfig(**COVARIANCE)
    named, _ = select_for_policy(batch, config.parts, seed=0)
    fallback, _ = select_for_policy(
        batch.replace(rollout_logprobs_T=batch.old_logprobs_T, old_logprobs_T=None), config.parts, seed=0
    )
    assert torch.equal(named.weights_T, fallback.weights_T)


@pytest.mark.parametrize(
    ("method", "power", "weights"),
    [
        ("pow", 2.0, [1.0, 4.0, 0.0, 9.0]),
        ("pow", 1.0, [1.0, 2.0, 0.0, 3.0]),
        ("max_min", 2.0, [0.0, 1.0, 0.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.1, 0.4]),
    ],
)
def test_pf_ppo_draws_rows_by_their_score(method, power, weights):
    scores = [1.0, -2.0, 0.0, 3.0] * 2000
    batch = to_batch([lone(0, i, s) for i, s in enumerate(scores)], history=False)
    keys = {"reweight_method": method, "weight_pow": power}
    config = AlgorithmConfig(use_pf_ppo=True, pf_ppo=keys)
    rows = pf_ppo_rows(batch, config, torch.Generator().manual_seed(0))
    share = torch.bincount(rows % 4, minlength=4).double() / len(rows)
    assert share.tolist() == pytest.approx([w / sum(weights) for w in weights], abs=0.02)
    out, metrics = select_for_policy(batch, config.parts, seed=0)
    assert out.num_sequences == batch.num_sequences
    assert metrics["actor/pf_ppo_distinct_frac"] == len(out.tokens_T.unique()) / len(scores)


def test_pf_ppo_draws_no_episode_that_was_taken_out_of_the_step():
    config = AlgorithmConfig(use_pf_ppo=True, pf_ppo={"reweight_method": "max_min"}, max_len_mask=True, mask_type="all")
    scores = [5.0, 1.0, 0.0, -5.0, 0.5, 0.75]
    batch = to_batch([lone(0, i, s) for i, s in enumerate(scores)], history=False)
    cut_off = torch.tensor([True, False, False, True, False, False])
    batch, _ = drop_masked_episodes(batch.replace(truncated_B=cut_off), config)
    out, metrics = select_for_policy(batch, config.parts, seed=1)
    assert out.loss_mask_T.tolist() == (~cut_off).tolist(), "as many as were played"
    drawn = out.scores_B[~cut_off]
    assert set(drawn.tolist()) <= {1.0, 0.0}, "the highest and the lowest of the others"
    assert metrics["actor/pf_ppo_distinct_frac"] == len(drawn.unique()) / 4


def test_pf_ppo_draws_evenly_where_every_score_is_zero_and_by_the_seed_alone():
    batch = to_batch([lone(0, i, 0.0) for i in range(50)], history=False)
    rows = pf_ppo_rows(batch, AlgorithmConfig(use_pf_ppo=True), torch.Generator().manual_seed(0))
    assert len(rows.unique()) > 20
    batch, _ = make_batch(0, max_episodes=20)
    config = AlgorithmConfig(**COVARIANCE, clip_cov_ratio=0.05, use_pf_ppo=True)
    first, again, other = (select_for_policy(batch, config.parts, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.tokens_T, again.tokens_T) and torch.equal(first.weights_T, again.weights_T)
    assert first.tokens_T.tolist() != other.tokens_T.tolist()


EVERY_OPTION: list[dict[str, Any]] = [
    {"difficulty_loss_weight": True},
    {"length_loss_weight": True},
    {"difficulty_mask": True},
    {"error_max_len_clip": True},
    {"use_pf_ppo": True},
    {"pg_variant": "clip_cov"},
    {"pg_variant": "kl_cov"},
    {"max_len_mask": True},
    {"train_infer_correction": {"is_weight": {"enabled": True}, "filters": [{"enabled": True}]}},
]


@pytest.mark.parametrize("keys", EVERY_OPTION, ids=str)
def test_a_batch_without_sampled_tokens_stays_without(keys):
    batch = to_batch([lone(0, 0, 0.0, sampled=False)], history=False)
    batch = batch.replace(advantages_T=torch.zeros(1), truncated_B=torch.tensor([True]))
    out, metrics = select_for_policy(batch, AlgorithmConfig(**keys).parts, seed=0)
    assert not out.loss_mask_T.any() and all(abs(value) <= 1 for value in metrics.values())


@pytest.mark.parametrize(
    ("keys", "column"),
    [
        ({"difficulty_loss_weight": True}, "group_B"),
        ({"difficulty_mask": True}, "scores_B"),
        ({"error_max_len_clip": True}, "scores_B"),
        ({"use_pf_ppo": True}, "scores_B"),
        ({"pg_variant": "clip_cov"}, "advantages_T"),
        ({"pg_variant": "kl_cov"}, "advantages_T"),
        ({"max_len_mask": True}, "truncated_B"),
    ],
)
def test_a_missing_column_is_named(keys, column):
    batch, _ = make_batch(1)
    (key,) = keys
    with pytest.raises(ValueError, match=f"{key}.*{column}"):
        select_for_policy(batch.replace(**{column: None}), AlgorithmConfig(**keys).parts, seed=0)


def test_scores_that_are_not_finite_are_refused():
    batch, _ = make_batch(1)
    bad = batch.replace(scores_B=batch.scores_B * torch.nan)
    for key in ("difficulty_mask", "use_pf_ppo"):
        with pytest.raises(ValueError, match=r"scores_B: .* nan in sequence 0"):
            select_for_policy(bad, AlgorithmConfig(**{key: True}).parts, seed=0)


@pytest.mark.parametrize("column", ["advantages_T", "old_logprobs_T", "ref_logprobs_T", "scores_B"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_the_losses_read_must_be_finite(column, bad):
    batch, _ = make_batch(1)
    values = getattr(batch, column).clone()
    values[-1] = bad
    with pytest.raises(ValueError, match=rf"Batch.{column}: 1 of \d+ values are not finite"):
        select_for_policy(batch.replace(**{column: values}), AlgorithmConfig().parts, seed=0)


levels = st.sampled_from(["token", "segment", "geometric", "sequence"])


def corrected(**keys: Any) -> AlgorithmConfig:
    config = AlgorithmConfig(train_infer_correction=keys)
    assert not list(config.train_infer_correction.problems())
    return config


def at_level(episodes: list[Episode], history: bool, level: str, value: Any) -> dict[int, float]:
    """``value`` of each sampled token, taken together as the level says."""
    out: dict[int, float] = {}
    for row in (row for episode in episodes for row in turns_of_rows(episode, history)):
        for turn in row:
            members = {"segment": turn.sampled, "geometric": sampled(row), "sequence": sampled(row)}
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
    assume(batch.loss_mask_T.any())
    keys = {"enabled": True, "weight_type": level}
    plain, _ = select_for_policy(batch, corrected(is_weight=keys).parts, seed=0)
    scaled, _ = select_for_policy(batch, corrected(is_weight={**keys, "batch_normalize": True}).parts, seed=0)
    weights = by_token(plain, plain.weights_T)
    units: list[list[Token]] = []
    for row in (row for episode in episodes for row in turns_of_rows(episode, history)):
        in_row = sampled(row)
        units += {"token": [[t] for t in in_row], "segment": [turn.sampled for turn in row]}.get(level, [in_row])
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
    expected = set()
    for tokens in (sampled(row) for e in episodes for row in turns_of_rows(e, history)):
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
    assume(batch.loss_mask_T.any())
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
    assume(batch.loss_mask_T.any())
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
