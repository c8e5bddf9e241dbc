"""Files that are complete or absent, strict JSON, and the manifest of a folder's checksums."""

from __future__ import annotations

import enum
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from roll.utils.hashing import WrittenFile, checksum_of

logger = logging.getLogger(__name__)


def write_atomic(path: Path, text: str, *, synced: bool = True) -> None:
    """Replaces ``path`` with ``text`` in one step: at any moment there is the old file or the new one.

    A lone surrogate is written as ``\\udc80``, which a JSON reader turns back into it.

    Args:
        synced: it is on disk when this returns, also if the machine then fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, none if there is no file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):  # bytes: the cut may be within a character
        if not line:
            continue
        try:
            records.append(json.loads(line.decode()))
        except ValueError:
            logger.warning("%s: leaving out a line that was cut off: %.60r", path, line)
    return records


_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def to_plain(value: Any) -> Any:
    """``value`` made of dicts, lists, strings, numbers, booleans and None only; NaN and infinities become None.

    JSON has no word for a number that is not finite, and most parsers stop at Python's ``NaN``.

    Raises:
        TypeError: something else is inside, such as a tensor.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        return {str(key): item if type(item) in _AS_THEY_ARE else to_plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic | np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.80}")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text of ``to_plain(value)``."""
    return json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


MANIFEST_FILE = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or the requested one cannot be used."""


def find_damage(path: Path) -> str | None:
    """Reason why ``path`` is not a whole checkpoint, or None when every file matches the manifest."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    files: dict[str, dict[str, Any]] = manifest["files"]
    sized = []
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["size"]:
            return f"{name} has {size} bytes, expected {expected['size']}"
        sized.append(file)
    with ThreadPoolExecutor(max_workers=4) as pool:
        checksums = list(pool.map(checksum_of, sized))
    for file, checksum in zip(sized, checksums, strict=True):
        name = file.relative_to(path).as_posix()
        if checksum != files[name]["xxh3"]:
            return f"{name} has checksum {checksum}, expected {files[name]['xxh3']}"
        if file.suffix == ".safetensors" and (problem := _safetensors_problem(file)):
            return f"{name} {problem}"
    return None


def write_manifest(folder: Path, step: int, saved_at: float, written: Iterable[WrittenFile]) -> None:
    """Lists every file once all are on disk; the manifest is the last file to appear.

    Args:
        written: files that are on disk already, with their checksums; the others are read.
    """
    known = {file.path: file for file in written}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name not in known:
            _sync_file(path)
            known[name] = WrittenFile(name, path.stat().st_size, checksum_of(path))
        entries[name] = {"size": known[name].size, "xxh3": known[name].checksum}
    for name, file in known.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file.size:
            raise CheckpointError(f"checkpoint-{step}: {name} has {size} bytes, {file.size} were written")
        if name.endswith(".safetensors") and (problem := _safetensors_problem(folder / name)):
            raise CheckpointError(f"checkpoint-{step}: {name} {problem}")
    manifest = {"step": step, "saved_at": saved_at, "files": entries}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync_file(folder / MANIFEST_FILE)
    for sub in {path.parent for path in paths} | {folder}:
        sync_folder(sub)


def read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"it has no {MANIFEST_FILE} (half-written, or not a checkpoint of this library)"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"its {MANIFEST_FILE} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or not {"step", "saved_at", "files"} <= manifest.keys():
        raise CheckpointError(f"its {MANIFEST_FILE} lacks step, saved_at or files")
    if any("xxh3" not in entry for entry in manifest["files"].values()):
        raise CheckpointError("it is of an earlier version, whose model folders also held what resumes a run")
    return manifest


def _safetensors_problem(path: Path) -> str | None:
    """A safetensors file announces its own length (8 bytes of header size, a JSON header, the data)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            return f"is cut off inside its header ({size} bytes)"
        try:
            header = json.loads(file.read(header_size))
        except ValueError as error:
            return f"has an unreadable header ({error})"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_size + max(ends, default=0)
    return None if size == expected else f"has {size} bytes, its header announces {expected}"


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
