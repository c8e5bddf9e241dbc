"""Columns, parts of records, and items that lie in blocks of an object store; whoever reads one fetches it.

The rows of a large step are too many bytes for one process. Whoever makes a column leaves it in a block near by, and
what passes through the driver says where each row lies, with the sum of its entries: ``Stored``, of all rows of a
batch, and ``Piece``, of one turn. A class whose fields ``may_be_stored`` holds them like any other value: they are
fetched when they are read for the first time, and then kept. The data of a large item travel so wherever it goes, once
whoever prepared it has ``leave``d them.

Importing this module does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from roll.data.columns import Compact, IntArray, Item, compact, expand

if TYPE_CHECKING:
    from torch import Tensor

Kind = TypeVar("Kind", bound=type)
Arrays: TypeAlias = "Mapping[str, np.ndarray | Compact]"


class Block(Hashable, Protocol):
    """Arrays by name, in an object store."""

    @classmethod
    def fetch(cls, blocks: Sequence[Any]) -> list[Arrays]:
        """What these blocks hold."""
        ...


@dataclass(frozen=True, eq=False)
class Held:
    """A block that is here, and travels with whoever refers to it."""

    arrays: Arrays

    @classmethod
    def fetch(cls, blocks: Sequence[Held]) -> list[Arrays]:
        return [block.arrays for block in blocks]


TEXTS = "texts"
"""Texts end to end in UTF-8, in a block."""


@dataclass(eq=False)
class Piece:
    """A part of an array in a block, or one of its texts: a field of a record, or the data of an item."""

    block: Block
    name: str
    start: int = 0
    end: int | None = None
    """``None``: all of the array, as it lies there."""
    figures: Any = None
    """What whoever left it there has computed, for those who then need not read it."""

    def __len__(self) -> int:
        assert self.end is not None, "of arrays that are one piece nobody asks"
        return self.end - self.start

    @cached_property
    def value(self) -> Any:
        """The entries or the text, fetched."""
        return self.cut(expand(self.block.fetch([self.block])[0][self.name]))

    def cut(self, array: np.ndarray) -> Any:
        """The same, out of the whole array; of a part a copy, which does not keep the others."""
        if self.end is None:
            return array
        part = array[self.start : self.end]
        return part.tobytes().decode("utf-8", "surrogatepass") if self.name == TEXTS else part.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without what was fetched."""
        return Piece, tuple(getattr(self, entry.name) for entry in fields(self))


def unread(records: Iterable[Any]) -> list[Piece]:
    """The pieces of records that have not been fetched."""
    pieces = (value for record in records for value in vars(record).values() if isinstance(value, Piece))
    return [piece for piece in pieces if "value" not in vars(piece)]


def hold(records: Iterable[Any]) -> None:
    """Fetches all of them at once."""
    missing = unread(records)
    blocks = [*dict.fromkeys(piece.block for piece in missing)]
    found = dict(zip(blocks, blocks[0].fetch(blocks), strict=True)) if blocks else {}
    whole: dict[tuple[Block, str], np.ndarray] = {}
    for piece in missing:
        key = piece.block, piece.name
        if key not in whole:
            whole[key] = expand(found[piece.block][piece.name])
        piece.value = piece.cut(whole[key])


def pack_texts(texts: Iterable[str]) -> tuple[np.ndarray, list[int]]:
    """Texts as ``TEXTS``, and where each ends."""
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return np.frombuffer(b"".join(parts), dtype=np.uint8), [*accumulate(map(len, parts))]


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of a batch lie."""

    blocks: tuple[Block, ...]
    block_B: IntArray
    """The number of each row's block; -1: it lies nowhere."""
    start_B: IntArray
    """Each row's first token within its block."""
    lengths_B: IntArray

    def select(self, rows: IntArray) -> Places:
        """The given rows, with the blocks that they need."""
        used, block_B = np.unique(self.block_B[rows], return_inverse=True)
        blocks = tuple(self.blocks[number] for number in used if number >= 0)
        return Places(blocks, block_B - (len(used) - len(blocks)), self.start_B[rows], self.lengths_B[rows])

    @classmethod
    def joined(cls, lengths_B: Tensor, rows: Iterable[Tensor], parts: Iterable[Places]) -> Places:
        """Of rows of these lengths: some are those of the parts, the others lie nowhere."""
        blocks: list[Block] = []
        block_B, start_B = np.full(len(lengths_B), -1), np.zeros(len(lengths_B), dtype=np.int64)
        for own, part in zip(rows, parts, strict=True):
            block_B[own.numpy()] = part.block_B + len(blocks)
            start_B[own.numpy()] = part.start_B
            blocks += part.blocks
        return cls(tuple(blocks), block_B, start_B, lengths_B.numpy())


@dataclass(frozen=True, eq=False)
class Stored:
    """A column over the tokens of a batch, in blocks."""

    name: str
    """Its name in them."""
    places: Places
    dtype: np.dtype[Any]
    width: tuple[int, ...]
    """Shape of an entry."""
    sums_B: npt.NDArray[np.float64] | None
    """Of each row: of numbers with fractions the sum, of several integers how many are known (at least 0), but for the
    last token's; ``None``: of others."""
    unset: int = 0
    """Entry of rows that lie nowhere."""
    factor: float = 1.0
    """Multiplies entries when they are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.places.lengths_B.sum()), *self.width)

    @property
    def is_finite(self) -> bool:
        """Tells whether all entries are finite numbers; false also where that is not known."""
        return self.sums_B is not None and bool(np.isfinite(self.sums_B).all())

    @cached_property
    def value(self) -> Tensor:
        """The entries, fetched."""
        return read([self])[0]

    def with_value(self, value: Tensor) -> Stored:
        """The same, of entries that are here too."""
        vars(self)["value"] = value
        return self

    def select(self, rows: IntArray, places: Places) -> Stored:
        """The given rows, which lie at ``places``."""
        return replace(self, places=places, sums_B=None if self.sums_B is None else self.sums_B[rows])

    def assembled(self, found: Mapping[Block, Arrays]) -> Tensor:
        """The entries, out of blocks."""
        import torch

        arrays = [expand(found[block][self.name]) for block in self.places.blocks]
        each = zip(self.places.block_B, self.places.start_B, self.places.lengths_B, strict=True)
        rows = [
            arrays[block][start : start + length] if block >= 0 else np.full((length, *self.width), self.unset)
            for block, start, length in each
        ]
        nothing = np.zeros((0, *self.width), self.dtype)
        values = np.concatenate([nothing, *rows], dtype=self.dtype, casting="unsafe")
        return torch.from_numpy(values if self.factor == 1 else (values * np.float64(self.factor)).astype(self.dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without what was fetched."""
        return Stored, tuple(getattr(self, entry.name) for entry in fields(self))


def store(columns: Mapping[str, Tensor], lengths_B: Tensor, put: Callable[[Arrays], Block]) -> dict[str, Stored]:
    """Puts columns of the same rows into one block."""
    arrays = {name: column.detach().cpu().numpy() for name, column in columns.items()}
    start_B = (lengths_B.cumsum(0) - lengths_B).numpy()
    block = put({name: compact(values) for name, values in arrays.items()})
    places = Places((block,), np.zeros(len(lengths_B), dtype=np.int64), start_B, lengths_B.numpy())
    return {
        name: Stored(name, places, values.dtype, values.shape[1:], _sums(values, start_B, lengths_B.numpy()))
        for name, values in arrays.items()
    }


def _sums(values: np.ndarray, start_B: IntArray, lengths_B: IntArray) -> npt.NDArray[np.float64] | None:
    if values.ndim == 2 and values.dtype.kind == "i":
        values = (values >= 0).sum(1, dtype=np.float64)
        values[start_B + lengths_B - 1] = 0
    if values.ndim > 1 or values.dtype.kind != "f":
        return None
    return np.add.reduceat(values, start_B, dtype=np.float64) if len(start_B) else np.zeros(0)


def joined(columns: Sequence[Stored], lengths_B: Tensor, rows: Sequence[Tensor], unset: int = 0) -> Stored:
    """A column of a batch from those of its parts, which have these rows of it."""
    places = Places.joined(lengths_B, rows, [column.places for column in columns])
    sums_B = None
    if all(column.sums_B is not None for column in columns):
        sums_B = np.zeros(len(lengths_B))
        for own, column in zip(rows, columns, strict=True):
            sums_B[own.numpy()] = column.sums_B
    return replace(columns[0], places=places, sums_B=sums_B, unset=unset)


def scaled(column: Tensor | Stored, factor: float) -> Tensor | Stored:
    """The column with each entry multiplied, in float64, and rounded again; a stored one when it is read."""
    if isinstance(column, Stored):
        sums_B = None if column.sums_B is None else column.sums_B * factor
        return replace(column, sums_B=sums_B, factor=column.factor * factor)
    return (column.double() * factor).to(column.dtype)


def read(columns: Sequence[Stored]) -> list[Tensor]:
    """The entries of columns, fetched at once."""
    blocks = [*dict.fromkeys(block for column in columns for block in column.places.blocks)]
    found = dict(zip(blocks, type(blocks[0]).fetch(blocks), strict=True)) if blocks else {}
    return [column.assembled(found) for column in columns]


class _MaybeStored:
    """Attribute that may be stored."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, record: Any, kind: type | None = None) -> Any:
        if record is None:
            return None
        value = vars(record)[self._name]
        return value.value if isinstance(value, Stored | Piece) else value

    def __set__(self, record: Any, value: Any) -> None:
        vars(record)[self._name] = value


def may_be_stored(*names: str) -> Callable[[Kind], Kind]:
    """Decorates a dataclass: these fields may be ``Stored`` or a ``Piece``, which ``vars`` shows; reading fetches."""

    def decorate(kind: Kind) -> Kind:
        for name in names:
            setattr(kind, name, _MaybeStored(name))
        return kind

    return decorate


may_be_stored("data")(Item)

_LARGE = 100_000
"""Bytes of an item that is worth a block of its own; Ray sends smaller objects along with a call."""
_left = WeakValueDictionary[str, Piece]()
"""What has been left by this process, by hash."""
_leaving = threading.Lock()


def heavy(items: Iterable[Item]) -> list[Item]:
    """Those that are large and travel with all of their data."""
    return [item for item in items if isinstance(data := vars(item)["data"], np.ndarray) and data.nbytes >= _LARGE]


def leave(items: Iterable[Item], put: Callable[[Arrays], Block]) -> None:
    """Moves the data of large items into blocks, of equal items into one; they are read there from now on.

    May be called in several threads.
    """
    with _leaving:
        for item in heavy(items):
            piece = _left.get(item.hash)
            if piece is None:
                piece = _left[item.hash] = Piece(put({item.hash: item.data}), item.hash)
            vars(item)["data"] = piece
            hold([item])
