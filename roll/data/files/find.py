"""The files that a dataset's names mean: files, folders, globs."""

from __future__ import annotations

import difflib
import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path

from roll.data.files.rows import Problems

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
"""Endings of the files that can be read."""

_FOLDER_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Endings of the files that are read of a folder. Not .json: metadata beside the data is written in that."""

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
        return f"; there is no folder {path.parent}"
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
