"""A configuration that is being converted, and the outcome of each key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from roll.configs.problems import NOTHING
from roll.configs.schema import ROLES
from roll.extras.importers import table
from roll.extras.importers.reading import Given
from roll.extras.importers.table import TRANSFORMS, Omitted, Partial, Row, Untranslatable, fill, find

_NAMES = ("file", "path", "dir", "name")
"""Parts of keys whose values are places and names, not numbers."""
_ARGUMENT = re.compile(r"\$\(echo \$(\d+)\)")
USUAL = "its default there, as if it were not given"
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")


def _may_be_a_number(text: str) -> bool:
    """A number, nothing, or what a link reads."""
    try:
        float(text)
    except ValueError:
        return not text or "${" in text or text.lower() in ("null", "none")
    return True


class Kind(StrEnum):
    """Kind of outcome that a key has."""

    KEPT = "kept"
    RENAMED = "renamed"
    TRANSLATED = "translated"
    DERIVED = "derived"
    THEIRS = "their default"
    DROPPED = "dropped"
    TO_DO = "left to you"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown to the importer"


@dataclass(frozen=True)
class Outcome:
    """Outcome of the import for one key."""

    kind: Kind
    key: str
    """Theirs, dotted."""
    got: Any
    ours: str = ""
    value: Any = NOTHING
    note: str = ""


class Draft:
    """Takes the keys of a foreign configuration one by one, by the rows of its system's table.

    Args:
        system: a key of ``SYSTEMS``.
        given: what the files say.
    """

    def __init__(self, system: str, given: Given) -> None:
        self.system = system
        self.given = given
        self.ours: dict[str, Any] = {}
        """Our configuration, as far as it is known."""
        self.outcomes: list[Outcome] = []
        self.unknown: list[tuple[str, Any]] = []
        """Keys that the table has no row for."""
        self.last_read = ""
        """Key, theirs or ours, that was read last."""
        self._left_to_derive: list[tuple[Row, str, Any]] = []

    def take_all(self) -> None:
        """Applies the rows; keys that are to be derived wait for ``theirs``."""
        self._settle_variables(self.given.values, ())
        self._tell_unread()
        self._take_section(self.given.values, ())
        told = {outcome.ours for outcome in self.outcomes if outcome.ours}
        for row in table.rows(self.system):
            silent = row.default is not NOTHING and "<" not in row.key and not self.has(row.key)
            if silent and (row.ours or row.key) not in told:  # another spelling of theirs may have said it
                self._apply(row, {}, row.key, row.default, Kind.THEIRS)

    def _settle_variables(self, values: dict[str, Any], path: tuple[str, ...]) -> None:
        """Takes out numbers and switches that only the environment of a shell knows."""
        for name, value in list(values.items()):
            here = (*path, name)
            if isinstance(value, dict):
                self._settle_variables(value, here)
            elif isinstance(value, str) and (variable := _VARIABLE.fullmatch(value)):
                if isinstance(usual := self._usual(here), int | float) and variable[1] in os.environ:
                    values[name] = yaml.safe_load(os.environ[variable[1]])
                elif isinstance(usual, int | float):
                    self._take_usual(values, here, usual, "no line of the files sets it")
            elif isinstance(value, str) and not _may_be_a_number(value):
                usual = self._usual(here, ("", table.DERIVE))
                if isinstance(usual, int | float) and not isinstance(usual, bool):
                    self._take_usual(values, here, usual, "it is not a number")

    def _usual(self, path: Sequence[str], hows: Container[str] | None = None) -> Any:
        """Value that a key of theirs has when it is not given, if a row (that says one of ``hows``) knows it."""
        found = find(self.system, path)
        return NOTHING if found is None or (hows is not None and found[0].how not in hows) else found[0].default

    def _take_usual(self, values: dict[str, Any], path: tuple[str, ...], usual: Any, why: str) -> None:
        """Takes out a value that cannot be read, so that the usual one stands for it."""
        key = ".".join(path)
        self.tell(Kind.IMPOSSIBLE, key, values.pop(path[-1]), note=f"{why}: {usual} is taken; give {key}=…")

    def _tell_unread(self) -> None:
        """Notes what only a shell can tell, unless it is given after all."""
        for key, value in self.given.unread.items():
            found = find(self.system, key.split("."))
            if found is not None and found[0].how == table.DROP:
                continue
            usual = found[0].default if found is not None else NOTHING
            taken = "" if usual in (NOTHING, None) else f" {usual} is taken;"
            named = any(word in key.rpartition(".")[2] for word in _NAMES)
            why = "a shell computes its value"
            give = f"{key}=…"
            if argument := _ARGUMENT.fullmatch(value.text):
                why = f"it is argument {argument[1]} of the script"
            elif value.by:
                names = " and ".join(value.by)
                why = f"it depends on {names}, which nothing sets"
                give = f"{' '.join(f'--set {name}=…' for name in value.by)}, or {give}"
            note = f"{why};{taken} give {give}"
            self.tell(Kind.TO_DO if named else Kind.IMPOSSIBLE, key, value.text, note=note)

    def _take_section(self, values: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, value in values.items():
            here = (*path, name)
            found = find(self.system, here)
            rest = found is not None and found[0].parts[-1] == "**"
            if isinstance(value, dict) and value and (found is None or found[0].how == table.SECTION or rest):
                self._take_section(value, here)
            elif found is None and self.is_usual(key := ".".join(here), value):
                self.tell(Kind.DROPPED, key, value, note=USUAL)
            elif found is None:
                self.unknown.append((".".join(here), value))
            elif found[0].how != table.SECTION:
                self._apply(found[0], found[1], ".".join(here), value)

    def _apply(self, row: Row, found: dict[str, str], key: str, value: Any, given: Kind | None = None) -> None:
        self.last_read = key
        if row.how == table.DERIVE:  # the system's own function reads it
            if given is None:
                self._left_to_derive.append((row, key, value))
            return
        if row.how == table.DROP:
            if given is None:
                self.tell(Kind.DROPPED, key, value, note=row.note)
            return
        if row.how == table.IMPOSSIBLE:
            usual = row.default is NOTHING and self.is_usual(key, value)
            harmless = usual or any(_same(value, each) for each in row.harmless)
            if given is None or not harmless:
                note = (USUAL if usual else "this happens here anyway") if harmless else row.note
                self.tell(Kind.DROPPED if harmless else Kind.IMPOSSIBLE, key, value, note=note)
            return
        ours = fill(row.ours, found) or key
        try:
            new, note = (TRANSFORMS[row.how](value) if row.how else value), row.note
        except Untranslatable as error:
            self.tell(Kind.IMPOSSIBLE, key, value, ours, note=str(error))
            return
        except Omitted as why:
            if given is None:
                self.tell(Kind.DROPPED, key, value, note=str(why))
            return
        except Partial as some:
            new, note = some.value, str(some)
        self.set(ours, new)
        for setting in row.beside:
            self.set(fill(setting.key, found), setting.value)
        kind = Kind.KEPT if key == ours else Kind.RENAMED
        kind = kind if _same(new, value) and not row.beside else Kind.TRANSLATED
        self.tell(given or kind, key, value, ours, new, note)

    def tell_unused(self) -> None:
        """Notes the keys that would have been derived from, had they been needed: none goes without a word."""
        told = {key for outcome in self.outcomes for key in outcome.key.split(", ")}
        for row, key, value in self._left_to_derive:
            if not any(key == each or each.startswith(f"{key}.") or key.startswith(f"{each}.") for each in told):
                note = row.note or "nothing follows from it here"
                self.tell(Kind.DROPPED, key, value, note=note)

    def theirs(self, key: str, default: Any = None) -> Any:
        """Value of a key of theirs; else the default of its row, else ``default``."""
        self.last_read = key
        value = value_at(self.given.values, key)
        if value is NOTHING:
            value = self._usual(key.split("."))
        return default if value is NOTHING else value

    def is_usual(self, key: str, value: Any) -> bool:
        """Tells whether a value says no more than the key's absence would: it is a default there."""
        values = table.usual(self.system, key).values
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)

    def rule(self, key: str) -> str:
        """What the row of a key of theirs says of it; empty where there is none."""
        found = find(self.system, key.split("."))
        return found[0].how if found else ""

    def has(self, key: str) -> bool:
        """Tells whether the files give a key of theirs."""
        return value_at(self.given.values, key) is not NOTHING

    def link(self, key: str) -> Any:
        """Value of a key of theirs in the files, before links are followed."""
        return value_at(self.given.links, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key of ours, as far as it is known."""
        self.last_read = key
        value = value_at(self.ours, key)
        return default if value is NOTHING else value

    def set(self, key: str, value: Any) -> None:
        """Gives a key of ours its value, sections made where they are missing."""
        *above, last = key.split(".")
        node = self.ours
        for part in above:
            inside = node.setdefault(part, {})
            if not isinstance(inside, dict):
                inside = node[part] = {}
            node = inside
        node[last] = value

    def remove(self, key: str) -> Any:
        """Takes a key of ours out, and the sections that it leaves empty; returns its value."""
        *above, last = key.split(".")
        node = value_at(self.ours, ".".join(above)) if above else self.ours
        value = node.pop(last, NOTHING) if isinstance(node, dict) else NOTHING
        if above and node == {}:
            self.remove(".".join(above))
        return value

    def tell(self, kind: Kind, key: str, got: Any, ours: str = "", value: Any = NOTHING, note: str = "") -> None:
        """Notes what has become of a key of theirs."""
        self.outcomes.append(Outcome(kind, key, got, ours, value, note))

    def derive(self, keys: Sequence[str] | str, ours: str, value: Any, note: str = "") -> None:
        """Gives a key of ours a value that follows from several of theirs, in place of the default of one of them."""
        keys = [keys] if isinstance(keys, str) else keys
        self.outcomes = [each for each in self.outcomes if (each.kind, each.ours) != (Kind.THEIRS, ours)]
        self.set(ours, value)
        given = [key for key in keys if self.has(key)] or list(keys[:1]) or ["its algorithm and data"]
        self.tell(Kind.DERIVED, ", ".join(given), NOTHING, ours, value, note)

    def carry(self, key: str, ours: str, kind: Callable[[Any], Any] | None = None, note: str = "") -> None:
        """Gives a key of ours the value of one of theirs, of a kind if asked, where they have one that is not null."""
        if (value := self.theirs(key)) is not None:
            self.derive(key, ours, value if kind is None else kind(value), note)

    def carry_set(self, key: str, ours: str, kind: Callable[[Any], Any] | None = None, note: str = "") -> None:
        """The same where it is not false, 0 or empty either: it asks for nothing then."""
        if self.theirs(key):
            self.carry(key, ours, kind, note)

    def keep(self, key: str, value: Any) -> None:
        """Takes a key of theirs, which is one of ours, with its value."""
        self.set(key, value)
        self.tell(Kind.KEPT, key, value, key, value)

    def translate(self, keys: Sequence[str], ours: str, how: str, value: Any) -> None:
        """Gives a key of ours what a value of theirs is here by one of ``TRANSFORMS``; that there is none is told."""
        try:
            self.derive(keys, ours, TRANSFORMS[how](value))
        except Untranslatable as error:
            self.tell(Kind.IMPOSSIBLE, keys[0], value, ours, note=str(error))

    def drop_ours(self, key: str, note: str) -> None:
        """Takes out a key of ours that the configuration does not need, and says so."""
        if (value := self.remove(key)) is not NOTHING:
            self.retell(key, Kind.DROPPED, note, value)

    def retell(self, ours: str, kind: Kind, note: str, got: Any = NOTHING) -> None:
        """Changes what was noted of the keys that became one of ours, or lie below it."""
        about = [each for each in self.outcomes if each.ours == ours or each.ours.startswith(f"{ours}.")]
        self.outcomes = [each for each in self.outcomes if each not in about]
        told = {each.key: each.got for each in about if each.kind != Kind.THEIRS}
        if len(told) > 1 and all(key.startswith(f"{ours}.") for key in told):
            told = {ours: "a section"}
        for key, value in told.items() if about else [(ours, got)]:
            self.tell(kind, key, value, note=note)

    def forget(self, ours: str) -> None:
        """Takes out a key or section of ours and all that was noted of it, for another one."""
        self.remove(ours)
        self.outcomes = [each for each in self.outcomes if not f"{each.ours}.".startswith(f"{ours}.")]

    def roles(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The model roles of ours that are there."""
        for role in ROLES:
            section = self.ours.get(role)
            if isinstance(section, dict):
                yield role, section


def value_at(values: Any, key: str) -> Any:
    """Value at a dotted key; ``NOTHING`` where there is none."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return NOTHING
        values = values[part]
    return values


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other
