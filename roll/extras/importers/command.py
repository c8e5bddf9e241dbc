"""Entry of the importers: the command ``roll import``, and what the core asks about other systems' keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.extras.importers.recognise import command_for, system_of
from roll.extras.importers.table import advice, called, key_names, meaning
from roll.pipeline.cli import EXIT_USAGE

__all__ = ["advice", "called", "command_for", "key_names", "meaning", "run", "system_of"]


def run(
    system: str, words: Sequence[str], output: str | None, variables: Sequence[str] = (), everything: bool = False
) -> int:
    """Imports files and prints what became of each key.

    Args:
        words: files, and ``key=value`` changes with the system's keys.
        variables: ``NAME=value`` of a launch script's environment.
        everything: also names the keys that are kept as they are.
        output: file to write; the YAML goes to standard output and the report to standard error, if not given.

    Returns:
        0; 1 when something that changes results could not be carried over, or the result needs an edit; 2 for files
        that cannot be read, or written.
    """
    from roll.extras.importers.convert import convert, report
    from roll.extras.importers.reading import UnreadableError
    from roll.preflight.choices import CHECKS

    files = [Path(word).expanduser() for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not files:
        sys.stderr.write(f"roll import {system}: no file is named\n")
        return EXIT_USAGE
    if wrong := [word for word in variables if not re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL)]:
        sys.stderr.write(f"roll import {system}: --set {wrong[0]}: expected NAME=value\n")
        return EXIT_USAGE
    environment = dict(word.split("=", 1) for word in variables)
    name = Path(output).stem if output else files[-1].stem
    try:
        imported = convert(system, files, overrides, CHECKS, name, environment)
    except UnreadableError as error:
        sys.stderr.write(f"roll import {system}: {error}\n")
        return EXIT_USAGE
    if output is None:
        sys.stdout.write(imported.text)
        sys.stderr.write(report(imported, everything))
    else:
        try:
            Path(output).expanduser().write_text(imported.text, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"roll import {system}: -o {output}: {error.strerror}\n")
            return EXIT_USAGE
        sys.stdout.write(f"{report(imported, everything)}written to {output}\n")
    return imported.exit_code
