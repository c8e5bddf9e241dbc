"""Facts about a key, from the configuration classes and the tables of other systems."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from roll.configs.base import Config
from roll.configs.engines import cards
from roll.configs.env import ALIASES
from roll.configs.schema import default_text, element_of, ends_with, range_text, section_of, type_text
from roll.utils.registry import extra

Schemas = Mapping[str, type[Config]]
"""The pipelines' configurations, by the name of the pipeline."""

Part = tuple[str, str, type[Config]]
"""A section that one plug-in reads: its name, the path of the section, its class."""
_NEAR = 3
_PLACEHOLDERS = {"rewards": "<domain>", "custom_envs": "<Tag>", "tools": "<name>", "servers": "<name>", "use": "<name>"}


@dataclass
class Key:
    """A key of a section, in every place that has this section."""

    name: str
    info: FieldInfo
    places: list[str] = field(default_factory=list)
    """Dotted paths; a part in angle brackets stands for any name, or the number in a list."""
    defaults: dict[str, list[str]] = field(default_factory=dict)
    """The pipelines and plug-ins that have it, by the default that it has there."""
    pipelines: list[str] = field(default_factory=list)
    """Those that have it."""
    readers: list[str] = field(default_factory=list)
    """The engines and verifiers that read it, of the options of those."""

    @property
    def type(self) -> str:
        """Type and choices in words."""
        return type_text(self.info.annotation, self.info.metadata)

    @property
    def range(self) -> str:
        """The bounds in words."""
        return range_text(self.info.metadata)

    @property
    def inside(self) -> list[str]:
        """The keys of the section that it holds."""
        section = section_of(self.info.annotation) or section_of(element_of(self.info.annotation))
        return list(section.model_fields) if section else []


@dataclass(frozen=True)
class Passed:
    """An argument that is passed on to an engine unchanged."""

    engine: str
    name: str
    type: str
    """Its annotation; empty where it is not made of plain types."""


@dataclass(frozen=True)
class Explanation:
    """Everything that a word can mean."""

    keys: list[Key]
    foreign: list[Any]
    """Keys of other systems that are called so."""
    passed: list[Passed]
    near: list[str]
    """Names that are alike, where nothing is called so."""

    def __bool__(self) -> bool:
        return bool(self.keys or self.foreign or self.passed)


def engine_options() -> tuple[Part, ...]:
    """The options of engines."""
    return tuple((card.name, "<role>.strategy_args.strategy_config", card.options) for card in cards())


def explain(word: str, schemas: Schemas, parts: Sequence[Part]) -> Explanation:
    """Everything that is called so, here or in another system.

    Args:
        word: a key, or the last parts of one; what stands behind ``=`` is left out.
    """
    path = tuple(ALIASES.get(part, part) for part in word.partition("=")[0].split("."))
    known = all_keys(schemas, parts)
    named = [key for key in known if key.name == path[-1]]
    exact = [
        key
        for key in named
        if any(ends_with(place, path) and place.count(".") + 1 == len(path) for place in key.places)
    ]
    keys = exact or [key for key in named if any(ends_with(place, path) for place in key.places)]
    foreign = extra("importers").called(path)
    passes = not keys and (len(path) == 1 or "strategy_config" in path)
    passed = list(_passed_on(path[-1])) if passes else []
    if not keys:  # those that they mean
        keys = [key for key in known if any(each.means(key.name, key.places) for each in foreign)]
    if keys or foreign or passed:
        return Explanation(keys, foreign, passed, [])
    return Explanation([], [], [], _alike(path, known))


@functools.cache
def _keys(schemas: tuple[tuple[str, type[Config]], ...], parts: tuple[Part, ...]) -> tuple[Key, ...]:
    found: dict[tuple[type[Config], str], Key] = {}
    for pipeline, schema in schemas:
        for place, section, name in _walk(schema):
            _add(pipeline, _note(found, section, name, place, pipeline).pipelines)
    for reader, path, options in parts:
        for place, section, name in _walk(options, f"{path}."):
            _add(reader, _note(found, section, name, place, reader).readers)
    return tuple(found.values())


def all_keys(schemas: Schemas, parts: Sequence[Part]) -> tuple[Key, ...]:
    """Every key of every pipeline and plug-in, those in lists and mappings included."""
    return _keys(tuple(schemas.items()), tuple(parts))


def _note(found: dict[tuple[type[Config], str], Key], section: type[Config], name: str, place: str, who: str) -> Key:
    origin = [base for base in section.__mro__ if name in getattr(base, "model_fields", {})][-1]
    key = found.setdefault((origin, name), Key(name, section.model_fields[name]))
    _add(place, key.places)
    _add(who, key.defaults.setdefault(default_text(section.model_fields[name]), []))
    return key


def _add(name: str, names: list[str]) -> None:
    if name not in names:
        names.append(name)


def _walk(
    section: type[Config], prefix: str = "", above: tuple[type[Config], ...] = ()
) -> Iterator[tuple[str, type[Config], str]]:
    """Path, section and name of every key, sections themselves too."""
    for name, each in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, section, name
        inner, part = section_of(each.annotation), ""
        if inner is None and (element := element_of(each.annotation)) is not None:
            inner = section_of(element)
            part = ".<number>" if "list" in type_text(each.annotation) else f".{_PLACEHOLDERS.get(name, '<name>')}"
        if inner is not None and inner not in above:
            yield from _walk(inner, f"{path}{part}.", (*above, section))


def _passed_on(name: str) -> Iterator[Passed]:
    for source in (card.source for card in cards() if card.source is not None):
        if name in (arguments := source.signature(None).arguments):
            yield Passed(source.engine, name, arguments[name])


def _alike(path: Sequence[str], known: Sequence[Key]) -> list[str]:
    theirs = extra("importers").key_names()
    names = [*dict.fromkeys([*(key.name for key in known), *sorted(theirs)])]
    wanted = path[-1].lower()
    near = difflib.get_close_matches(wanted, names, n=_NEAR, cutoff=0.6)
    holding = [name for name in names if len(wanted) > 3 and wanted in re.split(r"[_\W]+", name.lower())]
    return [*dict.fromkeys([*near, *holding])][:_NEAR]
