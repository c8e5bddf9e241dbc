"""Keys that nothing reads under what other keys choose; given all the same, they are refused, or reported where files
that others build on have them for another case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from roll.configs.algorithm_names import ADV_ESTIMATORS, PG_VARIANTS, STATE_ESTIMATORS
from roll.configs.pipeline import TINY, PipelineConfig
from roll.configs.problems import ConfigProblem, show
from roll.configs.rl import RLConfig

_LOSS, _ESTIMATOR = "pg_variant", "adv_estimator"

READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "topr_positive_weight": (_LOSS, ("topr",)),
    "topr_negative_weight": (_LOSS, ("topr",)),
    "tis_lower_bound": (_LOSS, ("tis",)),
    "tis_upper_bound": (_LOSS, ("tis",)),
    "cispo_epsilon_low": (_LOSS, ("cispo",)),
    "cispo_epsilon_high": (_LOSS, ("cispo",)),
    "cispo_use_unified_mask": (_LOSS, ("cispo",)),
    "kimi15_tau": (_LOSS, ("kimi15",)),
    "sapo_tau_pos": (_LOSS, ("sapo",)),
    "sapo_tau_neg": (_LOSS, ("sapo",)),
    "clip_cov_ratio": (_LOSS, ("clip_cov",)),
    "clip_cov_lb": (_LOSS, ("clip_cov",)),
    "clip_cov_ub": (_LOSS, ("clip_cov",)),
    "kl_cov_ratio": (_LOSS, ("kl_cov",)),
    "ppo_kl_coef": (_LOSS, ("kl_cov",)),
    "lambd": (_ESTIMATOR, ("gae",)),
    "value_clip": (_ESTIMATOR, ("gae",)),
    "value_loss_coef": (_ESTIMATOR, ("gae",)),
    "episode_reward_weight": (_ESTIMATOR, STATE_ESTIMATORS),
    "step_reward_weight": (_ESTIMATOR, STATE_ESTIMATORS),
}
"""By key: the key that chooses who reads it, and the choices that do. A function of a user's own may read anything."""

SWITCHED: dict[str, tuple[str, ...]] = {
    "max_additional_running_prompts": ("is_use_additional_prompts",),
    "kl_horizon": ("target_kl", "kl_loss_target"),
    "kl_penalty": ("add_token_level_kl", "use_kl_loss"),
}
"""By key: keys of which one has to be given for it to be read."""

_KNOWN = {_LOSS: PG_VARIANTS, _ESTIMATOR: ADV_ESTIMATORS}


def unread(given: Callable[[str], Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys that nothing reads, what is expected in words, and the keys that decide it.

    Args:
        given: the value of a key, defaults included.
    """
    for key, (chooser, readers) in READERS.items():
        chosen = given(chooser)
        if chosen in _KNOWN[chooser] and chosen not in readers:
            yield key, f"no such key with {chooser} {chosen}: read with {', '.join(readers)}", (chooser,)
    for key, switches in SWITCHED.items():
        if not any(given(switch) for switch in switches):
            yield key, f"no such key without {' or '.join(switches)}: nothing reads it", switches


def check_inert(config: RLConfig) -> Iterator[ConfigProblem]:
    """Keys of the algorithm that this run would not read have their defaults."""
    fields = type(config).model_fields
    off = {key for key in SWITCHED if not getattr(config, key)}  # 0 asks for nothing

    def given(key: str) -> Any:
        return config.policy_loss if key == _LOSS else getattr(config, key)

    for key, expected, involved in unread(given):
        seen, default = getattr(config, key), fields[key].get_default(call_default_factory=True)
        if key not in off and seen != default:
            hint = f"leave it out: ~{key} on the command line, or its default, {key}: {show(default)}"
            yield ConfigProblem(key, seen, expected, hint, involves=involved)


def describe_unread(config: PipelineConfig) -> Iterator[str]:
    """What is given for the tiny model alone, where models of another kind take its place, in a sentence each."""
    models = config.models
    taught = {"warm_start": "pretrain", "teacher_warm_start": "teacher_pretrain"}
    for key, chooser in taught.items():
        model = models.get(chooser)
        if model not in (None, TINY) and _given(config, key):
            yield f"{key}: nothing reads it, since {chooser} is {model}: only tiny is taught before the run"
    sizes = [key for key in ("tiny_num_heads", "tiny_hidden_size", "tiny_num_layers") if _given(config, key)]
    if sizes and TINY not in models.values():
        yield f"{', '.join(sizes)}: nothing reads them, since no model is tiny"


def _given(config: PipelineConfig, key: str) -> bool:
    """Tells whether a key has another value than its default."""
    field = type(config).model_fields.get(key)
    return field is not None and getattr(config, key) != field.get_default(call_default_factory=True)
