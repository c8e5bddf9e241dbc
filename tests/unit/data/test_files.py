"""Reading datasets: every format, and the place of everything that is wrong."""

import csv
import datetime
import decimal
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from roll.data.files import SHOWN_PROBLEMS, DataError, Problems, Row, Unreadable, plain_row, read_rows
from roll.data.prompt_rows import RowError, lookup
from tests.support.lines import write_lines as jsonl

ROWS = [
    {"id": "a", "prompt": "1+1=", "solution": "2"},
    {"id": "b", "prompt": "line one\nline two, \"quoted\" and 'so'", "solution": "√4"},
    {"id": "c", "prompt": "\u2028 no line break", "solution": "5"},
]


def read(*names: str | Path) -> list[dict[str, Any]]:
    problems = Problems()
    rows = [dict(row.values) for row in read_rows([str(name) for name in names], problems)]
    problems.raise_any()
    return rows


def complaints(*names: str | Path) -> list[str]:
    problems = Problems()
    list(read_rows([str(name) for name in names], problems))
    with pytest.raises(DataError) as raised:
        problems.raise_any()
    return raised.value.problems


def placed(path: Path) -> list[Row]:
    """Rows with their names and places, whatever is wrong with others."""
    return list(read_rows([str(path)], Problems()))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def as_arrow(path: Path, rows: list[dict[str, Any]], stream: bool = True) -> Path:
    table = pa.Table.from_pylist(rows)
    with (ipc.new_stream if stream else ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def saved_dataset(folder: Path, rows: list[dict[str, Any]], **state: Any) -> Path:
    """What ``datasets.Dataset.save_to_disk`` writes, in two shards."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    as_arrow(folder / names[0], rows[:1])
    as_arrow(folder / names[1], rows[1:])
    write(folder / "dataset_info.json", "{}")
    write(folder / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    return folder


WRITERS = {
    "a.jsonl": jsonl,
    "a.json": lambda path, rows: write(path, json.dumps(rows)),
    "indented.json": lambda path, rows: write(path, json.dumps(rows, indent=2, ensure_ascii=False)),
    "lines.json": jsonl,
    "a.csv": as_csv,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "file.arrow": lambda path, rows: as_arrow(path, rows, stream=False),
    "SHOUTED.JSONL": jsonl,
    "saved": saved_dataset,
}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_every_format_gives_the_same_rows(tmp_path, name):
    assert read(WRITERS[name](tmp_path / name, ROWS)) == ROWS


def test_files_are_read_in_order_globs_by_name_relative_to_the_working_directory_and_home(tmp_path, monkeypatch):
    for number in (2, 0, 1):
        jsonl(tmp_path / f"part{number}.jsonl", [{"n": number}])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    jsonl(tmp_path / "deep" / "er" / "x.jsonl", [{"n": 9}])
    assert [row["n"] for row in read(tmp_path / "part*.jsonl")] == [0, 1, 2]
    assert [row["n"] for row in read(tmp_path / "part2.jsonl", tmp_path / "part[01].jsonl")] == [2, 0, 1]
    assert sorted(row["n"] for row in read(tmp_path / "**" / "*.jsonl")) == [0, 1, 2, 9]
    jsonl(tmp_path / "part[0].jsonl", [{"n": 7}])  # a file of that very name comes before the pattern
    assert read(tmp_path / "part[0].jsonl") == [{"n": 7}]
    jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("a.jsonl") == read("~/a.jsonl") == ROWS


def test_a_folder_of_one_format_is_read_whole(tmp_path):
    as_parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:2])
    as_parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[2:])
    write(tmp_path / "dataset_infos.json", "{}")
    write(tmp_path / "README.md", "words")
    assert read(tmp_path) == ROWS


def test_a_folder_of_several_splits_or_formats_is_not_guessed_at(tmp_path):
    for folder in ("gsm", "both", "neither", "names"):
        (tmp_path / folder).mkdir()
    as_parquet(tmp_path / "gsm" / "train-00000-of-00001.parquet", ROWS)
    as_parquet(tmp_path / "gsm" / "test-00000-of-00001.parquet", ROWS)
    as_parquet(tmp_path / "both" / "a.parquet", ROWS)
    jsonl(tmp_path / "both" / "a.jsonl", ROWS)
    write(tmp_path / "neither" / "notes.txt", "")
    assert complaints(tmp_path / "gsm") == [
        f"{tmp_path}/gsm: the folder holds the splits test, train, expected one; give {tmp_path}/gsm/test*.parquet"
    ]
    assert complaints(tmp_path / "both") == [
        f"{tmp_path}/both: the folder holds .jsonl and .parquet files, expected one format; give a glob"
    ]
    assert complaints(tmp_path / "neither") == [
        f"{tmp_path}/neither: the folder holds notes.txt, expected files .parquet, .jsonl, .csv"
    ]
    # Names that only begin like a split.
    jsonl(tmp_path / "names" / "trained.jsonl", ROWS[:1])
    jsonl(tmp_path / "names" / "tests.jsonl", ROWS[1:])
    assert len(read(tmp_path / "names")) == 3


def test_a_folder_of_saved_splits_must_name_one(tmp_path):
    for split in ("train", "test"):
        saved_dataset(tmp_path / "all" / split, ROWS)
    write(tmp_path / "all" / "dataset_dict.json", json.dumps({"splits": ["train", "test"]}))
    assert complaints(tmp_path / "all") == [
        f"{tmp_path}/all: holds the splits test, train, expected {tmp_path}/all/test or {tmp_path}/all/train"
    ]
    assert read(tmp_path / "all" / "train") == ROWS


def test_a_broken_saved_dataset_is_told(tmp_path):
    (tmp_path / "odd").mkdir()
    write(tmp_path / "odd" / "state.json", "[]")
    assert complaints(tmp_path / "odd")[0].startswith(f"{tmp_path}/odd/state.json: is not what datasets.save_to_disk")
    folder = saved_dataset(tmp_path / "short", ROWS)
    (folder / "data-00001-of-00002.arrow").unlink()
    assert complaints(folder) == [f"{folder}/data-00001-of-00002.arrow: no such file, though state.json lists it"]
    selected = saved_dataset(tmp_path / "selected", ROWS, _indices_data_files=[{"filename": "indices.arrow"}])
    assert "flatten_indices() before saving" in complaints(selected)[0]


def test_names_that_lead_nowhere(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "train.xlsx", "")
    (tmp_path / "folder").mkdir()
    assert complaints(tmp_path / "trian.jsonl", tmp_path / "none" / "x.jsonl", "*/*.nothing", tmp_path / "fol*") == [
        f"{tmp_path}/trian.jsonl: no such file or folder; did you mean {tmp_path}/train.jsonl?",
        f"{tmp_path}/none/x.jsonl: no such file or folder; no folder {tmp_path}/none",
        "*/*.nothing: the pattern matches nothing, expected files",
        f"{tmp_path}/fol*: the pattern matches only folders ({tmp_path}/folder), expected files",
    ]
    assert complaints(tmp_path / "train.*") == [
        f"{tmp_path}/train.xlsx: suffix '.xlsx', expected one of .json, .jsonl, .csv, .parquet, .arrow, .txt"
    ]


def test_a_file_that_is_named_twice_is_an_error(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "link.jsonl").symlink_to(path)
    assert complaints(path, tmp_path / "l*") == [
        f"{tmp_path}/link.jsonl: named twice in file_name (by '{path}' and '{tmp_path}/l*'), expected once"
    ]


def test_a_file_that_vanishes_is_told_and_the_next_one_read(tmp_path):
    problems = Problems()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        jsonl(tmp_path / name, [{"n": name}])
    rows = read_rows([str(tmp_path / "*.jsonl")], problems)
    seen = [next(rows)]
    (tmp_path / "b.jsonl").unlink()
    seen += rows
    assert [row.values["n"] for row in seen] == ["a.jsonl", "c.jsonl"]
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read \(No such file or directory\)"):
        problems.raise_any()


def test_every_bad_line_of_json_lines_has_its_number(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"n": 1}',  # a byte order mark is no error
        b'{"n": 1,}',
        b" \r",
        b'["n"]',
        b'{"n": "\xff"}',
        b'{"n": 2}\r',
        b"null",
        b'{"n": 3} {"n": 4}',
        b'{"n": ' + b"[" * 100_000,
    ]
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    assert [(row.name, row.place, row.values) for row in placed(path)] == [
        (f"{path}:{line}", f"{path}:{line}", {"n": n}) for line, n in ((1, 1), (6, 2))
    ]
    assert complaints(path) == [
        f"{path}:2: invalid JSON: {json_message(lines[1])}",
        f"{path}:4: a list, expected an object",
        f"{path}:5: invalid UTF-8 at byte 8 of the line",
        f"{path}:7: null, expected an object",
        f"{path}:8: invalid JSON: Extra data (column 10)",
        f"{path}:9: invalid JSON: nested too deeply",
    ]


def json_message(text: bytes | str) -> str:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads(text)
    return f"{raised.value.msg} (column {raised.value.colno})"


def test_rows_of_a_json_array_know_their_lines(tmp_path):
    path = write(tmp_path / "a.json", '\n[ {"n": 1}, {"n":\n 2},\n\n3,{"n": 4}\n]\n')
    assert [(row.name, row.place) for row in placed(path)] == [
        (f"{path}:1", f"{path}:2 (row 1)"),
        (f"{path}:2", f"{path}:2 (row 2)"),
        (f"{path}:4", f"{path}:5 (row 4)"),
    ]
    assert complaints(path) == [f"{path}:5 (row 3): a number, expected an object"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: expected an array of objects, [{…}, …]"),
        ("\n3", "2: expected an array of objects, [{…}, …]"),
        ('{\n"n": 1}', "1: one object, expected an array of objects, [{…}, …], or one object per line"),
        ('[{"n": 1},\n{"n": }]', "2 (row 2): invalid JSON: Expecting value (column 7)"),
        ('[{"n": 1},\n]', "2 (row 2): invalid JSON: Expecting value (column 1)"),
        ('[{"n": 1}\n{"n": 2}]', "2: invalid JSON: '{' after row 1, expected ',' or ']'"),
        ('[{"n": 1}\n', "2: invalid JSON: the end of the file after row 1, expected ',' or ']'"),
        ('[{"n": 1}]\n\nmore', "3: invalid JSON: 'm' after row 1, expected the end of the file"),
        ("[" * 100_000, "1 (row 1): invalid JSON: nested too deeply"),
    ],
)
def test_json_that_is_no_array_of_objects(tmp_path, text, problem):
    path = write(tmp_path / "a.json", text)
    assert complaints(path) == [f"{path}:{problem}"]


def test_no_rows_are_no_problem_of_the_file(tmp_path):
    for name, content in (("a.json", "[ ]"), ("b.jsonl", "\n"), ("c.csv", "")):
        assert read(write(tmp_path / name, content)) == []


json_values = st.text(max_size=4) | st.integers() | st.lists(st.text('[]{},\\"\n', max_size=4), max_size=2)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=3), max_size=4),
    indent=st.none() | st.integers(0, 2),
)
def test_json_arrays_are_read_as_the_library_reads_them(tmp_path, rows, indent):
    assert read(write(tmp_path / "a.json", json.dumps(rows, indent=indent))) == rows


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_bytes_that_are_no_utf8_have_their_line(tmp_path, name):
    path = write(tmp_path / name, b"\xef\xbb\xbfone\ntwo \xe9\n")
    assert complaints(path) == [f"{path}:2: invalid UTF-8 at byte 5 of the line"]


def test_csv_fields_may_be_empty_long_and_of_many_lines(tmp_path):
    limit = csv.field_size_limit()
    text = "x" * 200_000
    path = write(tmp_path / "a.csv", f'\ufeffid,prompt\r\n1,"two\nlines"\r\n\r\n2,\r\n3,{text}\r\n')
    assert [(row.place, row.values) for row in placed(path)] == [
        (f"{path}:2", {"id": "1", "prompt": "two\nlines"}),
        (f"{path}:5", {"id": "2", "prompt": None}),
        (f"{path}:6", {"id": "3", "prompt": text}),
    ]
    assert csv.field_size_limit() == limit and len(read(path)) == 3


def test_wrong_csv_has_its_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'id,prompt\n1,a,b\n2,"x"y\n3\n4,fine\n5,"never closed\n6,z\n')
    assert complaints(path) == [
        f"{path}:2: 3 fields, expected 2 (is a comma or a quote unquoted?)",
        f"{path}:3: invalid CSV: ',' expected after '\"'",
        f"{path}:4: 1 fields, expected 2 (is a comma or a quote unquoted?)",
        f"{path}:6: invalid CSV: unexpected end of data (a quote was opened in line 6 and read on to line 7)",
    ]
    twice = write(tmp_path / "b.csv", "\nid,id\n1,2\n")
    assert complaints(twice) == [f"{twice}:2: the columns 'id', 'id', expected distinct names"]


def test_what_only_claims_to_be_parquet_or_arrow(tmp_path):
    words = b"these are words\n" * 9
    broken = {"a.parquet": words, "a.arrow": words, "short.arrow": b"", "file.arrow": b"ARROW1\0\0 and no more"}
    for name, content in broken.items():
        path = write(tmp_path / name, content)
        (problem,) = complaints(path)
        assert problem.startswith(f"{path}: cannot be read")


def test_rows_of_parquet_are_counted_through_its_parts(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"n": range(10)}), path, row_group_size=3)
    assert [(row.name, row.place, row.values["n"]) for row in placed(path)] == [
        (f"{path}:{n + 1}", f"{path}:row {n + 1}", n) for n in range(10)
    ]


def test_arrow_values_become_json_values(tmp_path):
    table = pa.table(
        {
            "nested": [[{"role": "user", "content": None}]],
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "day": [datetime.date(2024, 2, 29)],
            "exact": [decimal.Decimal("1.10")],
            "half": pa.array([np.float16(0.5)], pa.float16()),
            "category": pa.array(["x"]).dictionary_encode(),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet")
    assert json.loads(json.dumps(row)) == row
    assert row == {
        "nested": [{"role": "user"}],  # arrow gives every object of a list the keys of all
        "map": {"k": 1},
        "day": "2024-02-29",
        "exact": "1.10",
        "half": 0.5,
        "category": "x",
    }
    parquet.write_table(pa.table({"n": [1, 2], "image": [{"raw": None}, {"raw": b"\x89PNG"}]}), tmp_path / "b.parquet")
    first, second = read(tmp_path / "b.parquet")
    assert first == {"n": 1, "image": {"raw": None}} and second["n"] == 2
    assert second["image"] == Unreadable("raw: bytes, expected text, a number, a list or a mapping")


def test_a_value_that_nothing_can_read_is_a_problem_only_for_its_reader(tmp_path):
    twice = pa.array([[("k", 1), ("k", 2)], [("k", 3)]], pa.map_(pa.string(), pa.int64()))
    nanoseconds = pa.array([1, 2], pa.timestamp("ns"))
    parquet.write_table(pa.table({"n": [1, 2], "map": twice, "at": nanoseconds}), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert isinstance(first["map"], Unreadable) and second["map"] == {"k": 3} and (first["n"], second["n"]) == (1, 2)
    with pytest.raises(RowError, match="column 'map': "):
        lookup(first, "map")
    digits = "7" * 5000
    text = f'{{"n": {digits}, "m": Infinity}}'
    for name, written in (("a.jsonl", f"{text}\n"), ("a.json", f"[{text}]")):
        assert read(write(tmp_path / name, written)) == [{"n": digits, "m": math.inf}]


def test_numpy_values_become_json_values():
    problems = Problems()
    values = {
        "list": np.array([[1, 2]], dtype=np.int32),
        "objects": np.array([{"a": np.float32(0.5)}], dtype=object),
        "flag": np.bool_(True),
        "text": np.str_("x"),
        "tuple": (1, None),
    }
    row = plain_row("x:1", "x:row 1", values, problems)
    assert row is not None and row.values == {
        "list": [[1, 2]],
        "objects": [{"a": 0.5}],
        "flag": True,
        "text": "x",
        "tuple": [1, None],
    }
    assert json.loads(json.dumps(row.values)) == row.values
    wrong = plain_row("x:1", "x:row 1", {"f": len, "g": {1: 2}}, problems)
    assert wrong is not None
    for column, reason in (("f", "'f': builtin_function_or_method"), ("g", "'g': key 1, expected text")):
        with pytest.raises(RowError, match=reason):
            lookup(wrong.values, column)
    problems.raise_any()
    assert plain_row("x:1", "x:row 1", [], problems) is None
    with pytest.raises(DataError, match="a list, expected a mapping of columns"):
        problems.raise_any()


def test_many_problems_are_counted_and_the_first_shown(tmp_path):
    path = write(tmp_path / "a.jsonl", "x\n" * 1500)
    problems = Problems()
    list(read_rows([str(path)], problems))
    with pytest.raises(DataError) as raised:
        problems.raise_any()
    assert raised.value.count == 1500 and len(raised.value.problems) == SHOWN_PROBLEMS
    lines = str(raised.value).splitlines()
    assert lines[0] == "1,500 problems in the dataset"
    assert lines[1] == f"  {path}:1: invalid JSON: Expecting value (column 1)"
    assert lines[-1] == "  and 1,480 more" and len(lines) == SHOWN_PROBLEMS + 2
