"""Calls as Python writes them: Llama 4, Llama 3.2 and others. They are parsed and never run."""

from __future__ import annotations

import ast
import keyword
import warnings
from collections.abc import Sequence
from typing import Any

from roll.agentic.tools.dialects.base import THOUGHT_END, Call, Found, Schemas, ThinkingDialect
from roll.agentic.tools.tool import CallError, ToolCall

_START, _END = "<|python_start|>", "<|python_end|>"
_TAG = "<|python_tag|>"


class PythonicDialect(ThinkingDialect):
    """``[name(key="value"), …]`` as the whole answer, or between Llama 4's markers after text.

    Arguments are literals given by name. An answer is one of calls if it is a list that begins with one.
    """

    name = "llama_pythonic"
    example = '[<name>(<key>="<value>")]'

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        words, marked, rest = said.partition(_START if _START in said else _TAG)
        if not marked:
            words, rest = "", said
        written, _, behind = rest.partition(_END)
        if not marked and not _is_list_of_calls(written):
            return said, []
        return words + behind, _read_list(written.strip())

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = f"[{', '.join(map(_write_call, calls))}]"
        return f"{content}{_START}{written}{_END}" if content else written


def _is_list_of_calls(text: str) -> bool:
    """Tells whether a text begins as a list of calls does: a bracket, a name, a parenthesis."""
    head, called, _ = text.strip().partition("(")
    names = head.removeprefix("[").strip().split(".")
    return head.startswith("[") and bool(called) and all(name.isidentifier() for name in names)


def _read_list(written: str) -> list[Found]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of what a model writes
            tree = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return [CallError(written, f"expected a Python list of calls, got text that Python cannot parse ({reason})")]
    elements = tree.elts if isinstance(tree, ast.List) else [tree]
    return [_read_call(element, written) for element in elements]


def _read_call(node: ast.expr, text: str) -> Found:
    if not isinstance(node, ast.Call):
        return CallError(text, f"expected a call, got {_kind(node)}")
    name = _name(node.func)
    if name is None:
        return CallError(text, f"expected the name of a tool, got {_kind(node.func)}")
    if node.args:
        return CallError(text, "expected every argument by name, got one without a name")
    arguments: dict[str, Any] = {}
    for each in node.keywords:
        try:
            value = _literal(each.value)
        except ValueError as error:
            return CallError(text, f"{error} in {each.arg or 'the arguments'}")
        # ``**{"from": 1}``: names that Python keeps for itself
        given = {each.arg: value} if each.arg is not None else value
        if not isinstance(given, dict):
            return CallError(text, "expected an object after **")
        if not arguments.keys().isdisjoint(given):
            return CallError(text, "expected every argument once")
        arguments |= given
    return Call(text, name, arguments)


def _name(node: ast.expr) -> str | None:
    """A name, dots in it allowed."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _kind(node: ast.expr) -> str:
    """Name that Python has for such an expression."""
    return repr(node.value) if isinstance(node, ast.Constant) else type(node).__name__


def _literal(node: ast.expr) -> Any:
    """The value of a literal of JSON's types.

    Raises:
        ValueError: it is none.
    """
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("expected literals, got something else") from None
    return _lists(value)


def _lists(value: Any) -> Any:
    """Tuples as lists, which JSON has."""
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value


def _write_call(call: ToolCall) -> str:
    plain = {key: value for key, value in call.arguments.items() if key.isidentifier() and not keyword.iskeyword(key)}
    others = {key: value for key, value in call.arguments.items() if key not in plain}
    written = [f"{key}={_write(value)}" for key, value in plain.items()] + [f"**{_write(others)}"] * bool(others)
    return f"{call.name}({', '.join(written)})"


def _write(value: object) -> str:
    """A literal with nothing in it that ends reasoning or the calls."""
    written = repr(value)
    for marker in (THOUGHT_END, _START, _END, _TAG):
        written = written.replace(marker, "\\x3c" + marker[1:])
    return written
