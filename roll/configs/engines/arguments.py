"""Arguments of an engine's constructor, read from its source: importing an engine takes many seconds and a device."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.configs.foreign import advice
from roll.configs.problems import ConfigProblem

PLAIN: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "list": list,
    "dict": dict,
    "None": type(None),
}


def constructor_fields(package: str, file: str, classes: Sequence[str]) -> dict[str, str]:
    """The arguments that an engine's dataclass (or pydantic model) has.

    Args:
        package: top-level name of the engine.
        file: where the classes are, below the package's folder.
        classes: the dataclass and those that it inherits from.

    Returns:
        Annotations by name, a pydantic alias being one more name; empty when the package is not installed or has no
        such file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    source = next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
    if source is None:
        return {}
    found: dict[str, str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    names = [statement.target.id, *_aliases(statement.value)]
                    found |= dict.fromkeys(names, ast.unparse(statement.annotation))
    return found


def _aliases(default: ast.expr | None) -> list[str]:
    """The second name in ``Field(..., alias="name")``."""
    words = default.keywords if isinstance(default, ast.Call) else []
    names = [word.value.value for word in words if word.arg == "alias" and isinstance(word.value, ast.Constant)]
    return [name for name in names if isinstance(name, str)]


def type_problems(options: Mapping[str, Any], annotations: Mapping[str, str]) -> list[ConfigProblem]:
    """Values that an engine's constructor takes for another type; what it says of ranges is left to it.

    Args:
        options: keys and values.
        annotations: of the constructor's arguments; those that are not made of plain types are not looked at.
    """
    problems = []
    for key, value in options.items():
        words = _plain_types(ast.parse(annotations.get(key) or "Any", mode="eval").body)
        if words is not None and not any(_is_of(value, word) for word in words):
            problems.append(ConfigProblem(key, value, " or ".join(words)))
    return problems


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
    *,
    typed: Collection[str],
    known: Mapping[str, str],
    elsewhere: Mapping[str, str],
    arguments: str,
) -> list[ConfigProblem]:
    """Wrong keys and values of a ``strategy_config`` among those that an engine's constructor gets.

    Args:
        options: the whole section.
        typed: keys that its own class checks.
        known: arguments of the constructor and their annotations; empty when the engine is not installed.
        elsewhere: arguments that are set by other keys, and by which; also what other engines call an option.
        arguments: what they are called, for messages, e.g. ``vLLM's AsyncEngineArgs``.
    """
    extra = [key for key in options if key not in typed]
    problems = [
        ConfigProblem(key, options[key], here if here.startswith("no such key") else f"{here} instead")
        for key in extra
        if (here := elsewhere.get(key))
    ]
    for key in extra if known else ():
        if key not in known and key not in elsewhere:
            hint = foreign_key_hint(key, {*known, *typed} - {*elsewhere})
            problems.append(ConfigProblem(key, options[key], f"an argument of {arguments}", hint))
    return problems + type_problems({key: options[key] for key in extra if key not in elsewhere}, known)


def foreign_key_hint(key: str, known: Collection[str]) -> str:
    """The hint for a key that an engine does not have: where it belongs, or what it may be meant for."""
    if hint := advice(key):
        return hint
    near = difflib.get_close_matches(key, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
