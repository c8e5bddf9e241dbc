"""Rules between the sections of a configuration that distils (see ``roll.configs.rules``)."""

from __future__ import annotations

from roll.configs.distill import DistillConfig
from roll.configs.offline_rules import OFFLINE_RULES
from roll.configs.pipeline import TINY
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rules import Rule
from roll.configs.sft_rules import check_responses


def check_teacher(config: DistillConfig) -> list[ConfigProblem]:
    """There is something to learn from."""
    if config.teacher is None and config.teacher_logprobs is None:
        expected = "a section with a scoring strategy, or teacher_logprobs"
        return [ConfigProblem("teacher", NOTHING, expected, involves=("teacher_pretrain", "teacher_logprobs"))]
    return []


def check_starts(config: DistillConfig) -> list[ConfigProblem]:
    """What is taught on the spot is tiny, and is measured by its answers."""
    problems = []
    starts = {
        "warm_start": ("pretrain", config.pretrain, config.warm_start),
        "teacher_warm_start": ("teacher_pretrain", config.teacher_pretrain, config.teacher_warm_start),
    }
    for section, (key, model, start) in starts.items():
        path, needed = f"{section}.file_name", section == "teacher_warm_start" and model == TINY
        if needed and not start.file_name:
            expected = "demonstrations to teach a tiny teacher with"
            problems.append(ConfigProblem(path, NOTHING, expected, involves=(key,)))
        if start.file_name and model != TINY:
            problems.append(
                ConfigProblem(path, start.file_name, "nothing: only a tiny model is taught", involves=(key,))
            )
        if start.file_name and (config.actor_infer is None or not config.rewards):
            expected = "nothing without actor_infer and rewards: answers tell how far the start has come"
            problems.append(ConfigProblem(path, start.file_name, expected, involves=("actor_infer", "rewards")))
    return problems


DISTILL_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_responses, check_teacher, check_starts)
