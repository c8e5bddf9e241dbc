"""Engines are optional packages: which extra installs one, and what its constructor takes, without importing it."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def ignore_renamed_collectives() -> None:
    """Silences PyTorch's warning about two old names, which are called by engines and not by who reads the warning."""
    for old in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{old}` is deprecated", FutureWarning)


@dataclass(frozen=True)
class EnginePackage:
    """What an engine needs to be installed."""

    module: str
    """To import, e.g. ``vllm``."""
    extra: str
    """Of this package, which installs it."""

    @property
    def installed(self) -> bool:
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of the package that it is a part of
            return False


PACKAGES = {
    "deepspeed_train": EnginePackage("deepspeed", "deepspeed"),
    "deepspeed_infer": EnginePackage("deepspeed", "deepspeed"),
    "megatron_train": EnginePackage("megatron.core", "megatron"),
    "megatron_infer": EnginePackage("megatron.core", "megatron"),
    "vllm": EnginePackage("vllm", "vllm"),
    "sglang": EnginePackage("sglang", "sglang"),
}
"""By the name of the strategy; those that are not here need nothing but torch and Transformers."""


class MissingEngineError(ImportError):
    """The package of a strategy's engine is not installed."""


def require_engine(module: str, *, extra: str, strategy: str) -> None:
    """Checks that an engine can be imported, without importing it.

    Args:
        module: top-level name to import, e.g. ``vllm``.
        extra: the extra of this package that installs it.
        strategy: ``strategy_name`` of the role that needs it, for the message.

    Raises:
        MissingEngineError: the package is not there; says which extra to install.
    """
    if not EnginePackage(module, extra).installed:
        raise MissingEngineError(
            f"strategy {strategy}: the package {module!r} is not installed; expected: pip install 'roll-rl[{extra}]'",
            name=module,
        )


def option_problems(
    options: Mapping[str, Any],
    *,
    typed: Collection[str],
    known: Collection[str],
    elsewhere: Mapping[str, str],
    arguments: str,
) -> list[str]:
    """What is wrong with the keys that a ``strategy_config`` passes on to an engine's constructor.

    Args:
        options: the whole section.
        typed: keys that its own class checks.
        known: arguments of the constructor; empty when the engine is not installed.
        elsewhere: arguments that are set by other keys, and by which.
        arguments: what they are called, for messages, e.g. ``vLLM's AsyncEngineArgs``.

    Returns:
        ``key: seen …, expected …``.
    """
    extra = [key for key in options if key not in typed]
    problems = [f"{k}: seen {options[k]!r}, expected {elsewhere[k]} instead" for k in extra if k in elsewhere]
    for key in extra if known else ():
        if key not in known and key not in elsewhere:
            near = difflib.get_close_matches(key, sorted({*known, *typed} - {*elsewhere}), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{key}: seen {options[key]!r}, expected an argument of {arguments}{hint}")
    return problems


def constructor_fields(package: str, file: str, classes: Sequence[str]) -> frozenset[str]:
    """The names that an engine's dataclass of arguments has, read from its source.

    Importing an engine takes many seconds and a device; a check of the configuration may take neither.

    Args:
        package: top-level name of the engine.
        file: where the classes are, below the package's folder.
        classes: the dataclass and those that it inherits from.

    Returns:
        Names of annotated fields; empty when the package is not installed or has no such file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    source = next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
    if source is None:
        return frozenset()
    return frozenset(
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
