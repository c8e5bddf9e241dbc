"""Reads the configuration classes themselves: types and ranges in words, the field behind a dotted path, names."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from roll.configs.base import Config
from roll.configs.problems import NOTHING, ConfigProblem

ROLES = ("actor_train", "actor_infer", "critic", "reference", "teacher")
"""Sections of model roles."""
_SIMPLE = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null", Any: "any value", object: "any"}


@dataclass(frozen=True)
class Described:
    """Put into ``Annotated[...]`` where the annotation alone would read badly."""

    text: str


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in words: ``int``, ``list of str, or null``, ``one of: a, b``."""
    for item in metadata:
        if isinstance(item, Described):
            return item.text
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        names = [type_text(argument) for argument in arguments if argument is not type(None)]
        names += ["null"] if type(None) in arguments else []
        return ", or ".join([", ".join(names[:-1]), names[-1]])
    if origin is Literal:
        return "one of: " + ", ".join(str(argument) for argument in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"mapping of {type_text(arguments[0])} to {type_text(arguments[1])}"
    return "section" if is_section(annotation) else getattr(annotation, "__name__", str(annotation))


def range_text(metadata: Sequence[Any]) -> str:
    """The bounds of a field in words, e.g. ``at least 1``; empty when it has none."""
    words = []
    lower = next((m.ge for m in metadata if isinstance(m, annotated_types.Ge)), None)
    upper = next((m.le for m in metadata if isinstance(m, annotated_types.Le)), None)
    if lower is not None and lower == upper:
        return f"only {lower}"
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound}")
            case annotated_types.Gt(gt=bound):
                words.append(f"more than {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"less than {bound}")
            case annotated_types.MinLen(min_length=bound):
                words.append(f"at least {bound} long")
            case _ if getattr(item, "pattern", None):
                words.append(f"matching {item.pattern}")
    return ", ".join(words)


def default_text(field: FieldInfo) -> str:
    """The default as JSON; ``required``, or ``its own`` for a section that has defaults inside."""
    if field.is_required():
        return "required"
    if section_of(field.annotation) is not None and field.default_factory is not None:
        return "its own"
    return json.dumps(field.get_default(call_default_factory=True, validated_data={}), ensure_ascii=False)


def expectation(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Type and range together, as an error message says them."""
    return ", ".join(text for text in (type_text(annotation, metadata), range_text(metadata)) if text)


def choices(annotation: Any) -> list[str]:
    """The values that may be written for a key, as YAML has them; none where they are not counted."""
    if annotation is bool:
        return ["true", "false"]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [str(argument) for argument in arguments]
    if origin is Annotated:
        return choices(arguments[0])
    if origin in (Union, types.UnionType):
        found = [choice for argument in arguments for choice in choices(argument)]
        return [*found, "null"] if found and type(None) in arguments else found
    return []


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def section_of(annotation: Any) -> type[Config] | None:
    """The ``Config`` class in ``Section``, ``Section | None`` or ``Annotated[Section, ...]``."""
    if is_section(annotation):
        return annotation  # type: ignore[no-any-return]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return next((s for a in get_args(annotation) if (s := section_of(a))), None)
    return None


def element_of(annotation: Any) -> Any | None:
    """Type of a list's or mapping's items, looking through unions; ``None`` for anything else."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (list, tuple):
        return arguments[0]
    if origin is dict:
        return arguments[1]
    if origin in (Union, types.UnionType, Annotated):
        return next((e for a in arguments if (e := element_of(a)) is not None), None)
    return None


def locate(root: type[Config], path: Sequence[str | int]) -> tuple[Any, Sequence[Any]] | None:
    """Annotation and metadata of the field (or list element, or mapping entry) at ``path``; ``None`` if unknown."""
    annotation: Any = root
    metadata: Sequence[Any] = ()
    for part in path:
        section = section_of(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            if field is None:
                return None
            annotation, metadata = field.annotation, field.metadata
        else:
            annotation, metadata = element_of(annotation), ()
            if annotation is None:
                return None
            if get_origin(annotation) is Annotated:
                annotation, *given = get_args(annotation)
                inside = [each.metadata if isinstance(each, FieldInfo) else [each] for each in given]
                metadata = [item for items in inside for item in items]
    return annotation, metadata


def settings_of(values: Mapping[str, Any], root: type[Config] | None = None) -> Iterator[tuple[str, Any, bool]]:
    """Every key of a configuration in JSON values, dotted, with its value and whether that differs from the default.

    Args:
        root: the class of the configuration; without it every value differs.
    """
    yield from _settings(values, {} if root is None else _defaults(root), root, ())


def _settings(
    values: Mapping[str, Any], defaults: Mapping[str, Any], root: type[Config] | None, path: tuple[str, ...]
) -> Iterator[tuple[str, Any, bool]]:
    for name, value in values.items():
        place, default = (*path, name), defaults.get(name, NOTHING)
        if not isinstance(value, Mapping) or not value:
            yield ".".join(place), value, value != default
            continue
        if not isinstance(default, Mapping):  # an entry of a mapping, or a section that is null by default
            section = None if root is None else section_at(root, place)
            default = {} if section is None else _defaults(section)
        yield from _settings(value, default, root, place)


def _defaults(section: type[Config]) -> dict[str, Any]:
    return section.model_construct().model_dump(mode="json", warnings=False)


def section_at(root: type[Config], path: Sequence[str | int]) -> type[Config] | None:
    found = locate(root, path)
    return section_of(found[0]) if found else None


def leaf_paths(root: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key under ``root`` that is no section, with its dotted path; mapping entries are not entered."""
    for name, field in root.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from leaf_paths(section, f"{prefix}{name}.")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known name, if one is similar enough; one that goes on where it ends comes first."""
    names = list(known)
    longer = [each for each in names if len(name) > 2 and each.startswith(f"{name}_")]
    found = difflib.get_close_matches(name, longer or names, n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint at the most similar known name; empty where none is."""
    near = nearest(name, known, cutoff)
    return f"did you mean {near}?" if near else ""


def name_problems(config: Config, key: str, known: Collection[str]) -> Iterator[ConfigProblem]:
    """A name that is neither known nor the path of a function."""
    name = getattr(config, key)
    if name not in known and ":" not in name:
        expected = f"one of {', '.join(known)} or package.module:function"
        yield config.problem(key, expected, hint=did_you_mean(name, known, cutoff=0.5))


def same_part(part: str, name: str) -> bool:
    """Tells whether a part of a key's path stands for a name: ``<role>`` for a model role, ``<…>`` for anything."""
    return part == name or (part == "<role>" and name in ROLES) or (part.startswith("<") and part != "<role>")


def ends_with(place: str, path: Sequence[str]) -> bool:
    """Tells whether a dotted path ends as another does, which names at least the key itself."""
    parts = place.split(".")
    if len(path) > len(parts) or parts[-1] != path[-1]:
        return False
    return all(same_part(part, name) for part, name in zip(parts[-len(path) :], path, strict=True))
