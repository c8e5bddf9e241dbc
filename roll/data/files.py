"""Dataset files, folders and globs to rows of plain values, with the place of each row and of each error.

A line of a text file is a row. JSON and CSV are read by the standard library; parquet and arrow by pyarrow, which is
imported only for them.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import difflib
import glob
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow


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


SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
"""Endings of the files that can be read."""

_FOLDER_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Suffixes of the files that are read from a folder. Not .json, which metadata files have."""

_SPLIT = re.compile(r"(train|training|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)


def find_files(names: Sequence[str], problems: Problems) -> list[Path]:
    """The files that ``file_name`` means, each once."""
    found: dict[Path, str] = {}
    paths: list[Path] = []
    for name in names:
        for path in _expand(name, problems):
            real = path.resolve()
            if real in found:
                problems.add(str(path), f"named twice in file_name (by {found[real]!r} and {name!r}), expected once")
                continue
            found[real] = name
            paths.append(path)
    return paths


def _expand(name: str, problems: Problems) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, problems)
    if path.exists():
        return _with_known_suffix([path], problems)
    if not glob.has_magic(str(path)):
        problems.add(str(path), f"no such file or folder{_neighbour(path)}")
        return []
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [match for match in matches if match.is_file()]
    if not files:
        seen = f"only folders ({', '.join(map(str, matches[:5]))})" if matches else "nothing"
        problems.add(name, f"the pattern matches {seen}, expected files")
    return _with_known_suffix(files, problems)


def _with_known_suffix(paths: Sequence[Path], problems: Problems) -> list[Path]:
    known = [path for path in paths if path.suffix.lower() in SUFFIXES]
    for path in paths:
        if path not in known:
            problems.add(str(path), f"suffix {path.suffix!r}, expected one of {', '.join(SUFFIXES)}")
    return known


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; no folder {path.parent}"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else f" in {path.parent.resolve()}"


def _folder(folder: Path, problems: Problems) -> list[Path]:
    """Files of a folder: as Hugging Face datasets saved it, or whatever one format is in it."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        expected = " or ".join(str(folder / split) for split in splits) or "splits in it"
        problems.add(str(folder), f"holds the splits {', '.join(splits) or 'of none'}, expected {expected}")
        return []
    if (folder / "state.json").is_file():
        return _saved_dataset(folder, problems)
    files = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in _FOLDER_SUFFIXES and entry.is_file())
    suffixes = sorted({file.suffix.lower() for file in files})
    splits = sorted({match[1].lower() for file in files if (match := _SPLIT.match(file.name))})
    if not files:
        entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        problems.add(str(folder), f"the folder holds {entries}, expected files {', '.join(_FOLDER_SUFFIXES)}")
    elif len(suffixes) > 1:
        problems.add(str(folder), f"the folder holds {' and '.join(suffixes)} files, expected one format; give a glob")
    elif len(splits) > 1:
        example = folder / f"{splits[0]}*{suffixes[0]}"
        problems.add(str(folder), f"the folder holds the splits {', '.join(splits)}, expected one; give {example}")
    else:
        return files
    return []


def _saved_dataset(folder: Path, problems: Problems) -> list[Path]:
    """The arrow files that ``Dataset.save_to_disk`` lists in ``state.json``."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        # Only the name: a file outside the folder is none of this dataset's.
        paths = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        problems.add(str(folder / "state.json"), f"is not what datasets.save_to_disk writes ({error!r})")
        return []
    if state.get("_indices_files") or state.get("_indices_data_files"):
        problems.add(str(folder), "its rows are selected by an index file; expected flatten_indices() before saving")
        return []
    for path in paths:
        if not path.is_file():
            problems.add(str(path), "no such file, though state.json lists it")
    return [path for path in paths if path.is_file()]


_JSON_BLANK = re.compile(r"[ \t\r\n]*")


def read_rows(names: Sequence[str], problems: Problems, head: int | None = None) -> Iterator[Row]:
    """The rows of files, folders and globs, in the order given (globs and folders: by name).

    ``head`` ends each file after so many rows.

    Whatever cannot be read goes to ``problems``, and the reading goes on behind it where that is possible.
    """
    for path in find_files(names, problems):
        try:
            yield from itertools.islice(_READERS[path.suffix.lower()](path, problems), head)
        except OSError as error:
            problems.add(str(path), f"cannot be read ({error.strerror or error})")


def _read_jsonl(path: Path, problems: Problems) -> Iterator[Row]:
    with path.open("rb") as lines:
        yield from _json_lines(path, lines, problems)


def _text_lines(path: Path, lines: Iterable[bytes], problems: Problems) -> Iterator[tuple[str, str]]:
    """Place and text of the lines that are not blank."""
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            problems.add(place, f"invalid UTF-8 at byte {error.start + 1} of the line")
        else:
            if text.strip():
                yield place, text


def _json_lines(path: Path, lines: Iterable[bytes], problems: Problems) -> Iterator[Row]:
    for place, text in _text_lines(path, lines, problems):
        try:
            values, _ = _decode_json(text, 0, whole=True)
        except (ValueError, RecursionError) as error:
            problems.add(place, _json_reason(error))
        else:
            if isinstance(values, dict):
                yield Row(place, place, values)
            else:
                problems.add(place, f"{kind_of(values)}, expected an object")


def _read_txt(path: Path, problems: Problems) -> Iterator[Row]:
    """Lines of text, each a row with the column ``prompt``; blank ones are none."""
    with path.open("rb") as lines:
        for place, text in _text_lines(path, lines, problems):
            yield Row(place, place, {"prompt": text.rstrip("\r\n")})


def _read_json(path: Path, problems: Problems) -> Iterator[Row]:
    """An array of objects; also one object per line, which many tools write under this suffix."""
    content = path.read_bytes()
    text = _decode(path, content, problems)
    if text is None:
        return
    start = _skip_blank(text, 0)
    if text[start : start + 1] == "[":
        yield from _json_array(path, text, start + 1, problems)
    elif text[start : start + 1] != "{":
        problems.add(f"{path}:{_line_of(text, start)}", "expected an array of objects, [{…}, …]")
    elif _is_one_object(text):
        problems.add(f"{path}:1", "one object, expected an array of objects, [{…}, …], or one object per line")
    else:
        yield from _json_lines(path, io.BytesIO(content), problems)


def _decode_json(text: str, position: int, *, whole: bool = False) -> tuple[Any, int]:
    """The value that stands at a position, alone there if ``whole``, and where it ends.

    Whole numbers of more digits than Python reads (4,300) stay texts.
    """
    try:
        return _decoded(_DECODER, text, position, whole)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _decoded(_DECODER_OF_DIGITS, text, position, whole)


def _decoded(decoder: json.JSONDecoder, text: str, position: int, whole: bool) -> tuple[Any, int]:
    return (decoder.decode(text), len(text)) if whole else decoder.raw_decode(text, position)


def _whole_number(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


_DECODER, _DECODER_OF_DIGITS = json.JSONDecoder(), json.JSONDecoder(parse_int=_whole_number)


def _is_one_object(text: str) -> bool:
    if "\n" not in text.strip():
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_array(path: Path, text: str, position: int, problems: Problems) -> Iterator[Row]:
    """Reads element by element, to know where each begins. After a syntax error nothing more can be read."""
    number, line, counted = 0, 1, 0
    position = _skip_blank(text, position)
    if text[position : position + 1] == "]":
        return
    while True:
        number += 1
        line, counted = line + text.count("\n", counted, position), position
        place = f"{path}:{line} (row {number})"
        try:
            values, position = _decode_json(text, position)
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, json.JSONDecodeError) else line
            problems.add(f"{path}:{at} (row {number})", _json_reason(error))
            return
        if isinstance(values, dict):
            yield Row(f"{path}:{number}", place, values)
        else:
            problems.add(place, f"{kind_of(values)}, expected an object")
        position = _skip_blank(text, position)
        separator = text[position : position + 1]
        if separator != ",":
            break
        position = _skip_blank(text, position + 1)
    end = _skip_blank(text, position + 1)
    if separator != "]" or end != len(text):
        at = position if separator != "]" else end
        seen = repr(text[at]) if at < len(text) else "the end of the file"
        expected = "',' or ']'" if separator != "]" else "the end of the file"
        problems.add(f"{path}:{_line_of(text, at)}", f"invalid JSON: {seen} after row {number}, expected {expected}")


def _read_csv(path: Path, problems: Problems) -> Iterator[Row]:
    """Comma-separated, quoted by ``"``, the first row names the columns; an empty field is null."""
    text = _decode(path, path.read_bytes(), problems)
    if text is None:
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    limit = csv.field_size_limit(len(text) + 1)  # the default refuses long fields, such as test cases of a program
    try:
        header: list[str] | None = None
        for line, fields in _csv_records(path, reader, problems):
            place = f"{path}:{line}"
            if header is None:
                header = fields
                if "" in header or len(set(header)) != len(header):
                    problems.add(place, f"the columns {', '.join(map(repr, header))}, expected distinct names")
                    return
            elif len(fields) != len(header):
                problems.add(place, f"{len(fields)} fields, expected {len(header)} (is a comma or a quote unquoted?)")
            else:
                yield Row(place, place, {name: field or None for name, field in zip(header, fields, strict=True)})
    finally:
        csv.field_size_limit(limit)


def _csv_records(path: Path, reader: Any, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Records with the line they start in; one that is not CSV is a problem, and the next line is tried."""
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problems.add(f"{path}:{line}", f"invalid CSV: {error}" + _unclosed(line, reader.line_num))
            continue
        if fields:
            yield line, fields


def _unclosed(first: int, last: int) -> str:
    return f" (a quote was opened in line {first} and read on to line {last})" if last > first else ""


def _read_parquet(path: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _arrow_rows(path, file.iter_batches(), problems)
    except pyarrow.ArrowException as error:
        problems.add(str(path), f"cannot be read as parquet ({error})")


def _read_arrow(path: Path, problems: Problems) -> Iterator[Row]:
    """Arrow's stream format, which Hugging Face datasets writes, or its file format."""
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                reader = ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = iter(ipc.open_stream(source))
            yield from _arrow_rows(path, batches, problems)
    except pyarrow.ArrowException as error:
        problems.add(str(path), f"cannot be read as arrow ({error})")


def _arrow_rows(path: Path, batches: Iterator[pyarrow.RecordBatch], problems: Problems) -> Iterator[Row]:
    number = 0
    for batch in batches:
        columns = [_arrow_values(column) for column in batch.columns]
        for index in range(batch.num_rows):
            number += 1
            values = {name: column[index] for name, column in zip(batch.schema.names, columns, strict=True)}
            row = plain_row(f"{path}:{number}", f"{path}:row {number}", values, problems)
            if row is not None:
                yield row


def _arrow_values(column: pyarrow.Array) -> list[Any]:
    """The values of a column; those that Python has no word for, such as a map with a key twice, are ``Unreadable``."""
    import pyarrow

    failures = (pyarrow.ArrowException, KeyError, ValueError, OverflowError, TypeError, ImportError)
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
    except failures:
        values = []
        for scalar in column:
            try:
                values.append(scalar.as_py(maps_as_pydicts="strict"))
            except failures as error:
                values.append(Unreadable(str(error)))
    return [_without_absent(value) for value in values]


def _without_absent(value: Any, *, listed: bool = False) -> Any:
    """The value without the nulls of objects in lists, all of which arrow gives the keys of each."""
    if isinstance(value, list):
        return [_without_absent(entry, listed=True) for entry in value]
    if isinstance(value, dict):
        return {
            key: _without_absent(entry, listed=listed)
            for key, entry in value.items()
            if entry is not None or not listed
        }
    return value


def _decode(path: Path, content: bytes, problems: Problems) -> str | None:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Positions count from behind the byte order mark, as does error.object.
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        problems.add(f"{path}:{line}", f"invalid UTF-8 at byte {column} of the line")
        return None


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON: {error.msg} (column {error.colno})"
    return f"invalid JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}"


def _skip_blank(text: str, position: int) -> int:
    match = _JSON_BLANK.match(text, position)
    assert match is not None  # it matches the empty text
    return match.end()


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


_READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_txt,
}
