"""Tells whose configuration a file is, by its sections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from roll.configs.importers import SYSTEMS
from roll.configs.importers.shell import ENTRIES

_SECTIONS = {
    "actor_rollout_ref": "verl",
    "optim": "verl_sft",
    "runtime_args": "chatlearn",
    "megatron_training": "mindspeed",
    "rl_config": "mindspeed",
    "generate_config": "mindspeed",
}
_ROLL = ("roll.pipeline.", "roll.distributed.", "/config/deepspeed_zero", "/config/traj_envs", "/config/envs")
"""Parts of values that only ROLL's own files have."""


def system_of(file: Path) -> str | None:
    """A key of ``SYSTEMS``; ``None`` for a file of ours, or one that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".sh":
            words = [word.strip("\"'{}()") for word in text.replace("=", " ").split()]
            return next((name for name in SYSTEMS if any(ENTRIES[name][0].search(word) for word in words)), None)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    found = next((system for key, system in _SECTIONS.items() if key in content), None)
    return found or ("roll" if any(sign in text for sign in _ROLL) else None)


def variant_of(system: str, files: Sequence[Path]) -> str:
    """The table that files of a system are read by: verl's supervised training has one of its own."""
    supervised = system == "verl" and any(system_of(file) == "verl_sft" for file in files)
    return "verl_sft" if supervised else system


def command_for(file: Path) -> str | None:
    """Hint for a user of another system's file; ``None`` for a file of ours."""
    system = system_of(file)
    if system is None:
        return None
    return f"it is a configuration of {SYSTEMS[system]}: roll import {system} {file} -o mine.yaml"
