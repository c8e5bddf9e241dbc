"""Report of an import, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from roll.configs.importers.convert import Imported
from roll.configs.importers.draft import Kind, Outcome
from roll.configs.problems import NOTHING, show

WIDTH = 110

_MEANINGS = {
    Kind.KEPT: "the same key here",
    Kind.RENAMED: "another key, the same value",
    Kind.TRANSLATED: "another value that says the same",
    Kind.DERIVED: "follows from several keys",
    Kind.THEIRS: "not given; written out, since the default here is another",
    Kind.DROPPED: "changes nothing here",
    Kind.TO_DO: "outside of the configuration",
    Kind.IMPOSSIBLE: "changes results, and cannot be said here",
    Kind.UNKNOWN: "no rule here knows the key: see what it does, and whether it is spelled right",
}


def report(imported: Imported) -> str:
    """Every key by what became of it, then what keeps the result from being valid."""
    return "\n".join(_lines(imported)) + "\n"


def _lines(imported: Imported) -> Iterator[str]:
    for note in imported.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")
    for kind in Kind:
        outcomes = [each for each in imported.outcomes if each.kind == kind]
        if not outcomes:
            continue
        yield f"{kind} ({len(outcomes)}): {_MEANINGS[kind]}"
        if kind == Kind.KEPT:
            keys = ", ".join(each.key for each in outcomes)
            yield from textwrap.wrap(keys, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        else:
            yield from _told(outcomes)
    yield ", ".join(f"{sum(each.kind == kind for each in imported.outcomes)} {kind}" for kind in Kind)
    if imported.problems:
        count = len(imported.problems)
        yield f"the result needs {count} {'edit' if count == 1 else 'edits'}:"
        for problem in imported.problems:
            yield from textwrap.wrap(str(problem), WIDTH, initial_indent="  ", subsequent_indent="    ")
    else:
        yield "the result is valid"


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
