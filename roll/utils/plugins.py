"""A user's own packages, imported in every process of a run so that what they register is known there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from roll.utils.registry import import_module

PLUGINS = "ROLL_PLUGINS"
"""Environment variable with the modules that a process of a run, and those that it starts, import first."""


def plugin_variables(names: Sequence[str]) -> dict[str, str]:
    """Environment variables of processes that import these plug-ins."""
    places = [str(Path(name).expanduser().resolve()) if name.endswith(".py") else name for name in names]
    return {PLUGINS: os.pathsep.join(places)} if places else {}


def load_inherited_plugins() -> None:
    """Imports what the process that started this one has asked for; raises what their code raises."""
    for name in os.environ.get(PLUGINS, "").split(os.pathsep):
        if name:
            import_module(name)
