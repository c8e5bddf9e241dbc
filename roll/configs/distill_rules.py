"""Rules between the sections of a configuration that distils (see ``roll.configs.rules``)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.distill import DistillConfig
from roll.configs.offline_rules import OFFLINE_RULES, check_responses, start_problems
from roll.configs.pipeline import TINY
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rules import Rule


def check_teacher(config: DistillConfig) -> list[ConfigProblem]:
    """There is something to learn from."""
    if config.teacher is None and config.teacher_logprobs is None:
        expected = "a section with a scoring strategy, or teacher_logprobs"
        hint = "a configuration of SFT is run by examples/start_sft_pipeline.py, or by `roll train`"
        return [ConfigProblem("teacher", NOTHING, expected, hint, involves=("teacher_pretrain", "teacher_logprobs"))]
    return []


def check_starts(config: DistillConfig) -> Iterator[ConfigProblem]:
    """Checks that what is taught on the spot is tiny, and is measured by its answers."""
    if config.teacher_pretrain == TINY and not config.teacher_warm_start.file_name:
        expected = "demonstrations to teach a tiny teacher with"
        yield ConfigProblem("teacher_warm_start.file_name", NOTHING, expected, involves=("teacher_pretrain",))
    yield from start_problems(config, "warm_start", config.warm_start, "pretrain")
    yield from start_problems(config, "teacher_warm_start", config.teacher_warm_start, "teacher_pretrain")


DISTILL_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_responses, check_teacher, check_starts)
