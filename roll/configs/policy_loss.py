"""The keys of the policy's loss: a class for each ``pg_variant``, and what all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.configs.schema import name_problems

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ImportanceSampling: TypeAlias = Literal["token", "segment", "seq"]

NORMED = ("token-sum", "seq-mean-token-sum-norm")
"""Aggregations that ``loss_agg_norm`` divides."""


class ClipRange(Config):
    """The clip range of the probability ratio."""

    switches: ClassVar[tuple[str, ...]] = ("use_pg_clip_range",)

    use_pg_clip_range: bool = Field(False, description="Use `pg_clip_low` and `pg_clip_high` instead of `pg_clip`.")
    pg_clip_low: float = Field(0.2, gt=0, le=1, description="Lower clip range: the ratio stays above 1 - x.")
    pg_clip_high: float = Field(0.2, gt=0, description="Upper clip range: the ratio stays below 1 + x.")


class Clipped(ClipRange):
    """The clip range of every loss: no loss refuses it."""

    pg_clip: float = Field(0.2, gt=0, description="PPO clips the probability ratio to [1 - x, 1 + x].")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances below and above 1 that the ratio may go."""
        return (self.pg_clip_low, self.pg_clip_high) if self.use_pg_clip_range else (self.pg_clip, self.pg_clip)


class PolicyVariant(Clipped):
    """Keys of every policy loss. ``vanilla``, ``dppo_kl``, ``dppo_tv`` and ``gmpo`` have no others."""

    off_policy: ClassVar[bool] = True
    """Whether it weighs the policy against the one that sampled."""
    mixes_rows: ClassVar[bool] = False
    """Whether it compares tokens of all rows, by which no row belongs to the first optimizer step alone."""


class Vanilla(PolicyVariant):
    """REINFORCE without correction for old samples."""

    off_policy = False


class WithRatio(PolicyVariant):
    """Losses with a probability ratio that tokens can share."""

    importance_sampling: Literal["token", "segment", "seq"] = Field(
        "token",
        description="Probability ratio of each `token`, of the turn (`segment`) or of the sequence (`seq`): the "
        "geometric mean over its sampled tokens, shared by all of them. With `pg_variant: ppo` the latter is GSPO.",
    )


class DualClip(Config):
    """A bound for negative advantages."""

    switches: ClassVar[tuple[str, ...]] = ("dual_clip_loss",)

    dual_clip_loss: bool = Field(False, description="Limit the loss of negative advantages by `dual_clip_c`.")
    dual_clip_c: float = Field(3.0, gt=1, description="Dual clip: the loss is at most -c * advantage.")


class Ppo(DualClip, WithRatio):
    """PPO's clipped surrogate; GSPO with the ratio of sequences."""

    pg_loss_cap: float | None = Field(
        None, gt=0, description="The loss of a token (`ppo`, `clip_cov`) is at most this; null is off."
    )


class ClipCov(Ppo):
    """PPO without some tokens of large covariance."""

    mixes_rows = True

    clip_cov_ratio: float = Field(0.0002, gt=0, le=1, description="Share of tokens that Clip-Cov drops.")
    clip_cov_lb: float = Field(1.0, description="Clip-Cov picks among tokens whose covariance is above this …")
    clip_cov_ub: float = Field(5.0, description="… and below this.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        yield from self.order_problems("clip_cov_lb", "clip_cov_ub")


class KlCov(WithRatio):
    """Ratios, and a KL on the tokens of the largest covariance."""

    mixes_rows = True

    kl_cov_ratio: float = Field(
        0.0002, gt=0, le=1, description="Share of tokens, those with the largest covariance, that get KL-Cov's penalty."
    )
    ppo_kl_coef: float = Field(
        0.1, ge=0, description="KL-Cov's coefficient of the absolute log ratio to the old policy on those tokens."
    )


class Topr(WithRatio):
    """Tapered off-policy REINFORCE."""

    topr_positive_weight: float = Field(1.0, ge=0, description="TOPR's weight of tokens with positive advantage.")
    topr_negative_weight: float = Field(1.0, ge=0, description="TOPR's weight of the other tokens.")


class Tis(WithRatio):
    """Truncated importance sampling."""

    tis_lower_bound: float = Field(0.0, ge=0, description="TIS keeps the ratio at or above this.")
    tis_upper_bound: float = Field(1.0, gt=0, description="TIS keeps the ratio at or below this.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        yield from self.order_problems("tis_lower_bound", "tis_upper_bound")


class Cispo(WithRatio):
    """Importance weights around 1."""

    cispo_epsilon_low: float = Field(0.1, ge=0, le=1, description="CISPO keeps the ratio at or above 1 - x.")
    cispo_epsilon_high: float = Field(0.1, ge=0, description="CISPO keeps the ratio at or below 1 + x.")
    cispo_use_unified_mask: bool = Field(
        False,
        description="CISPO drops the tokens that PPO would clip: beyond a bound, on the side that increases "
        "the objective.",
    )


class Kimi15(PolicyVariant):
    """Kimi k1.5's policy mirror descent."""

    off_policy = False

    kimi15_tau: float = Field(0.1, ge=0, description="Kimi k1.5's coefficient of the squared log ratio.")


class Sapo(WithRatio):
    """Soft gates instead of a clip."""

    sapo_tau_pos: float = Field(1.0, gt=0, description="SAPO's gate steepness for positive advantages.")
    sapo_tau_neg: float = Field(1.05, gt=0, description="SAPO's gate steepness for the other tokens.")


PG_VARIANTS: dict[str, type[PolicyVariant]] = {
    "cispo": Cispo,
    "clip_cov": ClipCov,
    "dppo_kl": PolicyVariant,
    "dppo_tv": PolicyVariant,
    "gmpo": PolicyVariant,
    "kimi15": Kimi15,
    "kl_cov": KlCov,
    "ppo": Ppo,
    "sapo": Sapo,
    "tis": Tis,
    "topr": Topr,
    "vanilla": Vanilla,
}
"""The keys that each built-in ``pg_variant`` reads."""


class PolicyLossConfig(Sapo, Kimi15, Cispo, Tis, Topr, KlCov, ClipCov, Vanilla):
    """The policy's loss: its variant, aggregation, and added terms."""

    choices: ClassVar = {"pg_variant": PG_VARIANTS}
    off_policy = True  # of a loss of the user's own
    mixes_rows = False

    rl_loss_coef: float = Field(1.0, ge=0, description="Coefficient of the policy-gradient term.")
    pg_variant: str = Field("ppo", description=f"Policy loss: {', '.join(PG_VARIANTS)}, or `package.module:function`.")
    use_topr_loss: bool = Field(False, description="Alias of `pg_variant: topr`.")
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

    @property
    def loss_name(self) -> str:
        """The name of the policy loss, whichever key chose it."""
        return "topr" if self.use_topr_loss else self.pg_variant

    @property
    def variant(self) -> PolicyVariant:
        """The keys of the chosen loss; all keys, for a function of the user's own."""
        kind = PG_VARIANTS.get(self.loss_name)
        return self if kind is None else self.part(kind)

    def choice_of(self, key: str) -> Any:
        return self.loss_name if key == "pg_variant" else super().choice_of(key)

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        yield from name_problems(self, "pg_variant", PG_VARIANTS)
        if self.use_topr_loss and self.pg_variant not in ("ppo", "topr"):
            yield self.problem("pg_variant", "topr or nothing with use_topr_loss: true", "use_topr_loss")
        if self.loss_agg_norm is not None and self.loss_agg_mode not in NORMED:
            expected = f"null with loss_agg_mode {self.loss_agg_mode}; {' and '.join(NORMED)} have a divisor"
            yield self.problem("loss_agg_norm", expected, "loss_agg_mode")
