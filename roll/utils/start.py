"""What a process does before it imports much: imports are most of its start, and a run has many processes."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from roll.utils.memory import relax_gc_at_start


def quick_start() -> None:
    """Makes what this process imports from now on quicker, Transformers above all. Calling it again does nothing."""
    relax_gc_at_start()
    if not any(isinstance(finder, _LightTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LightTransformers())


class _LightTransformers(importlib.abc.MetaPathFinder):
    """Leaves out what Transformers (5.x) does in every process that imports it and nobody here needs."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        lighter = _LIGHTER.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if lighter else None
        if lighter and spec and spec.loader:
            setattr(spec.loader, "exec_module", functools.partial(lighter, spec.loader.exec_module))  # noqa: B010
        return spec


def _fewer_files_read(run: Callable[[ModuleType], None], module: Any) -> None:
    """It reads the file lists of all packages; and the source of all its models, twice, as its cache is too small."""
    from importlib import metadata

    given = metadata.packages_distributions
    setattr(metadata, "packages_distributions", Distributions)  # noqa: B010
    try:
        run(module)
    finally:
        setattr(metadata, "packages_distributions", given)  # noqa: B010
    structure: Any = getattr(module, "create_import_structure_from_path", None)
    if hasattr(structure, "__wrapped__"):
        module.create_import_structure_from_path = functools.cache(structure.__wrapped__)


def _no_docstrings(run: Callable[[ModuleType], None], module: Any) -> None:
    """It writes docstrings when it imports classes, and for those of configurations it imports models."""
    run(module)
    module.auto_docstring = lambda decorated=None, **_: decorated or (lambda given: given)


_LIGHTER = {
    "transformers.utils.import_utils": _fewer_files_read,
    "transformers.utils.auto_docstring": _no_docstrings,
}


class Distributions(Mapping[str, list[str]]):
    """``importlib.metadata.packages_distributions()``, worked out only where no distribution has the package's name."""

    @functools.cached_property
    def _all(self) -> Mapping[str, list[str]]:
        from importlib import metadata

        return metadata.packages_distributions()

    def __getitem__(self, package: str) -> list[str]:
        from importlib import metadata

        if not package.startswith("flash_attn"):  # several distributions have it
            try:
                return [metadata.distribution(package).name]
            except metadata.PackageNotFoundError:
                pass
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
