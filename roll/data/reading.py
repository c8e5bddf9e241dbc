"""One pass over a dataset: the rows that its filter keeps, what they become, and all problems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from roll.configs.data import DataArguments
from roll.configs.resuming import Rows
from roll.data.addresses import Address
from roll.data.files import DataError, Problems, Row, Unreadable, plain_row, read_rows
from roll.data.pictures import Reach, Source
from roll.data.prompt_rows import RowError, passes, picture_reach, unread_columns
from roll.data.row_pictures import counted, fetch, sources_in
from roll.data.tool_messages import Message
from roll.utils.foreign import describe_error
from roll.utils.hashing import Checksum, derive_seed
from roll.utils.progress import advance
from roll.utils.registry import import_path

T = TypeVar("T")


@dataclass
class Reading:
    """Reads the rows that ``args`` selects; problems are collected and raised together."""

    args: DataArguments
    seed: int
    """Of the run; it draws ``dataset_filter.num_samples`` and goes to ``dataset_cls``."""
    head: int | None = None
    """Most rows of each file."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By the type of a part, ``image`` or ``video``, why rows must have no such part; empty: they may."""
    problems: Problems = field(default_factory=Problems)
    counts: Counter[str] = field(default_factory=Counter)
    """``rows`` read and ``filtered`` out, and what a loader counts of the others."""
    notes: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """What is worth knowing of the rows of a file: how many, and the place of the first."""
    unread: dict[str, dict[str, None]] = field(default_factory=dict)
    """Columns of each file that nobody reads."""
    _content: Any = field(default_factory=Checksum, repr=False)
    _place: str = ""
    """Of the row that is read."""
    _elsewhere: list[tuple[str, Source]] = field(default_factory=list, repr=False)
    """Pictures to fetch, with the places of their rows."""

    def note(self, file: str, what: str, place: str) -> None:
        """Counts a row of a file."""
        count, first = self.notes.get((file, what), (0, place))
        self.notes[file, what] = count + 1, first

    def noted(self) -> tuple[str, ...]:
        """Account of the notes and of unused columns, a line each."""
        lines = [
            f"warning: {file}: {what}: {count:,} {'row' if count == 1 else 'rows'}, the first {place}"
            for (file, what), (count, place) in self.notes.items()
        ]
        unread = self.unread.items()
        return (*lines, *(f"data: {file}: unused columns: {', '.join(columns)}" for file, columns in unread))

    def leaves(self, row: Row, *read: str) -> None:
        """Notes the columns of a row that neither ``args`` nor ``read`` name."""
        if columns := unread_columns(row.values, self.args, read):
            self.unread.setdefault(row.file, {}).update(dict.fromkeys(columns))

    def each(self, make: Callable[[Row], T]) -> Iterator[T]:
        """Yields what is made of the rows that ``dataset_filter`` keeps; others may be of another shape."""
        for row in self._rows():
            self.counts["rows"] += 1
            advance()
            try:
                if passes(row.values, self.args.dataset_filter):
                    text = json.dumps(row.values, sort_keys=True, default=str)
                    self._content.update(f"{text}\n".encode())
                    for column in filter(
                        None, (self.args.image, self.args.video, self.args.messages, self.args.prompt)
                    ):
                        self._add_bytes(row.values.get(column))
                    self._place = row.place
                    yield make(row)
                else:
                    self.counts["filtered"] += 1
            except RowError as error:
                self.problems.add(row.place, str(error))

    def reach(self, row: Row) -> Reach:
        """Where a row's pictures may lie."""
        return picture_reach(self.args, row.file)

    def allow(self, messages: Sequence[Message]) -> None:
        """Looks whether a row may have its pictures, which ``require`` fetches if they are elsewhere.

        Raises:
            RowError: it has some, and must have none.
        """
        sources = sources_in(messages)
        for kind, why in self.refused.items():
            if why and (shown := [source for source in sources if source.is_video == (kind == "video")]):
                unread = f"data_args.{kind}: null: the column is not read"
                raise RowError(f"{counted(shown)}, but {why} ({unread})")
        self._elsewhere += [(self._place, each) for each in sources if isinstance(each.found, Address)]

    def _add_bytes(self, value: Any) -> None:
        """Adds the bytes of pictures, which are no JSON, to the content."""
        if isinstance(value, Unreadable):
            self._add_bytes(value.value)
        elif isinstance(value, bytes):
            self._content.update(value)
        elif isinstance(value, Mapping | list):
            for each in value.values() if isinstance(value, Mapping) else value:
                self._add_bytes(each)

    def _rows(self) -> Iterator[Row]:
        """The rows of the dataset's files or class."""
        args = self.args
        if args.dataset_cls is None:
            yield from read_rows(args.file_names, self.problems, self.head)
            return
        for number, values in enumerate(self._of_class(args.dataset_cls), 1):
            row = plain_row(f"{args.dataset_cls}:{number}", f"{args.dataset_cls}:row {number}", values, self.problems)
            if row is not None:
                yield row

    def _of_class(self, path: str) -> Iterator[Any]:
        """What a user's function yields; raises ``DataError`` for whatever it raises."""
        make = cast(Any, import_path(path, "data_args.dataset_cls"))
        try:
            yield from make(self.args, self.seed)
        except DataError:
            raise
        except Exception as error:
            expected = "expected rows as mappings, returned by a call with (data_args, seed)"
            raise DataError([f"data_args.dataset_cls {path}: {describe_error(error)}; {expected}"]) from error

    def identity(self, samples: int) -> Rows:
        """What tells the dataset from others, once it was read: the content of its rows, wherever they lie.

        Args:
            samples: how many the run has of them.
        """
        return Rows(self.counts["rows"] - self.counts["filtered"], samples, self._content.hexdigest())

    def drawn(self, samples: Iterable[T]) -> list[T]:
        """``dataset_filter.num_samples`` of them, in their order."""
        found, wanted = list(samples), self.args.dataset_filter.num_samples
        if wanted == 0 or wanted >= len(found):
            return found
        self.counts["filtered"] += len(found) - wanted
        if not self.args.shuffle:
            return found[:wanted]
        self._content.update(f"{wanted} of them, by {self.seed}".encode())
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "prompts", "num_samples")))
        return [found[index] for index in np.sort(generator.permutation(len(found))[:wanted])]

    def require(self, samples: Sequence[object]) -> None:
        """Raises all that was wrong, or that nothing is left; fetches pictures of rows that are right otherwise.

        Raises:
            DataError: by file and line.
        """
        self.problems.raise_any()
        if self.head is None and self._elsewhere:
            for digest in fetch(self._elsewhere, self.problems):
                self._content.update(digest.encode())
        self.problems.raise_any()
        if not samples:
            rows, where = self.counts["rows"], self.args.dataset_cls or ", ".join(self.args.file_names)
            why = f"dataset_filter removed all {rows:,} rows" if rows else "no rows"
            raise DataError([f"{where}: {why}"])

    def checked(self, tags: Iterable[str]) -> tuple[Counter[str], bool]:
        """Samples by tag of the first ``head`` rows of each file, and whether these are all.

        Raises:
            DataError: everything that is wrong with them, or that there are none.
        """
        found = list(tags)
        self.problems.raise_any()
        assert self.head is not None
        whole = self.counts["rows"] < self.head
        if whole:  # otherwise the filter may keep some of the others
            self.require(found)
        return Counter(found), whole
