"""Parts that all dialects share: reasoning, ids, checks of names and arguments, answers to malformed calls."""

from __future__ import annotations

import json
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from roll.agentic.tools.tool import AssistantTurn, CallError, ToolCall, ToolSchema, call_id

THOUGHT, THOUGHT_END = "<think>", "</think>"
_SHOWN = 200
"""Characters of a malformed call that an answer repeats."""
_LEVELS = 64
"""Of arguments: deeper than that, what reads them later may run out of stack."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was read, before ids are given.

    Attributes:
        text: what the model wrote.
        name: anything, if it is no text there is an error.
        arguments: likewise for what is no JSON object.
        id: ``None`` where the model wrote none.
    """

    text: str
    name: object
    arguments: object
    id: object = None


Found: TypeAlias = Call | CallError
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn taken apart, its calls not checked."""

    content: str
    found: Sequence[Found]
    reasoning: str | None


class BaseDialect(ABC):
    """The notation in which a model family writes calls: checks calls, gives them ids; subclasses read and write turns.

    Attributes:
        name: in configurations.
        example: a call as it should be written, for answers to malformed ones.
    """

    name: str
    example: str

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> AssistantTurn:
        """Reads a turn; never raises.

        Args:
            text: what was sampled, special tokens as text, without the token that ended the turn.
            tools: say the types of arguments where the dialect writes bare words.
        """
        read = self.read_turn(text, {tool.name: tool.parameters for tool in tools})
        calls: list[ToolCall] = []
        errors: list[CallError] = []
        for each in read.found:
            checked = _check(each, {call.id for call in calls}, len(calls)) if isinstance(each, Call) else each
            if isinstance(checked, ToolCall):
                calls.append(checked)
            else:
                errors.append(checked)
        return AssistantTurn(read.content.strip(), tuple(calls), tuple(errors), read.reasoning)

    def format(self, turn: AssistantTurn) -> str:
        """The text that ``parse`` reads as ``turn``, its errors left out.

        Raises:
            ValueError: the dialect cannot write it.
        """
        text = self.write_turn(turn)
        if _without_ids(self.parse(text)) != _without_ids(turn):
            raise ValueError(f"the tool dialect {self.name} cannot write {turn}")
        return text

    def error_text(self, error: CallError) -> str:
        """Content of the tool message that answers a malformed call."""
        got = error.text if len(error.text) <= _SHOWN else error.text[:_SHOWN] + " …"
        return f"error: this tool call was not run: {error.reason}.\nGot: {got}\nExpected: {self.example}"

    @abstractmethod
    def read_turn(self, text: str, schemas: Schemas) -> ReadTurn:
        """Takes a turn apart.

        Args:
            text: see ``parse``.
            schemas: JSON schemas of the tools' arguments, by name.
        """

    @abstractmethod
    def write_turn(self, turn: AssistantTurn) -> str:
        """The text that ``read_turn`` reads so, where there is one."""


class ThinkingDialect(BaseDialect):
    """Reasoning comes before ``</think>``, text and calls after it; subclasses read and write the latter."""

    def read_turn(self, text: str, schemas: Schemas) -> ReadTurn:
        reasoning, said = split_reasoning(text)
        content, found = self.read(said, schemas)
        return ReadTurn(content, found, reasoning)

    def write_turn(self, turn: AssistantTurn) -> str:
        said = self.write(turn.content, turn.calls)
        return said if turn.reasoning is None else f"{THOUGHT}\n{turn.reasoning}\n{THOUGHT_END}\n\n{said}"

    @abstractmethod
    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        """Words and calls of what follows the reasoning."""

    @abstractmethod
    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """The text that ``read`` reads so."""


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Returns the text before ``</think>``, and the rest; an opening tag may have been in the prompt.

    A text that opens the tag and never closes it was cut off: all of it is reasoning.
    """
    thought, closed, said = text.partition(THOUGHT_END)
    if not closed and not text.lstrip().startswith(THOUGHT):
        return None, text
    return thought.strip().removeprefix(THOUGHT).strip() or None, said


def _without_ids(turn: AssistantTurn) -> AssistantTurn:
    """Without what a dialect need not write: ids, and errors."""
    return replace(turn, calls=tuple(replace(call, id="") for call in turn.calls), errors=())


def _check(call: Call, taken: set[str], index: int) -> ToolCall | CallError:
    if not isinstance(call.name, str) or not call.name.strip():
        return CallError(call.text, f"expected the name of a tool, got {_show(call.name)}")
    if not isinstance(call.arguments, dict):
        return CallError(call.text, f"expected the arguments as an object, got {_show(call.arguments)}")
    if call.id is not None and not (isinstance(call.id, str) and call.id):
        return CallError(call.text, f"expected a text id, got {_show(call.id)}")
    if call.id in taken:
        return CallError(call.text, f"expected a unique id, got {call.id!r} twice")
    try:
        check_json([call.name, call.id, call.arguments])
    except ValueError as error:
        return CallError(call.text, str(error))
    number = index
    while call.id is None and call_id(number) in taken:
        number += 1
    return ToolCall(call_id(number) if call.id is None else str(call.id), call.name, call.arguments)


def _show(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"


def check_json(value: object, levels: int = _LEVELS) -> None:
    """Raises ``ValueError`` for what has no JSON form that every reader takes, such as infinities and lone surrogates.

    Args:
        levels: that lists and objects may be nested.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"expected Unicode text, got a lone surrogate in {value!r:.60}") from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected numbers, got {value!r}")
    elif isinstance(value, int):
        try:
            str(value)
        except ValueError:  # Python writes no longer ones, which dialects with hexadecimal numbers read
            raise ValueError(f"expected numbers, got one with {value.bit_length()} bits") from None
    elif isinstance(value, dict | list) and not levels:
        raise ValueError(f"expected at most {_LEVELS} nested lists and objects, got more")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected text keys, got {key!r:.60}")
            check_json(key, levels - 1)
            check_json(item, levels - 1)
    elif isinstance(value, list):
        for item in value:
            check_json(item, levels - 1)
    elif value is not None and not isinstance(value, float):
        raise ValueError(f"expected JSON values, got {_show(value)}")


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` (white space before it allowed), and where it ends.

    Raises:
        ValueError: there is none, said as an error's reason.
    """
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            raise ValueError("expected JSON, got only its beginning: it was cut off") from None
        raise ValueError(f"expected JSON, got {text[error.pos : error.pos + 20]!r} ({error.msg})") from None
    except RecursionError:
        raise ValueError("expected JSON, got JSON nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"expected JSON, got {name}")


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"expected JSON, got a number with {len(digits)} digits") from None


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer)


def to_json(value: object) -> str:
    """JSON as chat templates write it, with nothing in it that ends reasoning."""
    return json.dumps(value, ensure_ascii=False).replace(THOUGHT_END, "<\\/think>")


def call_of(value: object, text: str, *, arguments: Sequence[str] = ("arguments",), more: Sequence[str] = ()) -> Found:
    """A call written as a JSON object of a name and arguments.

    Args:
        arguments: keys that arguments may have.
        more: keys that may stand beside them and say nothing.
    """
    if not isinstance(value, dict):
        return CallError(text, f"expected an object, got {_show(value)}")
    if "name" not in value:
        return CallError(text, "expected the key 'name', got " + (", ".join(map(repr, value)) or "none"))
    given = [key for key in arguments if key in value]
    if len(given) != 1:
        return CallError(text, f"expected the key {arguments[0]!r} once, got {', '.join(map(repr, value))}")
    unknown = [key for key in value if key not in ("name", "id", *arguments, *more)]
    if unknown:
        return CallError(text, f"expected 'name' and {arguments[0]!r}, got {', '.join(map(repr, unknown))} too")
    return Call(text, value["name"], value[given[0]], value.get("id"))
