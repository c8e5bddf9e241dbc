"""Divergence of a model from its teacher, over the vocabulary: the keys of ``roll.algorithms.divergences``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

KdObjective: TypeAlias = Literal["forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl"]

_READ_BY: dict[str, tuple[str, ...]] = {
    "jsd_beta": ("js_divergence",),
    "skew_lambda": ("skewed_forward_kl", "skewed_reverse_kl"),
}


class DivergenceConfig(Config):
    """The distance from the teacher's distribution of the next token to the policy's."""

    kd_objective: KdObjective = Field(
        default="forward_kl",
        description="forward_kl (teacher to policy), reverse_kl (policy to teacher), js_divergence (generalised "
        "Jensen–Shannon), or one of the KLs to a mixture of both (skewed_forward_kl, skewed_reverse_kl).",
    )
    jsd_beta: float = Field(
        default=0.5, gt=0, lt=1, description="Weight of the teacher in the mixture and in the sum of js_divergence."
    )
    skew_lambda: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share that the first distribution of a skewed KL has in the mixture; 0 is the plain KL.",
    )
    logits_topk: int | None = Field(
        default=None,
        ge=1,
        description="Compare this many of the teacher's most likely tokens, and the mass of all others as one. null: "
        "the whole vocabulary, for which the teacher returns its final hidden states.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        for key, objectives in self.unread(_READ_BY, self.kd_objective):
            expected = f"nothing with kd_objective {self.kd_objective}: {' and '.join(objectives)} read it"
            yield self.problem(key, expected, "kd_objective")
