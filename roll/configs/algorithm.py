"""The keys of the reinforcement-learning algorithm: advantages, rewards, losses. Flat, under their documented names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll.configs.algorithm_names import ADV_ESTIMATORS, PG_VARIANTS, TOKEN_BASELINES
from roll.configs.algorithm_rules import ALGORITHM_RULES
from roll.configs.base import Config
from roll.configs.correction import TrainInferCorrectionConfig
from roll.configs.problems import ConfigProblem

KlPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+", "full"
]
NormType = Literal["batch", "group", "running"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class RewardNormalizationConfig(Config):
    """Normalisation of episode scores before advantages (agentic)."""

    grouping: Literal["state", "batch", "inductive"] = Field(
        default="batch",
        description="Which episodes share a mean and a standard deviation: `state` those of one rollout group (same "
        "start state), `batch` all, `inductive` those of one environment tag.",
    )
    method: Literal["asym_clip", "identity", "mean", "mean_std"] = Field(
        default="identity",
        description="`identity` changes nothing, `mean` is score - mean, `mean_std` (score - mean) / (std + 1e-6), "
        "`asym_clip` the latter clipped to [-1, 3].",
    )


class OverlongBufferConfig(Config):
    """Soft punishment of answers that come close to the length limit (DAPO)."""

    enable: bool = Field(default=False, description="Lower the score of responses that reach into the buffer.")
    len: int = Field(
        default=0, ge=0, description="Tokens before the limit in which the penalty grows from 0 to `penalty_factor`."
    )
    penalty_factor: float = Field(default=1.0, ge=0, description="Penalty of a response as long as the limit.")
    max_length: int | None = Field(
        default=None, ge=1, description="The limit, in sampled tokens of a turn; null is `response_length`."
    )


class PfPpoConfig(Config):
    """Draws of the samples that the policy learns from (PF-PPO)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        default="pow",
        description="A sample's weight by its score s: `pow` |s| to the power `weight_pow`, `max_min` 1 for the "
        "highest and lowest scores and else 0, `max_random` 0.4 for the highest and else 0.1.",
    )
    weight_pow: float = Field(default=2.0, ge=0, description="Exponent of `pow`.")


class AlgorithmConfig(Config):
    """Algorithm keys that every pipeline shares; pipelines inherit from it so that they stay at the top level."""

    # Optimisation
    ppo_epochs: int = Field(1, ge=1, description="Passes over one rollout's samples.")
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
    gdpo_reward_keys: list[str] = Field(
        [],
        description="Rewards that `gdpo` normalises separately: `<verifier>/score` and `<verifier>/<part>` of the "
        "domain's verifiers (RLVR), or numbers of the environment's last info (agentic).",
    )
    gdpo_reward_weights: list[float] | None = Field(
        None, description="Their weights in the advantage, in the same order; null: 1 each."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per sampled token.")
    lambd: float = Field(0.95, ge=0, le=1, description="GAE's lambda; 1 gives Monte Carlo returns, 0 one-step TD.")
    step_reward_gamma: float = Field(0.95, ge=0, le=1, description="Discount from one turn of an episode to the next.")
    turn_level_gae: bool = Field(
        False,
        description="GAE over turns instead of tokens: the value is taken at a turn's first sampled token, all tokens "
        "of a turn have the same advantage, and `step_reward_gamma` discounts.",
    )
    episode_reward_weight: float = Field(
        1.0, ge=0, description="Weight of the episode-level advantage in `step_reinforce` and `gigpo`."
    )
    step_reward_weight: float = Field(
        1.0, ge=0, description="Weight of the step-level advantage in `step_reinforce` and `gigpo`."
    )
    whiten_advantages: bool = Field(
        False, description="Normalise advantages to mean 0 and variance 1 over all sampled tokens."
    )
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
        "(`running`); null is off. Alternative to `reward_norm` with `reward_shift`.",
    )
    norm_std_type: NormType | None = Field(
        None,
        description="Divide episode scores by the standard deviation of the `batch`, the rollout `group`, or all "
        "scores so far (`running`); null is off. Alternative to `reward_norm` with `reward_scale`.",
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
    overlong_buffer: OverlongBufferConfig = Field(
        default_factory=OverlongBufferConfig, description="Penalty for overlong responses, added to episode scores."
    )
    add_len_reward: bool = Field(
        False,
        description="Add Kimi k1.5's length reward to episode scores: in a group, shorter successes gain and longer "
        "episodes lose.",
    )
    len_reward_coef: float = Field(1.0, ge=0, description="Coefficient of the length reward.")
    whiten_rewards: bool = Field(
        False,
        description="Normalise token rewards to mean 0 and variance 1 over all sampled tokens, before advantages.",
    )

    # KL to the reference model
    kl_penalty: KlPenalty = Field(
        "kl",
        description="KL estimator: `kl` (= `k1`) log ratio, `abs` its absolute value, `mse` (= `k2`) half its square, "
        "`low_var_kl` (= `k3`) ratio - 1 - log ratio; with a `+` appended, the gradient is that of `k2`. `full` "
        "is exact: it sums over the vocabulary, for which the reference returns its final hidden states.",
    )
    kl_loss_penalty: KlPenalty | None = Field(None, description="KL estimator of the loss. null: `kl_penalty`.")
    add_token_level_kl: bool = Field(False, description="Subtract KL to the reference from each token's reward.")
    init_kl_coef: float = Field(
        0.2, ge=0, description="Coefficient of the KL in the reward (the initial one if adaptive)."
    )
    target_kl: float | None = Field(
        None, gt=0, description="Target KL of the adaptive coefficient; null keeps the coefficient fixed."
    )
    kl_horizon: int = Field(
        10000, ge=1, description="Sequences over which the adaptive coefficient changes by at most 20 %."
    )
    use_kl_loss: bool = Field(False, description="Add KL to the reference to the policy loss.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the KL loss (the initial one if adaptive).")
    kl_loss_target: float | None = Field(
        None,
        gt=0,
        description="Target KL to which `kl_loss_coef` adapts, as the reward's does with `target_kl`; null: fixed.",
    )

    # Policy loss
    rl_loss_coef: float = Field(1.0, ge=0, description="Coefficient of the policy-gradient term.")
    pg_variant: str = Field("ppo", description=f"Policy loss: {', '.join(PG_VARIANTS)}, or `package.module:function`.")
    use_topr_loss: bool = Field(False, description="Alias of `pg_variant: topr`.")
    importance_sampling: Literal["token", "segment", "seq"] = Field(
        "token",
        description="Probability ratio of each `token`, of the turn (`segment`) or of the sequence (`seq`): the "
        "geometric mean over its sampled tokens, shared by all of them. With `pg_variant: ppo` the latter is GSPO.",
    )
    pg_clip: float = Field(0.2, gt=0, description="PPO clips the probability ratio to [1 - x, 1 + x].")
    use_pg_clip_range: bool = Field(False, description="Use `pg_clip_low` and `pg_clip_high` instead of `pg_clip`.")
    pg_clip_low: float = Field(0.2, gt=0, le=1, description="Lower clip range: the ratio stays above 1 - x.")
    pg_clip_high: float = Field(0.2, gt=0, description="Upper clip range: the ratio stays below 1 + x.")
    dual_clip_loss: bool = Field(False, description="Limit the loss of negative advantages by `dual_clip_c`.")
    dual_clip_c: float = Field(3.0, gt=1, description="Dual clip: the loss is at most -c * advantage.")
    pg_loss_cap: float | None = Field(
        None, gt=0, description="The loss of a token (`ppo`, `clip_cov`) is at most this; null is off."
    )
    topr_positive_weight: float = Field(1.0, ge=0, description="TOPR's weight of tokens with positive advantage.")
    topr_negative_weight: float = Field(1.0, ge=0, description="TOPR's weight of the other tokens.")
    tis_lower_bound: float = Field(0.0, ge=0, description="TIS keeps the ratio at or above this.")
    tis_upper_bound: float = Field(1.0, gt=0, description="TIS keeps the ratio at or below this.")
    cispo_epsilon_low: float = Field(0.1, ge=0, le=1, description="CISPO keeps the ratio at or above 1 - x.")
    cispo_epsilon_high: float = Field(0.1, ge=0, description="CISPO keeps the ratio at or below 1 + x.")
    cispo_use_unified_mask: bool = Field(
        False,
        description="CISPO drops the tokens that PPO would clip: beyond a bound, on the side that increases "
        "the objective.",
    )
    kimi15_tau: float = Field(0.1, ge=0, description="Kimi k1.5's coefficient of the squared log ratio.")
    sapo_tau_pos: float = Field(1.0, gt=0, description="SAPO's gate steepness for positive advantages.")
    sapo_tau_neg: float = Field(1.05, gt=0, description="SAPO's gate steepness for the other tokens.")
    clip_cov_ratio: float = Field(0.0002, gt=0, le=1, description="Share of tokens that Clip-Cov drops.")
    clip_cov_lb: float = Field(1.0, description="Clip-Cov picks among tokens whose covariance is above this …")
    clip_cov_ub: float = Field(5.0, description="… and below this.")
    kl_cov_ratio: float = Field(
        0.0002, gt=0, le=1, description="Share of tokens, those with the largest covariance, that get KL-Cov's penalty."
    )
    ppo_kl_coef: float = Field(
        0.1, ge=0, description="KL-Cov's coefficient of the absolute log ratio to the old policy on those tokens."
    )
    entropy_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    entropy_loss_coef_end: float | None = Field(
        None, ge=0, description="Value that `entropy_loss_coef` reaches linearly at the run's end; null: constant."
    )
    sft_loss_coef: float = Field(
        0.0, ge=0, description="Coefficient of a supervised loss on samples whose episode score is positive."
    )
    loss_agg_mode: LossAggMode = Field(
        "seq-mean-token-mean", description="How token losses are aggregated over the whole optimizer step."
    )
    loss_agg_norm: float | None = Field(
        None,
        gt=0,
        description="Constant divisor of `token-sum` (null: 1) and `seq-mean-token-sum-norm` (null: the longest "
        "sequence of the step); the length limit is Dr. GRPO's.",
    )
    difficulty_loss_weight: bool = Field(
        False,
        description="Weight samples from 0.5 (the batch's easiest group, by mean score) to 1.5 (its hardest) in the "
        "policy-gradient term.",
    )
    length_loss_weight: bool = Field(
        False,
        description="Weight samples from 1.5 (fewest sampled tokens in the batch) to 0.5 (most) in the "
        "policy-gradient term.",
    )
    max_len_mask: bool = Field(
        False,
        description="Mask samples that the length limit cut off: the last response hit its limit, or the episode "
        "ended because its context was full.",
    )
    mask_type: Literal["all", "loss"] = Field(
        "loss",
        description="Scope of `max_len_mask`, `difficulty_mask` and `error_max_len_clip`: `loss` is only the policy's "
        "loss; `all` is the whole step, with all samples of the episode: reward statistics, baselines, the critic.",
    )
    difficulty_mask: bool = Field(
        False,
        description="Keep only groups whose mean score lies between `difficulty_low_threshold` and "
        "`difficulty_high_threshold` in the policy's loss.",
    )
    difficulty_low_threshold: float = Field(0.0, description="Groups with at most this mean score are masked.")
    difficulty_high_threshold: float = Field(1.0, description="Groups with at least this mean score are masked.")
    error_max_len_clip: bool = Field(
        False,
        description="Mask failed samples (score at most 0) of more than `error_max_len_threshold` sampled tokens in "
        "the policy's loss.",
    )
    error_max_len_threshold: int = Field(9999999999, ge=0, description="Longest failed sample that is not masked.")
    train_infer_correction: TrainInferCorrectionConfig = Field(
        default_factory=TrainInferCorrectionConfig,
        description="Correction of the mismatch between the training and the generating engine.",
    )
    use_pf_ppo: bool = Field(
        False, description="PF-PPO: the policy trains on samples that are resampled, with replacement, by score."
    )
    pf_ppo: PfPpoConfig = Field(default_factory=PfPpoConfig, description="How PF-PPO resamples.")
    enable_old_logprobs_recompute: bool = Field(
        False,
        description="Compute the old log-probs of all rows with the training engine. false: rows that only the first "
        "optimizer step of a rollout trains have none, because their old policy is the current one.",
    )
    force_disable_old_logprobs_recompute: bool = Field(
        False,
        description="Never compute log-probs with the training engine before training: in every optimizer step of a "
        "rollout the old policy is the current one, so ratios are 1 and clips have no effect.",
    )

    # Value loss
    value_clip: float | None = Field(
        None, gt=0, description="Value predictions are clipped to [old - x, old + x] in the value loss; null is off."
    )
    value_loss_coef: float = Field(1.0, ge=0, description="Coefficient of the critic's loss.")

    @property
    def policy_loss(self) -> str:
        """The name of the policy loss, whichever key chose it."""
        return "topr" if self.use_topr_loss else self.pg_variant

    @property
    def masks_samples(self) -> bool:
        """Tells whether whole samples may be masked."""
        return self.max_len_mask or self.difficulty_mask or self.error_max_len_clip

    @property
    def needs_greedy_baseline(self) -> bool:
        """Tells whether every rollout group needs one more, greedy episode (``RolloutGroup.baseline``)."""
        return self.adv_estimator == "remax"

    @property
    def sums_squares(self) -> bool:
        """Tells whether the trainer sums the squared probabilities of what it scores before the update."""
        return self.adv_estimator in TOKEN_BASELINES

    @property
    def uses_full_kl(self) -> bool:
        """Tells whether the KL over the vocabulary is computed, for which the reference's hidden states travel."""
        in_reward = self.add_token_level_kl and self.kl_penalty == "full"
        return in_reward or (self.use_kl_loss and self.loss_kl_penalty == "full")

    @property
    def loss_kl_penalty(self) -> KlPenalty:
        """The KL of the loss."""
        return self.kl_loss_penalty or self.kl_penalty

    @property
    def bypasses_old_logprobs(self) -> bool:
        """Tells whether the old policy of the loss is the one that sampled."""
        return self.train_infer_correction.bypass

    @property
    def leaves_rollouts_unscored(self) -> bool:
        """Tells whether the training engine says nothing of a rollout before it is trained."""
        return self.bypasses_old_logprobs or self.force_disable_old_logprobs_recompute

    @property
    def overlong_max_length(self) -> int | None:
        """The limit that ``overlong_buffer`` counts from; a run's configuration knows it also without the key."""
        return self.overlong_buffer.max_length

    @property
    def teacher_loss_coef(self) -> float:
        """Coefficient of the divergence from a teacher in the policy's loss."""
        return 0.0

    @property
    def wants_old_logprobs(self) -> bool:
        """Tells whether the training engine must score rollouts even where a first optimizer step could do without."""
        return not self.bypasses_old_logprobs and (
            self.enable_old_logprobs_recompute
            or self.add_token_level_kl
            or self.sums_squares
            or self.train_infer_correction.uses_old_logprobs
        )

    @property
    def mixes_rows(self) -> bool:
        """Tells whether rows are compared or exchanged, by which no row belongs to the first optimizer step alone."""
        return self.use_pf_ppo or self.policy_loss in ("clip_cov", "kl_cov")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        for rule in ALGORITHM_RULES:
            yield from rule(self)
