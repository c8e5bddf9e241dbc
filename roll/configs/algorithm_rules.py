"""Rules between the keys of the reinforcement-learning algorithm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from roll.configs.algorithm_names import ADV_ESTIMATORS, NORMED, PER_TOKEN, PG_VARIANTS, SWITCHES
from roll.configs.problems import ConfigProblem
from roll.configs.schema import did_you_mean

if TYPE_CHECKING:
    from roll.configs.algorithm import AlgorithmConfig

_SHAPING: dict[str, object] = {
    "add_len_reward": False,
    "add_token_level_kl": False,
    "norm_mean_type": None,
    "norm_std_type": None,
    "overlong_buffer.enable": False,
    "reward_clip": None,
    "reward_norm": None,
    "reward_normalization.method": "identity",
    "use_reward_norm": False,
    "use_reward_scaling": False,
    "whiten_rewards": False,
}
"""Keys that change rewards before advantages, and the values with which they do not."""
_LOWERING = _SHAPING.keys() - {"norm_std_type", "reward_clip", "use_reward_scaling"}
"""Those that may take a reward below 0."""


def _advantage_problems(config: AlgorithmConfig) -> Iterator[ConfigProblem]:
    """Keys of the advantages that do not go together."""
    estimator = f"with adv_estimator {config.adv_estimator}"
    yield from _name_problems(config, "adv_estimator", ADV_ESTIMATORS)
    if config.turn_level_gae and config.adv_estimator != "gae":
        yield config.problem("turn_level_gae", f"false {estimator}", "adv_estimator")
    if not config.norm_adv_by_std_in_grpo and config.adv_estimator not in ("grpo", "grpo_passk"):
        expected = f"true {estimator}, which does not read it"
        yield config.problem("norm_adv_by_std_in_grpo", expected, "adv_estimator")
    yield from _gdpo_problems(config)
    if config.adv_estimator == "maxrl":
        why = "with adv_estimator maxrl, which takes rewards of 0 and more"
        yield from _shaping_problems(config, _LOWERING, why)
    if config.sums_squares and config.bypasses_old_logprobs:
        bypass = "train_infer_correction.bypass"
        expected = f"another with {bypass}: its weights are probabilities that the trainer then does not compute"
        yield config.problem("adv_estimator", expected, bypass)
    if config.adv_estimator == "remax" and config.whiten_rewards:
        expected = f"false {estimator}, whose baseline is a score as it is"
        yield config.problem("whiten_rewards", expected, "adv_estimator")
    if config.critic_warmup and config.adv_estimator in ADV_ESTIMATORS and config.adv_estimator != "gae":
        yield config.problem("critic_warmup", f"0 {estimator}, which has no critic", "adv_estimator")


def _gdpo_problems(config: AlgorithmConfig) -> Iterator[ConfigProblem]:
    """Keys of ``gdpo`` without it, and what it cannot be combined with."""
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights
    if config.adv_estimator != "gdpo":
        for key in ("gdpo_reward_keys", "gdpo_reward_weights"):
            if getattr(config, key):
                expected = f"no such key with adv_estimator {config.adv_estimator}, which does not read it"
                yield config.problem(key, expected, "adv_estimator")
        return
    if not keys or len(set(keys)) < len(keys):
        yield config.problem("gdpo_reward_keys", "at least one name, every one once", "adv_estimator")
    if weights is not None and len(weights) != len(keys):
        expected = f"null, or {len(keys)} numbers: one for each of gdpo_reward_keys"
        yield config.problem("gdpo_reward_weights", expected, "gdpo_reward_keys")
    why = "with adv_estimator gdpo, which reads the rewards apart, not their sum"
    yield from _shaping_problems(config, _SHAPING.keys(), why)


def _shaping_problems(config: AlgorithmConfig, keys: Collection[str], why: str) -> Iterator[ConfigProblem]:
    """Keys that change rewards, where nothing may."""
    for key, neutral in _SHAPING.items():
        section, _, name = key.rpartition(".")
        if key in keys and getattr(getattr(config, section) if section else config, name) != neutral:
            expected = "null" if neutral is None else str(neutral).lower()
            yield config.problem(key, f"{expected} {why}", "adv_estimator")


def _reward_problems(config: AlgorithmConfig) -> Iterator[ConfigProblem]:
    """Keys of the rewards that do not go together."""
    if config.use_reward_norm and not config.use_reward_scaling:
        yield config.problem("use_reward_norm", "false unless use_reward_scaling is true", "use_reward_scaling")
    if config.reward_shift and config.reward_scale:
        expected = "false beside reward_shift: true; for (score - mean) / std leave both false"
        yield config.problem("reward_scale", expected, "reward_shift")
    for key in ("reward_shift", "reward_scale"):
        if getattr(config, key) and config.reward_norm is None:
            yield config.problem(key, "false unless reward_norm is set", "reward_norm")
    newer = "norm_std_type" if config.norm_mean_type is None else "norm_mean_type"
    normalisers = {
        newer: getattr(config, newer) is not None,
        "reward_norm": config.reward_norm is not None,
        "use_reward_scaling": config.use_reward_scaling,
        "reward_normalization.method": config.reward_normalization.method != "identity",
    }
    if len(chosen := [key for key, on in normalisers.items() if on]) > 1:
        expected = f"nothing beside {chosen[0]}: at most one normalisation of the rewards"
        yield config.problem(chosen[1], expected, chosen[0])
    buffer, limit = config.overlong_buffer, config.overlong_max_length
    if buffer.enable and buffer.len < 1:
        yield config.problem("overlong_buffer.len", "at least 1 with enable: true", "overlong_buffer.enable")
    elif buffer.enable and limit is not None and buffer.len > limit:
        limits = ("overlong_buffer.max_length", "response_length")
        yield config.problem("overlong_buffer.len", f"at most the limit of {limit} tokens", *limits)
    if config.target_kl is not None and not config.add_token_level_kl:
        yield config.problem("target_kl", "null unless add_token_level_kl is true", "add_token_level_kl")


def _policy_problems(config: AlgorithmConfig) -> Iterator[ConfigProblem]:
    """Keys of the policy loss that do not go together."""
    loss, chosen = f"with pg_variant {config.policy_loss}", ("pg_variant", "use_topr_loss")
    yield from _name_problems(config, "pg_variant", PG_VARIANTS)
    if config.use_topr_loss and config.pg_variant not in ("ppo", "topr"):
        yield config.problem("pg_variant", "topr or nothing beside use_topr_loss: true", "use_topr_loss")
    if config.importance_sampling != "token" and config.policy_loss in PER_TOKEN:
        yield config.problem("importance_sampling", f"token {loss}, which does not read it", *chosen)
    if config.dual_clip_loss and config.policy_loss in set(PG_VARIANTS) - {"ppo", "clip_cov"}:
        yield config.problem("dual_clip_loss", f"false {loss}", *chosen)
    if config.pg_loss_cap is not None and config.policy_loss in set(PG_VARIANTS) - {"ppo", "clip_cov"}:
        yield config.problem("pg_loss_cap", f"null {loss}", *chosen)
    if config.loss_agg_norm is not None and config.loss_agg_mode not in NORMED:
        expected = f"null with loss_agg_mode {config.loss_agg_mode}; {' and '.join(NORMED)} have a divisor"
        yield config.problem("loss_agg_norm", expected, "loss_agg_mode")
    for key in ("kl_loss_penalty", "kl_loss_target"):
        if getattr(config, key) is not None and not config.use_kl_loss:
            yield config.problem(key, "null unless use_kl_loss is true", "use_kl_loss")
    if config.kl_loss_target is not None and config.loss_kl_penalty == "full":
        expected = "null with the KL over the vocabulary, which is known after the update only"
        yield config.problem("kl_loss_target", expected, "kl_penalty", "kl_loss_penalty")
    if config.bypasses_old_logprobs and config.enable_old_logprobs_recompute:
        expected = "false with train_infer_correction.bypass: nothing reads them"
        yield config.problem("enable_old_logprobs_recompute", expected, "train_infer_correction.bypass")
    if config.bypasses_old_logprobs and config.add_token_level_kl and config.kl_penalty == "full":
        expected = "an estimator with train_infer_correction.bypass: the trainer does not score what it trains on"
        yield config.problem("kl_penalty", expected, "train_infer_correction.bypass")
    unset = type(config).model_fields
    for key, switch in SWITCHES.items():
        if getattr(config, key) != unset[key].default and not getattr(config, switch):
            yield config.problem(key, f"no such key, or {switch}: true, without which nothing reads it", switch)
    if config.use_kl_loss and not config.kl_loss_coef:
        yield config.problem("kl_loss_coef", "above 0 with use_kl_loss: true", "use_kl_loss")
    if config.mask_type == "all" and not config.masks_samples:
        masks = ("max_len_mask", "difficulty_mask", "error_max_len_clip")
        yield config.problem("mask_type", f"loss unless one of {', '.join(masks)} is true", *masks)
    for low, high in (
        ("tis_lower_bound", "tis_upper_bound"),
        ("clip_cov_lb", "clip_cov_ub"),
        ("difficulty_low_threshold", "difficulty_high_threshold"),
    ):
        if getattr(config, low) > getattr(config, high):
            yield config.problem(low, f"at most {high} = {getattr(config, high)}", high)


def _name_problems(config: AlgorithmConfig, key: str, known: tuple[str, ...]) -> Iterator[ConfigProblem]:
    """A name that is neither known nor a path."""
    name = getattr(config, key)
    if name not in known and ":" not in name:
        expected = f"one of {', '.join(known)} or package.module:function"
        yield config.problem(key, expected, hint=did_you_mean(name, known, cutoff=0.5))


def _unscored_problems(config: AlgorithmConfig) -> Iterator[ConfigProblem]:
    """Finds keys that need log-probabilities of the training engine before the update, where it computes none."""
    if not config.force_disable_old_logprobs_recompute:
        return
    key, expected = "force_disable_old_logprobs_recompute", "false"
    if config.ppo_epochs > 1:
        yield config.problem(key, f"{expected} with ppo_epochs {config.ppo_epochs}: later passes clip", "ppo_epochs")
    for reader, reads in (
        ("train_infer_correction.bypass", config.bypasses_old_logprobs),
        ("enable_old_logprobs_recompute", config.enable_old_logprobs_recompute),
        ("add_token_level_kl", config.add_token_level_kl),
        ("adv_estimator", config.sums_squares),
        ("train_infer_correction", config.train_infer_correction.uses_old_logprobs),
    ):
        if reads:
            words = "which takes the sampler's" if reader.endswith("bypass") else "which reads what it leaves out"
            yield config.problem(key, f"{expected} beside {reader}, {words}", reader)


ALGORITHM_RULES: tuple[Callable[[AlgorithmConfig], Iterator[ConfigProblem]], ...] = (
    _advantage_problems,
    _reward_problems,
    _policy_problems,
    _unscored_problems,
)
