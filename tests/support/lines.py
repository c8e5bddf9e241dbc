"""Files of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path | str, rows: Iterable[Any]) -> Path:
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
