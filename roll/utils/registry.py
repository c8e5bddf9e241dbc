"""Code that the core finds but never imports by itself: plug-ins by name or path, a user's packages, the extras."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from roll.utils.foreign import describe_error

T = TypeVar("T")

_OF_FILE = "_file_"


class UnknownNameError(ValueError):
    """A plug-in name that is neither registered nor an importable ``module:attr``."""


class Registry(Generic[T]):
    """Maps short names to plug-ins; ``package.module:attr`` reaches code that is not registered.

    Entries may be objects or ``module:attr`` strings, which are imported at first use, so that listing
    the names never loads an engine.

    >>> envs: Registry[type] = Registry("environment")
    >>> envs.register("counter", "collections:Counter")
    >>> envs.get("counter").__name__
    'Counter'
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = {}

    def register(self, name: str, target: T | str, *, override: bool = False) -> None:
        """Adds ``target`` (an object or ``module:attr``) under ``name``.

        Raises:
            ValueError: the name is taken by something else and ``override`` is off.
        """
        if not override and name in self._entries and self._entries[name] != target:
            raise ValueError(f"{self.kind} {name!r} is already registered as {self._entries[name]!r}")
        self._entries[name] = target

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def check(self, name: str) -> None:
        """Raises ``UnknownNameError`` unless ``name`` is registered or a path: ``module:attr``, ``file.py:attr``."""
        if name in self._entries or _is_path(name):
            return
        near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(self.names()) or "nothing"
        raise UnknownNameError(
            f"unknown {self.kind} {name!r}.{hint} Registered: {known}; or give package.module:attribute"
        )

    def get(self, name: str) -> T:
        """Returns the plug-in, importing it if it was given by path.

        Raises:
            UnknownNameError: no such name, module or attribute.
        """
        self.check(name)
        entry = self._entries.get(name, name)
        return cast(T, import_path(entry, self.kind)) if isinstance(entry, str) else entry


def import_path(path: str, kind: str = "object") -> object:
    """Imports ``package.module:attr`` (``package.module.attr`` is understood too) or ``folder/file.py:attr``.

    Raises:
        UnknownNameError: no such module, file or attribute, or its code raises.
    """
    module_name, _, attr = path.rpartition(":") if ":" in path else path.rpartition(".")
    try:
        module = import_module(module_name)
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:  # ValueError: the name is empty
        raise UnknownNameError(f"{kind} {path!r}: cannot import module {module_name!r} ({error})") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UnknownNameError(f"{kind} {path!r}: importing it raised {describe_error(error)}") from error
    try:
        return getattr(module, attr)
    except AttributeError as error:
        near = difflib.get_close_matches(attr, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"{kind} {path!r}: module {module_name!r} has no {attr!r}{hint}") from error


def import_module(name: str) -> ModuleType:
    """``package.module`` or ``folder/file.py``.

    Raises:
        ModuleNotFoundError, FileNotFoundError, ValueError: there is none; or whatever its code raises.
    """
    return _import_file(name) if name.endswith(".py") else importlib.import_module(name)


def importable_path(thing: type | Callable[..., object]) -> str:
    """``package.module:name`` of a class or function, or ``file.py:name`` where its module was imported by its file.

    Another process can import what stands at the top of a module that is not ``__main__``.
    """
    module = thing.__module__
    if module.startswith(_OF_FILE):  # a name that no other process knows
        return f"{sys.modules[module].__file__}:{thing.__qualname__}"
    return f"{module}:{thing.__qualname__}"


def _import_file(name: str) -> ModuleType:
    """A Python file as a module; the same file is imported once."""
    path = Path(name).expanduser().resolve()
    module_name = f"{_OF_FILE}{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a name that ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _is_path(name: str) -> bool:
    module_name, _, attr = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module_name and attr.isidentifier()):
        return False
    return module_name.endswith(".py") or all(part.isidentifier() for part in module_name.split("."))


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


@dataclass(frozen=True)
class Extra:
    """A part of the package that the core calls but does not import."""

    entry: str
    """Import path of the module that the core calls; verifiers and environments are found by the paths that their
    registries hold."""
    page: str
    """Its page in ``docs/``."""


EXTRAS = {
    "boxes": Extra("roll.extras.boxes", "rewards.md"),
    "doctor": Extra("roll.extras.doctor", "planning.md"),
    "env_check": Extra("roll.extras.env_check", "environments.md"),
    "importers": Extra("roll.extras.importers.command", "migrating.md"),
    "maths": Extra("roll.extras.maths.verifier", "rewards.md"),
    "plan": Extra("roll.extras.plan.command", "planning.md"),
    "sandbox": Extra("roll.extras.sandbox.cell", "rewards.md"),
    "smollm2": Extra("roll.extras.smollm2", "real_model.md"),
    "worlds": Extra("roll.extras.worlds", "environments.md"),
}


def extra(name: str) -> ModuleType:
    """The module through which an extra is called, imported at the first call."""
    return importlib.import_module(EXTRAS[name].entry)
