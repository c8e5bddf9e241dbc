"""Divergence of a model from its teacher, over the vocabulary: the keys of ``roll.algorithms.divergences``."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config

KdObjective: TypeAlias = Literal["forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl"]


class JsDivergence(Config):
    """The generalised Jensen–Shannon divergence."""

    jsd_beta: float = Field(
        default=0.5, gt=0, lt=1, description="Weight of the teacher in the mixture and in the sum of js_divergence."
    )


class SkewedKl(Config):
    """A KL to a mixture."""

    skew_lambda: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share that the first distribution of a skewed KL has in the mixture; 0 is the plain KL.",
    )


KD_OBJECTIVES: dict[str, type[Config]] = {
    "forward_kl": Config,
    "reverse_kl": Config,
    "js_divergence": JsDivergence,
    "skewed_forward_kl": SkewedKl,
    "skewed_reverse_kl": SkewedKl,
}
"""By ``kd_objective``: the keys that it reads."""


class DivergenceConfig(SkewedKl, JsDivergence):
    """The divergence between the teacher's next-token distribution and the policy's."""

    choices: ClassVar = {"kd_objective": KD_OBJECTIVES}

    kd_objective: KdObjective = Field(
        default="forward_kl",
        description="forward_kl (teacher to policy), reverse_kl (policy to teacher), js_divergence (generalised "
        "Jensen–Shannon), or one of the KLs to a mixture of both (skewed_forward_kl, skewed_reverse_kl).",
    )
    logits_topk: int | None = Field(
        default=None,
        ge=1,
        description="Compare this many of the teacher's most likely tokens, and the mass of all others as one. null: "
        "the whole vocabulary, for which the teacher returns its final hidden states.",
    )
