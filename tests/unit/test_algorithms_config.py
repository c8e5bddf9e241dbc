"""The algorithm section: documented defaults, bounds, cross-field rules, no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pydantic
import pytest

from roll.configs.algorithm import ADV_ESTIMATORS, AlgorithmConfig


def test_defaults_have_no_problems() -> None:
    assert AlgorithmConfig().problems() == []


@pytest.mark.parametrize("estimator", [*ADV_ESTIMATORS, "my.module:estimator"])
def test_known_and_foreign_estimators_are_accepted(estimator: str) -> None:
    assert AlgorithmConfig(adv_estimator=estimator).problems() == []


@pytest.mark.parametrize(
    ("keys", "key", "hint"),
    [
        ({"adv_estimator": "gpro"}, "adv_estimator", "did you mean 'grpo'"),
        ({"adv_estimator": "grpo", "turn_level_gae": True}, "turn_level_gae", "expected false"),
        ({"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}, "norm_adv_by_std_in_grpo", "expected true"),
        ({"adv_estimator": "grpo", "critic_warmup": 3}, "critic_warmup", "has no critic"),
        ({"use_reward_norm": True}, "use_reward_norm", "use_reward_scaling"),
        ({"reward_norm": "batch", "reward_shift": True, "reward_scale": True}, "reward_scale", "one of them"),
        ({"reward_shift": True}, "reward_shift", "reward_norm"),
        ({"reward_scale": True}, "reward_scale", "reward_norm"),
        ({"reward_norm": "batch", "use_reward_scaling": True}, "use_reward_scaling", "at most one"),
        ({"norm_mean_type": "batch", "reward_norm": "group"}, "reward_norm", "beside norm_mean_type"),
        ({"norm_std_type": "group", "use_reward_scaling": True}, "use_reward_scaling", "beside norm_std_type"),
        (
            {"reward_norm": "batch", "reward_normalization": {"method": "mean_std"}},
            "reward_normalization.method",
            "at most one",
        ),
        ({"target_kl": 0.1}, "target_kl", "add_token_level_kl"),
    ],
)
def test_rules_between_keys(keys: dict[str, Any], key: str, hint: str) -> None:
    (problem,) = AlgorithmConfig(**keys).problems()
    assert problem.startswith(f"{key}: ") and hint in problem


@pytest.mark.parametrize(
    "keys",
    [
        {"gamma": 1.1},
        {"lambd": -0.1},
        {"dual_clip_c": 1.0},
        {"advantage_clip": 0.0},
        {"ppo_epochs": 0},
        {"kl_penalty": "full"},
        {"norm_mean_type": "tag"},
        {"loss_agg_mode": "mean"},
        {"reward_normalization": {"grouping": "tags"}},
        {"reward_normalisation": {}},
    ],
)
def test_values_out_of_range_and_unknown_keys_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        AlgorithmConfig(**keys)


def test_every_key_is_described() -> None:
    assert all(field.description for field in AlgorithmConfig.model_fields.values())


def test_the_section_loads_without_torch() -> None:
    code = "import sys, roll.configs.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
