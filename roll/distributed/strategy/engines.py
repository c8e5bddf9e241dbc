"""Engines are optional packages: which extra installs one, and what its constructor takes, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
