"""The whole configuration of a run on preferences (DPO and its relatives)."""

from __future__ import annotations

from pydantic import Field

from roll.configs.offline import OfflineConfig
from roll.configs.preference import AnswerColumns, PreferenceConfig
from roll.configs.warm_start import PromptWarmStartConfig
from roll.configs.worker import WorkerConfig


class DPOConfig(PreferenceConfig, OfflineConfig):
    """Everything that ``examples/start_dpo_pipeline.py`` reads."""

    preferences: AnswerColumns = Field(default_factory=AnswerColumns, description="Columns of the compared responses.")
    reference: WorkerConfig | None = Field(
        default=None,
        description="The initial policy, in a role that scores each step's pairs. null: with lora_target the policy "
        "without its adapter; else see precompute_reference.",
    )
    precompute_reference: bool = Field(
        default=False,
        description="The reference scores all pairs once, before the first step, and the results are stored on disk. "
        "Without a section reference the untrained policy does it: no further copy of the model is needed.",
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
