"""Packages that are as if they were not installed."""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from roll.configs.engines import packages

ENGINES = sorted({package.module.partition(".")[0] for package in packages().values()})


class _Refuser(importlib.abc.MetaPathFinder):
    """The import system's first finder, which says of packages what it says itself of those that are not there."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def hide(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Makes top-level packages impossible to find and to import, for the length of a test."""
    monkeypatch.setattr(sys, "meta_path", [_Refuser(names), *sys.meta_path])
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, module)
