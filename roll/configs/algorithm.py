"""The keys of the reinforcement-learning algorithm: advantages, rewards, losses. Flat, under their documented names."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field

from roll.configs.base import Config

ADV_ESTIMATORS: tuple[str, ...] = (
    "gae",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "step_reinforce",
)
"""Names that ``adv_estimator`` accepts besides ``package.module:function``."""

STATE_ESTIMATORS: tuple[str, ...] = ("gigpo", "step_reinforce")
"""Those that compare turns which start from the same state; every turn must be a sample of its own."""

KlPenalty = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
NormType = Literal["batch", "group", "running"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class RewardNormalizationConfig(Config):
    """How episode scores are normalised before advantages (agentic)."""

    grouping: Literal["state", "batch", "inductive"] = Field(
        default="batch",
        description="Which episodes share a mean and a standard deviation: `state` those of one rollout group (same "
        "start state), `batch` all, `inductive` those of one environment tag.",
    )
    method: Literal["asym_clip", "identity", "mean_std"] = Field(
        default="identity",
        description="`identity` changes nothing, `mean_std` gives (score - mean) / (std + 1e-6), `asym_clip` clips "
        "the latter to [-1, 3].",
    )


class AlgorithmConfig(Config):
    """Algorithm keys that every pipeline shares; pipelines inherit from it so that they stay at the top level."""

    # Optimisation
    ppo_epochs: int = Field(1, ge=1, description="Passes over one rollout's samples.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    l2: float = Field(0.0, ge=0, description="Coefficient of an L2 penalty on the trained weights, added to the loss.")
    critic_warmup: int = Field(0, ge=0, description="Steps at the start in which only the critic is trained.")

    # Advantages
    adv_estimator: str = Field(
        "gae",
        description=f"Advantage estimator: {', '.join(ADV_ESTIMATORS)}, or `package.module:function`.",
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True,
        description="`grpo` and `grpo_passk` divide by the group's standard deviation; false is Dr. GRPO.",
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per sampled token.")
    lambd: float = Field(0.95, ge=0, le=1, description="GAE's lambda; 1 gives Monte Carlo returns, 0 one-step TD.")
    step_reward_gamma: float = Field(0.95, ge=0, le=1, description="Discount from one turn of an episode to the next.")
    turn_level_gae: bool = Field(
        False,
        description="GAE over turns, not tokens: the value is read at a turn's first sampled token, all tokens of a "
        "turn share one advantage, and `step_reward_gamma` discounts.",
    )
    episode_reward_weight: float = Field(
        1.0, ge=0, description="Weight of the episode-level advantage in `step_reinforce` and `gigpo`."
    )
    step_reward_weight: float = Field(
        1.0, ge=0, description="Weight of the step-level advantage in `step_reinforce` and `gigpo`."
    )
    whiten_advantages: bool = Field(False, description="Advantages to mean 0 and variance 1 over all sampled tokens.")
    advantage_clip: float | None = Field(
        None, gt=0, description="Advantages are clipped to [-x, x], after whitening; null is off."
    )

    # Rewards
    reward_normalization: RewardNormalizationConfig = Field(
        default_factory=RewardNormalizationConfig,
        description="Normalisation of episode scores by named grouping.",
    )
    norm_mean_type: NormType | None = Field(
        None,
        description="Subtract from episode scores the mean of the `batch`, the rollout `group`, or all scores so far "
        "(`running`); null is off. Newer name of `reward_norm` with `reward_shift`.",
    )
    norm_std_type: NormType | None = Field(
        None,
        description="Divide episode scores by the standard deviation of the `batch`, the rollout `group`, or all "
        "scores so far (`running`); null is off. Newer name of `reward_norm` with `reward_scale`.",
    )
    reward_norm: NormType | None = Field(
        None,
        description="Normalise episode scores by the statistics of the `batch`, the rollout `group`, or all scores so "
        "far (`running`); null is off.",
    )
    reward_shift: bool = Field(False, description="`reward_norm` only subtracts the mean.")
    reward_scale: bool = Field(False, description="`reward_norm` only divides by the standard deviation.")
    use_reward_scaling: bool = Field(False, description="Divide episode scores by their running standard deviation.")
    use_reward_norm: bool = Field(False, description="`use_reward_scaling` subtracts the running mean as well.")
    reward_clip: float | None = Field(
        None, gt=0, description="Episode scores are clipped to [-x, x], after normalisation; null is off."
    )
    whiten_rewards: bool = Field(
        False, description="Token rewards to mean 0 and variance 1 over all sampled tokens, before advantages."
    )

    # KL to the reference model
    kl_penalty: KlPenalty = Field(
        "kl",
        description="KL estimator: `kl` (= `k1`) log ratio, `abs` its absolute value, `mse` (= `k2`) half its square, "
        "`low_var_kl` (= `k3`) ratio - 1 - log ratio.",
    )
    add_token_level_kl: bool = Field(False, description="Subtract KL to the reference from each token's reward.")
    init_kl_coef: float = Field(0.2, ge=0, description="Coefficient of the KL in the reward (its start if adaptive).")
    target_kl: float | None = Field(
        None, gt=0, description="KL that the coefficient is steered to; null keeps the coefficient fixed."
    )
    kl_horizon: int = Field(
        10000, ge=1, description="Sequences over which the adaptive coefficient changes by at most 20 %."
    )
    use_kl_loss: bool = Field(False, description="Add KL to the reference to the policy loss.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the KL loss.")

    # Policy loss
    rl_loss_coef: float = Field(1.0, ge=0, description="Coefficient of the policy-gradient term.")
    pg_clip: float = Field(0.2, gt=0, description="PPO clips the probability ratio to [1 - x, 1 + x].")
    use_pg_clip_range: bool = Field(False, description="Use `pg_clip_low` and `pg_clip_high` instead of `pg_clip`.")
    pg_clip_low: float = Field(0.2, gt=0, le=1, description="Lower clip range: the ratio stays above 1 - x.")
    pg_clip_high: float = Field(0.2, gt=0, description="Upper clip range: the ratio stays below 1 + x.")
    dual_clip_loss: bool = Field(False, description="Bound the loss of negative advantages by `dual_clip_c`.")
    dual_clip_c: float = Field(3.0, gt=1, description="Dual clip: the loss is at most -c * advantage.")
    entropy_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    entropy_loss_coef_end: float | None = Field(
        None, ge=0, description="Value that `entropy_loss_coef` reaches linearly at the run's end; null: constant."
    )
    sft_loss_coef: float = Field(
        0.0, ge=0, description="Coefficient of a supervised loss on samples whose episode score is positive."
    )
    loss_agg_mode: LossAggMode = Field(
        "seq-mean-token-mean", description="How token losses become one number, over the whole optimizer step."
    )
    enable_old_logprobs_recompute: bool = Field(
        False,
        description="Recompute the old log-probabilities with the training engine even when one optimizer step per "
        "rollout would not need them.",
    )

    # Value loss
    value_clip: float | None = Field(
        None, gt=0, description="Value predictions are clipped to [old - x, old + x] in the value loss; null is off."
    )
    value_loss_coef: float = Field(1.0, ge=0, description="Coefficient of the critic's loss.")

    def problems(self) -> list[str]:
        return [*super().problems(), *self._advantage_problems(), *self._reward_problems()]

    def _advantage_problems(self) -> list[str]:
        found = []
        if self.adv_estimator not in ADV_ESTIMATORS and ":" not in self.adv_estimator:
            near = difflib.get_close_matches(self.adv_estimator, ADV_ESTIMATORS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            found.append(
                f"adv_estimator: {self.adv_estimator!r}, expected one of {', '.join(ADV_ESTIMATORS)} "
                f"or package.module:function{hint}"
            )
        if self.turn_level_gae and self.adv_estimator != "gae":
            found.append(f"turn_level_gae: true, expected false with adv_estimator {self.adv_estimator!r}")
        if not self.norm_adv_by_std_in_grpo and self.adv_estimator not in ("grpo", "grpo_passk"):
            found.append(
                f"norm_adv_by_std_in_grpo: false, expected true with adv_estimator {self.adv_estimator!r}, which does "
                "not read it"
            )
        if self.critic_warmup and self.adv_estimator in ADV_ESTIMATORS and self.adv_estimator != "gae":
            found.append(
                f"critic_warmup: {self.critic_warmup}, expected 0: adv_estimator {self.adv_estimator!r} has no critic"
            )
        return found

    def _reward_problems(self) -> list[str]:
        found = []
        if self.use_reward_norm and not self.use_reward_scaling:
            found.append("use_reward_norm: true, expected false unless use_reward_scaling is true")
        if self.reward_shift and self.reward_scale:
            found.append(
                "reward_scale: true beside reward_shift: true, expected one of them; for (score - mean) / std leave "
                "both false"
            )
        for key in ("reward_shift", "reward_scale"):
            if getattr(self, key) and self.reward_norm is None:
                found.append(f"{key}: true, expected false unless reward_norm is set")
        newer = "norm_std_type" if self.norm_mean_type is None else "norm_mean_type"
        normalisers = {
            newer: getattr(self, newer) is not None,
            "reward_norm": self.reward_norm is not None,
            "use_reward_scaling": self.use_reward_scaling,
            "reward_normalization.method": self.reward_normalization.method != "identity",
        }
        if len(chosen := [key for key, on in normalisers.items() if on]) > 1:
            found.append(f"{chosen[1]}: set beside {chosen[0]}, expected at most one normalisation of the rewards")
        if self.target_kl is not None and not self.add_token_level_kl:
            found.append(f"target_kl: {self.target_kl}, expected null unless add_token_level_kl is true")
        return found
