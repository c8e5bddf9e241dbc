"""Rules of the pipelines that read datasets (see ``roll.configs.rules``)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.pipeline import TINY
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import PromptsConfig
from roll.configs.teacher import TinyTeacherConfig

TRAIN_DATA, VAL_DATA = "actor_train.data_args", "validation.data_args"


def check_datasets(config: PromptsConfig) -> Iterator[ConfigProblem]:
    """There is something to train on and to evaluate on."""
    datasets = {} if config.eval_only else {TRAIN_DATA: config.actor_train.data_args}
    if config.validation is not None:
        datasets[VAL_DATA] = config.validation.data_args
    for path, data in datasets.items():
        if not data.has_dataset and data.file_name is None:
            yield ConfigProblem(f"{path}.file_name", NOTHING, "a file, several, a glob, or dataset_cls")


def check_templates(config: PromptsConfig) -> Iterator[ConfigProblem]:
    """Held-out data is rendered like that of training."""
    if config.validation is None:
        return
    for key, unset in (("template", "native"), ("chat_template_kwargs", {}), ("tag_templates", {})):
        trained = getattr(config.actor_train.data_args, key)
        if (held_out := getattr(config.validation.data_args, key)) not in (unset, trained):
            expected = f"the same as {TRAIN_DATA}.{key} = {trained}, or nothing"
            yield ConfigProblem(f"{VAL_DATA}.{key}", held_out, expected, involves=(f"{TRAIN_DATA}.{key}",))


def check_tiny_teacher(config: TinyTeacherConfig) -> Iterator[ConfigProblem]:
    """A teacher that is made on the spot has something to imitate."""
    if config.teacher_pretrain == TINY and not config.teacher_warm_start.file_name:
        expected = "demonstrations to teach a tiny teacher with"
        yield ConfigProblem("teacher_warm_start.file_name", NOTHING, expected, involves=("teacher_pretrain",))
