"""Rules between the sections of an SFT configuration (see ``roll.configs.rules``)."""

from __future__ import annotations

from roll.configs.data import DataArguments
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompt_rules import TRAIN_DATA, VAL_DATA, check_datasets, check_templates
from roll.configs.rules import Rule, too_many_tokens
from roll.configs.sft import SFTConfig


def check_data_keys(config: SFTConfig) -> list[ConfigProblem]:
    """The answer's column is known, and no key is set that only prompts have."""
    problems = []
    datasets = {TRAIN_DATA: config.actor_train.data_args}
    if config.validation is not None:
        datasets[VAL_DATA] = config.validation.data_args
    expected = "no such key in the SFT pipeline"
    unread = {
        "prompt_overflow": f"{expected}: sample_overflow is about the whole conversation",
        "domain_interleave_probs": f"{expected}: each conversation comes once per epoch",
        "preprocessing_num_workers": expected,
    }
    default = DataArguments()
    for path, data in datasets.items():
        if data.has_dataset and data.prompt is not None and data.response is None:
            problems.append(ConfigProblem(f"{path}.response", None, "the column of the answer to imitate"))
        for key, words in unread.items():
            if getattr(data, key) != getattr(default, key):
                problems.append(ConfigProblem(f"{path}.{key}", getattr(data, key), words))
    return problems


def check_answers(config: SFTConfig) -> list[ConfigProblem]:
    """Answers are scored and sampled only where something generates."""
    if config.actor_infer is None:
        expected = "no section without actor_infer: nothing is answered that could be scored"
        given = {f"rewards.{name}" for name in config.rewards}
        return [ConfigProblem(key, "a section", expected, involves=("actor_infer",)) for key in sorted(given)]
    if config.validation is None:
        expected = "a section with held-out conversations, whose questions actor_infer answers; or no actor_infer"
        return [ConfigProblem("validation", NOTHING, expected, involves=("actor_infer",))]
    own = config.validation.generating_args
    limit = {"validation.generating_args.max_new_tokens": own.max_new_tokens if own else None}
    return too_many_tokens(config, limit)


SFT_RULES: tuple[Rule, ...] = (check_datasets, check_templates, check_data_keys, check_answers)
