"""Learning from preferences: the keys of the losses in ``roll.algorithms.preferences``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

PreferenceLoss: TypeAlias = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "kto"]


class PairColumns(Config):
    """Columns of the dataset with a row's two responses; dotted paths are allowed."""

    chosen: str = Field(
        default="chosen",
        min_length=1,
        description="Column of the better response: its text, or, if data_args.messages is the same column, the whole "
        "conversation.",
    )
    rejected: str = Field(default="rejected", min_length=1, description="Column of the worse response, likewise.")


class MarginColumns(PairColumns):
    """Columns of pairs, and by how much one response is better."""

    margin: str | None = Field(
        default=None,
        min_length=1,
        description="Column of numbers, 0 or more: by how much the chosen response is better. It is added to "
        "target_margin (sigmoid, simpo), and a reward model's scores should differ by it. null: 0.",
    )


class LabelColumn(Config):
    """The column with the label of a single response."""

    label: str = Field(
        default="label",
        min_length=1,
        description="Column that says whether the response in data_args.response, or the conversation in messages, is "
        "good: true or false (kto).",
    )


class AnswerColumns(MarginColumns, LabelColumn):
    """Columns of the dataset with a row's responses; dotted paths are allowed."""


class OfPairs(Config):
    """Losses that compare a chosen with a rejected answer; ``orpo`` has no more keys."""

    columns: ClassVar[type[Config]] = PairColumns
    with_reference: ClassVar[bool] = False

    nll_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the chosen responses' negative log-likelihood, the mean over responses of their means "
        "over tokens; orpo needs it (1 in its paper).",
    )


class OfRewards(OfPairs):
    """Losses of the implicit rewards of two responses: ``ipo``, ``hinge``."""

    with_reference = True

    length_normalized: bool = Field(
        default=False, description="Rewards per token of the response (sigmoid, ipo, hinge); simpo and orpo always."
    )


class Logistic(OfPairs):
    """Losses that smooth labels and take a margin: ``simpo``."""

    columns: ClassVar[type[Config]] = MarginColumns

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


class Sigmoid(OfRewards, Logistic):
    """DPO."""


class Kto(Config):
    """Single responses, good or bad."""

    columns: ClassVar[type[Config]] = LabelColumn
    with_reference: ClassVar[bool] = True

    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of good responses (kto).")
    undesirable_weight: float = Field(default=1.0, gt=0, description="Weight of bad responses (kto).")


PREFERENCE_LOSSES: dict[str, type[OfPairs] | type[Kto]] = {
    "sigmoid": Sigmoid,
    "ipo": OfRewards,
    "hinge": OfRewards,
    "simpo": Logistic,
    "orpo": OfPairs,
    "kto": Kto,
}
"""By ``preference_loss``: the keys that the loss reads; ``beta`` is read by all."""


class PreferenceConfig(Sigmoid, Kto):
    """The loss of chosen and rejected responses."""

    choices: ClassVar = {"preference_loss": PREFERENCE_LOSSES}

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

    @property
    def compares_with_reference(self) -> bool:
        """The loss asks for the reference's log-probabilities."""
        return PREFERENCE_LOSSES[self.preference_loss].with_reference

    @property
    def in_pairs(self) -> bool:
        """The loss compares a chosen with a rejected answer."""
        return self.preference_loss != "kto"

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.preference_loss == "orpo" and not self.nll_coef:
            yield self.problem("nll_coef", "more than 0 with orpo (its paper: 1)", "preference_loss")
