"""The whole configuration of a run that trains a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.offline import OfflineConfig
from roll.configs.preference import PairColumns
from roll.configs.problems import ConfigProblem

RewardLoss: TypeAlias = Literal["bradley_terry", "regression", "process"]


class RewardLossConfig(Config):
    """The loss of a reward model."""

    reward_loss: RewardLoss = Field(
        default="bradley_terry",
        description="bradley_terry (pairs), regression (responses with scores) or process (responses in steps, each "
        "right or wrong).",
    )
    center_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which keeps them around 0 (bradley_terry).",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.center_coef and self.reward_loss != "bradley_terry":
            yield self.problem("center_coef", f"0 with {self.reward_loss}", "reward_loss")


class RewardColumns(PairColumns):
    """Columns of the dataset that hold a row's answers and what they are worth. They may be dotted paths."""

    score: str = Field(
        default="score",
        min_length=1,
        description="Column of the score of the response in data_args.response, or at the end of messages "
        "(regression).",
    )
    steps: str = Field(
        default="steps",
        min_length=1,
        description="Column with the response as a list of texts, its steps, which joined are the whole response "
        "(process).",
    )
    step_labels: str = Field(
        default="step_labels",
        min_length=1,
        description="Column with a list of true and false, or of numbers from 0 to 1: which steps are right (process).",
    )


class RewardTrainingConfig(RewardLossConfig, OfflineConfig):
    """Everything that ``examples/start_rm_pipeline.py`` reads."""

    answers: RewardColumns = Field(
        default_factory=RewardColumns, description="Columns of the responses and their labels."
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
