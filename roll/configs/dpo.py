"""A run on preferences (DPO and its relatives): its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from roll.configs.offline import OFFLINE_RULES, OfflineConfig
from roll.configs.pipeline import PromptWarmStartConfig
from roll.configs.preference import PREFERENCE_LOSSES, AnswerColumns, PreferenceConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rules import Rule
from roll.configs.worker import WorkerConfig


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
