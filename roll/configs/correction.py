"""``train_infer_correction``: what to do where the training engine disagrees with the engine that generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

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
    """Rejection: tokens (or whole rows) outside the bounds take no part in the policy's loss."""

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
            expected = "true, since diff_enabled is false: one of them"
            yield self.problem("ratio_enabled", expected, "diff_enabled", "enabled")
        for key in ("ratio", "diff"):
            low, high = getattr(self, f"{key}_low"), getattr(self, f"{key}_high")
            if low > high:
                yield self.problem(f"{key}_low", f"at most {key}_high = {high}", f"{key}_high")


class TrainInferCorrectionConfig(Config):
    """Correction of the mismatch between the training and the generating engine."""

    bypass: bool = Field(
        default=False,
        description="The old policy of the loss is the one that sampled, by the generating engine's log-probs: the "
        "trainer computes none before it trains on rollouts, and the loss's own clip also limits the mismatch.",
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
            yield self.problem("is_weight.enabled", "false with bypass: the loss's ratio is it", "bypass")
        if self.bypass and any(each.enabled for each in self.filters):
            expected = "none that is enabled with bypass: there is nothing to compare"
            yield ConfigProblem("filters", "a filter", expected, involves=("bypass",))

    @property
    def uses_old_logprobs(self) -> bool:
        """Tells whether it compares the old log-probabilities, which then must be computed by the training engine."""
        return (self.is_weight.enabled and self.is_weight.detach) or any(f.enabled for f in self.filters)
