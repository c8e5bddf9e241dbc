"""Rows of plain values with their places, and everything that is wrong with a dataset."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHOWN_PROBLEMS = 20


class DataError(ValueError):
    """Everything that is wrong with a dataset.

    Attributes:
        problems: the first ``SHOWN_PROBLEMS``, as ``file:line: reason``.
        count: how many there are.
    """

    def __init__(self, problems: Sequence[str], count: int | None = None) -> None:
        self.problems = list(problems)
        self.count = len(problems) if count is None else count
        noun = "problem" if self.count == 1 else "problems"
        rest = [f"and {self.count - len(self.problems):,} more"] if self.count > len(self.problems) else []
        super().__init__("\n  ".join([f"{self.count:,} {noun} in the dataset", *self.problems, *rest]))


class Problems:
    """Collects problems; keeps the text of the first few and counts the rest."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._count = 0

    def add(self, place: str, reason: str) -> None:
        self._count += 1
        if len(self._shown) < SHOWN_PROBLEMS:
            self._shown.append(f"{place}: {reason}")

    def raise_any(self) -> None:
        """Raises ``DataError`` if there was any."""
        if self._count:
            raise DataError(self._shown, self._count)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset."""

    name: str
    """``file:row``, rows counted from 1; in JSON lines and CSV the row is the line that it starts in."""
    place: str
    """Place that a person looks for: ``file:line``, or ``file:row 7`` where there are no lines."""
    values: Mapping[str, Any]
    """JSON values by column; ``Unreadable`` where there is none."""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for an unreadable value: a problem of the row only if it is read."""

    reason: str
    value: Any = field(default=None, repr=False, compare=False)
    """What was read, such as bytes."""


def plain_row(name: str, place: str, values: object, problems: Problems) -> Row | None:
    """A row whose values are made JSON values, or ``Unreadable`` ones; ``None`` with a problem if it is no mapping."""
    if not isinstance(values, Mapping):
        problems.add(place, f"{kind_of(values)}, expected a mapping of columns")
        return None
    return Row(name, place, {str(column): _readable(value) for column, value in values.items()})


def _readable(value: Any) -> Any:
    try:
        return value if isinstance(value, Unreadable) else _plain(value, "")
    except TypeError as error:
        return Unreadable(str(error), value)


_ATOMS = (str, int, float, bool, type(None))


def _plain(value: Any, path: str) -> Any:
    """``value`` of JSON types only.

    Raises:
        TypeError: it holds something that JSON has no word for.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path}key {key!r}, expected text")
        return {str(key): _plain(entry, f"{key}: ") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, path) for entry in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), path)
    if isinstance(value, np.generic):
        return _plain(value.item(), path)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"{path}{type(value).__name__}, expected text, a number, a list or a mapping")


def kind_of(value: object) -> str:
    """A value's type in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
