"""``roll explain``: what a key means, here and in other systems."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from roll.configs.explain import (
    Explanation,
    Key,
    Part,
    Passed,
    engine_options,
    explain,
)
from roll.configs.schema import ROLES
from roll.pipeline.cli import EXIT_USAGE
from roll.pipeline.programs import PROGRAMS, schemas
from roll.utils.registry import extra

WIDTH = 110
MOST_SHOWN = 6
"""Most keys of one name that are described in full."""


def run(word: str) -> int:
    """Prints what a key means; 2 for a word that nothing is called by."""
    found = explain(word, schemas(), engine_options()) or explain(word, schemas(), verifier_options())
    if not found:
        hint = f"; did you mean {' or '.join(found.near)}?" if found.near else "; see docs/configuration.md"
        sys.stderr.write(f"roll explain: no key is called {word!r}{hint}\n")
        return EXIT_USAGE
    sys.stdout.write(page(found))
    return 0


def verifier_options() -> tuple[Part, ...]:
    """The arguments of verifiers, whose modules take a while to import."""
    from roll.rewards import VERIFIERS

    path = "rewards.<domain>.verifiers.<number>.args"
    return tuple((name, path, VERIFIERS.get(name).config_class) for name in VERIFIERS.names())


def page(found: Explanation) -> str:
    """An explanation as text for a terminal."""
    shown, more = found.keys[:MOST_SHOWN], found.keys[MOST_SHOWN:]
    parts = [_key(key) for key in shown]
    if more:
        parts.append(f"and {len(more)} more: {', '.join(key.places[0] for key in more)}\n")
    parts += [_passed(each) for each in found.passed]
    told = {(each.system, each.row.key) for key in shown for each in _elsewhere(key)}
    others = [each for each in found.foreign if (each.system, each.row.key) not in told]
    if others:
        parts.append("".join(_lines("called so", map(_theirs, others))))
    return "\n".join(parts)


def _key(key: Key) -> str:
    lines = [f"{key.name}\n", *_lines("key", _places(key)), *_lines("type", [key.type])]
    lines += _lines("range", [key.range] if key.range else [])
    if key.inside:
        lines += _lines("holds", [", ".join(key.inside)])
    else:
        lines += _lines("default", _defaults(key))
    lines += _lines("meaning", [str(key.info.description)])
    lines += _lines("pipelines", ["all" if len(key.pipelines) == len(PROGRAMS) else ", ".join(key.pipelines)])
    lines += _lines("read by", [", ".join(key.readers)])
    return "".join([*lines, *_lines("elsewhere", (_theirs(each, told=True) for each in _elsewhere(key)))])


def _places(key: Key) -> Iterator[str]:
    """The paths, those of all model roles as one."""
    of_roles = Counter(place.partition(".")[2] for place in key.places if place.partition(".")[0] in ROLES)
    joined = {place for place, count in of_roles.items() if count == len(ROLES)}
    for place in key.places:
        role, _, rest = place.partition(".")
        if role not in ROLES or rest not in joined:
            yield place
        elif role == ROLES[0]:
            yield f"<role>.{rest}"


def _defaults(key: Key) -> Iterator[str]:
    for default, having in key.defaults.items():
        yield default if len(key.defaults) == 1 else f"{default} ({', '.join(having)})"


def _elsewhere(key: Key) -> list[Any]:
    """Keys of other systems that mean it."""
    return list(extra("importers").meaning(key.name, key.places))


def _theirs(foreign: Any, *, told: bool = False) -> str:
    """A line about a key of another system; ``told``: the key here stands above it."""
    row = foreign.row
    became = row.verdict if told or row.here in ("", row.key) else f"{row.verdict}: {row.here}"
    return f"{foreign.system}: {row.key} ({became}){f'; {row.note}' if row.note else ''}"


def _passed(argument: Passed) -> str:
    key = f"<role>.strategy_args.strategy_config.{argument.name}"
    lines = [
        f"{argument.name}\n",
        *_lines("key", [key]),
        *_lines("type", [argument.type or f"{argument.engine}'s own"]),
    ]
    return "".join(
        [*lines, *_lines("meaning", [f"passed on to {argument.engine} unchanged; its documentation has it"])]
    )


def _lines(label: str, texts: Iterator[str] | list[str]) -> Iterator[str]:
    for text in filter(None, texts):
        head = f"  {label:<10} "
        yield textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) + "\n"
        label = ""
