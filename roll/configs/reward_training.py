"""The whole configuration of a run that trains a reward model."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.offline import OfflineConfig
from roll.configs.preference import MarginColumns

RewardLoss: TypeAlias = Literal["bradley_terry", "regression", "process"]


class ScoreColumn(Config):
    """The column of an answer's score."""

    score: str = Field(
        default="score",
        min_length=1,
        description="Column of the score of the answer in data_args.response, or at the end of messages (regression).",
    )


class StepColumns(Config):
    """The columns of an answer in steps."""

    steps: str = Field(
        default="steps",
        min_length=1,
        description="Column with the answer as a list of texts, which are its steps and joined the whole answer "
        "(process).",
    )
    step_labels: str = Field(
        default="step_labels",
        min_length=1,
        description="Column with a list of true and false, or of numbers from 0 to 1: which steps are right (process).",
    )


class RewardColumns(MarginColumns, ScoreColumn, StepColumns):
    """Columns of the dataset that hold a row's answers and what they are worth. They may be dotted paths."""


class BradleyTerry(Config):
    """Pairs."""

    columns: ClassVar[type[Config]] = MarginColumns

    center_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which keeps them around 0 (bradley_terry).",
    )


class Regression(Config):
    """Answers with scores."""

    columns: ClassVar[type[Config]] = ScoreColumn


class Process(Config):
    """Answers in steps."""

    columns: ClassVar[type[Config]] = StepColumns


REWARD_LOSSES: dict[str, type[BradleyTerry] | type[Regression] | type[Process]] = {
    "bradley_terry": BradleyTerry,
    "regression": Regression,
    "process": Process,
}
"""By ``reward_loss``: the keys that it reads, and its columns."""


class RewardLossConfig(BradleyTerry, Regression, Process):
    """The loss of a reward model."""

    choices: ClassVar = {"reward_loss": REWARD_LOSSES}

    reward_loss: RewardLoss = Field(
        default="bradley_terry",
        description="bradley_terry (pairs), regression (answers with scores) or process (answers in steps, each right "
        "or wrong).",
    )


class RewardTrainingConfig(RewardLossConfig, OfflineConfig):
    """Everything that ``examples/start_rm_pipeline.py`` reads."""

    answers: RewardColumns = Field(
        default_factory=RewardColumns, description="Columns of the answers and what they are worth."
    )

    @property
    def trains_scores(self) -> bool:
        return True

    @property
    def sample(self) -> str:
        return "pair" if self.reward_loss == "bradley_terry" else "answer"

    @property
    def sequences_per_sample(self) -> int:
        return 2 if self.reward_loss == "bradley_terry" else 1
