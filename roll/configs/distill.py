"""A distillation run: a fixed dataset, and a teacher's distribution at each token. Its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.offline import OFFLINE_RULES, OfflineConfig, check_responses
from roll.configs.pipeline import PromptWarmStartConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import check_tiny_teacher
from roll.configs.rules import Rule
from roll.configs.teacher import DivergenceConfig, TinyTeacherConfig
from roll.configs.worker import WorkerConfig


class DistillLossConfig(Config):
    """The loss of a distillation, apart from the divergence."""

    distill_loss_weight: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Weight of the divergence; the rest up to 1 weights the negative log-likelihood of the responses.",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="token-mean",
        description="The loss of an optimizer step: the mean over all trained tokens, or the mean over conversations "
        "of their means.",
    )


class DistillConfig(DistillLossConfig, DivergenceConfig, TinyTeacherConfig, OfflineConfig):
    """All keys of a distillation (``examples/start_distill_pipeline.py``)."""

    train_on: Literal["all", "last"] = Field(
        default="all",
        description="Which responses of a conversation are trained on: all of the assistant's, or its last.",
    )
    distill_on_prompt: bool = Field(
        default=False,
        description="Train on every token of a conversation but its first, not only on responses: divergence and "
        "likelihood then include questions, system messages and the template's own tokens.",
    )
    kd_temperature: float = Field(
        default=1.0, gt=0, description="Divides the logits of teacher and student before they are compared."
    )
    teacher_logprobs: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of the teacher's top log-probs (logits_topk). With a section teacher, all samples are "
        "scored before the first step and stored there; without one they are read from there.",
    )
    precompute_only: bool = Field(
        default=False, description="Stop when the teacher's log-probs are on disk; nothing is trained."
    )
    warm_start: PromptWarmStartConfig = Field(
        default_factory=PromptWarmStartConfig,
        description="Supervised start of the tiny model; read when pretrain is tiny and file_name is set.",
    )

    @property
    def divergence(self) -> DivergenceConfig:
        return self.part(DivergenceConfig)

    @property
    def teacher_temperature(self) -> float:
        return self.kd_temperature

    @property
    def models(self) -> dict[str, str]:
        return {**super().models, **self.teacher_models}

    def model_of(self, role: str) -> str:
        return self.teacher_pretrain if role == "teacher" and self.teacher_pretrain else self.pretrain

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The model roles that this run starts, by name."""
        return {**super().roles, **self.teacher_roles}

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.distill_on_prompt and self.train_on != "all":
            yield self.problem("train_on", "all with distill_on_prompt: every token is trained on", "distill_on_prompt")
        if self.teacher_logprobs is None and self.precompute_only:
            expected = "a folder, which precompute_only fills"
            yield self.problem("teacher_logprobs", expected, "precompute_only")
        if self.teacher_logprobs is not None and self.logits_topk is None:
            expected = "a number with teacher_logprobs: whole distributions are not stored on disk"
            yield self.problem("logits_topk", expected, "teacher_logprobs")
        if self.precompute_only and self.teacher is None:
            yield self.problem("precompute_only", "false without a section teacher", "teacher")


def check_teacher(config: DistillConfig) -> list[ConfigProblem]:
    """There is something to learn from."""
    if config.teacher is None and config.teacher_logprobs is None:
        expected = "a section whose strategy computes log-probs, or teacher_logprobs"
        hint = "a configuration of SFT is run by examples/start_sft_pipeline.py, or by `roll train`"
        return [ConfigProblem("teacher", NOTHING, expected, hint, involves=("teacher_pretrain", "teacher_logprobs"))]
    return []


DISTILL_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_responses, check_teacher, check_tiny_teacher)
