"""The keys of the reinforcement-learning algorithm, flat under their documented names, and the parts that it reads.

A class declares the keys that one choice reads; ``AlgorithmConfig`` inherits from all of them, so that its keys are
flat. ``AlgorithmConfig.parts`` makes a value of each part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.policy_loss import PolicyLossConfig
from roll.configs.problems import ConfigProblem
from roll.configs.schema import name_problems
from roll.configs.teacher import TeacherTerm

AggregationLevel = Literal["token", "segment", "geometric", "sequence"]

_LEVELS = (
    "of each `token`; `segment`: mean over a turn's sampled tokens; `geometric`: mean over the sequence's; `sequence`: "
    "sum over the sequence's"
)


class IsWeightConfig(Config):
    """Truncated importance weights on the policy-gradient term."""

    enabled: bool = Field(default=False, description="Multiply each token's policy-gradient loss by its weight.")
    weight_type: AggregationLevel = Field(
        default="token",
        description=f"The weight is the exponential of the log ratio, training to generating engine, {_LEVELS}.",
    )
    upper_bound: float | None = Field(default=1.2, gt=0, description="Weights are cut to this; null: no limit.")
    batch_normalize: bool = Field(
        default=False,
        description="Divide the cut weights by their mean over the batch (each token, turn or sequence once).",
    )
    detach: bool = Field(
        default=True,
        description="The weight is a constant, from the old log-probs. false: from the policy being trained, and "
        "gradients flow through it.",
    )


class TrainInferFilterConfig(Config):
    """Rejection: tokens (or whole rows) outside the bounds are masked in the policy's loss."""

    enabled: bool = Field(default=False, description="Use this filter.")
    agg_type: AggregationLevel = Field(
        default="token", description=f"What is compared with the bounds: the value {_LEVELS}."
    )
    ratio_enabled: bool = Field(default=True, description="Bound the probability ratio, training to generating engine.")
    ratio_low: float = Field(default=0.8, ge=0, description="Smallest accepted ratio.")
    ratio_high: float = Field(default=1.2, ge=0, description="Largest accepted ratio.")
    diff_enabled: bool = Field(
        default=False, description="Bound the difference of probabilities, training minus generating."
    )
    diff_low: float = Field(default=-0.2, description="Smallest accepted difference.")
    diff_high: float = Field(default=0.2, description="Largest accepted difference.")
    whole_rows: bool = Field(
        default=False,
        description="Reject a row if any of its tokens is outside the bounds: with agg_type token and only a small "
        "ratio_low, a veto of responses with a token that the trainer finds nearly impossible.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.enabled and not (self.ratio_enabled or self.diff_enabled):
            expected = "true, since diff_enabled is false: at least one of the two"
            yield self.problem("ratio_enabled", expected, "diff_enabled", "enabled")
        for key in ("ratio", "diff"):
            yield from self.order_problems(f"{key}_low", f"{key}_high")


class TrainInferCorrectionConfig(Config):
    """Correction of the mismatch between the training and the generating engine."""

    bypass: bool = Field(
        default=False,
        description="The old policy of the loss is the one that sampled, by the generating engine's log-probs: the "
        "trainer computes none before it trains on rollouts, and the loss's own clip also limits the mismatch.",
    )
    replay_kept_sets: int = Field(
        default=0,
        ge=0,
        description="With truncated sampling (top_p, top_k, min_p) each token travels with the set of tokens that were "
        "left to choose from, if these are at most so many; its log-probs, in the generator, the policy and the "
        "reference, are those among this set. Larger sets count as the whole vocabulary (rollout/kept_overflow). 0 is "
        "off: log-probs are of the whole vocabulary, and not those of the distribution that was sampled from.",
    )
    is_weight: IsWeightConfig = Field(default_factory=IsWeightConfig, description="Importance weights.")
    filters: list[TrainInferFilterConfig] = Field(
        default_factory=list, description="Rejections; a token must pass all enabled ones."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        weight = self.is_weight
        if weight.batch_normalize and not (weight.enabled and weight.detach):
            expected = "false unless is_weight is enabled and detached"
            yield self.problem("is_weight.batch_normalize", expected, "is_weight.enabled", "is_weight.detach")
        if self.bypass and weight.enabled:
            yield self.problem(
                "is_weight.enabled", "false with bypass: the loss's ratio already is this weight", "bypass"
            )
        if self.bypass and self.enabled_filters:
            expected = "none enabled with bypass: there is nothing to compare"
            yield ConfigProblem("filters", "a filter", expected, involves=("bypass",))

    @property
    def enabled_filters(self) -> list[TrainInferFilterConfig]:
        """Those that are switched on; a token is trained on if it passes all of them."""
        return [each for each in self.filters if each.enabled]

    @property
    def uses_old_logprobs(self) -> bool:
        """Tells whether it compares the old log-probabilities, which then must be computed by the training engine."""
        return (self.is_weight.enabled and self.is_weight.detach) or bool(self.enabled_filters)


KlPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+", "full"
]
NormType = Literal["batch", "group", "running"]


class CorrectionConfig(Config):
    """The correction of the mismatch between the training and the generating engine."""

    train_infer_correction: TrainInferCorrectionConfig = Field(
        default_factory=TrainInferCorrectionConfig,
        description="Correction of the mismatch between the training and the generating engine.",
    )


# ---- Advantages


class Estimator(CorrectionConfig):
    """What every advantage estimator can read. ``gpg``, ``opo``, ``rloo`` and others read no more."""

    compares: ClassVar[bool] = True
    """Whether it compares an episode with others of its group."""
    by_state: ClassVar[bool] = False
    """Whether it compares turns that start from the same state; every turn must then be a sample of its own."""
    sums_squares: ClassVar[bool] = False
    """Whether it weighs tokens by the probabilities of the policy before the update."""
    greedy_baseline: ClassVar[bool] = False
    """Whether every rollout group needs one more, greedy episode (``RolloutGroup.baseline``)."""
    has_critic: ClassVar[bool] = False

    adv_estimator: str = Field("gae", description="Its name.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per sampled token.")
    step_reward_gamma: float = Field(0.95, ge=0, le=1, description="Discount from one turn of an episode to the next.")


class Alone(Estimator):
    """Estimators that compare an episode with no other."""

    compares = False


class Gae(Alone):
    """Generalised advantage estimation, and the critic that it needs."""

    has_critic = True

    lambd: float = Field(0.95, ge=0, le=1, description="GAE's lambda; 1 gives Monte Carlo returns, 0 one-step TD.")
    turn_level_gae: bool = Field(
        False,
        description="GAE over turns instead of tokens: the value is taken at a turn's first sampled token, all tokens "
        "of a turn have the same advantage, and `step_reward_gamma` discounts.",
    )
    value_clip: float | None = Field(
        None, gt=0, description="Value predictions are clipped to [old - x, old + x] in the value loss; null is off."
    )
    value_loss_coef: float = Field(1.0, ge=0, description="Coefficient of the critic's loss.")


class Gdpo(Estimator):
    """Several rewards, each normalised separately."""

    gdpo_reward_keys: list[str] = Field(
        [],
        description="Rewards that `gdpo` normalises separately: `<verifier>/score` and `<verifier>/<part>` of the "
        "domain's verifiers (RLVR), or numbers of the environment's last info (agentic).",
    )
    gdpo_reward_weights: list[float] | None = Field(
        None, description="Their weights in the advantage, in the same order; null: 1 each."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if getattr(self, "adv_estimator", "gdpo") != "gdpo":
            return
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if not keys or len(set(keys)) < len(keys):
            yield self.problem("gdpo_reward_keys", "at least one name, every one once", "adv_estimator")
        if weights is not None and len(weights) != len(keys):
            expected = f"null, or {len(keys)} numbers: one for each of gdpo_reward_keys"
            yield self.problem("gdpo_reward_weights", expected, "gdpo_reward_keys")


class Grpo(Estimator):
    """Scores relative to the group, divided by its spread."""

    norm_adv_by_std_in_grpo: bool = Field(
        True,
        description="`grpo` and `grpo_passk` divide by the group's standard deviation; false is Dr. GRPO.",
    )


class OfStates(Estimator):
    """Returns of turns that start from the same state, and the score of the whole episode."""

    by_state = True

    episode_reward_weight: float = Field(
        1.0, ge=0, description="Weight of the episode-level advantage in `step_reinforce` and `gigpo`."
    )
    step_reward_weight: float = Field(
        1.0, ge=0, description="Weight of the step-level advantage in `step_reinforce` and `gigpo`."
    )


class Remax(Alone):
    """The score of a greedy episode as the baseline."""

    greedy_baseline = True


class TokenBaseline(Estimator):
    """Baselines of single tokens, weighted by the size of their gradients."""

    sums_squares = True


ADV_ESTIMATORS: dict[str, type[Estimator]] = {
    "gae": Gae,
    "gdpo": Gdpo,
    "gigpo": OfStates,
    "gpg": Estimator,
    "grpo": Grpo,
    "grpo_passk": Grpo,
    "maxrl": Estimator,
    "opo": Estimator,
    "optimal_token_baseline": TokenBaseline,
    "reinforce": Alone,
    "reinforce_plus_plus": Alone,
    "reinforce_plus_plus_baseline": Estimator,
    "remax": Remax,
    "rloo": Estimator,
    "step_reinforce": OfStates,
    "tir_optimal_token_baseline": TokenBaseline,
}
"""The keys that each built-in ``adv_estimator`` reads."""


class AdvantageConfig(Gae, Gdpo, Grpo, OfStates, TokenBaseline):
    """The advantage estimator, and what is done to all advantages."""

    choices: ClassVar = {"adv_estimator": ADV_ESTIMATORS}
    compares = has_critic = by_state = sums_squares = False  # of an estimator of the user's own

    adv_estimator: str = Field(
        "gae",
        description=f"Advantage estimator: {', '.join(ADV_ESTIMATORS)}, or `package.module:function`.",
    )
    whiten_advantages: bool = Field(
        False, description="Normalise advantages to mean 0 and variance 1 over all sampled tokens."
    )
    advantage_clip: float | None = Field(
        None, gt=0, description="Advantages are clipped to [-x, x], after whitening; null is off."
    )

    @property
    def estimator(self) -> Estimator:
        """The keys of the chosen estimator; all keys, for a function of the user's own."""
        kind = ADV_ESTIMATORS.get(self.adv_estimator)
        return self if kind is None else self.part(kind)

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        yield from name_problems(self, "adv_estimator", ADV_ESTIMATORS)


# ---- Rewards


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
    """Soft penalty for responses that come close to the length limit (DAPO)."""

    enable: bool = Field(default=False, description="Lower the score of responses that reach into the buffer.")
    len: int = Field(
        default=0, ge=0, description="Tokens before the limit in which the penalty grows from 0 to `penalty_factor`."
    )
    penalty_factor: float = Field(default=1.0, ge=0, description="Penalty of a response as long as the limit.")
    max_length: int | None = Field(
        default=None, ge=1, description="The limit, in sampled tokens of a turn; null is `response_length`."
    )


Scope: TypeAlias = Literal["batch", "group", "tag", "running"]
"""The scores that share a mean or a standard deviation."""

ASYM_CLIP = (-1.0, 3.0)
"""Bounds of ``asym_clip``: rare successes may stand out, failures may not drag as far the other way."""

_SCOPE_OF_GROUPING: dict[str, Scope] = {"state": "group", "batch": "batch", "inductive": "tag"}


@dataclass(frozen=True)
class Normalisation:
    """Scopes of the mean that is subtracted and of the standard deviation that is divided by; ``None``: neither.

    The divisor is ``std + 1e-6``, or 1 where the scores do not differ.
    """

    mean_over: Scope | None = None
    std_over: Scope | None = None
    bounds: tuple[float, float] | None = None
    """Clip after normalising."""


@dataclass(frozen=True)
class Overlong:
    """The penalty of a turn of more than ``limit - buffer`` tokens, which grows to ``factor`` at the limit."""

    limit: int | None
    buffer: int
    factor: float


@dataclass(frozen=True)
class RewardShaping:
    """The shaping of episode scores before advantages are computed; ``None``: none."""

    normalisation: Normalisation
    clip: float | None
    overlong: Overlong | None
    length_coef: float | None
    whiten: bool


class RewardNorm(Config):
    """Normalisation of scores, in ROLL's first spelling."""

    switches: ClassVar[tuple[str, ...]] = ("reward_norm",)

    reward_norm: NormType | None = Field(
        None,
        description="Normalise episode scores by the statistics of the `batch`, the rollout `group`, or all scores so "
        "far (`running`); null is off.",
    )
    reward_shift: bool = Field(False, description="`reward_norm` only subtracts the mean.")
    reward_scale: bool = Field(False, description="`reward_norm` only divides by the standard deviation.")


class RewardScaling(Config):
    """Division by the running standard deviation."""

    switches: ClassVar[tuple[str, ...]] = ("use_reward_scaling",)

    use_reward_scaling: bool = Field(False, description="Divide episode scores by their running standard deviation.")
    use_reward_norm: bool = Field(False, description="`use_reward_scaling` subtracts the running mean as well.")


class LengthReward(Config):
    """Kimi k1.5's length reward."""

    switches: ClassVar[tuple[str, ...]] = ("add_len_reward",)

    add_len_reward: bool = Field(
        False,
        description="Add Kimi k1.5's length reward to episode scores: in a group, shorter successes gain and longer "
        "episodes lose.",
    )
    len_reward_coef: float = Field(1.0, ge=0, description="Coefficient of the length reward.")


class RewardConfig(LengthReward, RewardScaling, RewardNorm):
    """The shaping of rewards before advantages; users have four spellings of the same normalisation."""

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
    reward_clip: float | None = Field(
        None, gt=0, description="Episode scores are clipped to [-x, x], after normalisation; null is off."
    )
    overlong_buffer: OverlongBufferConfig = Field(
        default_factory=OverlongBufferConfig, description="Penalty for overlong responses, added to episode scores."
    )
    whiten_rewards: bool = Field(
        False,
        description="Normalise token rewards to mean 0 and variance 1 over all sampled tokens, before advantages.",
    )

    @property
    def overlong_max_length(self) -> int | None:
        """The limit that ``overlong_buffer`` counts from; a run's configuration knows it also without the key."""
        return self.overlong_buffer.max_length

    @property
    def normalisation(self) -> Normalisation:
        """The one normalisation that is asked for (two are refused)."""
        if self.use_reward_scaling:
            return Normalisation("running" if self.use_reward_norm else None, "running")
        if self.norm_mean_type is not None or self.norm_std_type is not None:
            return Normalisation(self.norm_mean_type, self.norm_std_type)
        if self.reward_norm is not None:
            norm: Scope = self.reward_norm
            return Normalisation(None if self.reward_scale else norm, None if self.reward_shift else norm)
        chosen = self.reward_normalization
        if chosen.method == "identity":
            return Normalisation()
        over = _SCOPE_OF_GROUPING[chosen.grouping]
        spread = None if chosen.method == "mean" else over
        return Normalisation(over, spread, ASYM_CLIP if chosen.method == "asym_clip" else None)

    @property
    def reward(self) -> RewardShaping:
        """The keys above as one value."""
        buffer = self.overlong_buffer
        penalty = Overlong(self.overlong_max_length, buffer.len, buffer.penalty_factor) if buffer.enable else None
        length = self.len_reward_coef if self.add_len_reward else None
        return RewardShaping(self.normalisation, self.reward_clip, penalty, length, self.whiten_rewards)

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.reward_shift and self.reward_scale:
            expected = "false with reward_shift: true; for (score - mean) / std leave both false"
            yield self.problem("reward_scale", expected, "reward_shift")
        newer = "norm_std_type" if self.norm_mean_type is None else "norm_mean_type"
        normalisers = {
            newer: getattr(self, newer) is not None,
            "reward_norm": self.reward_norm is not None,
            "use_reward_scaling": self.use_reward_scaling,
            "reward_normalization.method": self.reward_normalization.method != "identity",
        }
        if len(chosen := [key for key, on in normalisers.items() if on]) > 1:
            expected = f"nothing with {chosen[0]}: at most one reward normalisation"
            yield self.problem(chosen[1], expected, chosen[0])
        buffer, limit = self.overlong_buffer, self.overlong_max_length
        if buffer.enable and buffer.len < 1:
            yield self.problem("overlong_buffer.len", "at least 1 with enable: true", "overlong_buffer.enable")
        elif buffer.enable and limit is not None and buffer.len > limit:
            limits = ("overlong_buffer.max_length", "response_length")
            yield self.problem("overlong_buffer.len", f"at most the limit of {limit} tokens", *limits)


# ---- KL to the reference model


@dataclass(frozen=True)
class KlTerm:
    """A KL to the reference: how it is estimated, and its coefficient, fixed or adapted to a target."""

    penalty: KlPenalty
    coef: float
    target: float | None = None
    horizon: int = 10000


@dataclass(frozen=True)
class KlTerms:
    """The KL in the reward and the one in the loss, where they are switched on."""

    reward: KlTerm | None
    loss: KlTerm | None

    @property
    def over_vocabulary(self) -> bool:
        """Tells whether one of them sums over the vocabulary, for which the reference's hidden states travel."""
        return any(term is not None and term.penalty == "full" for term in (self.reward, self.loss))


class KlReward(Config):
    """The KL in each token's reward."""

    switches: ClassVar[tuple[str, ...]] = ("add_token_level_kl",)

    add_token_level_kl: bool = Field(False, description="Subtract KL to the reference from each token's reward.")
    init_kl_coef: float = Field(
        0.2, ge=0, description="Coefficient of the KL in the reward (the initial one if adaptive)."
    )
    target_kl: float | None = Field(
        None, gt=0, description="Target KL of the adaptive coefficient; null keeps the coefficient fixed."
    )


class KlLoss(Config):
    """The KL as a term of the policy's loss."""

    switches: ClassVar[tuple[str, ...]] = ("use_kl_loss",)

    use_kl_loss: bool = Field(False, description="Add KL to the reference to the policy loss.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the KL loss (the initial one if adaptive).")
    kl_loss_penalty: KlPenalty | None = Field(None, description="KL estimator of the loss. null: `kl_penalty`.")
    kl_loss_target: float | None = Field(
        None,
        gt=0,
        description="Target KL to which `kl_loss_coef` adapts, as the reward's does with `target_kl`; null: fixed.",
    )


class KlPenaltyConfig(Config):
    """The estimator of both."""

    switches: ClassVar[tuple[str, ...]] = ("add_token_level_kl", "use_kl_loss")

    kl_penalty: KlPenalty = Field(
        "kl",
        description="KL estimator: `kl` (= `k1`) log ratio, `abs` its absolute value, `mse` (= `k2`) half its square, "
        "`low_var_kl` (= `k3`) ratio - 1 - log ratio; with a `+` appended, the gradient is that of `k2`. `full` "
        "is exact: it sums over the vocabulary, for which the reference returns its final hidden states.",
    )


class KlHorizon(Config):
    """How fast an adaptive coefficient changes."""

    switches: ClassVar[tuple[str, ...]] = ("target_kl", "kl_loss_target")

    kl_horizon: int = Field(
        10000, ge=1, description="Sequences over which the adaptive coefficient changes by at most 20 %."
    )


class KlConfig(KlHorizon, KlLoss, KlReward, KlPenaltyConfig):
    """The KL to the reference model, in the reward and in the loss."""

    @property
    def loss_kl_penalty(self) -> KlPenalty:
        """The estimator of the loss."""
        return self.kl_loss_penalty or self.kl_penalty

    @property
    def kl(self) -> KlTerms:
        """The keys above as one value."""
        reward = KlTerm(self.kl_penalty, self.init_kl_coef, self.target_kl, self.kl_horizon)
        loss = KlTerm(self.loss_kl_penalty, self.kl_loss_coef, self.kl_loss_target, self.kl_horizon)
        return KlTerms(reward if self.add_token_level_kl else None, loss if self.use_kl_loss else None)

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.use_kl_loss and not self.kl_loss_coef:
            yield self.problem("kl_loss_coef", "above 0 with use_kl_loss: true", "use_kl_loss")
        if self.use_kl_loss and self.kl_loss_target is not None and self.loss_kl_penalty == "full":
            expected = "null with the KL over the vocabulary, which is known only after the update"
            yield self.problem("kl_loss_target", expected, "kl_penalty", "kl_loss_penalty")


# ---- What the policy learns from


class PfPpoConfig(Config):
    """Resampling of the policy's training samples (PF-PPO)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        default="pow",
        description="A sample's weight by its score s: `pow` |s| to the power `weight_pow`, `max_min` 1 for the "
        "highest and lowest scores and else 0, `max_random` 0.4 for the highest and else 0.1.",
    )
    weight_pow: float = Field(default=2.0, ge=0, description="Exponent of `pow`.")


class DifficultyMask(Config):
    """A mask of groups that are too easy or too hard."""

    switches: ClassVar[tuple[str, ...]] = ("difficulty_mask",)

    difficulty_mask: bool = Field(
        False,
        description="Keep only groups whose mean score lies between `difficulty_low_threshold` and "
        "`difficulty_high_threshold` in the policy's loss.",
    )
    difficulty_low_threshold: float = Field(0.0, description="Groups with at most this mean score are masked.")
    difficulty_high_threshold: float = Field(1.0, description="Groups with at least this mean score are masked.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        yield from self.order_problems("difficulty_low_threshold", "difficulty_high_threshold")


class LongErrorMask(Config):
    """A mask of failed samples that are long."""

    switches: ClassVar[tuple[str, ...]] = ("error_max_len_clip",)

    error_max_len_clip: bool = Field(
        False,
        description="Mask failed samples (score at most 0) of more than `error_max_len_threshold` sampled tokens in "
        "the policy's loss.",
    )
    error_max_len_threshold: int = Field(9999999999, ge=0, description="Longest failed sample that is not masked.")


class MaskType(Config):
    """What masked samples are removed from."""

    switches: ClassVar[tuple[str, ...]] = ("max_len_mask", "difficulty_mask", "error_max_len_clip")

    mask_type: Literal["all", "loss"] = Field(
        "loss",
        description="Scope of `max_len_mask`, `difficulty_mask` and `error_max_len_clip`: `loss` is only the policy's "
        "loss; `all` is the whole step, with all samples of the episode: reward statistics, baselines, the critic.",
    )


class SelectionConfig(LongErrorMask, DifficultyMask, MaskType):
    """Masks, weights and resampling of the policy's training samples."""

    max_len_mask: bool = Field(
        False,
        description="Mask samples that the length limit cut off: the last response hit its limit, or the episode "
        "ended because its context was full.",
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
    use_pf_ppo: bool = Field(
        False, description="PF-PPO: the policy trains on samples that are resampled, with replacement, by score."
    )
    pf_ppo: PfPpoConfig = Field(default_factory=PfPpoConfig, description="How PF-PPO resamples.")


# ---- All together


@dataclass(frozen=True)
class AlgorithmParts:
    """What the algorithms read."""

    advantage: AdvantageConfig
    policy_loss: PolicyLossConfig
    kl: KlTerms
    reward: RewardShaping
    correction: TrainInferCorrectionConfig
    selection: SelectionConfig
    teacher: TeacherTerm | None = None


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
_RAW_REWARDS = {
    "gdpo": (_SHAPING.keys(), "with adv_estimator gdpo, which reads separate rewards, not their sum"),
    "maxrl": (_LOWERING, "with adv_estimator maxrl, which needs rewards of at least 0"),
    "remax": ({"whiten_rewards"}, "with adv_estimator remax, whose baseline is an unshaped score"),
}
"""By estimator, the keys that may not change rewards, and why."""


class AlgorithmConfig(SelectionConfig, PolicyLossConfig, KlConfig, RewardConfig, AdvantageConfig):
    """Algorithm keys that every pipeline shares; pipelines inherit from it so that they stay at the top level."""

    ppo_epochs: int = Field(1, ge=1, description="Passes over one rollout's samples.")
    critic_warmup: int = Field(0, ge=0, description="Steps at the start in which only the critic is trained.")
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

    @property
    def parts(self) -> AlgorithmParts:
        """The keys as one value per part, which is what algorithms read."""
        own_estimator, own_loss = ":" in self.adv_estimator, ":" in self.loss_name
        return AlgorithmParts(
            # A function of the user's own may read anything.
            advantage=self if own_estimator else self.part(AdvantageConfig),
            policy_loss=self if own_loss else self.part(PolicyLossConfig),
            kl=self.kl,
            reward=self.reward,
            correction=self.train_infer_correction,
            selection=self.part(SelectionConfig),
        )

    @property
    def uses_full_kl(self) -> bool:
        """Tells whether the KL over the vocabulary is computed, for which the reference's hidden states travel."""
        return self.kl.over_vocabulary

    @property
    def bypasses_old_logprobs(self) -> bool:
        """Tells whether the old policy of the loss is the one that sampled."""
        return self.train_infer_correction.bypass

    @property
    def leaves_rollouts_unscored(self) -> bool:
        """Tells whether the training engine says nothing of a rollout before it is trained."""
        return self.bypasses_old_logprobs or self.force_disable_old_logprobs_recompute

    @property
    def wants_old_logprobs(self) -> bool:
        """Tells whether the training engine must score rollouts even where a first optimizer step could do without."""
        return not self.bypasses_old_logprobs and (
            self.enable_old_logprobs_recompute
            or self.add_token_level_kl
            or self.estimator.sums_squares
            or self.train_infer_correction.uses_old_logprobs
        )

    @property
    def mixes_all_rows(self) -> bool:
        """Tells whether rows are compared or exchanged, by which no row belongs to the first optimizer step alone."""
        return self.use_pf_ppo or self.variant.mixes_rows

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        yield from self._advantage_problems()
        yield from self._old_policy_problems()

    def _advantage_problems(self) -> Iterator[ConfigProblem]:
        """Keys of other parts that do not go with the advantage estimator."""
        name = self.adv_estimator
        if name in _RAW_REWARDS:
            keys, why = _RAW_REWARDS[name]
            yield from self._shaping_problems(keys, why)
        if self.estimator.sums_squares and self.bypasses_old_logprobs:
            bypass = "train_infer_correction.bypass"
            expected = f"another with {bypass}: its weights need probabilities that the trainer then does not compute"
            yield self.problem("adv_estimator", expected, bypass)
        if self.critic_warmup and name in ADV_ESTIMATORS and not self.estimator.has_critic:
            yield self.problem("critic_warmup", f"0 with adv_estimator {name}, which has no critic", "adv_estimator")

    def _shaping_problems(self, keys: Collection[str], why: str) -> Iterator[ConfigProblem]:
        """Keys that change rewards, where nothing may."""
        for key, neutral in _SHAPING.items():
            section, _, name = key.rpartition(".")
            if key in keys and getattr(getattr(self, section) if section else self, name) != neutral:
                expected = "null" if neutral is None else str(neutral).lower()
                yield self.problem(key, f"{expected} {why}", "adv_estimator")

    def _old_policy_problems(self) -> Iterator[ConfigProblem]:
        """Keys that need log-probabilities of the training engine before the update, where it computes none."""
        bypass = "train_infer_correction.bypass"
        if self.bypasses_old_logprobs and self.enable_old_logprobs_recompute:
            yield self.problem("enable_old_logprobs_recompute", f"false with {bypass}: nothing reads them", bypass)
        if self.bypasses_old_logprobs and self.add_token_level_kl and self.kl_penalty == "full":
            expected = f"an estimator with {bypass}: the trainer then computes no log-probs before training"
            yield self.problem("kl_penalty", expected, bypass)
        if not self.force_disable_old_logprobs_recompute:
            return
        key, expected = "force_disable_old_logprobs_recompute", "false"
        if self.ppo_epochs > 1:
            yield self.problem(key, f"{expected} with ppo_epochs {self.ppo_epochs}: later passes clip", "ppo_epochs")
        for reader, reads in (
            (bypass, self.bypasses_old_logprobs),
            ("enable_old_logprobs_recompute", self.enable_old_logprobs_recompute),
            ("add_token_level_kl", self.add_token_level_kl),
            ("adv_estimator", self.estimator.sums_squares),
            ("train_infer_correction", self.train_infer_correction.uses_old_logprobs),
        ):
            if reads:
                words = "which uses the sampler's log-probs" if reader == bypass else "which needs those log-probs"
                yield self.problem(key, f"{expected} with {reader}, {words}", reader)
