"""The algorithm section: documented defaults, bounds, cross-field rules, no torch."""

import re
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest

from roll.algorithms.advantages import ADVANTAGES
from roll.algorithms.losses import POLICY_LOSSES
from roll.algorithms.preferences import PREFERENCE_LOSSES, REWARD_LOSSES
from roll.configs.algorithm import (
    ADV_ESTIMATORS,
    AggregationLevel,
    AlgorithmConfig,
    IsWeightConfig,
    KlPenalty,
    OverlongBufferConfig,
    PfPpoConfig,
    RewardNormalizationConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
)
from roll.configs.distill import DistillLossConfig
from roll.configs.parsing import rules_broken
from roll.configs.policy_loss import PG_VARIANTS, LossAggMode
from roll.configs.preference import PreferenceConfig, PreferenceLoss, RewardLossConfig
from roll.configs.rl import RLConfig
from roll.configs.teacher import DivergenceConfig, KdObjective, OnPolicyDistillationConfig, OpdForm


def test_defaults_and_all_names_known_or_foreign_have_no_problems():
    given = [{}, *({"pg_variant": name} for name in (*PG_VARIANTS, "my.module:loss"))]
    for estimator in (*ADV_ESTIMATORS, "my.module:estimator"):
        keys = {"gdpo_reward_keys": ["format/score"]} if estimator == "gdpo" else {}
        given.append({"adv_estimator": estimator, **keys})
    assert not [problem for keys in given for problem in AlgorithmConfig(**keys).problems()]


def last_key(keys: dict[str, Any]) -> str:
    """Where the last of some keys stands, as a problem names it."""
    key, value = list(keys.items())[-1]
    return f"{key}.{last_key(value)}" if isinstance(value, dict) and key != "train_infer_correction" else key


BYPASS = {"train_infer_correction": {"bypass": True}}
WEIGHTS = {"train_infer_correction": {"is_weight": {"enabled": True}}}
GDPO = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]}


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"adv_estimator": "gpro"}, "did you mean grpo"),
        ({"adv_estimator": "grpo", "turn_level_gae": True}, "read with gae"),
        ({"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}, "read with grpo, grpo_passk"),
        ({"adv_estimator": "grpo", "critic_warmup": 3}, "has no critic"),
        ({"use_reward_norm": True}, "use_reward_scaling"),
        ({"reward_norm": "batch", "reward_shift": True, "reward_scale": True}, "with reward_shift"),
        ({"reward_shift": True}, "reward_norm"),
        ({"reward_scale": True}, "reward_norm"),
        ({"reward_norm": "batch", "use_reward_scaling": True}, "at most one"),
        ({"norm_mean_type": "batch", "reward_norm": "group"}, "with norm_mean_type"),
        ({"norm_std_type": "group", "use_reward_scaling": True}, "with norm_std_type"),
        ({"reward_norm": "batch", "reward_normalization": {"method": "mean_std"}}, "at most one"),
        ({"target_kl": 0.1}, "add_token_level_kl"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, "above 0"),
        ({"adv_estimator": "remax", "whiten_rewards": True}, "remax"),
        ({"adv_estimator": "maxrl", "norm_mean_type": "group"}, "maxrl, which needs rewards of at least 0"),
        ({"adv_estimator": "grpo", "gdpo_reward_keys": ["a"]}, "read with gdpo"),
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": []}, "at least one name, every one once"),
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "a"]}, "at least one name, every one once"),
        ({**GDPO, "gdpo_reward_weights": [1.0]}, "2 numbers: one for each"),
        ({**GDPO, "norm_mean_type": "group"}, "gdpo, which reads separate rewards"),
        ({**GDPO, "overlong_buffer": {"len": 2, "enable": True}}, "gdpo, which reads separate rewards"),
        ({"overlong_buffer": {"enable": True, "len": 0}}, "at least 1"),
        ({"overlong_buffer": {"enable": True, "max_length": 8, "len": 9}}, "at most the limit of 8"),
        ({"mask_type": "all"}, "max_len_mask"),
        ({"kl_loss_coef": 0.1}, "use_kl_loss: true"),
        ({"init_kl_coef": 0.1}, "add_token_level_kl: true"),
        ({"pg_clip_low": 0.1}, "use_pg_clip_range: true"),
        ({"pg_clip_high": 0.3}, "use_pg_clip_range: true"),
        ({"dual_clip_c": 2.0}, "dual_clip_loss: true"),
        ({"loss_agg_norm": 8.0}, "have a divisor"),
        ({"kl_loss_penalty": "k3"}, "use_kl_loss"),
        ({"kl_loss_target": 0.1}, "use_kl_loss"),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_penalty": "full", "kl_loss_target": 0.1},
            "over the vocabulary",
        ),
        ({"pg_variant": "sapo", "pg_loss_cap": 3.0}, "sapo"),
        ({"pg_variant": "dppo_tv", "importance_sampling": "seq"}, "dppo_tv"),
        ({**BYPASS, "enable_old_logprobs_recompute": True}, "bypass"),
        ({**BYPASS, "force_disable_old_logprobs_recompute": True}, "uses the sampler's log-probs"),
        ({**WEIGHTS, "force_disable_old_logprobs_recompute": True}, "needs those log-probs"),
        (
            {"enable_old_logprobs_recompute": True, "force_disable_old_logprobs_recompute": True},
            "with enable_old_logprobs_recompute",
        ),
        ({"ppo_epochs": 2, "force_disable_old_logprobs_recompute": True}, "ppo_epochs 2"),
        ({"pg_variant": "gspo"}, "expected one of cispo"),
        ({"pg_variant": "topl"}, "did you mean topr"),
        ({"use_topr_loss": True, "pg_variant": "tis"}, "use_topr_loss"),
        ({"pg_variant": "vanilla", "importance_sampling": "seq"}, "vanilla"),
        ({"use_topr_loss": True, "dual_clip_loss": True}, "topr"),
        ({"pg_variant": "tis", "tis_lower_bound": 1.5}, "at most tis_upper_bound"),
        ({"pg_variant": "clip_cov", "clip_cov_lb": 6.0}, "at most clip_cov_ub"),
        ({"difficulty_mask": True, "difficulty_low_threshold": 2.0}, "at most difficulty_high_threshold"),
    ],
)
def test_rules_between_keys_are_told_of_the_last_one(keys, hint):
    (problem,) = AlgorithmConfig(**keys).problems()
    assert problem.path == last_key(keys) and hint in str(problem)


@pytest.mark.parametrize(
    ("keys", "key", "hint"),
    [
        ({"ratio_low": 2.0}, "filters.1.ratio_low", "at most ratio_high = 1.2"),
        ({"diff_high": -1.0}, "filters.1.diff_low", "at most diff_high = -1.0"),
        ({"enabled": True, "ratio_enabled": False}, "filters.1.ratio_enabled", "at least one of the two"),
    ],
)
def test_rules_of_train_infer_filters(keys, key, hint):
    correction = AlgorithmConfig(train_infer_correction={"filters": [{}, keys]}).train_infer_correction
    (problem,) = rules_broken(correction)
    assert problem.path == key and hint in str(problem)


def test_values_out_of_range_and_unknown_keys_are_refused_all_at_once():
    wrong = {
        **{"gamma": 1.1, "lambd": -0.1, "dual_clip_c": 1.0, "advantage_clip": 0.0, "ppo_epochs": 0},
        **{"kl_penalty": "whole", "mask_type": "tokens", "kl_cov_ratio": 0.0, "importance_sampling": "sequence"},
        **{"clip_cov_ratio": 0.0, "norm_mean_type": "tag", "loss_agg_mode": "mean", "reward_normalisation": {}},
        "overlong_buffer": {"length": 4},
        "pf_ppo": {"reweight_method": "max"},
        "reward_normalization": {"grouping": "tags"},
        "train_infer_correction": {"is_weight": {"weight_type": "turn"}, "filters": [{"ratio": 1.0}]},
    }
    with pytest.raises(pydantic.ValidationError) as caught:
        AlgorithmConfig(**wrong)
    found = {error["loc"] for error in caught.value.errors()}
    inner = {("overlong_buffer", "length"), ("pf_ppo", "reweight_method"), ("reward_normalization", "grouping")}
    inner |= {("train_infer_correction", *path) for path in (("is_weight", "weight_type"), ("filters", 0, "ratio"))}
    assert found == inner | {(key,) for key in wrong.keys() - {path[0] for path in inner}}


def test_the_overlong_limit_is_that_of_a_turn_unless_it_is_given():
    run = {"response_length": 64, "sequence_length": 128, "prompt_length": 16}
    buffer = {"enable": True, "len": 16}
    assert AlgorithmConfig(overlong_buffer=buffer).overlong_max_length is None
    assert RLConfig(**run, overlong_buffer=buffer).overlong_max_length == 64
    assert RLConfig(**run, overlong_buffer={**buffer, "max_length": 40}).overlong_max_length == 40
    (problem,) = RLConfig(**run, overlong_buffer={"enable": True, "len": 65}).problems()
    assert "at most the limit of 64 tokens" in problem.expected


def test_what_the_algorithm_needs_of_a_run():
    assert AlgorithmConfig(adv_estimator="remax").estimator.greedy_baseline
    assert not AlgorithmConfig(adv_estimator="rloo").estimator.greedy_baseline
    assert AlgorithmConfig(kl_penalty="full", add_token_level_kl=True).uses_full_kl
    assert AlgorithmConfig(kl_penalty="full", use_kl_loss=True, kl_loss_coef=0.1).uses_full_kl
    assert not AlgorithmConfig(kl_penalty="full").uses_full_kl


def test_every_key_is_described():
    assert all(field.description for field in AlgorithmConfig.model_fields.values())


DOCS = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
ELSEWHERE = {"ppo_epochs", "max_grad_norm", "l2", "critic_warmup", "enable_old_logprobs_recompute", "teacher_pretrain"}
"""Keys of the training loop and the optimizer, which state no formula."""


def test_registered_names_and_keys_are_documented():
    choices = (PreferenceLoss, KdObjective, OpdForm, KlPenalty, AggregationLevel, LossAggMode)
    fields = [(PfPpoConfig, "reweight_method"), *((RewardNormalizationConfig, key) for key in ("method", "grouping"))]
    names = [*ADVANTAGES.names(), *POLICY_LOSSES.names(), *PREFERENCE_LOSSES.names(), *REWARD_LOSSES]
    names += [name for choice in choices for name in get_args(choice)]
    names += [name for section, key in fields for name in get_args(section.model_fields[key].annotation)]
    assert not [name for name in names if f"`{name}`" not in DOCS and f": {name}`" not in DOCS]
    sections = (AlgorithmConfig, OverlongBufferConfig, PfPpoConfig, PreferenceConfig, DistillLossConfig)
    sections += (DivergenceConfig, OnPolicyDistillationConfig, RewardLossConfig, TrainInferCorrectionConfig)
    sections += (IsWeightConfig, TrainInferFilterConfig)
    keys = {key for section in sections for key in section.model_fields} - ELSEWHERE
    assert not [key for key in keys if not re.search(rf"\b{key}\b", DOCS)]
