"""A teacher's tokenizer beside the policy's, where both are on this machine."""

from __future__ import annotations

from pathlib import Path

from roll.configs.engines.card import kind_of
from roll.configs.pipeline import TINY, PipelineConfig
from roll.configs.problems import ConfigProblem
from roll.models.tokenizer import check_same_ids


def check_teacher(config: PipelineConfig) -> list[ConfigProblem]:
    """An id that both models have stands for the same token."""
    own = config.tokenizer_path
    here = _is_here(config.pretrain) if own is None else Path(own).expanduser().is_dir()
    if config.aligns_teacher or not here:
        return []
    problems = []
    for key, teacher in config.models.items():
        role = "teacher" if key == "teacher_pretrain" else key.removesuffix(".pretrain")
        if kind_of(role) != "teacher" or not _is_here(teacher):
            continue
        try:
            trust = {"trust_policy": config.trusts("actor_train"), "trust_teacher": config.trusts(role)}
            check_same_ids(config.pretrain, teacher, config.tokenizer_path, **trust)
        except ValueError as error:
            expected = "a model with the policy's vocabulary, or in an RL run align_tokenizers: text"
            problems.append(ConfigProblem(key, teacher, expected, str(error), involves=("pretrain",)))
    return problems


def _is_here(model: str) -> bool:
    return model == TINY or (Path(model).expanduser() / "config.json").is_file()
