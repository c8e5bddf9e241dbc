"""Bounds of a YAML file: aliases make a few lines stand for more values than any machine holds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import yaml

from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem, Words

MAX_VALUES = 200_000
"""Keys and values of a file with its aliases written out. The largest configuration here has some hundreds."""
_ALIAS = re.compile(r"(?:^|[\s\[{,:-])\*\S", re.MULTILINE)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_expansion(name: str, folders: list[Path]) -> None:
    """Counts the values of a file, and of those in its defaults list.

    Args:
        folders: where files are looked for.

    Raises:
        ConfigErrors: too many values. A file that is not there or no YAML is told by whoever composes it.
    """
    waiting, seen = [name], set[Path]()
    while waiting:
        each = waiting.pop().partition("@")[0].strip().removesuffix(".yaml")
        file = next((path for folder in folders if (path := folder / f"{each}.yaml").is_file()), None)
        if file is None or file in seen:
            continue
        seen.add(file)
        try:
            text = file.read_text(encoding="utf-8")
            count = values_of(text)
            waiting += _included(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if math.isinf(count):
            raise ConfigErrors([ConfigProblem(file.name, NOTHING, "no value that leads back to itself")])
        if count > MAX_VALUES:
            shown = f"{count:.3g}" if count > 1e9 else f"{count:,.0f}"
            written = Words(f"{shown} keys and values, with aliases (*name) written out")
            raise ConfigErrors([ConfigProblem(file.name, written, f"at most {MAX_VALUES:,}")])


def values_of(text: str) -> float:
    """Keys and values of a YAML text with its aliases written out; 0 where it has no aliases and is no bomb."""
    if not _ALIAS.search(text):
        return 0
    counts: dict[int, float] = {}

    def count(node: yaml.Node) -> float:
        if id(node) not in counts:
            counts[id(node)] = math.inf  # while it is counted: a node within itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = [part for item in parts for part in (item if isinstance(item, tuple) else (item,))]
            counts[id(node)] = 1 + sum(count(part) for part in pairs)
        return counts[id(node)]

    root = yaml.compose(text, Loader=_LOADER)
    return count(root) if root is not None else 0


def _included(text: str) -> list[str]:
    """Names in the defaults list; ``group: choice`` is ``group/choice``."""
    block = re.search(r"^defaults:.*(?:\n(?:[ \t-].*)?)*", text, re.MULTILINE)
    if block is None:
        return []
    entries = yaml.safe_load(block[0])["defaults"]
    names = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, str):
            names.append(entry)
        elif isinstance(entry, dict):
            names += [f"{str(key).split()[-1]}/{value}" for key, value in entry.items()]
    return names
