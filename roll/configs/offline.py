"""Training on a fixed dataset (SFT, preferences, reward models): shared keys and rules, and those of SFT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll.configs.data import DataArguments
from roll.configs.pipeline import TINIES, PromptWarmStartConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import TRAIN_DATA, VAL_DATA, PromptsConfig, ValidationConfig, check_datasets, check_templates
from roll.configs.rules import Rule, sections, too_many_tokens


class HeldOutConfig(ValidationConfig):
    """The held-out samples; with ``actor_infer``, their last questions are also answered."""

    num_answers: int = Field(default=64, ge=1, description="Most held-out questions answered in an evaluation.")
    solution: str = Field(
        default="solution", min_length=1, description="Column with the reference answer that rewards compare with."
    )


class OfflineConfig(PromptsConfig):
    """A fixed dataset, the number of passes over it, and how the result is evaluated."""

    num_train_epochs: int | None = Field(
        default=None, ge=1, description="Passes over the training data; replaces max_steps."
    )
    sample_overflow: Literal["error", "truncate", "drop"] = Field(
        default="error",
        description="A conversation of more than sequence_length tokens stops the run (error), loses its end "
        "(truncate) or is dropped (with the other side of its pair, if it has one).",
    )
    validation: HeldOutConfig | None = Field(default=None, description="Held-out samples; null: no evaluation.")

    @property
    def sample(self) -> str:
        """Noun for a sample."""
        return "conversation"

    @property
    def sequences_per_sample(self) -> int:
        return 1


def datasets(config: OfflineConfig) -> Iterator[tuple[str, DataArguments]]:
    """The datasets that the configuration speaks of, by key."""
    yield TRAIN_DATA, config.actor_train.data_args
    if config.validation is not None:
        yield VAL_DATA, config.validation.data_args


def check_data_keys(config: OfflineConfig) -> Iterator[ConfigProblem]:
    """No key is set that only prompts have."""
    expected = "no such key in this pipeline"
    unread = {
        "prompt_overflow": f"{expected}: sample_overflow is about the whole conversation",
        "domain_interleave_probs": f"{expected}: each {config.sample} comes once per epoch",
        "preprocessing_num_workers": expected,
        "tag_templates": f"{expected}: all samples have one template",
    }
    default = DataArguments()
    for path, data in datasets(config):
        for key, words in unread.items():
            if (got := getattr(data, key)) != getattr(default, key):
                yield ConfigProblem(f"{path}.{key}", got, words)


def check_answers(config: OfflineConfig) -> Iterator[ConfigProblem]:
    """Answers are scored and sampled only where something generates."""
    if config.actor_infer is None:
        expected = "no section without actor_infer: no responses are generated to score"
        for name in sorted(config.rewards):
            yield ConfigProblem(f"rewards.{name}", "a section", expected, involves=("actor_infer",))
    elif config.validation is None:
        expected = "a section with held-out questions, which actor_infer answers; or no actor_infer"
        yield ConfigProblem("validation", NOTHING, expected, involves=("actor_infer",))
    elif own := config.validation.generating_args:
        yield from too_many_tokens(config, {"validation.generating_args.max_new_tokens": own.max_new_tokens})


def check_budgets(config: OfflineConfig) -> Iterator[ConfigProblem]:
    """A token budget holds all sequences of the longest sample, which are never cut apart."""
    count = config.sequences_per_sample
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            budget = getattr(worker, key := f"max_tokens_per_microbatch_in_{phase}")
            if config.sequence_length <= budget < count * config.sequence_length:
                least = f"{count} × sequence_length = {count * config.sequence_length}"
                expected = f"at least {least}, so that one {config.sample} fits"
                yield ConfigProblem(f"{role}.{key}", budget, expected, involves=("sequence_length",))


def check_responses(config: OfflineConfig) -> Iterator[ConfigProblem]:
    """The column of the answer to imitate is known."""
    for path, data in datasets(config):
        if data.has_dataset and data.prompt is not None and data.response is None:
            yield ConfigProblem(f"{path}.response", None, "the column of the answer to imitate")


def check_starts(config: OfflineConfig) -> Iterator[ConfigProblem]:
    """A warm start teaches a tiny model, and measures what it has learnt by its answers."""
    for section, key in (("warm_start", "pretrain"), ("teacher_warm_start", "teacher_pretrain")):
        start: PromptWarmStartConfig | None = getattr(config, section, None)
        if start is None or not start.file_name:
            continue
        path = f"{section}.file_name"
        if getattr(config, key) not in TINIES:
            yield ConfigProblem(path, start.file_name, "nothing: only a tiny model is warm-started", involves=(key,))
        if config.actor_infer is None or not config.rewards:
            expected = "nothing without actor_infer and rewards, which measure the warm start"
            yield ConfigProblem(path, start.file_name, expected, involves=("actor_infer", "rewards"))


OFFLINE_RULES: tuple[Rule, ...] = (
    check_datasets,
    check_templates,
    check_data_keys,
    check_answers,
    check_budgets,
    check_starts,
)
SFT_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_responses)


class SFTConfig(OfflineConfig):
    """All keys of an SFT run (``examples/start_sft_pipeline.py``)."""

    train_on: Literal["all", "last"] = Field(
        default="all",
        description="Which responses of a conversation are trained on: all of the assistant's, or its last.",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="token-mean",
        description="The loss of an optimizer step: the mean over all trained tokens, or the mean over conversations "
        "of their means.",
    )
