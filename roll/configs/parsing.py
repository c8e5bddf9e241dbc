"""Parses plain values into a section, and translates pydantic's errors."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from roll.configs.base import Config
from roll.configs.env import ALIASES, EnvManagerConfig
from roll.configs.problems import NOTHING, SHOWN_CHARACTERS, ConfigProblem, show
from roll.configs.schema import element_of, expectation, locate, nearest, section_at, section_of

SectionT = TypeVar("SectionT", bound=Config)
Path = Sequence[str | int]

MAX_LISTED_NAMES = 20
TYPO = 0.85  # similarity of names that differ in a letter

Advise = Callable[[type[Config], Path, Any], tuple[str, str | None]]
"""Takes the section's class, the path of a key that it does not know, and its value. Returns a hint, and the known key
of the same section that the unknown one was probably meant for."""


def parse(
    schema: type[SectionT], values: Mapping[str, Any], *, strict: bool = True, advise: Advise | None = None
) -> tuple[SectionT | None, list[ConfigProblem]]:
    """Builds a section with every wrong value replaced by its default, and a problem for each of those.

    Args:
        strict: ``"5"`` is no int.
        advise: hints for unknown keys; the nearest known one, if not given.

    Returns:
        The section, ``None`` where it cannot be built without what is wrong; and the problems, keys relative to it.
    """
    remaining = copy.deepcopy(dict(values))
    problems: dict[str, ConfigProblem] = {}
    filled: set[tuple[str | int, ...]] = set()
    while True:
        try:
            return schema.model_validate(remaining, strict=strict), list(problems.values())
        except ValidationError as error:
            details = error.errors(include_url=False)
        paths = [_real_path(remaining, detail) for detail in details]
        for path, detail in zip(paths, details, strict=True):
            if _wrong_inside(remaining, path, paths):
                continue
            problem = _translate(schema, path, detail, advise or nearest_key, remaining)
            problems.setdefault(problem.path, problem)
        moved = [_set_aside(schema, remaining, path, filled) for path in paths]
        if not all(moved):
            return None, list(problems.values())


def section_problems(
    schema: type[Config], values: Mapping[str, Any], *, strict: bool = True, advise: Advise | None = None
) -> list[ConfigProblem]:
    """All that is wrong with a section: its values, and its own rules as far as they do not rest on wrong ones."""
    section, wrong = parse(schema, values, strict=strict, advise=advise)
    return wrong if section is None else [*wrong, *not_resting_on(wrong, rules_broken(section))]


def rules_broken(section: Config, prefix: str = "") -> Iterator[ConfigProblem]:
    """The ``problems()`` of a section and of all sections inside."""
    for problem in section.problems():
        yield problem.under(prefix) if prefix else problem
    for name in type(section).model_fields:
        value = getattr(section, name)
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        path = f"{prefix}.{name}" if prefix else name
        for key, entry in entries:
            if isinstance(entry, Config):
                yield from rules_broken(entry, f"{path}.{key}")
        if isinstance(value, Config):
            yield from rules_broken(value, path)


def not_resting_on(wrong: Sequence[ConfigProblem], found: Iterator[ConfigProblem]) -> list[ConfigProblem]:
    """Those of the found problems that read no key which is wrong already, and so holds only its default."""
    broken = [path for problem in wrong for path in (problem.path, *problem.involves)]
    return [
        problem
        for problem in found
        if not any(overlap(key, path) for key in (problem.path, *problem.involves) for path in broken)
    ]


def overlap(one: str, other: str) -> bool:
    """Tells whether two dotted paths are the same, or one of them lies inside the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def nearest_key(section: type[Config], path: Path, value: Any, others: Iterable[str] = ()) -> tuple[str, str | None]:
    """Advice that needs nothing but the section: the most similar key, or all of them.

    A key that could not have the value must be very similar: then the value is wrong too.

    Args:
        others: further names that are known.
    """
    name, fields = str(path[-1]), section.model_fields
    aliases = ALIASES if issubclass(section, EnvManagerConfig) else {}
    fitting = [key for key, field in fields.items() if _may_hold(field.annotation, value)]
    fitting += [alias for alias, key in aliases.items() if key in fitting]
    known = [*fields, *aliases, *others]
    near = nearest(name, known, cutoff=TYPO) or nearest(name, [*fitting, *others])
    if near:
        return f"did you mean {near}?", near
    return (f"known here: {', '.join(known)}" if len(known) <= MAX_LISTED_NAMES else "see docs/configuration.md"), None


def _may_hold(annotation: Any, value: Any) -> bool:
    """Tells whether a field could be meant by a key of this value: sections by mappings, others by what they take."""
    if section_of(annotation) is not None:
        return isinstance(value, Mapping)
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _translate(
    schema: type[Config], path: list[str | int], detail: Any, advise: Advise, values: Mapping[str, Any]
) -> ConfigProblem:
    dotted, kind = ".".join(map(str, path)), detail["type"]
    if kind == "extra_forbidden":
        section, name = section_at(schema, path[:-1]) or schema, str(path[-1])
        if name in ALIASES and issubclass(section, EnvManagerConfig):
            same = f"one of the two: {ALIASES[name]} is the same key"
            return ConfigProblem(dotted, detail["input"], same)
        hint, meant = advise(section, path, detail["input"])
        # What is given under its own name is not what the unknown key was meant for.
        meant = None if meant is None or meant in _node(values, path[:-1]) else meant
        involves = (".".join([*map(str, path[:-1]), meant]),) if meant else ()
        return ConfigProblem(dotted, detail["input"], "no such key", hint, involves)
    if _wrong_key(detail) is not None:
        key = detail["input"]
        return ConfigProblem(dotted, key, "text as the key", f"YAML reads it as {type(key).__name__}: put it in quotes")
    if kind == "value_error":
        return ConfigProblem(dotted, detail["input"], str(detail["ctx"]["error"]))
    found = locate(schema, [ALIASES.get(str(part), part) for part in path])
    expected = (expectation(*found) if found else "") or str(detail["msg"]).lower().removeprefix("input should be ")
    if kind == "finite_number" or (kind == "float_type" and str(detail["input"]).lstrip("+-") in ("inf", "nan")):
        expected += ", finite"
    if found and _is_element(found[0], detail["input"]):
        quote = '"' * ("\\" in str(detail["input"]))  # a spelled line break is one between double quotes
        hint = f"write [{quote}{detail['input']}{quote}]"
    else:
        hint = _instead(found, detail)
    return ConfigProblem(dotted, NOTHING if kind == "missing" else detail["input"], expected, hint)


def _instead(found: tuple[Any, Sequence[Any]] | None, detail: Any) -> str:
    """Hint at what YAML has made of a value that was meant otherwise."""
    value = detail["input"]
    if value is None and found is not None and detail["type"] != "missing":
        if (section := section_of(found[0])) is None or any(
            field.is_required() for field in section.model_fields.values()
        ):
            return "leave the key out for its default"
        given = section().model_dump(mode="json").items()
        words = ", ".join(f"{key}: {show(each)}" for key, each in given if not isinstance(each, dict))
        return f"leave the section out for its defaults, {{{words if len(words) <= SHOWN_CHARACTERS else '…'}}}"
    if detail["type"] == "string_type" and isinstance(value, bool | int | float):
        return f"YAML reads it as {type(value).__name__}: put it in quotes"
    return ""


def _is_element(annotation: Any, value: Any) -> bool:
    """Tells whether a value is what a list should hold, in place of the list."""
    inside = element_of(annotation) if "list" in str(annotation) and isinstance(value, str | int | float) else None
    return inside is not None and section_of(inside) is None and _may_hold(inside, value)


def _real_path(values: Any, detail: Any) -> list[str | int]:
    """Pydantic's location without the names of the union branches that it tried."""
    path: list[str | int] = []
    node, wrong_key = values, _wrong_key(detail)
    for i, part in enumerate(detail["loc"]):
        if i == wrong_key:
            return [*path, detail["input"]]
        if isinstance(node, dict) and part in node:
            path.append(part)
            node = node[part]
        elif isinstance(node, dict) and (alias := _alias_of(part, node)):
            path.append(alias)
            node = node[alias]
        elif isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
            path.append(part)
            node = node[part]
        elif detail["type"] == "missing" and i == len(detail["loc"]) - 1:
            path.append(part)
    return path


def _wrong_key(detail: Any) -> int | None:
    """Index of the key that is no text in a location, where it may stand as one; ``None``: it is about a value."""
    if detail["type"] == "invalid_key":
        return len(detail["loc"]) - 1
    return len(detail["loc"]) - 2 if detail["type"] == "string_type" and detail["loc"][-1] == "[key]" else None


def _wrong_inside(values: Any, path: Path, paths: Sequence[Path]) -> bool:
    """Tells whether a list, of a key that may also hold something else, is wrong only for what is in it."""
    inside = any(len(other) > len(path) and other[: len(path)] == path for other in paths)
    return inside and isinstance(_node(values, path), list)


def _alias_of(part: str | int, node: Mapping[str, Any]) -> str | None:
    return next((alias for alias, name in ALIASES.items() if name == part and alias in node), None)


def _node(values: Any, path: Path) -> Any:
    """Value at a path; ``None`` where nothing is."""
    for part in path:
        inside = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if not inside and not (isinstance(values, dict) and part in values):
            return None
        values = values[part]
    return values


def _set_aside(schema: type[Config], values: Any, path: Path, filled: set[tuple[str | int, ...]]) -> bool:
    """Makes room for a default: removes a key. What has no default, or is one of a list, gets a value of its type.

    Where that is refused too, the section that it is in goes.

    Returns:
        Whether there was anything to set aside.
    """
    path = tuple(path)
    while path:
        holder, last = _node(values, path[:-1]), path[-1]
        given = isinstance(holder, dict) and last in holder
        if holder is None:
            return True  # gone with a section
        room = isinstance(holder, dict) or (isinstance(holder, list) and isinstance(last, int) and last < len(holder))
        if room and not given and path not in filled and (found := locate(schema, path)):
            holder[last] = _stand_in(found[0])
            filled.add(path)
            return True
        if given:
            del holder[last]
            return True
        path = path[:-1]
    return False


def _stand_in(annotation: Any) -> Any:
    """A value of a type, in place of one that is missing or wrong."""
    if section := section_of(annotation):
        fields = section.model_fields.items()
        return {name: _stand_in(field.annotation) for name, field in fields if field.is_required()}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return [_stand_in(element_of(annotation))]
    if origin in (dict, Literal):
        return {} if origin is dict else arguments[0]
    if origin is Annotated or origin in (Union, types.UnionType):
        return _stand_in(arguments[0])
    return {str: "?", int: 1, float: 1.0, bool: False}.get(annotation)
