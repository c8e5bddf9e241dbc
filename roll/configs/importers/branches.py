"""The branches of a launch script that would run, as far as its own variables say."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_LOOPS = ("for", "while", "until", "case", "select")
_UNKNOWN = re.compile(r"\$|`")  # a variable of the environment, or what a shell computes


@dataclass
class _Choice:
    """An ``if`` whose ``fi`` has not come."""

    runs: bool
    """The lines of this branch are read."""
    settled: bool
    """An earlier branch holds for certain, or nothing is read where the ``if`` stands."""


class Branches:
    """Follows ``if``, ``elif``, ``else`` and ``fi``.

    Of an ``if`` whose condition cannot be told, and of loops, every line is read.
    """

    def __init__(self, expand: Callable[[str], Sequence[str]]) -> None:
        self._expand = expand
        self._open: list[_Choice] = []
        self.guessed = False
        """A condition could not be told, or there is a loop."""

    def commands(self, words: Sequence[str]) -> Iterator[list[str]]:
        """The commands of a line that are read, without the words of the branches themselves."""
        for command in _statements(words):
            if command[0] in ("then", "do"):
                command = command[1:]
            elif command[0] in ("if", "elif", "else", "fi"):
                command = self._turn(command[0], command[1:])
            elif command[0] in _LOOPS:
                self.guessed |= self._reads
            if command and self._reads:
                yield command

    @property
    def _reads(self) -> bool:
        return all(choice.runs for choice in self._open)

    def _turn(self, word: str, rest: list[str]) -> list[str]:
        """Enters or leaves a branch; returns what stands behind it on the line."""
        if word == "fi":
            del self._open[-1:]
            return rest
        if word == "if":
            self._open.append(_Choice(runs=False, settled=not self._reads))
        if not self._open:  # an else without an if
            return rest
        choice = self._open[-1]
        if word == "else":
            choice.runs = not choice.settled
            return rest
        holds = False if choice.settled else self._holds(rest)
        self.guessed |= holds is None
        choice.runs, choice.settled = holds is not False, choice.settled or holds is True
        return []

    def _holds(self, condition: list[str]) -> bool | None:
        """Whether a test in brackets holds; ``None`` where only a shell can tell."""
        opening = condition[0] if condition else ""
        closing = {"[": "]", "[[": "]]"}.get(opening)
        if closing is None or condition[-1] != closing:
            return None
        words, parts = condition[1:-1], []
        for word in words:
            if word in ("&&", "||", "-a", "-o"):
                return None
            parts += [word] if word in ("==", "=", "!=", "!", *_NUMBERS) else [" ".join(self._expand(word))]
        wanted = True
        while parts[:1] == ["!"]:
            wanted, parts = not wanted, parts[1:]
        found = _compare(parts)
        return None if found is None else found == wanted


def _statements(words: Sequence[str]) -> Iterator[list[str]]:
    """The commands of a line with branches, cut at semicolons and behind ``then``, ``do`` and ``else``."""
    if not {"if", "elif", "else", "then", "fi", "do", "done", "for", "while"}.intersection(words):
        yield list(words)
        return
    command: list[str] = []
    for word in words:
        if word in ("then", "else", "do") and not command:
            yield [word]
            continue
        command += [word.rstrip(";")] if word.rstrip(";") else []
        if word.endswith(";") and command:
            yield command
            command = []
    if command:
        yield command


def _compare(parts: list[str]) -> bool | None:
    if any(_UNKNOWN.search(part) for part in parts):
        return None
    if len(parts) == 2 and parts[0] in ("-z", "-n"):
        return (parts[1] == "") == (parts[0] == "-z")
    if len(parts) == 1:
        return parts[0] != ""
    if len(parts) != 3:
        return None
    one, how, other = parts
    if how in ("=", "==", "!="):
        return fnmatchcase(one, other) == (how != "!=")
    if how in _NUMBERS and all(re.fullmatch(r"-?\d+", part) for part in (one, other)):
        return _NUMBERS[how](int(one), int(other))
    return None
