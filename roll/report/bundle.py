"""A run in one small file that its user can send to somebody: what was set, what happened, and what was said of it.

Texts alone: configuration, versions, metrics, logs, stacks, and the first rows that failed. Secrets are taken out, and
of a long file its middle, so that the archive cannot be larger than ``MOST_BYTES``.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.tracking.redact import redact_text
from roll.tracking.run import read_json_lines, software_versions

MOST_BYTES = 20 * 10**6
_MOST_OF_A_FILE = 2 * 10**6
"""Bytes; the beginning has a quarter of them."""
_ROWS = 20
_SUFFIXES = (".log", ".txt", ".err", ".out")
_ERRORS = ("error", "errors", "failed", "traceback")
"""Keys of a row that say what went wrong."""


def write_bundle(run: Path, output: Path, logs: Path | None = None, *, rows: bool = True) -> list[tuple[str, int]]:
    """Writes the archive, a zip file.

    Args:
        logs: the folder of log files, if it is not the run's own.
        rows: false: no prompts and responses.

    Returns:
        Names and bytes of what is in it, those without room left out.

    Raises:
        OSError: it cannot be written.
    """
    written: list[tuple[str, int]] = []
    left = MOST_BYTES - 10**6  # for what the archive itself needs
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _contents(run, run / "logs" if logs is None else logs, rows=rows):
            data = redact_text(text).encode()
            if len(data) <= left:  # uncompressed, so that the bound holds whatever it compresses to
                archive.writestr(f"{run.resolve().name}/{name}", data)
                written.append((name, len(data)))
                left -= len(data)
    return written


def _contents(run: Path, logs: Path, *, rows: bool) -> Iterator[tuple[str, str]]:
    """Names and texts, the most telling first."""
    for name in ("config.yaml", "summary.json"):
        if (run / name).is_file():
            yield name, _shortened(run / name)
    yield "versions.json", json.dumps(software_versions(), indent=1)
    yield "files.txt", "".join(f"{size:>15,} {name}\n" for name, size in _files(run))
    if logs.is_dir():
        found = [path for path in logs.rglob("*") if path.is_file() and path.suffix in _SUFFIXES]
        for path in sorted(found, key=lambda path: ("workers" in path.parts, path.stat().st_size)):
            yield f"logs/{path.relative_to(logs)}", _shortened(path)
    for name in ("metrics.jsonl", "timeline.jsonl", "schedule.jsonl"):
        if (run / name).is_file():
            yield name, _shortened(run / name)
    if rows and (failed := _failing(run)):
        yield "failed_rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in failed)


def _files(run: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(run)), path.stat().st_size) for path in run.rglob("*") if path.is_file())


def _shortened(path: Path) -> str:
    """A file's text, without the middle of a long one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _MOST_OF_A_FILE:
            return file.read().decode(errors="replace")
        head = file.read(_MOST_OF_A_FILE // 4)
        file.seek(size - _MOST_OF_A_FILE * 3 // 4)
        tail = file.read()
    left_out = size - len(head) - len(tail)
    return f"{head.decode(errors='replace')}\n[… {left_out:,} bytes left out …]\n{tail.decode(errors='replace')}"


def _failing(run: Path) -> list[dict[str, Any]]:
    """The first recorded rows with an error, or else without success."""
    errors: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for path in sorted((run / "trajectories").glob("*.jsonl")):
        for row in read_json_lines(path):
            if any(row.get(key) for key in _ERRORS):
                errors.append({"file": path.name, **row})
            elif row.get("success") is False and len(others) < _ROWS:
                others.append({"file": path.name, **row})
            if len(errors) == _ROWS:
                return errors
    return errors or others
