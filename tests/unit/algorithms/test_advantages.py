"""Advantage estimators against loops over nested lists in float64."""

import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from roll.algorithms.advantages import ADVANTAGES, advantage_metrics, compute_advantages, value_mask
from roll.algorithms.losses import build_policy_loss, build_sft_loss, build_value_loss
from roll.algorithms.reductions import find_episodes, reverse_recurrence
from roll.algorithms.selection import select_for_policy
from roll.algorithms.types import LossFn, TokenScores
from roll.configs.algorithm import ADV_ESTIMATORS, AlgorithmConfig
from roll.configs.policy_loss import LossAggMode
from roll.data.batch import Batch
from tests.support.algorithms_batches import (
    Episode,
    Turn,
    assert_any_split_adds_up,
    assert_close,
    by_group,
    by_token,
    context,
    gradient,
    lone,
    played,
    random_episodes,
    to_batch,
    to_tokens,
)
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)
unit = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def sampled_turns(episode: Episode) -> list[Turn]:
    return [turn for turn in episode.turns if turn.sampled]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def oracle_grpo_scores(episodes: list[Episode]) -> list[float]:
    out = []
    for e in episodes:
        members = [peer.score for peer in by_group(episodes)[e.group]]
        mean, std = (0.0, 1.0) if len(members) == 1 else (statistics.mean(members), statistics.stdev(members))
        out.append((e.score - mean) / (std + 1e-6))
    return out


def oracle_step_returns(episode: Episode, gamma: float) -> list[float]:
    turns = sampled_turns(episode)
    return [sum(gamma ** (j - i) * turns[j].reward for j in range(i, len(turns))) for i in range(len(turns))]


def suited(estimator: str, episodes: list[Episode]) -> list[Episode]:
    """The episodes, with rewards that the estimator takes."""
    if estimator == "maxrl":
        for turn in (turn for e in episodes for turn in e.turns):
            turn.reward = abs(turn.reward)
    return episodes


def group_mean(members: list[float]) -> float:
    return statistics.mean(members) if len(members) > 1 else 0.0


def oracle_group_advantage(name: str, one: Episode, members: list[Episode], everyone: list[Episode]) -> float:
    """One estimator for one episode of a group, by its definition."""
    scores = [e.score for e in members]
    lengths = [sum(len(turn.sampled) for turn in e.turns) for e in members]
    own, others = one.score, [e.score for e in members if e is not one]
    if name == "grpo":  # without division
        return own - group_mean(scores)
    if name == "rloo":
        return own - (statistics.mean(others) if others else 0.0)
    if name == "opo":
        weighted = sum(length * x for length, x in zip(lengths, scores, strict=True)) / sum(lengths)
        return own - (weighted if others else 0.0)
    if name == "gpg":
        nonzero = sum(e.score != 0 for e in everyone)
        return len(everyone) / max(nonzero, 1) * (own - group_mean(scores))
    if name == "maxrl":
        mean = statistics.mean(scores)
        return own if not others else (own - mean) / mean if mean > 0 else 0.0
    assert name == "grpo_passk"
    return max(own - max(others, default=0.0), 0.0) if others else own


@examples(120)
@given(
    seed=seeds,
    history=st.booleans(),
    rounded=st.booleans(),
    estimator=st.sampled_from(["grpo", "grpo_passk", "maxrl", "rloo", "opo", "gpg"]),
    divided=st.booleans(),
)
def test_group_estimators_are_their_definitions(seed, history, rounded, estimator, divided):
    divided &= estimator == "grpo"
    episodes = random_episodes(seed, max_episodes=10)
    if rounded:  # zeros and ties
        for turn in (turn for e in episodes for turn in e.turns):
            turn.reward = float(round(turn.reward))
    batch = to_batch(suited(estimator, episodes), history, seed)
    keys = {"norm_adv_by_std_in_grpo": divided} if "grpo" in estimator else {}
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=estimator, **keys))
    live = played(episodes)
    groups = by_group(live)
    expected = [oracle_group_advantage(estimator, e, groups[e.group], live) for e in live]
    # The standard deviation of nearly equal float32 rewards amplifies their rounding.
    expected, tolerance = (oracle_grpo_scores(live), 1e-4) if divided else (expected, 1e-5)
    assert_close(out, out.advantages_T, to_tokens(live, expected), tolerance)
    assert_close(out, out.returns_T, to_tokens(live, [e.score for e in live]))


def test_grpo_passk_divides_the_lead_by_the_spread():
    batch = to_batch([lone(0, 0, 1.0), lone(0, 1, 4.0), lone(0, 2, 3.0), lone(5, 3, 7.0)], history=False)
    advantages = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo_passk")).advantages_T
    spread_of_three = statistics.stdev([1.0, 4.0, 3.0]) + 1e-6
    assert advantages.tolist() == pytest.approx([0.0, 1.0 / spread_of_three, 0.0, 7.0 / (1 + 1e-6)])


def test_maxrl_refuses_penalties():
    batch = to_batch([lone(0, 0, 1.0), lone(0, 1, -0.5)], history=False)
    with pytest.raises(ValueError, match=r"got an episode whose rewards sum to -0\.5, expected 0 or more"):
        compute_advantages(batch, AlgorithmConfig(adv_estimator="maxrl"))


@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_passk", "maxrl", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("keys", [{}, {"norm_adv_by_std_in_grpo": False}])
def test_equal_rewards_of_a_group_teach_exactly_nothing(estimator, keys):
    episodes = [lone(0, i, 0.1, tokens=i + 1) for i in range(7)]
    out = compute_advantages(to_batch(episodes, history=False), AlgorithmConfig(adv_estimator=estimator, **keys))
    assert not out.advantages_T.any()


@examples(60)
@given(seed=seeds, history=st.booleans(), gamma=unit, baseline=st.booleans())
def test_reinforce_plus_plus_whitens_returns_over_sampled_tokens(seed, history, gamma, baseline):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    name = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=name, gamma=gamma, step_reward_gamma=0.123))
    live, plain, returns = played(episodes), {}, {}
    groups = by_group(live)
    for e in live:
        following = 0.0
        for turn in reversed(e.turns):
            for token in reversed(turn.sampled):
                following = (turn.reward if token is turn.sampled[-1] else 0.0) + gamma * following
                returns[token.id] = e.score if baseline else following
                plain[token.id] = following
                if baseline:
                    plain[token.id] = e.score - group_mean([peer.score for peer in groups[e.group]])
    assert_close(out, out.returns_T, returns)
    if len(plain) < 2 or 0 < (var := statistics.variance(plain.values())) < 1e-6:
        return  # rounding would be blown up
    mean = statistics.mean(plain.values())
    assert_close(out, out.advantages_T, {i: (x - mean) / (var + 1e-8) ** 0.5 for i, x in plain.items()}, 1e-3)


Numbers = dict[int, float]


def oracle_remax(episode: Episode, config: AlgorithmConfig) -> tuple[Numbers, Numbers]:
    """Takes the greedy score from what is still to come."""
    returns, to_come = {}, 0.0
    for turn in reversed(sampled_turns(episode)):
        to_come += turn.reward
        returns |= {token.id: to_come for token in turn.sampled}
    return {token: number - episode.baseline for token, number in returns.items()}, returns


def oracle_reinforce(episode: Episode, config: AlgorithmConfig) -> tuple[Numbers, Numbers]:
    """Discounts within and across turns."""
    expected, following = {}, 0.0  # the return of the next turn's first token
    for turn in reversed(sampled_turns(episode)):
        running = turn.reward + config.step_reward_gamma * following
        for token in reversed(turn.sampled):
            expected[token.id] = running
            running *= config.gamma
        following = expected[turn.sampled[0].id]
    return expected, expected


def oracle_gae(episode: Episode, config: AlgorithmConfig) -> tuple[Numbers, Numbers]:
    """Value and advantage pass through tokens that were not sampled."""
    advantages, returns = {}, {}
    next_value = last_advantage = 0.0
    for turn in reversed(episode.turns):
        for token in reversed(turn.sampled):
            reward = turn.reward if token is turn.sampled[-1] else 0.0
            delta = reward + config.gamma * next_value - token.value
            last_advantage = delta + config.gamma * config.lambd * last_advantage
            next_value = token.value
            advantages[token.id], returns[token.id] = last_advantage, last_advantage + token.value
    return advantages, returns


def oracle_turn_level_gae(episode: Episode, config: AlgorithmConfig) -> tuple[Numbers, Numbers]:
    """One advantage per turn, and targets where turns begin."""
    gamma, advantages, targets = config.step_reward_gamma, {}, {}
    next_value = advantage = 0.0
    for turn in reversed(sampled_turns(episode)):
        value = turn.sampled[0].value
        advantage = turn.reward + gamma * next_value - value + gamma * config.lambd * advantage
        next_value = value
        advantages |= {token.id: advantage for token in turn.sampled}
        targets[turn.sampled[0].id] = advantage + value
    return advantages, targets


ORACLES = {
    "remax": oracle_remax,
    "reinforce": oracle_reinforce,
    "gae": oracle_gae,
    "turn_level_gae": oracle_turn_level_gae,
}


@examples(60)
@given(seed=seeds, history=st.booleans(), gamma=unit, step_gamma=unit, lambd=unit)
@pytest.mark.parametrize("name", ORACLES)
def test_estimators_of_one_episode_are_their_definitions(name, seed, history, gamma, step_gamma, lambd):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, history, seed)
    keys = {"adv_estimator": "gae", "turn_level_gae": True} if name == "turn_level_gae" else {"adv_estimator": name}
    config = AlgorithmConfig(**keys, gamma=gamma, step_reward_gamma=step_gamma, lambd=lambd)
    out = compute_advantages(batch, config)
    advantages, returns = {}, {}
    for e in episodes:
        of_tokens, to_come = ORACLES[name](e, config)
        advantages |= of_tokens
        returns |= to_come
    assert_close(out, out.advantages_T, advantages)
    assert_close(out, out.returns_T, returns)
    if name == "turn_level_gae":
        assert {i for i, on in by_token(batch, value_mask(batch, config)).items() if on} == set(returns)


@examples(80)
@given(seed=seeds, gamma=unit, estimator=st.sampled_from(["step_reinforce", "gigpo"]))
def test_step_level_estimators_compare_turns_in_the_same_state(seed, gamma, estimator):
    episodes = random_episodes(seed)
    batch = to_batch(episodes, False, seed)
    weights = {"step_reward_weight": 0.7, "episode_reward_weight": 0.3}
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=estimator, step_reward_gamma=gamma, **weights))
    live = played(episodes)
    same_state, groups = defaultdict(list), by_group(live)
    for e in live:
        for turn, g in zip(sampled_turns(e), oracle_step_returns(e, gamma), strict=True):
            same_state[e.group, turn.state].append(g)
    expected = {}
    for e, normalised in zip(live, oracle_grpo_scores(live), strict=True):
        for turn, g in zip(sampled_turns(e), oracle_step_returns(e, gamma), strict=True):
            peers = same_state[e.group, turn.state]
            if estimator == "gigpo":
                step = (g - statistics.mean(peers)) / (spread(peers) + 1e-6)
                episode = normalised
            else:
                others = [(sum(peers) - g) / (len(peers) - 1)] if len(peers) > 1 else [g]
                step = g - others[0]
                episode = e.score - statistics.mean(peer.score for peer in groups[e.group])
            expected |= {token.id: 0.7 * step + 0.3 * episode for token in turn.sampled}
    if estimator == "gigpo" and any(0 < spread(peers) < 1e-4 for peers in same_state.values()):
        return  # where peers' returns differ only by rounding, the quotient is noise
    assert_close(out, out.advantages_T, expected, 1e-4)


def test_step_level_estimators_refuse_rows_of_several_turns():
    turns = [turn for number in range(2) for turn in lone(0, number, 1.0).turns]
    batch = to_batch([Episode(0, 0, turns)], history=True)
    with pytest.raises(ValueError, match="several turns"):
        compute_advantages(batch, AlgorithmConfig(adv_estimator="step_reinforce"))


@examples(30)
@given(seed=seeds, estimator=st.sampled_from(sorted(ADV_ESTIMATORS)))
def test_whitening_then_clipping(seed, estimator):
    batch = to_batch(suited(estimator, random_episodes(seed)), False, seed)
    plain = compute_advantages(batch, AlgorithmConfig(adv_estimator=estimator)).advantages_T
    out = compute_advantages(
        batch, AlgorithmConfig(adv_estimator=estimator, whiten_advantages=True, advantage_clip=0.75)
    )
    values = [x for x, on in zip(plain.tolist(), batch.loss_mask_T.tolist(), strict=True) if on]
    if len(values) < 2:
        return
    mean, var = statistics.mean(values), statistics.variance(values)
    expected = {
        token: max(-0.75, min(0.75, (x - mean) / (var + 1e-8) ** 0.5))
        for token, x, on in zip(batch.tokens_T.tolist(), plain.tolist(), batch.loss_mask_T.tolist(), strict=True)
        if on
    }
    assert_close(out, out.advantages_T, expected, 1e-3)


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_row_order_changes_nothing(estimator):
    episodes = suited(estimator, random_episodes(11, max_episodes=20))
    config = AlgorithmConfig(adv_estimator=estimator, whiten_advantages=True)
    ordered = compute_advantages(to_batch(episodes, False), config)
    shuffled = compute_advantages(to_batch(episodes, False, 3), config)
    assert_close(shuffled, shuffled.advantages_T, by_token(ordered, ordered.advantages_T), 1e-6)


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_a_batch_without_sampled_tokens_has_no_advantages(estimator):
    batch = to_batch([lone(0, 0, 0.0, sampled=False)], history=False)
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=estimator, whiten_advantages=True))
    assert out.advantages_T.tolist() == [0.0] and out.returns_T.tolist() == [0.0]
    assert advantage_metrics(out, AlgorithmConfig(adv_estimator=estimator)) == {}


@pytest.mark.parametrize(
    ("estimator", "column"),
    [*((name, "rewards_T") for name in ADV_ESTIMATORS), ("gae", "values_T"), ("remax", "baseline_B")],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(estimator, column, bad):
    batch = to_batch(random_episodes(1, empty_masks=False), history=False)
    values = getattr(batch, column).clone()
    values[batch.loss_mask_T.nonzero()[-1] if column.endswith("_T") else -1] = bad
    with pytest.raises(ValueError, match=rf"{column}: 1 of \d+ values are not finite"):
        compute_advantages(batch.replace(**{column: values}), AlgorithmConfig(adv_estimator=estimator))


def test_rewards_where_nothing_was_sampled_are_refused():
    batch = to_batch(random_episodes(1), history=False)
    with pytest.raises(ValueError, match="loss_mask 0"):
        compute_advantages(batch.replace(rewards_T=torch.ones_like(batch.rewards_T)), AlgorithmConfig())


@pytest.mark.parametrize(
    ("estimator", "column"),
    [
        ("grpo", "group_B"),
        ("gae", "values_T"),
        ("gigpo", "state_B"),
        ("remax", "baseline_B"),
        ("step_reinforce", "group_B"),
        *((name, "group_B") for name in ("maxrl", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline")),
        ("grpo", "rewards_T"),
        ("optimal_token_baseline", "prob_square_sum_T"),
    ],
)
def test_a_missing_column_is_named(estimator, column):
    batch = to_batch(random_episodes(1), history=False).replace(**{column: None})
    with pytest.raises(ValueError, match=f"{estimator}.*{column}"):
        compute_advantages(batch, AlgorithmConfig(adv_estimator=estimator))


def ones(batch: Batch, config: AlgorithmConfig) -> Batch:
    return batch.replace(advantages_T=torch.ones(batch.num_tokens), returns_T=torch.zeros(batch.num_tokens))


def test_estimators_have_the_names_of_the_configuration_or_are_reached_by_path_and_masked():
    assert tuple(ADVANTAGES.names()) == tuple(sorted(ADV_ESTIMATORS))
    batch = to_batch(random_episodes(2), history=False)
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=f"{__name__}:ones"))
    assert torch.equal(out.advantages_T, batch.loss_mask_T.float())


def test_rows_without_traj_are_episodes_of_their_own():
    batch = to_batch(random_episodes(4), history=True)
    assert torch.equal(find_episodes(batch).token_M, find_episodes(batch.replace(traj_B=None, turn_B=None)).token_M)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    batch = to_batch(random_episodes(5, max_episodes=20), history=False)
    out = compute_advantages(batch, AlgorithmConfig(lambd=1.0))
    perfect = out.replace(values_T=out.returns_T)
    assert advantage_metrics(perfect, AlgorithmConfig())["critic/explained_variance"] == pytest.approx(1.0)
    constant = out.replace(values_T=out.loss_mask_T.float() * 3)
    assert advantage_metrics(constant, AlgorithmConfig())["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)


@examples(40)
@given(seed=seeds, size=st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 4095, 4097]))
def test_reverse_recurrence_is_the_plain_loop(seed, size):
    rng = np.random.default_rng(seed)
    inputs, carry = rng.normal(size=size), rng.choice([0.0, 0.3, 0.95, 1.0], size=size)
    expected, x = np.empty(size), 0.0
    for i in reversed(range(size)):
        x = inputs[i] + carry[i] * x
        expected[i] = x
    got = reverse_recurrence(torch.from_numpy(inputs), torch.from_numpy(carry))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10, atol=1e-10)


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
def test_the_baseline_is_weighted_by_the_gradient_so_far(seed, history, bound, name):
    episodes = random_episodes(seed)
    batch = with_probabilities(to_batch(episodes, history, seed), seed)
    correction = {} if bound is None else {"is_weight": {"enabled": True, "upper_bound": bound}}
    config = AlgorithmConfig(adv_estimator=name, train_infer_correction=correction)
    out = compute_advantages(batch, config)
    assert_close(out, out.advantages_T, oracle(episodes, batch, name.startswith("tir_"), bound))


@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_equal_rewards_teach_nothing_where_there_is_somebody_to_compare_with(name):
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
    alone = lengths[-1] - lengths[-2] if name.startswith("tir_") else 0
    assert int(out.advantages_T.count_nonzero()) == alone


def test_certain_tokens_are_compared_by_the_plain_mean():
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


def test_without_scoring_there_is_nothing_to_weigh_by():
    config = AlgorithmConfig(adv_estimator="optimal_token_baseline", train_infer_correction={"bypass": True})
    assert [problem.path for problem in config.problems()] == ["adv_estimator"]
    assert AlgorithmConfig(adv_estimator="optimal_token_baseline").wants_old_logprobs


# They compare the states in which rows begin, and refuse rows of several turns.
BY_ROW = {"gigpo", "step_reinforce"}


def whole_and_branched(seed: int) -> tuple[Batch, Batch]:
    episodes = random_episodes(seed, empty_masks=False)
    return to_batch(episodes, history=True), to_batch(episodes, True, seed, branch_seed=seed)


@examples(25)
@given(seed=seeds)
@pytest.mark.parametrize("estimator", sorted(set(ADVANTAGES.names()) - BY_ROW))
def test_advantages_and_returns_are_those_of_one_row(estimator, seed):
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lambd=0.8)
    batches = whole_and_branched(seed)
    if estimator == "maxrl":  # takes no rewards below 0
        batches = tuple(batch.replace(rewards_T=batch.rewards_T.abs()) for batch in batches)
    whole, branched = (compute_advantages(batch, config) for batch in batches)
    assert_close(branched, branched.advantages_T, by_token(whole, whole.advantages_T), 1e-5)
    assert_close(branched, branched.returns_T, by_token(whole, whole.returns_T), 1e-5)


def scores_of(batch: Batch) -> TokenScores:
    """A number for each token id, wherever it stands."""
    return TokenScores(*[torch.sin(batch.tokens_T.double() + 1) - 1.5] * 4)


def loss_of(mode: LossAggMode, sft: bool) -> LossFn:
    return build_sft_loss(mode) if sft else build_policy_loss(AlgorithmConfig(loss_agg_mode=mode))


REJECTING = {"filters": [{"enabled": True, "agg_type": "token", "ratio_enabled": True, "ratio_high": 1.0}]}


def prepared(kind: str, mode: LossAggMode, batch: Batch) -> tuple[LossFn, Batch]:
    """A loss, and what it reads beside the scores."""
    cosines_T = torch.cos(batch.tokens_T.double())
    if kind == "masked":
        config = AlgorithmConfig(loss_agg_mode=mode, train_infer_correction=REJECTING)
        rewarded = batch.replace(advantages_T=torch.cos(batch.tokens_T) * batch.loss_mask_T)
        return build_policy_loss(config), select_for_policy(rewarded, config.parts, 0)[0]
    if kind == "value":
        config = AlgorithmConfig(adv_estimator="gae", turn_level_gae=True, loss_agg_mode=mode)
        targets = batch.replace(returns_T=torch.cos(batch.tokens_T))
        return build_value_loss(config), targets.with_loss_mask(value_mask(batch, config))
    return loss_of(mode, kind == "sft"), batch.replace(advantages_T=cosines_T, old_logprobs_T=None)


@examples(25)
@given(seed=seeds)
@pytest.mark.parametrize("kind", ["policy", "sft", "masked", "value"])
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_loss_and_gradient_are_those_of_one_row_in_every_aggregation(mode, kind, seed):
    """Also where tokens are masked, and of the value targets of turns."""
    losses, gradients = [], []
    for batch in reversed(whole_and_branched(seed)):
        loss_fn, read = prepared(kind, mode, batch)
        if not read.loss_mask_T.any():
            return
        out, slopes = gradient(loss_fn, scores_of(read), read, context(read))
        losses.append(out.loss.item())
        gradients.append(by_token(read, slopes.sum(0)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9, abs=1e-12)
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-9, abs=1e-12)


@examples(25)
@given(seed=seeds, parts=st.integers(1, 5))
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_the_branches_of_an_episode_may_lie_in_different_micro_batches(mode, seed, parts):
    branched = whole_and_branched(seed)[1].replace(old_logprobs_T=None)
    assume(branched.loss_mask_T.any())
    branched = branched.replace(advantages_T=torch.cos(branched.tokens_T.double()))
    assert_any_split_adds_up(loss_of(mode, False), scores_of(branched), branched, parts, seed)


def mine(tmp_path: Path, code: str) -> str:
    """The name of an estimator of one's own: ``mine`` in a file."""
    path = tmp_path / "own.py"
    path.write_text(f"import torch\n{code}\n")
    return f"{path}:mine"


def test_the_estimator_in_the_guide_is_the_score_minus_the_mean_of_the_group(tmp_path):
    guide = (Path(__file__).parents[3] / "docs/algorithms.md").read_text().partition("### Your own estimator")[2]
    code = guide.partition("```python\n")[2].partition("```")[0] + "\nmine = score_minus_mean"
    batch = to_batch(random_episodes(3), False, 3)
    own = compute_advantages(batch, AlgorithmConfig(adv_estimator=mine(tmp_path, code)))
    known = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    torch.testing.assert_close(own.advantages_T, known.advantages_T)
    torch.testing.assert_close(own.returns_T, known.returns_T)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("batch.advantages_T = batch.rewards_T; return batch", r"raised FrozenInstanceError: .* \(.*own.py:3\)"),
        ("return batch.replace(advantages_T=batch.rewards_T[1:])", r"raised ValueError: Batch.advantages_T: got shape"),
        ("pass", r"returned NoneType, expected the batch with float32 .*batch.replace"),
        ("return batch.rewards_T", r"returned Tensor, expected the batch"),
        ("return batch", r"needs Batch.advantages_T, Batch.returns_T, which is not set"),
        (
            "r = batch.rewards_T.double(); return batch.replace(advantages_T=r, returns_T=r)",
            "advantages_T of .*float64",
        ),
        ("r = batch.rewards_T / 0; return batch.replace(advantages_T=r, returns_T=r)", "are not finite"),
    ],
)
def test_an_estimator_of_ones_own_that_fails_is_named_with_what_was_expected(tmp_path, body, words):
    batch = to_batch(random_episodes(3), False, 3)
    name = mine(tmp_path, f"def mine(batch, config):\n    {body}")
    with pytest.raises(ValueError, match=words) as raised:
        compute_advantages(batch, AlgorithmConfig(adv_estimator=name))
    assert name in str(raised.value) or "finite" in words
