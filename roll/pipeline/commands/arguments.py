"""What these commands take. Imports nothing heavy: a command's module is imported when it is called."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Add(Protocol):
    """Adds a command to others: its name, a line about it, and what performs it."""

    def __call__(
        self, commands: Any, name: str, text: str, do: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser: ...


def add_commands(commands: Any, add: Add) -> None:
    """Adds all of them to the ``roll`` command."""
    _add_explain(commands, add)


def _add_explain(commands: Any, add: Add) -> None:
    parser = add(
        commands, "explain", "tell what a key means, here and in ROLL, verl, ChatLearn, MindSpeed RL", _explain
    )
    key = parser.add_argument("key", metavar="KEY", help="of any of them; its last parts are enough")
    key.completer = _complete_keys  # type: ignore[attr-defined]


def _explain(options: argparse.Namespace) -> int:
    from roll.pipeline.commands.explaining import run

    return run(options.key)


def _complete_keys(prefix: str, **_: Any) -> Iterator[str]:
    """Keys by any of their parts: whole ones, and the names that begin as the word does."""
    from roll.pipeline.commands.explaining import names

    for place in names():
        yield place
        yield place.rpartition(".")[2]
