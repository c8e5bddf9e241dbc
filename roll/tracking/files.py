"""Files that are either whole or absent, and JSON that every parser reads."""

from __future__ import annotations

import enum
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


def write_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` with ``text`` in one step: at any moment there is the old file or the new one.

    A lone surrogate is written as ``\\udc80``, which a JSON reader turns back into it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
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


def to_plain(value: Any) -> Any:
    """``value`` made of dicts, lists, strings, numbers, booleans and None only; NaN and infinities become None.

    JSON has no word for a number that is not finite, and most parsers stop at Python's ``NaN``.

    Raises:
        TypeError: something else is inside, such as a tensor.
    """
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if value is None or isinstance(value, bool | int | str):
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
