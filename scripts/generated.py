"""The command of scripts that write a document from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(target: Path, render: Callable[[], str], description: str | None) -> int:
    """Writes the document, or with ``--check`` compares alone.

    Returns:
        The exit code: 1 for a file that is out of date.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 when the file is out of date")
    if parser.parse_args().check:
        current = target.is_file() and target.read_text(encoding="utf-8") == render()
        sys.stdout.write(f"{target} is {'current' if current else 'out of date'}\n")
        return 0 if current else 1
    target.write_text(render(), encoding="utf-8")
    return 0
