"""Arguments of an engine's constructor, read from its source: importing an engine takes many seconds and a device."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from roll.configs.problems import ConfigProblem
from roll.configs.schema import did_you_mean
from roll.utils.registry import extra

PLAIN: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "list": list,
    "dict": dict,
    "None": type(None),
}


@dataclass(frozen=True)
class Signature:
    """Arguments that an engine's classes take."""

    classes: Mapping[str, Mapping[str, str]]
    """Annotations by argument, by class; empty are those that are not made of plain types."""
    release: str = ""
    """Name and version of the engine, where this is shipped with us as the engine is not installed."""

    @property
    def arguments(self) -> dict[str, str]:
        """Annotations by argument, of all classes; empty when the engine's source has none where it is looked for."""
        return {name: kind for fields in self.classes.values() for name, kind in fields.items()}

    @property
    def note(self) -> str:
        """Remark on how options were checked; empty when those of the installed engine were."""
        if self.release:
            return f"compared with {self.release}, as none is installed here"
        return "" if self.arguments else "not checked, as the engine's own are not known"

    def attributed(self, problem: ConfigProblem) -> ConfigProblem:
        """The same problem, saying which version expects otherwise where it is not the installed one."""
        release = f", according to {self.release}, as none is installed here" if self.release else ""
        return replace(problem, expected=problem.expected + release)


@dataclass(frozen=True)
class EngineSource:
    """The dataclasses (pydantic models, structs) of an engine whose fields are options."""

    engine: str
    """Its name in messages, e.g. ``vLLM``."""
    shipped: Path
    """The fields of the version that is pinned; ``scripts/generate_engine_arguments.py`` writes it."""
    classes: Mapping[str, Sequence[str]]
    """Names of classes, by their file below the package's folder; none: all in the files of that pattern."""

    def signature(self, folder: Path | None) -> Signature:
        """The fields in an installed package's folder; without one, those that are shipped."""
        if folder is not None:
            return Signature(self.read(folder))
        shipped = json.loads(self.shipped.read_text(encoding="utf-8"))
        return Signature(shipped["classes"], f"{self.engine} {shipped['version']}")

    def read(self, folder: Path) -> dict[str, dict[str, str]]:
        """The fields in a package's folder: annotations by name and class, a pydantic alias being one more name."""
        return {
            name: fields
            for pattern, names in self.classes.items()
            for path in sorted(folder.glob(pattern))
            for name, fields in _classes(path).items()
            if name in names or not names
        }


@cache
def _classes(path: Path) -> dict[str, dict[str, str]]:
    """The fields of each class in a file. A configuration asks several times; an installed engine stays as it is."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: _fields(node) for node in nodes if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = [statement.target.id, *_aliases(statement.value)]
            found |= dict.fromkeys(names, _plain_annotation(statement.annotation))
    return found


def _aliases(default: ast.expr | None) -> list[str]:
    """The second name in ``Field(..., alias="name")``."""
    words = default.keywords if isinstance(default, ast.Call) else []
    names = [word.value.value for word in words if word.arg == "alias" and isinstance(word.value, ast.Constant)]
    return [name for name in names if isinstance(name, str)]


def _plain_annotation(node: ast.expr) -> str:
    """An annotation of plain types, without what ``Annotated`` says beside it; empty for any other."""
    match node:
        case ast.Subscript(value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[inner, *beside])):
            words = [word.arg for each in beside if isinstance(each, ast.Call) for word in each.keywords]
            # A parser of the command line's text: the constructor gets what that makes of it.
            return "" if "type_parser" in words else _plain_annotation(inner)
    return ast.unparse(node) if _plain_types(node) else ""


def type_problems(options: Mapping[str, Any], annotations: Mapping[str, str]) -> Iterator[ConfigProblem]:
    """Values that an engine's constructor takes for another type; what it says of ranges is left to it.

    Args:
        annotations: of the constructor's arguments; those that are not made of plain types are not looked at.
    """
    for key, value in options.items():
        words = _plain_types(ast.parse(annotations.get(key) or "Any", mode="eval").body)
        if words is not None and not any(_is_of(value, word) for word in words):
            yield ConfigProblem(key, value, " or ".join(words))


def _plain_types(node: ast.expr) -> list[str] | None:
    """The plain types and literals that an annotation allows; ``None`` if it names anything else."""
    match node:
        case ast.Name(id=name) if name in PLAIN:
            return [name]
        case ast.Constant(value=None):
            return ["None"]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            members = [left, right]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=member):
            members = [member, ast.Constant(None)]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=elements)):
            members = elements
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            choices_given = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return [repr(each.value) for each in choices_given if isinstance(each, ast.Constant)]
        case _:
            return None
    words: list[str] = []
    for member in members:
        inner = _plain_types(member)
        if inner is None:
            return None
        words += inner
    return words


def _is_of(value: Any, word: str) -> bool:
    if word not in PLAIN:
        return repr(value) == word
    if word == "int" and isinstance(value, float) and value.is_integer():
        return True  # 5e8
    return isinstance(value, PLAIN[word]) and not (isinstance(value, bool) and word in ("int", "float"))


def option_problems(
    options: Mapping[str, Any],
    typed: Collection[str],
    known: Signature,
    elsewhere: Mapping[str, str],
    arguments: str,
) -> Iterator[ConfigProblem]:
    """Wrong keys and values of a ``strategy_config`` among those that an engine's constructor gets.

    Args:
        elsewhere: arguments that are set by other keys, and by which; also what other engines call an option.
        arguments: what they are called, for messages, e.g. ``vLLM's AsyncEngineArgs``.
    """
    taken, passed_on, wrong = known.arguments, {}, []
    for key, value in options.items():
        if key in typed:
            continue
        if here := elsewhere.get(key):
            yield ConfigProblem(key, value, here if here.startswith("no such key") else f"{here} instead")
            continue
        passed_on[key] = value
        if taken and key not in taken:
            hint = foreign_key_hint(key, {*taken, *typed} - {*elsewhere})
            wrong.append(ConfigProblem(key, value, f"an argument of {arguments}", hint))
    yield from map(known.attributed, [*wrong, *type_problems(passed_on, taken)])


def foreign_key_hint(key: str, known: Collection[str]) -> str:
    """The hint for a key that an engine does not have: where it belongs, or what it may be meant for."""
    return extra("importers").advice([key]) or did_you_mean(key, sorted(known))
