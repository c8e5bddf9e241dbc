"""Follows a bash script without running it: its variables, its branches, and the commands that it would start.

tree-sitter reads the grammar. Values are texts; what only a shell or its environment can tell stays in them as text:
``${oc.env:A}`` for a variable that nothing sets, ``$(nproc)`` for a command's output. Where only a shell can tell which
branch runs, all of them are followed apart and joined again: what differs between them is *undecided*.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_DOLLAR = "\ue000"
"""Stands for a dollar sign in which a shell replaces nothing."""
_SPACE = "\ue001"
"""Stands for a space of what only a shell can tell; it ends no word."""
_OPEN, _BY, _CLOSE = "\ue002", "\ue003", "\ue004"
"""Around the possible values of what is undecided, behind the names of the variables that decide."""
_UNDECIDED = re.compile(f"{_OPEN}([^{_BY}]*){_BY}([^{_CLOSE}]*){_CLOSE}")

_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
_WHOLE_ARRAY = re.compile(r"\"?\$(?:\{(?:(\w+)\[[@*]\]|([@*]))(?::(\d+)(?::(\d+))?)?\}|([@*]))\"?")
_PARAMETER = re.compile(r"(#?)(!?)([A-Za-z_]\w*|\d+|[@*#?$!])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"\$\{?[#1-9]")
"""In a script's text: the arguments that it is started with, or how many these are."""
_IN_PLACE = re.compile(r"(:?)([-=?+])(.*)", re.DOTALL)
_FOLDER = re.compile(r"cd (?:-\S* )?(\S+)(?: *[12&]*>\S*(?: *2>&1)?)? *&& *pwd(?: -[PL])?")
_SCRIPT = ("0", "BASH_SOURCE")
_SHELL = re.compile(r"(?:^|/)(?:ba|z|da)?sh$")
_SAYS = ("echo", "printf", "grep", "pgrep", "pkill", "ps")
"""Commands that only name a program."""
_HOLD = ("true", ":", "command", "which", "type")
"""Commands that are taken to succeed: a machine that trains has what its script asks for."""
_ASK = ("read", "getopts", "mapfile", "readarray")
"""Commands that set variables to what only a run can tell."""
_DEEPEST = 8
"""Functions that call functions, commands in the texts of commands, files that read files."""
_MOST_ROUNDS = 64
_MAX_POWER = 64

_JOINED = ("&&", "-a", "||", "-o")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, other: int(one / other) if abs(one) < 2**52 else one // other,
    "%": lambda one, other: abs(one) % abs(other) * (-1 if one < 0 else 1),
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&&": lambda one, other: bool(one) and bool(other),
    "||": lambda one, other: bool(one) or bool(other),
}


@dataclass(frozen=True)
class Word:
    """A word of a command."""

    text: str
    undecided: bool
    """A branch that only a shell can choose decides about it; ``text`` has the possible values."""
    by: tuple[str, ...]
    """The variables that decide."""


class _Leave(Exception):
    """``exit``, ``return``, ``break`` or ``continue``."""


class _Exit(_Leave):
    pass


class _Return(_Leave):
    pass


class _Break(_Leave):
    pass


class _Continue(_Leave):
    pass


@dataclass
class _Scope:
    """What holds at one place of a script. Its values are never changed, only replaced."""

    variables: dict[str, list[str] | dict[str, str]] = field(default_factory=dict)
    """Arrays have any number of words, other variables one; associative arrays are mappings."""
    arguments: list[str] = field(default_factory=list)
    """Of the script, or of the function that is followed."""
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    """The words of the commands that were asked for."""

    def copy(self) -> _Scope:
        return replace(
            self, variables=dict(self.variables), functions=dict(self.functions), commands=list(self.commands)
        )


class Bash:
    """Follows a script's commands.

    Args:
        wanted: tells by its words whether a command is one to keep.
        script: path of the script, which ``$0`` stands for.
        given: variables that the caller sets, as the environment would; they also stand for values that the script has
            a shell compute.
        find: the file that a script names by a path of its own, where there is one (``source``).
    """

    def __init__(
        self,
        wanted: Callable[[Sequence[str]], bool],
        script: str = "run.sh",
        given: Mapping[str, str] | None = None,
        find: Callable[[str], Path | None] = lambda path: None,
    ) -> None:
        self.notes: list[str] = []
        self._wanted, self._script, self._given, self._find = wanted, script, dict(given or {}), find
        self._scope = _Scope({name: [value] for name, value in self._given.items()})
        self._depth = 0
        self._in_function = False

    @property
    def commands(self) -> list[list[Word]]:
        """The commands to keep, in the order in which they would start."""
        return [[_word(word) for word in words] for words in self._scope.commands]

    def follow(self, text: str) -> None:
        """Follows a script to its end."""
        self._note_broken_lines(text)
        with contextlib.suppress(_Leave):
            self._follow(text)

    def follow_functions(self) -> None:
        """Follows the functions that the script itself does not call."""
        for name in list(self._scope.functions):
            with contextlib.suppress(_Leave):
                self._call(name, [])

    def _follow(self, text: str) -> None:
        if self._depth >= _DEEPEST:
            return
        self._depth += 1
        try:
            self._run_all(_parser().parse(text.replace("\r\n", "\n").encode()).root_node.children)
        finally:
            self._depth -= 1

    def _note_broken_lines(self, text: str) -> None:
        """Notes lines after which a command does not go on, though it looks as if it did."""
        lines = text.splitlines()
        for number, (before, line, after) in enumerate(zip(["", *lines], lines, [*lines[1:], ""], strict=False), 1):
            if line.lstrip().startswith("#"):
                continue
            if re.search(r"\\[ \t]+$", line):
                self._note(f"line {number}: a backslash followed by a space ends the command there")
            elif line.endswith("\\") and after.lstrip().startswith("#"):
                self._note(f"line {number + 1}: a comment ends the command; what follows it is not part of the run")
            elif before.endswith("\\") and not line.endswith("\\") and re.match(r"\s+\+{0,2}\w+(\.\w+)+=", after):
                self._note(f"line {number} ends the command: it has no backslash; what follows is not part of the run")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # Statements: each returns whether it succeeds, None where only a shell can tell.

    def _run_all(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if node.is_named:
                status = self._run(node)
        return status

    def _run(self, node: Node) -> bool | None:
        match node.type:
            case "comment" | "heredoc_body":
                return True
            case "variable_assignment":
                return self._assign(node)
            case "command":
                return self._command(node)
            case "declaration_command":
                return self._run_all(child for child in node.named_children if child.type == "variable_assignment")
            case "unset_command":
                for child in node.named_children:
                    self._scope.variables.pop(_source(child), None)
                return True
            case "redirected_statement":
                return self._redirected(node)
            case "list":
                return self._list(node)
            case "negated_command":
                status = self._run_all(node.named_children)
                return None if status is None else not status
            case "test_command":
                return self._test(node.named_children[0]) if len(node.named_children) == 1 else None
            case "compound_statement" if node.children[0].type == "((":
                number = self._number(node.named_children[0]) if node.named_child_count else None
                return None if number is None else number != 0
            case "if_statement":
                return self._if(node)
            case "case_statement":
                return self._case(node)
            case "while_statement":
                return self._while(node)
            case "for_statement":
                return self._for(node)
            case "c_style_for_statement":
                return self._run_all([*node.named_children[:1], node.named_children[-1]])
            case "function_definition":
                self._scope.functions[_source(node.named_children[0])] = node.named_children[-1]
                return True
            case "ERROR":
                line = node.start_point[0] + 1
                self._note(f"line {line} cannot be read: {_source(node).strip().partition(chr(10))[0][:80]}")
                return self._run_all(node.children)
            case "pipeline" | "subshell":
                self._run_all(node.children)
                return None
            case _:
                return self._run_all(node.children)

    def _list(self, node: Node) -> bool | None:
        """``a && b``, ``a || b``."""
        first, sign, second = node.children[0], node.children[1].type, node.children[-1]
        status = self._run(first)
        runs = sign == "&&"
        if status is runs and self._asks_for_arguments([first], [second]):
            return not runs
        if status is None:
            return self._fork([[second], []], [first])
        return self._run(second) if status is runs else status

    def _asks_for_arguments(self, condition: Sequence[Node], body: Sequence[Node]) -> bool:
        """Tells whether a script ends where it has too few arguments: whoever starts it gives them."""
        ends = any(_source(each) == "exit" for root in body for each in _walk(root) if each.type == "command_name")
        return ends and not self._in_function and any(_ARGUMENT.search(_source(each)) for each in condition)

    def _if(self, node: Node) -> bool | None:
        branches: list[tuple[list[Node] | None, list[Node]]] = []
        for part in (node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))):
            inside = [child for child in part.children if child.type not in ("elif_clause", "else_clause", "fi")]
            then = next((at for at, child in enumerate(inside) if child.type == "then"), 0)
            branches.append((inside[1:then] if then else None, inside[then + 1 :]))
        ways: list[list[Node]] = []
        asked: list[Node] = []
        for condition, body in branches:
            status = True if condition is None else self._run_all(condition)
            if condition and self._asks_for_arguments(condition, body):
                status = False
            if status is not False:
                ways.append(body)
            if status:
                break
            asked += condition or []
        else:
            ways.append([])
        return self._fork(ways, asked)

    def _case(self, node: Node) -> bool | None:
        subject, *items = node.named_children
        value = self._text(subject)
        ways: list[list[Node]] = []
        for item in (each for each in items if each.type == "case_item"):
            close = next((at for at, child in enumerate(item.children) if child.type == ")"), 0)
            patterns = [self._text(child) for child in item.children[:close] if child.is_named]
            if not _unknown(value) and not any(fnmatchcase(_plain(value), _plain(each)) for each in patterns):
                continue
            ways.append(item.children[close + 1 :])
            if not _unknown(value) or "*" in patterns:
                break
        else:
            ways.append([])
        return self._fork(ways, [subject])

    def _while(self, node: Node) -> bool | None:
        *condition, body = node.children[1:]
        wanted = node.children[0].type == "while"
        always = _source(node.named_children[0]) in ("true", ":")
        try:
            for _ in range(1 if always else _MOST_ROUNDS):
                status = self._run_all(condition)
                if status is None:
                    return self._fork([[body], []], condition)
                if status is not wanted:
                    break
                with contextlib.suppress(_Continue):
                    self._run(body)
        except _Break:
            pass
        return None

    def _for(self, node: Node) -> bool | None:
        name, *values, body = node.named_children
        words = [word for each in values for word in self._fields(each)] if values else self._scope.arguments
        try:
            for word in words[:_MOST_ROUNDS]:
                self._scope.variables[_source(name)] = [word]
                with contextlib.suppress(_Continue):
                    self._run(body)
        except _Break:
            pass
        return None

    def _fork(self, ways: Sequence[Sequence[Node]], asked: Sequence[Node]) -> bool | None:
        """Follows the ways of which one is taken, and joins what they leave; one that ends the script leaves nothing.

        Args:
            asked: the conditions that choose the way.
        """
        if len(ways) == 1:
            return self._run_all(ways[0])
        before = self._scope
        names = self._unknown_names(asked)
        ends, started = list[_Scope](), list[list[list[str]]]()
        for way in ways:
            self._scope = before.copy()
            leaves = False
            try:
                self._run_all(way)
            except _Exit:
                leaves = True
            except _Leave:
                pass
            started.append(self._scope.commands[len(before.commands) :])
            if not leaves:
                ends.append(self._scope)
        self._scope = _join(ends, names) if ends else before
        found = [each for each in started if each]
        if len(found) > 1 and any(each != found[0] for each in found):
            found = [[_join_words([each[0] for each in found], names)]]
        self._scope.commands = [*before.commands, *(found[0] if found else [])]
        if not ends:
            raise _Exit
        return None

    def _unknown_names(self, nodes: Sequence[Node]) -> list[str]:
        """The variables in conditions whose values only a shell can tell."""
        found: dict[str, None] = {}
        for node in (each for root in nodes for each in _walk(root) if each.type == "variable_name"):
            name = _source(node)
            value = self._value(name, None)
            if value is None:
                found[name] = None
            elif _unknown(value):
                deeper = [*re.findall(r"\$\{oc\.env:(\w+)\}", value), *_deciders(value)]
                found |= dict.fromkeys(deeper or [name])
        return list(found)

    # Commands.

    def _command(self, node: Node) -> bool | None:
        parts = [child for child in node.named_children if not child.type.endswith("_redirect")]
        assigned = [child for child in parts if child.type == "variable_assignment"]
        if assigned and len(parts) > len(assigned):
            between = (node.text or b"")[
                assigned[-1].end_byte - node.start_byte : parts[len(assigned)].start_byte - node.start_byte
            ]
            if re.search(rb"(?<!\\)\n", between):  # a line of its own, which the grammar joins with the next
                self._run_all(assigned)
        words = [
            word
            for child in parts
            if child not in assigned
            for word in self._fields(child.named_children[0] if child.type == "command_name" else child)
        ]
        if not words:
            return self._run_all(assigned)
        name, rest = words[0], words[1:]
        if name in self._scope.functions:
            return self._call(name, rest)
        if name in _SAYS or name in _HOLD:
            return None if name in ("grep", "pgrep") else True
        if name in _ASK:
            for word in rest:
                if re.fullmatch(r"[A-Za-z_]\w*", word):
                    self._scope.variables[word] = [self._given.get(word, _unread(name))]
            return None
        if name == "test":
            root = _parser().parse(f"[ {_source(node).strip()[4:]} ]".encode()).root_node
            return self._run_all(root.children)
        if name in ("exit", "return", "break", "continue"):
            raise {"exit": _Exit, "return": _Return, "break": _Break, "continue": _Continue}[name]
        if name == "shift":
            self._scope.arguments = self._scope.arguments[int(rest[0]) if rest and rest[0].isdigit() else 1 :]
        elif name == "set":
            self._scope.arguments = rest[rest.index("--") + 1 :] if "--" in rest else self._scope.arguments
        elif name in ("source", ".") and rest:
            self._read_file(rest[0])
        elif (text := _text_for_shell(words)) is not None:
            self._follow(_plain(text))
        elif self._wanted([_plain(word) for word in words]):
            self._scope.commands.append(words)
            return None
        else:
            return False if name == "false" else None
        return True

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        if self._depth >= _DEEPEST:
            return None
        self._depth += 1
        before, self._scope.arguments = self._scope.arguments, arguments
        outside, self._in_function = self._in_function, True
        try:
            return self._run(self._scope.functions[name])
        except _Return:
            return None
        finally:
            self._scope.arguments, self._in_function = before, outside
            self._depth -= 1

    def _read_file(self, path: str) -> None:
        """``source file``."""
        plain = _plain(path)
        found = self._find(plain)
        if found is None or self._depth >= _DEEPEST:
            self._note(
                f"{plain}, which the script reads with source, was not found: set its variables with --set NAME=value"
            )
            return
        try:
            self._follow(found.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self._note(f"{plain}: {error}")
        except _Return:
            pass

    def _redirected(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        status = None if body is None else self._run(body)
        for document in (child for child in node.named_children if child.type == "heredoc_redirect"):
            start, content = (
                next((_source(child) for child in document.named_children if child.type == kind), "")
                for kind in ("heredoc_start", "heredoc_body")
            )
            if "python" in ("" if body is None else _source(body)) or not self._wanted(content.split()):
                continue
            quoted = any(sign in start for sign in "'\"\\")
            self._follow(content if quoted else _plain(self._expanded(content, keeps_quotes=True)))
        return status

    def _assign(self, node: Node) -> bool:
        target, *rest = node.named_children
        name, index = _source(target), None
        if target.type == "subscript":
            name, index = _source(target.named_children[0]), self._text(target.named_children[1])
        appends = any(child.type == "+=" for child in node.children)
        variables, value = self._scope.variables, rest[0] if rest else None
        old = variables.get(name)
        if value is not None and value.type == "array":
            new = self._array(value)
            variables[name] = [*old, *new] if appends and isinstance(old, list) and isinstance(new, list) else new
            return True
        text = "" if value is None else self._text(value)
        if index is not None:
            entries = old if isinstance(old, dict) else {str(at): each for at, each in enumerate(old or [])}
            variables[name] = {**entries, index: (entries.get(index, "") if appends else "") + text}
            return True
        text = "".join(old or []) + text if appends else text
        if name in self._given:
            if _unknown(text):
                text = self._given[name]
            elif text != self._given[name]:
                self._note(f"--set {name}={self._given[name]}: the script itself sets {name} to {_plain(text)}")
        variables[name] = [text]
        return True

    def _array(self, node: Node) -> list[str] | dict[str, str]:
        entries = [re.fullmatch(r"\[([^\]]+)\]=(.*)", self._text(child), re.DOTALL) for child in node.named_children]
        if entries and all(entries):
            return {entry[1].strip("\"'"): entry[2] for entry in entries if entry}
        return [word for child in node.named_children if child.type != "comment" for word in self._fields(child)]

    # Words.

    def _fields(self, node: Node) -> list[str]:
        """The words that a shell makes of one: an array its elements, a value without quotes its parts."""
        if whole := _WHOLE_ARRAY.fullmatch(_source(node)):
            values = self._elements(whole)
            return values if _source(node).startswith('"') else [part for each in values for part in each.split()]
        fields: list[str] = []
        current: str | None = None
        for text, splits in self._pieces(node):
            parts = re.split(r"[ \t\n]+", text) if splits else [text]
            if splits and parts == [""]:
                continue
            for at, part in enumerate(parts):
                if at and current is not None:
                    fields.append(current)
                    current = None
                if part or not splits:
                    current = (current or "") + part
        return fields if current is None else [*fields, current]

    def _elements(self, whole: re.Match[str]) -> list[str]:
        name, at, first, count, plain = whole.groups()
        if at or plain:
            values, skip = self._scope.arguments, max(0, int(first or 1) - 1)
        else:
            found = self._scope.variables.get(name, [])
            values, skip = list(found.values() if isinstance(found, dict) else found), int(first or 0)
        return values[skip:][: int(count) if count else None]

    def _text(self, node: Node) -> str:
        """A word in one piece, as an assignment takes it."""
        if whole := _WHOLE_ARRAY.fullmatch(_source(node)):
            return " ".join(self._elements(whole))
        return "".join(text for text, _ in self._pieces(node))

    def _pieces(self, node: Node) -> Iterator[tuple[str, bool]]:
        """Parts of a word, and whether spaces in them separate words."""
        source = _source(node)
        match node.type:
            case "string":
                yield self._between(node, 1, len(node.text or b"") - 1), False
            case "translated_string":
                yield from self._pieces(node.named_children[0])
            case "raw_string":
                yield source[1:-1].replace("$", _DOLLAR), False
            case "ansi_c_string":
                escapes = {"n": "\n", "t": "\t", "r": "\r"}
                yield re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), source[2:-1]), False
            case "concatenation":
                for child in node.children:
                    yield from self._pieces(child)
            case kind if kind in _EXPANSIONS:
                yield self._expansion(node, quoted=False), True
            case "process_substitution":
                yield _unread(source), False
            case _ if any(child.type in _EXPANSIONS for child in node.children):
                yield self._between(node, 0, len(node.text or b"")), False
            case _:
                unescaped = re.sub(r"\\(\n|.)", lambda found: found[1].strip("\n").replace("$", _DOLLAR), source)
                yield unescaped, False

    def _between(self, node: Node, start: int, end: int) -> str:
        """A text between double quotes, its variables replaced."""
        text, parts, at = node.text or b"", list[str](), start
        for child in (each for each in node.children if each.type in _EXPANSIONS):
            first, last = child.start_byte - node.start_byte, child.end_byte - node.start_byte
            parts += [_unescaped(text[at:first].decode()), self._expansion(child, quoted=True)]
            at = last
        return "".join([*parts, _unescaped(text[at:end].decode())])

    def _expanded(self, raw: str, *, keeps_quotes: bool) -> str:
        """A text of the script with its variables replaced."""
        raw = raw.replace('"', '\\"') if keeps_quotes else re.sub(r"(?<!\\)\"", "", raw)
        command = _parser().parse(f'echo "{raw}"'.encode()).root_node.named_children
        string = command[0].named_children[-1] if command and command[0].named_children else None
        return raw if string is None or string.type != "string" else self._text(string)

    def _expansion(self, node: Node, *, quoted: bool) -> str:
        source = _source(node)
        if whole := _WHOLE_ARRAY.fullmatch(source):
            return " ".join(self._elements(whole))
        if node.type == "simple_expansion":
            return self._named(source[1:])
        if node.type == "expansion":
            return self._parameter(source[2:-1], quoted)
        if node.type == "arithmetic_expansion":
            number = self._number(node.named_children[0]) if node.named_child_count == 1 else None
            return _unread(f"({self._expanded(source[3:-2], keeps_quotes=False)})") if number is None else str(number)
        inside = source[1:-1] if source.startswith("`") else source[2:-1]
        return self._output(self._expanded(inside, keeps_quotes=False))

    def _output(self, command: str) -> str:
        """Output of a command that only looks at the text of a path; all others stay as text."""
        plain = _plain(command).strip()
        found = None if _unknown(command.replace("${oc.env:", "")) else _answer(plain)
        return _unread(plain) if found is None else found

    def _named(self, name: str) -> str:
        value = self._value(name, None)
        if not value and name.isdigit() and not self._in_function:
            return _unread(f"{_ECHO}{name}")  # an argument of the script
        return f"${{oc.env:{name}}}" if value is None else value

    def _value(self, name: str, index: str | None) -> str | None:
        """``None``: the script does not set it."""
        arguments = self._scope.arguments
        if name in _SCRIPT:
            return self._script
        if name in "@*":
            return " ".join(arguments)
        if name in "#?$!":
            return {"#": str(len(arguments)), "?": "0"}.get(name, "")
        if name.isdigit():
            return arguments[int(name) - 1] if int(name) <= len(arguments) else ""
        values = self._scope.variables.get(name)
        if values is None:
            return None
        if isinstance(values, dict):
            return " ".join(values.values()) if index in ("@", "*") else values.get((index or "0").strip("\"'"), "")
        if index in (None, "@", "*"):
            return " ".join(values) if index or len(values) == 1 else next(iter(values), "")
        at = self._number_in(str(index))
        return None if at is None else values[at] if -len(values) <= at < len(values) else ""

    def _parameter(self, inside: str, quoted: bool) -> str:
        """The value of ``${inside}``."""
        if inside.startswith("oc.env:"):
            return f"${{{inside}}}"
        found = _PARAMETER.fullmatch(inside)
        if found is None:
            return _unread(f"echo ${_DOLLAR}{inside}")
        counted, pointed, name, index, rest = found.groups()
        if index is not None and index not in ("@", "*"):
            index = self._expanded(index, keeps_quotes=False)
        if pointed:
            name = self._value(name, None) or name
        value = self._value(name, index)
        if counted:
            values = self._scope.arguments if name in "@*" else self._scope.variables.get(name)
            if rest or values is None:
                return _unread(f"echo {inside}")
            return str(len(values)) if index in ("@", "*") or name in "@*" else str(len(value or ""))
        if not rest:
            return self._named(name) if value is None else value
        if how := _IN_PLACE.fullmatch(rest):
            missing = value is None or (how[1] == ":" and not value)
            fallback = how[3] if quoted else re.sub(r"'([^']*)'", r"\1", how[3])
            if how[2] == "+":
                return "" if missing else self._expanded(fallback, keeps_quotes=False)
            if not missing or how[2] == "?":
                return f"${{oc.env:{name}}}" if missing or value is None else value
            text = self._expanded(fallback, keeps_quotes=False)
            if how[2] == "=":
                self._scope.variables[name] = [text]
            return text
        changed = None if value is None else _changed(value, rest, lambda raw: self._expanded(raw, keeps_quotes=False))
        return _unread(f"echo {inside}") if changed is None else changed

    # Tests and sums.

    def _test(self, node: Node) -> bool | None:
        if node.type == "parenthesized_expression":
            return self._test(node.named_children[0])
        if node.type == "unary_expression":
            sign, operand = _source(node.children[0]), node.children[-1]
            if sign == "!":
                return _not(self._test(operand))
            text = self._tested(operand)
            if sign in ("-z", "-n") and not _unknown(text):
                return (text == "") is (sign == "-z")
            return None
        if node.type != "binary_expression":
            text = self._tested(node)
            return None if _unknown(text) else text != ""
        left, right = node.children[0], node.children[-1]
        sign = _source(node.children[1])
        if sign in _JOINED:
            return _both(self._test(left), self._test(right), sign)
        # The grammar gives ! and -a a higher rank than comparisons; a shell does not.
        if left.type == "binary_expression" and (joined := _source(left.children[1])) in _JOINED:
            return _both(self._test(left.children[0]), self._compare(left.children[-1], sign, right), joined)
        if left.type == "unary_expression" and left.children[0].type == "!":
            return _not(self._compare(left.children[-1], sign, right))
        return self._compare(left, sign, right)

    def _tested(self, node: Node) -> str:
        """The text of an operand, where an argument that the script is not given is empty."""
        return _MISSING.sub("", self._text(node))

    def _compare(self, left: Node, sign: str, right: Node) -> bool | None:
        one, other = self._tested(left), self._tested(right)
        if _unknown(one) or _unknown(other):
            return None
        one, other = _plain(one), _plain(other)
        if sign in ("=", "==", "!="):
            return fnmatchcase(one, other) is (sign != "!=")
        if sign in _NUMBERS:
            numbers = [self._number_in(each) for each in (one, other)]
            return None if None in numbers else _NUMBERS[sign](*(each or 0 for each in numbers))
        if sign in ("<", ">"):
            return one < other if sign == "<" else one > other
        return None

    def _number_in(self, text: str) -> int | None:
        if re.fullmatch(r"-?\d{1,18}", text):
            return int(text)
        tree = _parser().parse(f"(( {text} ))".encode()).root_node.named_children
        return self._number(tree[0].named_children[0]) if tree and tree[0].named_child_count == 1 else None

    def _number(self, node: Node) -> int | None:
        """Whole-number arithmetic; ``None`` where only a shell can tell."""
        if node.type == "parenthesized_expression":
            return self._number(node.named_children[0])
        if node.type == "ternary_expression":
            condition, one, other = node.named_children
            chosen = self._number(condition)
            return None if chosen is None else self._number(one if chosen else other)
        if node.type == "unary_expression":
            value, sign = self._number(node.children[-1]), node.children[0].type
            signs: dict[str, Callable[[int], int]] = {"-": operator.neg, "+": operator.pos, "!": operator.not_}
            return None if value is None or sign not in signs else int(signs[sign](value))
        if node.type == "binary_expression":
            left, right = self._number(node.children[0]), self._number(node.children[-1])
            return None if left is None or right is None else _apply(node.children[1].type, left, right)
        text = _source(node)
        if node.type in ("variable_name", "word") and not text[0].isdigit():
            text = self._named(text)
        elif node.type not in ("number", "word"):
            text = self._text(node)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _source(node: Node) -> str:
    return (node.text or b"").decode()


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _not(status: bool | None) -> bool | None:
    return None if status is None else not status


def _both(one: bool | None, other: bool | None, sign: str) -> bool | None:
    decides = sign in ("||", "-o")
    return decides if decides in (one, other) else None if None in (one, other) else not decides


def _unknown(text: str) -> bool:
    """Tells whether only a shell can tell the value, or a part of it."""
    return "$" in text or _OPEN in text


def _unread(command: str) -> str:
    return f"$({command})".replace(" ", _SPACE)


_ECHO = f"echo {_DOLLAR}"
_MISSING = re.compile(re.escape(_unread(_ECHO))[: -len(re.escape(")"))] + r"\d+\)")
"""What stands for an argument of the script."""


def _plain(text: str) -> str:
    """The text as a shell would have it."""
    return _UNDECIDED.sub(r"\2", text).replace(_DOLLAR, "$").replace(_SPACE, " ")


def _deciders(text: str) -> list[str]:
    """The variables that decide about parts of a text."""
    return [name for found in _UNDECIDED.finditer(text) for name in found[1].split(",") if name]


def _word(text: str) -> Word:
    return Word(_plain(text), _OPEN in text, tuple(dict.fromkeys(_deciders(text))))


def _mark(values: Iterable[str], names: Sequence[str]) -> str:
    """One of several values, of which variables decide."""
    values = list(values)
    by = ",".join(dict.fromkeys([*names, *(name for each in values for name in _deciders(each))]))
    plain = dict.fromkeys(_UNDECIDED.sub(r"\2", each) for each in values)
    return f"{_OPEN}{by}{_BY}{' or '.join(plain)}{_CLOSE}".replace(" ", _SPACE)


def _join(scopes: Sequence[_Scope], names: Sequence[str]) -> _Scope:
    """What is certain after branches of which only a shell knows the right one."""
    first = scopes[0].copy()
    for name in dict.fromkeys(name for scope in scopes for name in scope.variables):
        values = [scope.variables.get(name) for scope in scopes]
        lists = [value or [] for value in values if not isinstance(value, dict)]
        if all(value == values[0] for value in values):
            continue
        if len(lists) < len(values):
            first.variables[name] = [_mark(("",), [*names, name])]
        elif all(len(each) < 2 for each in lists):
            first.variables[name] = [_mark(("".join(each) for each in lists), names)]
        else:
            first.variables[name] = _join_words(lists, names)
    first.functions = {name: body for scope in scopes for name, body in scope.functions.items()}
    if any(scope.arguments != first.arguments for scope in scopes):
        first.arguments = _join_words([scope.arguments for scope in scopes], names)
    return first


def _join_words(lists: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """The words of several lists in their order, those that are not in all of them marked."""
    order = dict.fromkeys(word for words in lists for word in words)
    return [word if all(word in words for words in lists) else _mark((word,), names) for word in order]


def _unescaped(text: str) -> str:
    """A part of a text between double quotes."""
    return re.sub(r"\\([$`\"\\\n])", lambda found: found[1].strip("\n").replace("$", _DOLLAR), text)


def _text_for_shell(words: Sequence[str]) -> str | None:
    """The text that a command gives to a shell: ``eval $CMD``, ``srun bash -c "…"``."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for word, option, *rest in (words[i : i + 3] for i in range(len(words) - 2)):
        if _SHELL.search(word) and re.fullmatch(r"-\w*c", option):
            return rest[0]
    return None


def _apply(sign: str, one: int, other: int) -> int | None:
    if sign == "**":
        return one**other if 0 <= other <= _MAX_POWER and abs(one) < 2**32 else None
    if sign not in _OPERATORS or (sign in "/%" and other == 0):
        return None
    return int(_OPERATORS[sign](one, other))


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
        wanted, text = translate(replace(old)).removesuffix("\\Z").removesuffix("\\z"), replace(new)
        return re.sub(wanted, lambda found: text, value, count=0 if every else 1) if old else value
    return None


def _answer(command: str) -> str | None:
    """Output of a command that only looks at the text of a path; ``None`` for all others."""
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
