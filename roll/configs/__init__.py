"""Typed, strict configuration, and where the shipped ones are.

Imports nothing of roll but itself, and neither torch nor Ray; here nothing heavy at all: ``roll --help`` lists them.
"""

from __future__ import annotations

from pathlib import Path

SHIPPED = (Path(__file__).parents[1] / "examples" / "config").resolve()
"""Folder of the shipped ones: ``examples/config`` of a checkout, package data where the package is installed."""


def config_names(folder: Path) -> list[str]:
    """The configurations in a folder, without their suffix."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def config_groups(folder: Path) -> dict[str, list[str]]:
    """Groups of files to choose from, ``train`` and ``infer`` for instance, each with the names of its choices.

    A group is a folder of YAML files; those in ``folder`` come on top of the shipped ones.
    """
    groups: dict[str, set[str]] = {}
    for file in (*SHIPPED.glob("*/*.yaml"), *folder.glob("*/*.yaml")):
        groups.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(choices) for group, choices in sorted(groups.items())}
