"""Python and the installed packages against what this library asks for and was tested with."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import roll
from roll.extras.doctor.findings import Finding, judged

DISTRIBUTION = "roll-rl"
PROJECT = Path(roll.__file__).parents[1] / "pyproject.toml"
TESTED = [PROJECT.with_name("constraints") / name for name in ("cpu.txt", "newest.txt")]
"""Versions that the tests run with, where this is a checkout: those of ``make test`` and of ``make test-newest``."""
_PIN = re.compile(r"([\w.-]+)==([\w.+!-]+)")


def check_packages() -> Iterator[Finding]:
    """Python, the packages that every run needs, and of those of extras the ones that are there."""
    python, requirements = stated()
    yield from check_python(platform.python_version(), python)
    yield from check_requirements(requirements, installed_versions(each.name for each in requirements))
    if pins := [path.read_text(encoding="utf-8") for path in TESTED if path.is_file()]:
        yield compare_tested(pins, requirements)


def stated() -> tuple[str, list[Requirement]]:
    """``requires-python`` and the requirements, of the installed distribution or else of the checkout.

    Raises:
        FileNotFoundError: it is neither.
    """
    try:
        told = importlib.metadata.metadata(DISTRIBUTION)
        return told["Requires-Python"] or "", list(map(Requirement, told.get_all("Requires-Dist") or ()))
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], list(map(Requirement, project["dependencies"]))


def check_python(version: str, wanted: str) -> Iterator[Finding]:
    """The interpreter against ``requires-python``."""
    right = SpecifierSet(wanted).contains(version, prereleases=True)
    fix = f"Make the environment with a Python {wanted}."
    yield judged("python", f"{version} (expected {wanted})", error=not right, fix=fix)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by name, of the packages that are there."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_requirements(requirements: list[Requirement], versions: dict[str, str]) -> Iterator[Finding]:
    """A finding for each that is wrong, and one that counts the right ones."""
    right = []
    for requirement in requirements:
        name, optional = requirement.name, "extra" in str(requirement.marker or "")
        if requirement.marker is not None and not optional and not requirement.marker.evaluate():
            continue
        version, wanted = versions.get(name), str(requirement.specifier)
        fix = f"pip install '{name}{wanted}'"
        if version is None:
            if not optional:
                yield Finding("error", name, f"not installed (expected {wanted or 'any version'})", fix)
        elif requirement.specifier.contains(version, prereleases=True):
            right.append(f"{name} {version}")
        else:
            yield judged(name, f"{version} (expected {wanted})", error=not optional, warning=True, fix=fix)
    shown = [text for text in right if text.split()[0] in ("torch", "ray", "transformers")]
    yield Finding("ok", "packages", f"{len(right)} of the wanted versions: {', '.join(shown)}, …")


def compare_tested(files: Sequence[str], requirements: list[Requirement]) -> Finding:
    """Compares the packages that are asked for with the versions that the tests run with, by file of constraints."""
    tested: dict[str, list[str]] = {}
    for name, version in itertools.chain.from_iterable(map(_PIN.findall, files)):
        tested.setdefault(name.lower().replace("_", "-"), []).append(version.partition("+")[0])
    others = [
        f"{name} {version} (tested: {', '.join(dict.fromkeys(tested[name]))})"
        for name, version in sorted(installed_versions(each.name for each in requirements).items())
        if name in tested and version.partition("+")[0] not in tested[name]
    ]
    return Finding("ok", "tested", f"not tested: {', '.join(others)}" if others else "all of them, in these versions")
