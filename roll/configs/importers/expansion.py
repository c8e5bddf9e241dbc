"""Words of a launch script with their variables replaced as a shell does it; no command is run."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate

LITERAL_DOLLAR = "\ue000"
"""Stands for a dollar sign in which a shell replaces nothing."""
SPACE = "\ue001"
"""Stands for a space that does not end a word."""
QUOTED = "\ue002"
"""Stands before a dollar sign between double quotes, whose value stays one word."""
HASH = "\ue003"
"""Stands for a number sign that begins no comment."""

_WHOLE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*|[@*])|\{(?P<braced>\w+|[@*])(?:\[[@*]\]|:(?P<from>\d+))?\})")
_PLAIN = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!\d])")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*])(?:\[([@*]|\d+)\])?(.*)", re.DOTALL)
_IN_PLACE = re.compile(r"(:?)([-=?+])(.*)", re.DOTALL)
_FOLDER = re.compile(r"cd (?:-\S* )?(\S+)(?: *[12&]*>\S*(?: *2>&1)?)? *&& *pwd(?: -[PL])?")
_SCRIPT = ("0", "BASH_SOURCE")
_MAX_POWER = 64
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass
class Scope:
    """Variables and arguments of a script, as far as it has been read."""

    script: str = "run.sh"
    """The script's own path, as its reader gave it."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Arrays have any number of words, other variables one."""
    arguments: list[str] = field(default_factory=list)
    """Of the script, or of the function that is read."""

    def words(self, word: str) -> list[str]:
        """A word with its variables replaced; an array alone becomes its words, a value without quotes its parts."""
        quoted, word = QUOTED in word, word.replace(QUOTED, "")
        if whole := _WHOLE.fullmatch(word):
            name = whole["plain"] or whole["braced"]
            if name in "@*":
                return self.arguments[max(0, int(whole["from"] or 1) - 1) :]
            values = self.variables.get(name)
            if values is not None and whole["from"] is None:
                if len(values) != 1:
                    return values
                if not quoted:
                    return values[0].split() or [""]
        return [self._replace(word).replace(LITERAL_DOLLAR, "$").replace(SPACE, " ").replace(HASH, "#")]

    def text(self, word: str) -> str:
        """A word with its variables replaced, in one piece."""
        return " ".join(self.words(word))

    def _replace(self, text: str) -> str:
        parts, at = [], 0
        while (start := text.find("$", at)) >= 0:
            parts.append(text[at:start])
            value, at = self._value_at(text, start)
            parts.append(value)
        return "".join([*parts, text[at:]])

    def _value_at(self, text: str, start: int) -> tuple[str, int]:
        """The value of what begins with a dollar sign, and where the text goes on."""
        end = _closing(text, start + 1)
        if end is not None and text.startswith("$((", start) and text[end - 1] == ")":
            return _sum(self._replace(text[start + 3 : end - 1]), self.variables), end + 1
        if end is not None and text[start + 1] == "(":
            inside = self._replace(text[start + 2 : end])
            value = _answer(inside.replace(SPACE, " ").strip())
            return (f"$({inside})" if value is None else value), end + 1
        if end is not None:
            return self._parameter(text[start + 2 : end]), end + 1
        if found := _PLAIN.match(text, start):
            return self._named(found[1]), found.end()
        return "$", start + 1

    def _named(self, name: str) -> str:
        value = self._value(name, None)
        return f"${{oc.env:{name}}}" if value is None else value

    def _value(self, name: str, index: str | None) -> str | None:
        """``None``: the script does not set it."""
        if name in _SCRIPT:
            return self.script
        if name in "@*":
            return " ".join(self.arguments)
        if name in "#?$!":
            return {"#": str(len(self.arguments)), "?": "0"}.get(name, "")
        if name.isdigit():
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else ""
        values = self.variables.get(name)
        if values is None or index in (None, "@", "*"):
            return None if values is None else " ".join(values)
        return values[int(index)] if int(index) < len(values) else ""

    def _parameter(self, inside: str) -> str:
        """The value of ``${inside}``."""
        found = _PARAMETER.fullmatch(inside.replace(HASH, "#"))
        unread = f"${{{inside}}}" if inside.startswith("oc.env:") else f"$(echo {inside})"
        if found is None:
            return unread
        counted, name, index, rest = found.groups()
        value = self._value(name, index)
        if counted:
            values = self.arguments if name in "@*" else self.variables.get(name)
            whole = index in ("@", "*") or name in "@*"
            return unread if rest or values is None else str(len(values if whole else "".join(values)))
        if not rest:
            return self._named(name) if value is None else value
        if how := _IN_PLACE.fullmatch(rest):
            missing = value is None or (how[1] == ":" and not value)
            if how[2] == "+":
                return "" if missing else self._replace(how[3])
            if not missing or how[2] == "?":
                return self._named(name) if value is None else value
            fallback = self._replace(how[3])
            if how[2] == "=":
                self.variables[name] = [fallback]
            return fallback
        changed = None if value is None else _changed(value, rest, self._replace)
        return unread if changed is None else changed


def _closing(text: str, start: int) -> int | None:
    """Index at which the bracket at ``start`` closes, if there is one."""
    if start >= len(text) or text[start] not in "({":
        return None
    opening, closing, depth = text[start], ")" if text[start] == "(" else "}", 0
    for at in range(start, len(text)):
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        if depth == 0:
            return at
    return None


def _changed(value: str, how: str, replace: Callable[[str], str]) -> str | None:
    """``${A%b}``, ``${A##b}``, ``${A//b/c}``, ``${A,,}``, ``${A:1:2}``; ``None`` for other changes."""
    if how in (",,", "^^"):
        return value.lower() if how == ",," else value.upper()
    if cut := re.fullmatch(r":(\d+)(?::(\d+))?", how):
        return value[int(cut[1]) :][: int(cut[2]) if cut[2] else None]
    if how[0] in "#%":
        side, many = how[0], how[:2] in ("##", "%%")
        pattern = re.compile(translate(replace(how[1 + many :])))
        lengths = range(len(value) + 1)
        for length in reversed(lengths) if many else lengths:
            part, left = (value[:length], value[length:]) if side == "#" else (value[len(value) - length :], "")
            if pattern.fullmatch(part):
                return left if side == "#" else value[: len(value) - length]
        return value
    if how[0] == "/" and len(how) > 1:
        every = how.startswith("//")
        old, _, new = how[1 + every :].partition("/")
        return value.replace(replace(old), replace(new), -1 if every else 1) if old else value
    return None


def _answer(command: str) -> str | None:
    """Output of a command that only looks at the text of a path; ``None`` for all others."""
    if "$(" in command:
        return None
    if folder := _FOLDER.fullmatch(command):
        return os.path.normpath(folder[1])
    words = [word for word in command.split() if not word.startswith("-")]
    if any(sign in command for sign in "|;&<>`*") or not words:
        return None
    match words:
        case ["pwd"]:
            return "."
        case ["dirname", path]:
            return os.path.dirname(path) or "."
        case ["basename", path, *end] if len(end) < 2:
            return os.path.basename(path.rstrip("/")).removesuffix(end[0] if end else "")
        case ["realpath" | "readlink", path]:
            return os.path.normpath(path)
        case ["echo", *said]:
            return " ".join(said)
    return None


def _sum(text: str, variables: Mapping[str, list[str]]) -> str:
    """Whole-number arithmetic; text that is none stays as it is."""
    try:
        return str(_number(ast.parse(text.replace(SPACE, " ").strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return f"$(({text}))"


def _number(node: ast.expr, variables: Mapping[str, list[str]]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in variables:
        return int("".join(variables[node.id]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, variables), _number(node.right, variables)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= _MAX_POWER:
            raise ValueError("a power that is too high")
        return int(_OPERATORS[type(node.op)](left, right))
    raise ValueError("no whole number")
