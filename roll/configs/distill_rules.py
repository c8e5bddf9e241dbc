"""Rules between the sections of a configuration that distils (see ``roll.configs.rules``)."""

from __future__ import annotations

from roll.configs.distill import DistillConfig
from roll.configs.offline_rules import OFFLINE_RULES, check_responses
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompt_rules import check_tiny_teacher
from roll.configs.rules import Rule


def check_teacher(config: DistillConfig) -> list[ConfigProblem]:
    """There is something to learn from."""
    if config.teacher is None and config.teacher_logprobs is None:
        expected = "a section with a scoring strategy, or teacher_logprobs"
        hint = "a configuration of SFT is run by examples/start_sft_pipeline.py, or by `roll train`"
        return [ConfigProblem("teacher", NOTHING, expected, hint, involves=("teacher_pretrain", "teacher_logprobs"))]
    return []


DISTILL_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_responses, check_teacher, check_tiny_teacher)
