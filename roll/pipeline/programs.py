"""The pipelines: one table, read by the start scripts and by ``roll``. Imports nothing heavy."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from roll.utils.registry import import_path

if TYPE_CHECKING:
    from roll.configs.base import Config


class Program(NamedTuple):
    """One pipeline. Classes and functions by path, so that none is imported too early."""

    schema: str
    """``module:class`` of its configuration."""
    run: str
    """``module:function`` that runs a checked configuration and returns the exit code."""
    description: str
    default: str
    """Name of the configuration that its examples show."""
    script: str
    """Its start script in ``examples/``."""
    tiny: str
    """``module:class`` of its start with ``pretrain: tiny``, see ``roll.pipeline.start``."""
    sections: tuple[str, ...]
    """Top-level keys that no pipeline behind it in ``PROGRAMS`` reads: a configuration with one of them is its own."""


AGENTIC = Program(
    "roll.configs.agentic:AgenticConfig",
    "roll.pipeline.agentic:run_agentic",
    "Trains a language model in text environments.",
    "agentic_sokoban",
    "start_agentic_pipeline.py",
    "roll.demo.warm_start:PlayStart",
    ("custom_envs", "train_env_manager", "val_env_manager"),
)
RLVR = Program(
    "roll.configs.rlvr:RLVRConfig",
    "roll.pipeline.rlvr:run_rlvr",
    "Trains a language model on prompts whose answers can be verified.",
    "rlvr_math",
    "start_rlvr_pipeline.py",
    "roll.demo.warm_start:AnswersStart",
    ("rewards",),
)
SFT = Program(
    "roll.configs.offline:SFTConfig",
    "roll.pipeline.offline.sft:run_sft",
    "Trains a language model to imitate conversations.",
    "sft_math",
    "start_sft_pipeline.py",
    "roll.demo.warm_start:Untaught",
    ("train_on", "sample_overflow", "num_train_epochs"),
)
DPO = Program(
    "roll.configs.preference:DPOConfig",
    "roll.pipeline.offline.dpo:run_dpo",
    "Trains a language model on preferences: answers that are better or worse.",
    "dpo_math",
    "start_dpo_pipeline.py",
    "roll.demo.warm_start:TaughtStart",
    ("preference_loss", "preferences", "precompute_reference", "reference_dir"),
)
DISTILL = Program(
    "roll.configs.distill:DistillConfig",
    "roll.pipeline.offline.distill:run_distill",
    "Trains a language model to give the probabilities that a teacher gives.",
    "distill_math",
    "start_distill_pipeline.py",
    "roll.demo.warm_start:TaughtStart",
    ("distill_loss_weight", "distill_on_prompt", "teacher_logprobs", "precompute_only"),
)
REWARD_MODEL = Program(
    "roll.configs.preference:RewardTrainingConfig",
    "roll.pipeline.offline.reward_model:run_reward_model",
    "Trains a reward model on answers that were compared or scored.",
    "rm_math",
    "start_rm_pipeline.py",
    "roll.demo.warm_start:Untaught",
    ("reward_loss", "answers", "center_coef"),
)
PROGRAMS = {"agentic": AGENTIC, "distill": DISTILL, "dpo": DPO, "reward_model": REWARD_MODEL, "sft": SFT, "rlvr": RLVR}
"""By name. The first whose ``sections`` a configuration has runs it."""


def program_of(keys: Iterable[str]) -> str | None:
    """Name of the pipeline that a configuration with these top-level keys is meant for."""
    given = set(keys)
    return next((name for name, program in PROGRAMS.items() if not given.isdisjoint(program.sections)), None)


def configurations(folder: Path) -> dict[str, tuple[str, str]]:
    """Pipeline and first comment of every configuration in a folder, by name.

    Files that are only included by others, because no pipeline's section is in them or in what they include, are left
    out. The files are not parsed, so that ``--help`` is quick.
    """
    texts = {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.yaml"))}
    found = {}
    for stem, text in texts.items():
        if name := program_of(_keys_of(stem, texts, set())):
            comment = re.match(r"#\s*(.*)", text)
            found[stem] = (name, comment[1] if comment else "")
    return found


def _keys_of(stem: str, texts: Mapping[str, str], seen: set[str]) -> set[str]:
    """Top-level keys of a file and of those in its defaults list that stand beside it."""
    seen.add(stem)
    keys = set(re.findall(r"^(\w+):", texts[stem], re.MULTILINE))
    included = re.search(r"^defaults:((?:\s*\[.*|\s*#.*|\n\s*-.*)*)", texts[stem], re.MULTILINE)
    for name in re.findall(r"[\w.-]+(?=\s*[,\]\n#]|$)", included[1]) if included else ():
        if name in texts and name not in seen:
            keys |= _keys_of(name, texts, seen)
    return keys


@functools.cache
def schemas() -> dict[str, type[Config]]:
    """The configurations of all pipelines."""
    return {name: cast("type[Config]", import_path(program.schema)) for name, program in PROGRAMS.items()}


def key_names() -> list[str]:
    """Every key of pipelines and engines."""
    from roll.configs.explain import all_keys, engine_options

    return [place for key in all_keys(schemas(), engine_options()) for place in key.places]
