"""GDPO against a loop in float64."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import compute_advantages
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.rlvr import RLVRConfig
from roll.preflight.choices import check_reward_parts
from tests.support.algorithms_batches import assert_close, random_episodes, to_batch
from tests.support.examples import examples

KEYS = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]}


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), history=st.booleans(), weights=st.sampled_from([None, [1.0, 0.25], [0.0, 2.0]]))
def test_rewards_are_normalised_apart_and_summed(seed: int, history: bool, weights: list[float] | None) -> None:
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
def test_what_gdpo_does_not_read_is_refused(keys: dict[str, object], path: str) -> None:
    config = AlgorithmConfig.model_validate(KEYS | keys)
    assert [problem.path for problem in config.problems()] == [path]


def test_every_domain_has_the_verifiers_that_are_named() -> None:
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
