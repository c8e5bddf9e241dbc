"""Report of an import, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from roll.configs.problems import NOTHING, show
from roll.extras.importers.convert import Imported
from roll.extras.importers.draft import Kind, Outcome

WIDTH = 110

_MEANINGS = {
    Kind.IMPOSSIBLE: "changes results, and cannot be said here",
    Kind.UNKNOWN: "no rule here knows the key: see what it does, and whether it is spelled right",
    Kind.TO_DO: "outside of the configuration",
    Kind.RENAMED: "another key, the same value",
    Kind.TRANSLATED: "another value that says the same",
    Kind.DERIVED: "follows from several keys",
    Kind.THEIRS: "not given; written out, since the default here is another",
    Kind.DROPPED: "changes nothing here",
    Kind.KEPT: "the same key here",
}
"""In the order of the report: what a user must look at comes first."""
_FIRST = (Kind.IMPOSSIBLE, Kind.UNKNOWN, Kind.TO_DO)


def report(imported: Imported, everything: bool = False) -> str:
    """What is lost and what is left to do, then what became of the other keys, and a summary.

    Args:
        imported: the result.
        everything: also names the keys that are kept as they are.
    """
    return "\n".join(_lines(imported, everything)) + "\n"


def _lines(imported: Imported, everything: bool) -> Iterator[str]:
    for note in imported.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")
    for kind in _FIRST:
        yield from _section(imported, kind)
    if imported.problems:
        count = len(imported.problems)
        yield f"the result needs {count} {'edit' if count == 1 else 'edits'}:"
        for problem in imported.problems:
            yield from textwrap.wrap(str(problem), WIDTH, initial_indent="  ", subsequent_indent="    ")
    for kind in _MEANINGS:
        if kind not in _FIRST and (everything or kind != Kind.KEPT):
            yield from _section(imported, kind)
    yield ", ".join(f"{sum(each.kind == kind for each in imported.outcomes)} {kind}" for kind in _MEANINGS)
    if not imported.problems:
        yield "the result is valid"


def _section(imported: Imported, kind: Kind) -> Iterator[str]:
    outcomes = [each for each in imported.outcomes if each.kind == kind]
    if not outcomes:
        return
    yield f"{kind} ({len(outcomes)}): {_MEANINGS[kind]}"
    if kind == Kind.KEPT:
        keys = ", ".join(each.key for each in outcomes)
        yield from textwrap.wrap(keys, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    else:
        yield from _told(outcomes)


def _told(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line for each key, notes below where they are long; what has the same note is told together."""
    together: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.ours:
            seen = "" if outcome.seen is NOTHING else f" {show(outcome.seen)}"
            value = "" if outcome.value is NOTHING else f": {show(outcome.value)}"
            line = f"{outcome.key}{seen} → {outcome.ours}{value}"
            note = f" ({outcome.note})" if outcome.note else ""
            yield from textwrap.wrap(
                line + note, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False
            )
        else:
            together.setdefault(outcome.note, []).append(outcome.key)
    for note, keys in together.items():
        line = f"{', '.join(keys)}{f': {note}' if note else ''}"
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
