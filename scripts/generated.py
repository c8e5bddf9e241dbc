"""The command of scripts that write documents from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def write_or_check(render: Callable[[], Mapping[Path, str]], description: str | None) -> int:
    """Writes the documents, each text to its path, or with ``--check`` only compares.

    Returns:
        The exit code: 1 when a file is out of date.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 when a file is out of date")
    check = parser.parse_args().check
    pages = render()
    old = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check:
        sys.stdout.write("".join(f"{path} is out of date\n" for path in old) or f"{len(pages)} files are current\n")
        return 1 if old else 0
    for path in old:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages[path], encoding="utf-8")
    return 0
