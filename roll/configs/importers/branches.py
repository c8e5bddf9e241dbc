"""The branches and loops of a launch script that would run, as far as its own variables say."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from roll.configs.importers.expansion import Scope

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_TESTS = {"[": "]", "[[": "]]"}
_LOOPS = ("for", "while", "until", "select")
_WORDS = {"if", "elif", "else", "then", "fi", "do", "done", "case", *_LOOPS}
_HOLD = ("true", ":", "command", "which", "type")
"""Commands that are taken to succeed: a machine that trains has what its script asks for."""
_GLUED = re.compile(r"(.*;)(do|then|else|fi|done)", re.DOTALL)
_UNKNOWN = re.compile(r"\$|`")  # a variable of the environment, or what a shell computes


@dataclass
class _Choice:
    """An ``if``, ``case`` or loop whose end has not come."""

    runs: bool
    """The lines of this branch are read."""
    settled: bool
    """An earlier branch holds for certain, or nothing is read where it stands."""
    word: str | None = None
    """Of a ``case``: what its patterns are compared with; ``None`` where only a shell can tell."""
    is_case: bool = False


class Branches:
    """Follows ``if``, ``case``, loops, and lists such as ``[ -z "$A" ] && A=1``.

    Where it cannot be told which branch runs, every line of it is read; of loops, the first round.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._open: list[_Choice] = []
        self._pattern = False  # that of a case is next
        self.guessed = False
        """A condition could not be told, or there is a loop."""

    def commands(self, words: Sequence[str]) -> Iterator[list[str]]:
        """The commands of a line that are read, without the words of the branches themselves."""
        for command in self._statements(list(_apart(words))):
            if command[0] in ("then", "do"):
                command = command[1:]
            if command and command[0] in ("if", "elif", "else", "fi"):
                command = self._turn(command[0], command[1:])
            elif command and command[0] in _LOOPS:
                command = self._loop(command[0], command[1:])
            elif command and command[0] in ("case", "pattern)", ";;", "esac", "done"):
                command = self._case(command[0], command[1:])
            if command and self._reads and (command := self._listed(command)):
                yield command

    @property
    def _reads(self) -> bool:
        return all(choice.runs for choice in self._open)

    def _statements(self, words: Sequence[str]) -> Iterator[list[str]]:
        """The commands of a line with branches, cut at semicolons and behind ``then``, ``do`` and ``else``."""
        inside = any(choice.is_case for choice in self._open)
        if not inside and not _WORDS.intersection(words):
            yield list(words)
            return
        command: list[str] = []
        for word in words:
            if self._pattern and word != "esac":
                command.append(word)
                if word.endswith(")"):
                    self._pattern = False
                    yield ["pattern)", *command]
                    command = []
                continue
            self._pattern = False
            if word in ("then", "else", "do") and not command:
                yield [word]
                continue
            ends = word.endswith(";;")
            command += [rest] if (rest := word.rstrip(";")) else []
            begins = word == "in" and command[:1] == ["case"]
            if (word.endswith(";") or begins) and command:
                yield command
                command = []
            if ends:
                yield [";;"]
            self._pattern = ends or begins
        if command:
            yield command

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

    def _loop(self, word: str, rest: list[str]) -> list[str]:
        """Enters a loop: its first round, if there is one."""
        reads = self._reads
        if word in ("while", "until"):
            holds = self._holds(rest) if reads else False
            runs = holds is not (word == "until") if holds is not None else True
            self.guessed |= holds is None
        elif word == "for" and rest[1:2] == ["in"]:
            values = [value for each in rest[2:] for value in self._scope.words(each)] if reads else []
            runs = bool(values)
            if runs:
                self._scope.variables[rest[0]] = values[:1]
            self.guessed |= len(values) > 1
        else:
            runs = True
            self.guessed |= reads
        self._open.append(_Choice(runs=runs and reads, settled=True))
        return []

    def _case(self, word: str, rest: list[str]) -> list[str]:
        """Enters a ``case``, one of its branches, or leaves one; leaves a loop."""
        if word in ("esac", "done"):
            del self._open[-1:]
            return []
        if word == "case":
            value = self._scope.text(rest[0]) if rest else ""
            known = None if _UNKNOWN.search(value) else value
            self._open.append(_Choice(False, settled=not self._reads, word=known, is_case=True))
            return []
        if not self._open or not self._open[-1].is_case:
            return []
        choice = self._open[-1]
        if word == ";;" or choice.settled:
            choice.runs = False
        elif choice.word is None:
            choice.runs = self.guessed = True
        else:
            known = choice.word
            names = " ".join(rest).removesuffix(")").lstrip("(").split("|")
            patterns = [self._scope.text(name.strip()) for name in names]
            choice.runs = choice.settled = any(fnmatchcase(known, pattern) for pattern in patterns)
        return []

    def _listed(self, command: list[str]) -> list[str]:
        """Words that are read of a command behind a test: ``[ … ] && command``."""
        closing = _TESTS.get(command[0])
        if closing is None or closing not in command:
            return command
        end = command.index(closing)
        behind = command[end + 1 :]
        if not behind or behind[0] not in ("&&", "||"):
            return []
        holds = self._holds(command[: end + 1])
        self.guessed |= holds is None and "=" in "".join(behind[1:2])
        if holds is None or holds == (behind[0] == "&&"):
            return self._listed(behind[1:]) if len(behind) > 1 else []
        further = next((i for i, word in enumerate(behind[1:], 1) if word in ("&&", "||") and word != behind[0]), None)
        return [] if further is None else behind[further + 1 :]

    def _holds(self, condition: list[str]) -> bool | None:
        """Tells whether a test holds; ``None`` where only a shell can tell."""
        depth, outside = 0, dict[str, int]()
        for at, word in enumerate(condition):
            depth += {"[[": 1, "]]": -1}.get(word, 0)
            if depth == 0:
                outside.setdefault(word, at)
        for sign, decides in (("||", True), ("&&", False)):
            if (split := outside.get(sign)) is not None:
                return self._both(condition[:split], condition[split + 1 :], decides)
        if condition[:1] == ["!"]:
            found = self._holds(condition[1:])
            return None if found is None else not found
        if condition and condition[0] in _HOLD:
            return True
        opening = condition[0] if condition else ""
        if opening not in _TESTS or condition[-1] != _TESTS[opening]:
            return None
        inside = condition[1:-1]
        for signs, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
            if (split := next((i for i, word in enumerate(inside) if word in signs), None)) is not None:
                one, other = ([opening, *part, condition[-1]] for part in (inside[:split], inside[split + 1 :]))
                return self._both(one, other, decides)
        known = ("==", "=", "!=", "!", *_NUMBERS)
        parts = [word if word in known else self._scope.text(word) for word in inside]
        wanted = True
        while parts[:1] == ["!"]:
            wanted, parts = not wanted, parts[1:]
        found = _compare(parts)
        return None if found is None else found == wanted

    def _both(self, one: list[str], other: list[str], decides: bool) -> bool | None:
        """Two tests, of which one that comes out as ``decides`` is enough."""
        found = [self._holds(one), self._holds(other)]
        return decides if decides in found else None if None in found else not decides


def _apart(words: Sequence[str]) -> Iterator[str]:
    """Words, those of branches and loops without what stands before them: ``"$A";do`` is two."""
    for word in words:
        if found := _GLUED.fullmatch(word):
            yield from found.groups()
        else:
            yield word


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
