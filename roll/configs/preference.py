"""Learning from preferences: the keys of the losses in ``roll.algorithms.preferences``, and of the runs that use them.

Runs are DPO and its relatives, and the training of a reward model; an RL run can add the first losses to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.offline import OFFLINE_RULES, OfflineConfig, datasets
from roll.configs.pipeline import PromptWarmStartConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rules import Rule
from roll.configs.worker import WorkerConfig

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


class DPOConfig(PreferenceConfig, OfflineConfig):
    """All keys of a DPO run (``examples/start_dpo_pipeline.py``)."""

    preferences: AnswerColumns = Field(default_factory=AnswerColumns, description="Columns of the compared responses.")
    reference: WorkerConfig | None = Field(
        default=None,
        description="The initial policy, in a role that computes the log-probs of each step's pairs. null: "
        "with lora_target the policy without its adapter; else see precompute_reference.",
    )
    precompute_reference: bool = Field(
        default=False,
        description="The reference computes the log-probs of all pairs once, before the first step, and the results "
        "are stored on disk. Without a section reference the untrained policy does it: no further copy of the model is "
        "needed.",
    )
    reference_dir: str | None = Field(
        default=None,
        description="Folder of the precomputed results, which runs on the same data and model can share. null: the "
        "run's.",
    )
    warm_start: PromptWarmStartConfig = Field(
        default_factory=PromptWarmStartConfig,
        description="Supervised start of the tiny model; read when pretrain is tiny and file_name is set.",
    )

    @property
    def uses_reference(self) -> bool:
        return self.compares_with_reference

    @property
    def sample(self) -> str:
        return "pair" if self.in_pairs else "answer"

    @property
    def sequences_per_sample(self) -> int:
        return 2 if self.in_pairs else 1

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The model roles that this run starts, by name."""
        own = {} if self.reference is None or not self.uses_reference else {"reference": self.reference}
        return {**super().roles, **own}


def check_reference(config: DPOConfig) -> Iterator[ConfigProblem]:
    """The reference is there where the loss asks for it, in one form, and nowhere else."""
    loss, lora = config.preference_loss, ("actor_train.model_args.lora_target",)
    if not config.uses_reference:
        expected = f"{{}} with {loss}, which compares the policy with no reference"
        if config.reference is not None:
            words = expected.format("no section")
            yield ConfigProblem("reference", "a section", words, involves=("preference_loss",))
        if config.precompute_reference:
            words = expected.format("false")
            yield ConfigProblem("precompute_reference", True, words, involves=("preference_loss",))
    elif config.uses_lora and config.reference is not None:
        expected = "no section: with lora_target the reference is the policy without its adapter"
        yield ConfigProblem("reference", "a section", expected, involves=lora)
    elif config.reference is None and not config.uses_lora and not config.precompute_reference:
        expected = f"a section whose strategy computes log-probs, or precompute_reference: true, with {loss}"
        involved = ("preference_loss", "precompute_reference", *lora)
        yield ConfigProblem("reference", NOTHING, expected, involves=involved)
    if config.reference_dir is not None and not config.precompute_reference:
        expected = "null, or precompute_reference: true, which writes it"
        yield ConfigProblem("reference_dir", config.reference_dir, expected, involves=("precompute_reference",))


def check_columns(config: DPOConfig) -> Iterator[ConfigProblem]:
    """No column is named that the loss does not read, and a pair is of two."""
    columns, loss = config.preferences, config.preference_loss
    for key in columns.without(PREFERENCE_LOSSES[loss].columns):
        yield config.problem(f"preferences.{key}", f"nothing: {loss} does not read it", "preference_loss")
    if config.in_pairs and columns.chosen == columns.rejected:
        expected = "a column other than preferences.chosen"
        yield ConfigProblem("preferences.rejected", columns.rejected, expected, involves=("preferences.chosen",))


DPO_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_reference, check_columns)


RewardLoss: TypeAlias = Literal["bradley_terry", "regression", "process"]


class ScoreColumn(Config):
    """The column of an answer's score."""

    score: str = Field(
        default="score",
        min_length=1,
        description="Column of the score of the response in data_args.response, or at the end of messages "
        "(regression).",
    )


class StepColumns(Config):
    """The columns of an answer in steps."""

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


class RewardColumns(MarginColumns, ScoreColumn, StepColumns):
    """Columns of the dataset with a row's responses and their labels; dotted paths are allowed."""


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
        description="bradley_terry (pairs), regression (responses with scores) or process (responses in steps, each "
        "right or wrong).",
    )


class RewardTrainingConfig(RewardLossConfig, OfflineConfig):
    """All keys of a reward model run (``examples/start_rm_pipeline.py``)."""

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


def check_roles(config: RewardTrainingConfig) -> Iterator[ConfigProblem]:
    """Nothing is generated by a reward model, and its score stands where nothing is cut off."""
    if config.actor_infer is not None:
        yield ConfigProblem("actor_infer", "a section", "no section: a reward model generates nothing")
    if config.sample_overflow == "truncate":
        expected = "error or drop: the score is read at the end of the conversation"
        yield ConfigProblem("sample_overflow", "truncate", expected)


def check_score_columns(config: RewardTrainingConfig) -> Iterator[ConfigProblem]:
    """No column is named that the loss does not read; the answer's own is known where there is one."""
    loss = config.reward_loss
    for key in config.answers.without(REWARD_LOSSES[loss].columns):
        yield config.problem(f"answers.{key}", f"nothing: {loss} does not read it", "reward_loss")
    if loss == "regression":
        yield from [
            ConfigProblem(f"{path}.response", None, "the column of the answer", involves=("reward_loss",))
            for path, data in datasets(config)
            if data.has_dataset and data.prompt is not None and data.response is None
        ]


REWARD_TRAINING_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_roles, check_score_columns)
