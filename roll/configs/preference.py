"""Learning from preferences: the keys of the losses in ``roll.algorithms.preferences``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

PreferenceLoss: TypeAlias = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "kto"]

WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses that compare the policy with nothing."""
LOGISTIC = ("sigmoid", "simpo")
"""Losses that smooth labels and take a margin."""
_OF_REWARDS = ("sigmoid", "ipo", "hinge")
OF_PAIRS = (*_OF_REWARDS, *WITHOUT_REFERENCE)
"""Losses that compare a chosen with a rejected answer."""
_READ_BY: dict[str, tuple[str, ...]] = {
    "length_normalized": _OF_REWARDS,
    "target_margin": LOGISTIC,
    "label_smoothing": LOGISTIC,
    "nll_coef": OF_PAIRS,
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""The losses that read a key; ``beta`` is read by all."""


class PairColumns(Config):
    """Columns of the dataset that hold a row's two answers. They may be dotted paths."""

    chosen: str = Field(
        default="chosen",
        min_length=1,
        description="Column of the better response: its text, or, if data_args.messages is the same column, the whole "
        "conversation.",
    )
    rejected: str = Field(default="rejected", min_length=1, description="Column of the worse response, likewise.")
    margin: str | None = Field(
        default=None,
        min_length=1,
        description="Column of numbers, 0 or more: by how much the chosen response is better. It is added to "
        "target_margin (sigmoid, simpo), and a reward model's scores should differ by it. null: 0.",
    )


class AnswerColumns(PairColumns):
    """Columns of the dataset that hold a row's answers. They may be dotted paths."""

    label: str = Field(
        default="label",
        min_length=1,
        description="Column that says whether the response in data_args.response, or the conversation in messages, is "
        "good: true or false (kto).",
    )


class PreferenceConfig(Config):
    """The loss of chosen and rejected answers."""

    preference_loss: PreferenceLoss = Field(
        default="sigmoid",
        description="sigmoid (DPO), ipo, hinge (SLiC), simpo and orpo (no reference), or kto (single responses, good "
        "or bad, not in pairs).",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="Scale of the rewards: the larger, the closer to the reference. simpo: scale of the mean log-prob "
        "(2 to 10 there). orpo: weight of the odds ratio.",
    )
    length_normalized: bool = Field(
        default=False, description="Rewards per token of the response (sigmoid, ipo, hinge); simpo and orpo always."
    )
    target_margin: float = Field(
        default=0.0,
        ge=0,
        description="How far the chosen response's reward should exceed the rejected one's (sigmoid, simpo).",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs assumed to be labelled the wrong way round (sigmoid, simpo).",
    )
    nll_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the chosen responses' negative log-likelihood, the mean over responses of their means "
        "over tokens; orpo needs it (1 in its paper).",
    )
    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of good responses (kto).")
    undesirable_weight: float = Field(default=1.0, gt=0, description="Weight of bad responses (kto).")

    @property
    def compares_with_reference(self) -> bool:
        """The loss asks for the reference's log-probabilities."""
        return self.preference_loss not in WITHOUT_REFERENCE

    @property
    def in_pairs(self) -> bool:
        """The loss compares a chosen with a rejected answer."""
        return self.preference_loss != "kto"

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        loss = self.preference_loss
        for key, losses in self.unread(_READ_BY, loss):
            default = str(type(self).model_fields[key].default).lower()
            expected = f"{default} with {loss}: it is read with {', '.join(losses)}"
            yield self.problem(key, expected, "preference_loss")
        if loss == "orpo" and not self.nll_coef:
            yield self.problem("nll_coef", "more than 0 with orpo (its paper: 1)", "preference_loss")
