"""The teacher of a distillation: its model, its role, how distributions are compared, and its term in RL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field

from roll.configs.base import Config
from roll.configs.pipeline import TINY, PromptWarmStartConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.worker import WorkerConfig

KdObjective: TypeAlias = Literal["forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl"]
OpdForm: TypeAlias = Literal["advantage", "reward", "loss"]


class JsDivergence(Config):
    """The generalised Jensen–Shannon divergence."""

    jsd_beta: float = Field(
        default=0.5, gt=0, lt=1, description="Weight of the teacher in the mixture and in the sum of js_divergence."
    )


class SkewedKl(Config):
    """A KL to a mixture."""

    skew_lambda: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share that the first distribution of a skewed KL has in the mixture; 0 is the plain KL.",
    )


KD_OBJECTIVES: dict[str, type[Config]] = {
    "forward_kl": Config,
    "reverse_kl": Config,
    "js_divergence": JsDivergence,
    "skewed_forward_kl": SkewedKl,
    "skewed_reverse_kl": SkewedKl,
}
"""By ``kd_objective``: the keys that it reads."""


class DivergenceConfig(SkewedKl, JsDivergence):
    """The divergence between the teacher's next-token distribution and the policy's."""

    choices: ClassVar = {"kd_objective": KD_OBJECTIVES}

    kd_objective: KdObjective = Field(
        default="forward_kl",
        description="forward_kl (teacher to policy), reverse_kl (policy to teacher), js_divergence (generalised "
        "Jensen–Shannon), or one of the KLs to a mixture of both (skewed_forward_kl, skewed_reverse_kl).",
    )
    logits_topk: int | None = Field(
        default=None,
        ge=1,
        description="Compare this many of the teacher's most likely tokens, and the mass of all others as one. null: "
        "the whole vocabulary, for which the teacher returns its final hidden states.",
    )


@dataclass(frozen=True)
class TeacherTerm:
    """The teacher's term of a sampled token: its log-prob minus the policy's."""

    form: OpdForm
    coefficient: float
    by_tag: tuple[float, ...]
    """Of several teachers the sum of the coefficients, by tag as a batch's ``tag_B`` counts them."""
    clip: float | None
    """Bound of a token's term."""
    least: float | None
    """Bound of the log-probabilities, from below."""
    alone: bool
    """Whether rewards count for nothing."""
    comparable: bool
    """Whether the teacher's log-probabilities are of the temperature of the policy's."""

    @property
    def replaces_advantages(self) -> bool:
        """Tells whether rewards do not become advantages."""
        return self.alone and self.form != "reward"


_COMPARES = {key: field.default for key, field in DivergenceConfig.model_fields.items()} | {"kd_temperature": None}
"""Defaults of the keys that say how distributions are compared."""


class TeacherConfig(Config):
    """A frozen model that the policy learns from."""

    teacher: WorkerConfig | None = Field(
        default=None,
        description="The role of the teacher, with any strategy that computes log-probs. It has the policy's "
        "vocabulary, or in an RL run another one (align_tokenizers); its size and architecture are free.",
    )
    teacher_pretrain: str | None = Field(
        default=None,
        min_length=1,
        description="The teacher: a folder in Hugging Face format (also an earlier checkpoint's actor_train), an "
        "org/name on the hub, or tiny, which is trained by teacher_warm_start.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.teacher is not None and self.teacher_pretrain is None:
            yield self.problem("teacher_pretrain", "a model, with a section teacher", "teacher", got=NOTHING)
        if self.teacher is None and self.teacher_pretrain is not None:
            yield self.problem(
                "teacher", "a section whose strategy computes log-probs", "teacher_pretrain", got=NOTHING
            )

    @property
    def teacher_roles(self) -> Mapping[str, WorkerConfig]:
        """The teacher's role, if there is one."""
        return {} if self.teacher is None else {"teacher": self.teacher}

    @property
    def teacher_models(self) -> Mapping[str, str]:
        """The teacher's model, by the key that names it."""
        return {} if self.teacher_pretrain is None else {"teacher_pretrain": self.teacher_pretrain}


class TinyTeacherConfig(TeacherConfig):
    """A teacher that can be created and trained by the run."""

    teacher_warm_start: PromptWarmStartConfig = Field(
        default_factory=PromptWarmStartConfig,
        description="Training of a tiny teacher; read when teacher_pretrain is tiny.",
    )

    def of_teacher(self) -> Self:
        """The configuration of its start, as that of a policy."""
        return self.model_copy(update={"pretrain": TINY, "warm_start": self.teacher_warm_start})


class TaggedTeacherConfig(WorkerConfig):
    """One of several teachers: a role like ``teacher``, its model, and the samples that it scores."""

    pretrain: str = Field(
        min_length=1, description="The teacher: a folder in Hugging Face format, or an org/name on the hub."
    )
    tag_included: list[str] = Field(default_factory=list, description="Tags of its samples. Empty: all tags.")
    opd_kl_coef: float | None = Field(
        default=None, gt=0, description="Coefficient of its term. null: the top-level one."
    )

    def judges(self, tag: str) -> bool:
        """Tells whether samples of a tag are its own."""
        return not self.tag_included or tag in self.tag_included


class OnPolicyDistillationConfig(DivergenceConfig, TeacherConfig):
    """Use of a teacher's log-probs on the policy's own samples."""

    teachers: dict[str, TaggedTeacherConfig] = Field(
        default_factory=dict,
        description="Instead of teacher: several, by name, each for the samples of its own tags. Every tag of the "
        "training samples needs a teacher; the terms of several add up.",
    )
    is_pure_opd: bool = Field(
        default=False,
        description="The policy learns only from the teacher: rewards are logged, but not used.",
    )
    opd_kl_coef: float = Field(
        default=1.0,
        gt=0,
        description="Coefficient of the teacher's term: its log-prob minus the policy's at each sampled token, or the "
        "divergence.",
    )
    opd_token_kld_clip: float | None = Field(
        default=None,
        gt=0,
        description="Limit of the absolute value of a token's term, with its coefficient, so that a few tokens with "
        "strong disagreement do not outweigh all others. null: no limit.",
    )
    opd_logprob_min: float | None = Field(
        default=None,
        lt=0,
        description="Log-probs of teacher and policy below this count as this in the term. null: no limit.",
    )
    opd_form: OpdForm = Field(
        default="advantage",
        description="Where the term is added: `advantage` to each token's advantage, so that it affects only that "
        "token; `reward` to each token's reward, and adv_estimator propagates it to earlier tokens; `loss` adds "
        "the divergence (kd_objective) at each sampled token to the policy's loss.",
    )

    kd_temperature: float | None = Field(
        default=None,
        gt=0,
        description="With opd_form: loss, divides the logits of teacher and policy before they are compared; the "
        "divergence is not multiplied by its square. null: the sampling temperature.",
    )
    align_tokenizers: Literal["text"] | None = Field(
        default=None,
        description="`text`: a teacher with another tokenizer reads the same text in its own tokens, and its term "
        "applies to chunks, the shortest spans that begin and end in both (`opd_form` advantage or reward). null: "
        "the teacher has the policy's tokens.",
    )

    @property
    def teacher_roles(self) -> Mapping[str, WorkerConfig]:
        """The teachers' roles, by the keys of their sections."""
        return {**super().teacher_roles, **{f"teachers.{name}": each for name, each in self.teachers.items()}}

    @property
    def teacher_models(self) -> Mapping[str, str]:
        """The teachers' models, by the keys that name them."""
        several = {f"teachers.{name}.pretrain": each.pretrain for name, each in self.teachers.items()}
        return {**super().teacher_models, **several}

    def teacher_coefficient(self, name: str) -> float:
        """That of one of several teachers."""
        own = self.teachers[name].opd_kl_coef
        return self.opd_kl_coef if own is None else own

    @property
    def aligns_teacher(self) -> bool:
        return bool(self.teacher_roles) and self.align_tokenizers is not None

    @property
    def estimates_advantages(self) -> bool:
        """Tells whether rewards become advantages: not where the teacher's opinion is the whole of them."""
        return not self.is_pure_opd or self.opd_form == "reward"

    @property
    def divergence(self) -> DivergenceConfig | None:
        """Divergence of the policy from the teacher over the vocabulary; ``None``: compared only at sampled tokens."""
        if self.teacher is None or self.opd_form != "loss":
            return None
        return self.part(DivergenceConfig)

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.opd_form != "loss":
            expected = "no such key without opd_form: loss, which compares distributions"
            yield from [
                self.problem(key, expected, "opd_form")
                for key, default in _COMPARES.items()
                if getattr(self, key) != default
            ]
        if self.teacher_roles:
            if self.align_tokenizers is not None and self.opd_form == "loss":
                expected = "null with opd_form: loss, which compares distributions over one vocabulary"
                yield self.problem("align_tokenizers", expected, "opd_form")
            bounds = [key for key in ("opd_token_kld_clip", "opd_logprob_min") if getattr(self, key) is not None]
            if self.opd_form == "loss":
                expected = "null with opd_form: loss, which is a divergence over the vocabulary"
                yield from [self.problem(key, expected, "opd_form") for key in bounds]
            return
        keys = ("is_pure_opd", "opd_kl_coef", "opd_token_kld_clip", "opd_logprob_min", "opd_form", "align_tokenizers")
        yield from [
            self.problem(key, "no such key without a section teacher", "teacher", "teachers")
            for key in keys
            if getattr(self, key) != OnPolicyDistillationConfig.model_fields[key].default
        ]
