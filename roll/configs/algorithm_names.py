"""Names that the algorithm's keys take, and which of these keys belong together."""

from __future__ import annotations

ADV_ESTIMATORS: tuple[str, ...] = (
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "step_reinforce",
    "tir_optimal_token_baseline",
)
"""Names that ``adv_estimator`` accepts besides ``package.module:function``."""

STATE_ESTIMATORS: tuple[str, ...] = ("gigpo", "step_reinforce")
"""Those that compare turns which start from the same state; every turn must be a sample of its own."""

ALONE: tuple[str, ...] = ("gae", "reinforce", "reinforce_plus_plus", "remax")
"""Those that compare an episode with no other of its group."""

TOKEN_BASELINES: tuple[str, ...] = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Those that weigh tokens by the probabilities of the policy before the update."""

PG_VARIANTS: tuple[str, ...] = (
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "kimi15",
    "kl_cov",
    "ppo",
    "sapo",
    "tis",
    "topr",
    "vanilla",
)
"""Names that ``pg_variant`` accepts besides ``package.module:function``."""

PER_TOKEN = ("dppo_kl", "dppo_tv", "gmpo", "kimi15", "vanilla")
"""Policy losses without a ratio of whole sequences."""

SWITCHES: dict[str, str] = {
    "difficulty_high_threshold": "difficulty_mask",
    "difficulty_low_threshold": "difficulty_mask",
    "dual_clip_c": "dual_clip_loss",
    "error_max_len_threshold": "error_max_len_clip",
    "init_kl_coef": "add_token_level_kl",
    "kl_loss_coef": "use_kl_loss",
    "len_reward_coef": "add_len_reward",
    "pg_clip_high": "use_pg_clip_range",
    "pg_clip_low": "use_pg_clip_range",
}
"""Keys that are read only when another one is true."""

NORMED = ("token-sum", "seq-mean-token-sum-norm")
"""Aggregations that ``loss_agg_norm`` divides."""
