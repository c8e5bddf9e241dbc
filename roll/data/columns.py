"""Columns per token, turn, row or item: declared once, as a field, and moved by one codec.

A field of a record (a request, a completion, a turn, an episode, a group) says along which axis it lies::

    class Completion:
        token_ids: Annotated[IntArray, Column(Axis.SAMPLED, np.int64)]
        logprobs: Annotated[FloatArray, Column(Axis.SAMPLED, np.float32, batch="rollout_logprobs_T")]

A field without ``Column`` is one value of its record. A column of ``Batch`` has its axis in its name: ``_T`` per token,
``_B`` per row, ``_I`` a tuple of items per row; a second letter (``_TE``) makes a vector of each entry.

``Records`` is many records as one value, for pickling: an array costs tens of microseconds to pickle, however short it
is, so those of all records travel as one. ``save`` and ``load`` are safetensors and JSON, so that reading runs no code.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ExpertArray: TypeAlias = npt.NDArray[np.int16]

UNKNOWN = -1
"""Entry of a column, such as the experts of a token, where nothing is known."""

_WORTH_COMPACTING = 4096
"""Bytes of an array that is sent in fewer; of others the time counts."""
_LEAST_RUN = 8
"""Equal neighbours, on average, from which on their number is worth its bytes."""

Record = TypeVar("Record")


class Axis(enum.Enum):
    """The unit that a column has an entry for."""

    PROMPT = "prompt"  # each token of the prompt
    SAMPLED = "sampled"  # each sampled token
    TOKEN = "token"  # each token of the prompt and the answer; what an earlier turn of the row knows of one, stays
    ROW = "row"  # the record as a whole
    ITEM = "item"  # each piece of content (``Item``) that belongs to the record
    SHARED = "shared"  # one value, a dataclass that is alike in most records but for its own columns


@dataclass(frozen=True)
class Column:
    """Declaration of a column."""

    axis: Axis = Axis.ROW
    dtype: type[np.generic] | None = None
    """Of an array, and of the column of the batch."""
    unset: int = 0
    """Entry where nothing is known."""
    batch: str | None = None
    """The column of ``Batch`` that it becomes; ``None``: it does not become one, or not by itself."""

    @functools.cached_property
    def is_array(self) -> bool:
        return self.axis in (Axis.PROMPT, Axis.SAMPLED, Axis.TOKEN)


_COLUMNS: dict[Any, dict[str, Column]] = {}


def columns_of(kind: Any) -> dict[str, Column]:
    """The columns of a class of records, in the order of its fields."""
    if kind not in _COLUMNS:
        declared = declared_columns(kind)
        _COLUMNS[kind] = {entry.name: declared.get(entry.name, Column()) for entry in fields(kind)}
    return _COLUMNS[kind]


def declared_columns(kind: Any) -> dict[str, Column]:
    """Those whose fields say what they are."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {
        name: [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Column)] for name, hint in hints.items()
    }
    return {name: found[0] for name, found in marks.items() if found}


@functools.cache
def columns_along(kind: Any, *axes: Axis) -> tuple[str, ...]:
    """The names of those along some axes."""
    return tuple(name for name, each in columns_of(kind).items() if each.axis in axes)


def suffix(name: str) -> str:
    """Axis letters of a column of ``Batch``, such as ``T`` or ``TE``."""
    return name.rpartition("_")[2]


def is_per_token(name: str) -> bool:
    """Tells a column of tokens from one of rows, by its name."""
    return suffix(name).startswith("T")


@dataclass(frozen=True, eq=False)
class Item:
    """A piece of content that rows refer to; it is moved and kept once, by its hash.

    A picture's ``data`` are its pixels as the model's processor has resized them: RGB, shape [height, width, 3]; a
    piece of a video has as many frames as the vision tower takes at a time, shape [frames, height, width, 3]. They may
    lie in an object store (``roll.data.stored``).
    """

    data: UInt8Array

    @classmethod
    def known(cls, data: Any, content_hash: str) -> Item:
        """One whose hash is known, so that the data need not be read for it."""
        item = cls(data)
        vars(item)["hash"] = content_hash
        return item

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of shape and bytes."""
        return hashlib.sha256(f"{self.data.shape}".encode() + self.data.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def distinct(items: Iterable[Item], known: dict[str, Item]) -> tuple[Item, ...]:
    """Each item once, in the order of its first place, and of equal ones the object that is in ``known``."""
    return tuple(dict.fromkeys(known.setdefault(item.hash, item) for item in items))


# --- many records as one value


@dataclass(frozen=True)
class Records(Generic[Record]):
    """Many records of one class: an array (``compact``) for each column of arrays, a list for each other."""

    kind: type[Record]
    values: dict[str, Any]
    lengths: dict[str, list[int]]
    """Entries that each record has in a column of arrays, -1 where it has none (``None``)."""

    @classmethod
    def of(
        cls, kind: type[Record], records: Sequence[Record], leave: Iterable[str] = (), **given: list[Any]
    ) -> Records[Record]:
        """Args:
            leave: columns that travel in another way.
            given: columns in place of the records' own.

        Raises:
            ValueError: columns of sampled tokens differ in length.
        """
        values: dict[str, Any] = {}
        lengths: dict[str, list[int]] = {}
        sampled: list[int] | None = None
        items: dict[str, Item] = {}
        for name, declared in columns_of(kind).items():
            if name in leave:
                continue
            entries = given[name] if name in given else [*map(attrgetter(name), records)]
            if declared.is_array:
                own = [-1 if entry is None else len(entry) for entry in entries]
                if declared.axis is Axis.SAMPLED:
                    sampled = own if sampled is None else sampled
                    own = sampled if own == sampled else _checked(kind, name, own, sampled)
                values[name], lengths[name] = compact(join(entries, declared)), own
            elif declared.axis is Axis.SHARED:
                values[name] = _Shared.of(entries)
            elif declared.axis is Axis.ITEM:
                values[name] = [tuple(items.setdefault(item.hash, item) for item in entry) for entry in entries]
            else:
                values[name] = entries
        return cls(kind, values, lengths)

    def __iter__(self) -> Iterator[Record]:
        return self.read()

    def read(self, **more: Iterable[Any]) -> Iterator[Record]:
        """The records; ``more`` are the columns that were left out."""
        entries = (more[name] if name in more else self._entries(name) for name in columns_of(self.kind))
        return map(self.kind, *entries)

    def _entries(self, name: str) -> Iterable[Any]:
        values = self.values[name]
        declared = columns_of(self.kind)[name]
        return cut(expand(values), self.lengths[name], declared) if name in self.lengths else values


def _checked(kind: type, name: str, lengths: list[int], expected: list[int]) -> list[int]:
    """Lengths that may be those of an axis: where a column has entries at all, as many as the others."""
    for got, wanted in zip(lengths, expected, strict=True):
        if got not in (-1, wanted):
            raise ValueError(f"{kind.__name__}.{name}: got {got} entries, expected {wanted}, as many as its tokens")
    return lengths


def join(entries: Iterable[np.ndarray | None], declared: Column) -> np.ndarray:
    """The arrays of a column end to end; an empty one may be of another dtype."""
    known = [entry for entry in entries if entry is not None]
    if not known:
        return np.zeros(0, declared.dtype)
    return np.concatenate(known, dtype=declared.dtype, casting="unsafe")


@dataclass(frozen=True)
class Compact:
    """A large array in fewer bytes, to be sent."""

    values: np.ndarray
    dtype: np.dtype[Any]
    counts: IntArray | None = None
    """How often each value stands in a row; ``None``: once."""


def compact(values: np.ndarray) -> np.ndarray | Compact:
    """An array to be sent: equal neighbours once, integers in the fewest bytes that hold them; ``expand`` undoes it.

    Masks, turns, versions, and advantages of whole episodes so cost bytes by the row and not by the token, ids of
    tokens half of their eight bytes. Equal means equal bits. Where nothing is saved, and if it is small, the array
    stays as it is.
    """
    if values.nbytes < _WORTH_COMPACTING:
        return values
    found = _narrow(values)
    if values.ndim == 1:
        bits = values.view(f"u{values.itemsize}")
        changes = bits[1:] != bits[:-1]
        if _LEAST_RUN * np.count_nonzero(changes) < len(changes):
            ends = np.append(changes.nonzero()[0], len(changes))
            return Compact(found[ends], values.dtype, _narrow(np.diff(ends, prepend=-1)))
    return values if found is values else Compact(found, values.dtype)


def expand(sent: np.ndarray | Compact) -> np.ndarray:
    """The array that ``compact`` was given."""
    if not isinstance(sent, Compact):
        return sent
    values = sent.values.astype(sent.dtype, copy=False)
    return values if sent.counts is None else np.repeat(values, sent.counts)


def num_bytes(sent: np.ndarray | Compact) -> int:
    """Bytes of an array to be sent."""
    if not isinstance(sent, Compact):
        return sent.nbytes
    return sent.values.nbytes + (0 if sent.counts is None else sent.counts.nbytes)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Integers in the fewest bytes that hold all of them."""
    if values.dtype.kind != "i":
        return values
    low, high = values.min(), values.max()
    kinds = (np.int8, np.int16, np.int32, np.int64)
    kind = next(kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return values.astype(kind, copy=False)


def cut(values: np.ndarray, lengths: Iterable[int], declared: Column) -> Iterator[np.ndarray | None]:
    """Parts of these lengths, copied: one that is kept for long must not keep the others."""
    start = 0
    for length in lengths:
        if length < 0:
            yield None
            continue
        yield values[start : start + length].astype(declared.dtype or values.dtype)
        start += length


@dataclass(frozen=True)
class _Shared:
    """Dataclasses that are alike in most records: the different ones, and of each record its own columns."""

    values: list[Any]
    uses: list[int]
    """Index into ``values`` of each record."""
    own: dict[str, list[Any]]

    @classmethod
    def of(cls, entries: Sequence[Any]) -> _Shared:
        if not entries:
            return cls([], [], {})
        kind: Any = type(entries[0])
        own, rest = _own_and_rest(kind)
        numbers: dict[Any, int] = {}
        values: list[Any] = []
        uses = []
        for entry in entries:
            number = numbers.setdefault(rest(entry), len(values))
            if number == len(values):
                values.append(entry)
            uses.append(number)
        return cls(values, uses, {name: [*map(attrgetter(name), entries)] for name in own})

    def __iter__(self) -> Iterator[Any]:
        own = zip(*self.own.values(), strict=True)
        for use, values in zip(self.uses, own, strict=True):
            shared = self.values[use]
            yield type(shared)(**{**vars(shared), **dict(zip(self.own, values, strict=True))})


@functools.cache
def _own_and_rest(kind: Any) -> tuple[tuple[str, ...], attrgetter[Any]]:
    """Declared columns of a shared dataclass, and the value of all other fields."""
    own = tuple(declared_columns(kind))
    return own, attrgetter(*(entry.name for entry in fields(kind) if entry.name not in own))


# --- along the tokens of a row


def unknown(num_tokens: int, width: Sequence[int], declared: Column) -> np.ndarray:
    """Entries for tokens of which nothing is known."""
    return np.full((num_tokens, *width), declared.unset, declared.dtype)


def continued(earlier: np.ndarray | None, later: np.ndarray, declared: Column) -> np.ndarray:
    """A ``TOKEN`` column of a row that a later turn continues: for each token what was known first.

    What the tokens after it were sampled under is that; what a later prompt goes through may differ.
    """
    if earlier is None:
        return later
    merged = later.copy()
    merged[: len(earlier)] = np.where(earlier == declared.unset, later[: len(earlier)], earlier)
    return merged


# --- on disk


def save(folder: Path, name: str, value: Any) -> None:
    """Writes nested dataclasses, lists and tuples into ``folder``, which is made: ``name``.safetensors and .json.

    Arrays of one dtype lie end to end in one tensor, and each item there once. In the JSON, ``[dtype, start, end, …]``
    stands for each of them, with the shape of an entry behind.
    """
    from safetensors.numpy import save_file

    writer = _Writer()
    rest = writer.plain(value)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({kind: np.concatenate(parts) for kind, parts in writer.parts.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(rest), encoding="utf-8")


def load(folder: Path, name: str, kind: type[Record]) -> Record | None:
    """What ``save`` has written of an object of that class, equal in every field; ``None`` where there is nothing."""
    from safetensors.numpy import load_file

    if not (folder / f"{name}.json").exists():
        return None
    arrays = load_file(folder / f"{name}.safetensors")
    value: Record = _Reader(arrays).value(kind, json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
    return value


class _Writer:
    """Takes the arrays out of a value."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        """By dtype."""
        self._lengths: defaultdict[str, int] = defaultdict(int)
        self._items: dict[str, list[str | int]] = {}

    def plain(self, value: Any) -> Any:
        """The value as JSON can hold it."""
        kind: Any = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if isinstance(value, Item):
            if value.hash not in self._items:
                self._items[value.hash] = self._add(value.data)
            return self._items[value.hash]
        if (names := _field_names(kind)) is not None:
            values = [getattr(value, name) for name in names]
            return {
                name: each if type(each) in _AS_THEY_ARE else self.plain(each)
                for name, each in zip(names, values, strict=True)
            }
        if isinstance(value, tuple | list):
            return [self.plain(item) for item in value]
        if isinstance(value, bytes):
            value = np.frombuffer(value, dtype=np.uint8)
        return self._add(value) if isinstance(value, np.ndarray) else value

    def _add(self, array: np.ndarray) -> list[str | int]:
        kind = _dtype_name(array.dtype)
        start = self._lengths[kind]
        self.parts[kind].append(array.reshape(-1))
        self._lengths[kind] += array.size
        return [kind, start, start + array.size, *array.shape[1:]]


class _Reader:
    """Builds a value by the types of its fields."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._items: dict[int, Item] = {}
        """By where they begin."""

    def value(self, kind: Any, saved: Any) -> Any:
        """What ``saved`` stands for, of that type."""
        origin = get_origin(kind) or kind
        if saved is None or isinstance(saved, bool | int | float):
            return saved
        if origin in (Union, types.UnionType):
            choices = [each for each in get_args(kind) if each is not type(None)]
            return self.value(str if isinstance(saved, str) and str in choices else choices[0], saved)
        if origin in (tuple, list):
            return origin(self.value(get_args(kind)[0], item) for item in saved)
        if origin is np.ndarray or origin is bytes:
            array = self._array(saved)
            return array.tobytes() if origin is bytes else array
        if origin is Item:
            return self._items.setdefault(saved[1], Item(self._array(saved)))
        if is_dataclass(origin) and isinstance(origin, type):
            hints = _hints(origin)
            return origin(**{name: self.value(hints[name], each) for name, each in saved.items()})
        return origin(saved) if isinstance(origin, type) and issubclass(origin, enum.Enum) else saved

    def _array(self, place: Sequence[Any]) -> np.ndarray:
        kind, start, end, *width = place
        array = self._arrays[kind][start:end] if kind in self._arrays else np.zeros(0, kind)
        return array.reshape(-1, *width) if width else array


_AS_THEY_ARE = frozenset({types.NoneType, bool, int, float, str})


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy composes it anew each time


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Those of a dataclass; ``None`` of another class."""
    return tuple(entry.name for entry in fields(kind)) if is_dataclass(kind) else None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
