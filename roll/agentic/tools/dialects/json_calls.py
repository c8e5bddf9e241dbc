"""Dialects whose calls are JSON: Hermes, Nemotron (between tags), Llama 3 (the answer), Mistral, DeepSeek (markers)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.agentic.tools.dialects.base import Call, Found, Schemas, ThinkingDialect, call_of, read_json, to_json
from roll.agentic.tools.tool import CallError, ToolCall
from roll.data.tool_messages import CALL_END as _END
from roll.data.tool_messages import CALL_START as _START


class HermesDialect(ThinkingDialect):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen2.5, Qwen3, and templates without tools."""

    name = "hermes"
    example = f'{_START}\n{{"name": "<name>", "arguments": {{"<key>": "<value>"}}}}\n{_END}'

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        words, found, position = "", list[Found](), 0
        while (start := said.find(_START, position)) >= 0:
            words += said[position:start]
            position, call = _read_call(said, start)
            found.append(call)
        return words + said[position:], found

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        written = [f"{_START}\n{to_json({'name': c.name, 'arguments': dict(c.arguments)})}\n{_END}" for c in calls]
        return "\n".join([content] * bool(content) + written)


def _read_call(said: str, start: int) -> tuple[int, Found]:
    """The call whose tag opens at ``start``, and where the text goes on."""
    inside = start + len(_START)
    try:
        value, end = read_json(said, inside)
    except ValueError as error:
        return _skip(said, start, inside, str(error))
    closing = end + len(said[end:]) - len(said[end:].lstrip())
    if said.startswith(_END, closing):
        stop = closing + len(_END)
        return stop, call_of(value, said[start:stop])
    got = repr(said[closing : closing + 20]) if closing < len(said) else "the end: it was cut off"
    return _skip(said, start, end, f"expected {_END} after the object, got {got}")


def _skip(said: str, start: int, inside: int, reason: str) -> tuple[int, Found]:
    """A malformed call, which ends with its tag or where another begins."""
    another = said.find(_START, inside)
    limit = len(said) if another < 0 else another
    closing = said.find(_END, inside, limit)
    stop = limit if closing < 0 else closing + len(_END)
    return stop, CallError(said[start:stop], reason)


_LIST, _LIST_END = "<TOOLCALL>", "</TOOLCALL>"


class NemotronDialect(ThinkingDialect):
    """``<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>``: Nemotron Nano 2 and Nemotron Super."""

    name = "nemotron"
    example = f'{_LIST}[{{"name": "<name>", "arguments": {{"<key>": "<value>"}}}}]{_LIST_END}'

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        words, marked, rest = said.partition(_LIST)
        if not marked:
            return said, []
        try:
            value, end = read_json(rest)
        except ValueError as error:
            return words, [CallError(_LIST + rest, str(error))]
        behind = rest[end:].lstrip()
        if not behind.startswith(_LIST_END):
            got = repr(behind[:20]) if behind else "the end: it was cut off"
            return words, [CallError(_LIST + rest, f"expected {_LIST_END} after the array, got {got}")]
        text = _LIST + rest[:end] + _LIST_END
        calls = value if isinstance(value, list) else [value]
        return words + behind.removeprefix(_LIST_END), [call_of(each, text) for each in calls]

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return f"{content}{_LIST}{to_json(written)}{_LIST_END}"


_PYTHON_TAG = "<|python_tag|>"
_MESSAGE_END = "<|eom_id|>"  # instead of the end of turn, where the model waits for a tool
_LLAMA_CALL = re.compile(r'\s*\{\s*"(name|parameters|arguments|type)"\s*:')


class LlamaJsonDialect(ThinkingDialect):
    """``{"name": …, "parameters": {…}}`` as the whole answer: Llama 3.1 and 3.2. Semicolons separate several.

    The model is not told to mark a call, so an object is one if it has a key of a call, or follows ``<|python_tag|>``.
    """

    name = "llama3_json"
    example = '{"name": "<name>", "parameters": {"<key>": "<value>"}}'

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        said = said.rstrip().removesuffix(_MESSAGE_END)
        words, marked, rest = said.partition(_PYTHON_TAG)
        if not marked:
            words, rest = "", said
            if not _LLAMA_CALL.match(said):
                return said, []
        found: list[Found] = []
        position = 0
        while True:
            try:
                value, end = read_json(rest, position)
            except ValueError as error:
                return words, [*found, CallError(rest[position:], str(error))]
            found.append(
                call_of(value, rest[position:end].strip(), arguments=("parameters", "arguments"), more=("type",))
            )
            behind = rest[end:].lstrip()
            if not behind:
                return words, found
            if not behind.startswith(";"):
                return words, [*found, CallError(behind, f"expected ';' and another call, got {behind[:20]!r}")]
            position = len(rest) - len(behind) + 1

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = "; ".join(to_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)
        return f"{content}{_PYTHON_TAG}{written}" if content else written


_MISTRAL, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_ID_LENGTH = 9
_NAMED = re.compile(r"([^\[\]{}]*)(?:\[CALL_ID\]([^\[\]{}]*))?" + re.escape(_ARGS))


class MistralDialect(ThinkingDialect):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]``, the form that is written, since it has ids.

    Mistral Small 3.2 and later: ``[TOOL_CALLS]name[ARGS]{…}``.
    """

    name = "mistral"
    example = '[TOOL_CALLS][{"name": "<name>", "arguments": {"<key>": "<value>"}, "id": "<9 letters or digits>"}]'

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        words, marked, rest = said.partition(_MISTRAL)
        if not marked:
            return said, []
        found = _read_list(rest) if rest.lstrip()[:1] in ("[", "{", "") else _read_named(rest)
        return words, [_with_right_id(each) for each in found]

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = [
            {"name": call.name, "arguments": dict(call.arguments)} | ({"id": call.id} if _is_right(call.id) else {})
            for call in calls
        ]
        return f"{content}{_MISTRAL}{to_json(written)}"


def _is_right(identity: object) -> bool:
    return not isinstance(identity, str) or len(identity) == _ID_LENGTH


def _with_right_id(found: Found) -> Found:
    """An error for a call whose id Mistral's templates refuse."""
    if isinstance(found, Call) and not _is_right(found.id):
        return CallError(found.text, f"expected an id of {_ID_LENGTH} letters or digits, got {str(found.id)[:40]!r}")
    return found


def _read_list(rest: str) -> list[Found]:
    """Calls in an array."""
    try:
        value, end = read_json(rest)
    except ValueError as error:
        return [CallError(rest, str(error))]
    if rest[end:].strip():
        return [CallError(rest, f"expected nothing after the array, got {rest[end:].strip()[:20]!r}")]
    return [call_of(each, _MISTRAL + rest) for each in (value if isinstance(value, list) else [value])]


def _read_named(rest: str) -> list[Found]:
    """Calls that each begin with the marker, a name and ``[ARGS]``."""
    found: list[Found] = []
    while rest:
        head = _NAMED.match(rest)
        if not head:
            stop = rest.find(_MISTRAL)
            piece = rest if stop < 0 else rest[:stop]
            found.append(CallError(_MISTRAL + piece, f"expected a name and {_ARGS}, got {piece[:20]!r}"))
            rest = "" if stop < 0 else rest[stop + len(_MISTRAL) :]
            continue
        try:
            value, end = read_json(rest, head.end())
            found.append(Call(_MISTRAL + rest[:end], head[1].strip(), value, head[2]))
        except ValueError as error:
            stop = rest.find(_MISTRAL, head.end())
            end = len(rest) if stop < 0 else stop
            found.append(CallError(_MISTRAL + rest[:end], str(error)))
        behind = rest[end:].lstrip()
        if behind and not behind.startswith(_MISTRAL):
            found.append(CallError(behind, f"expected {_MISTRAL}, got {behind[:20]!r}"))
            behind = ""
        rest = behind.removeprefix(_MISTRAL)
    return found


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"([^\n]*)\n```json\n")


class DeepSeekDialect(ThinkingDialect):
    """Calls between DeepSeek's markers: with type and code fence in V3 and R1; bare in V3.1, which is written."""

    name = "deepseek"
    example = f'{_CALLS}{_CALL}<name>{_SEP}{{"<key>": "<value>"}}{_CALL_END}{_CALLS_END}'

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        words, marked, rest = said.partition(_CALLS)
        found: list[Found] = []
        if not marked:
            return said, found
        while rest.strip():
            if not rest.lstrip().startswith(_CALL):
                ended, _, behind = rest.lstrip().partition(_CALLS_END)
                if not ended:
                    return words + behind, found
                return words, [*found, CallError(rest, f"expected {_CALL} or {_CALLS_END}, got {rest.strip()[:20]!r}")]
            rest = rest.lstrip()
            end, call = _read_deepseek(rest)
            found.append(call)
            rest = rest[end:]
        if found and isinstance(found[-1], CallError):  # which was cut off itself
            return words, found
        return words, [*found, CallError(_CALLS, f"expected {_CALLS_END}, got the end: it was cut off")]

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = [f"{_CALL}{call.name}{_SEP}{to_json(dict(call.arguments))}{_CALL_END}" for call in calls]
        return "".join([content, _CALLS, *written, _CALLS_END])


def _read_deepseek(text: str) -> tuple[int, Found]:
    """The call that ``text`` begins with, and where it ends."""
    inside = len(_CALL)
    sep = text.find(_SEP, inside)
    another = text.find(_CALL, inside)
    if sep < 0 or 0 <= another < sep:
        return _skip_deepseek(text, inside, f"expected {_SEP} after the name")
    name, position = text[inside:sep].strip(), sep + len(_SEP)
    fenced = _FENCED.match(text, position)
    if fenced:  # V3: a type, then the name and the arguments in a code fence
        name, position = fenced[1].strip(), fenced.end()
    try:
        value, end = read_json(text, position)
    except ValueError as error:
        return _skip_deepseek(text, position, str(error))
    rest = text[end:].lstrip()
    if fenced and not rest.startswith("```"):
        return _skip_deepseek(text, end, f"expected ``` after the arguments, got {rest[:20]!r}")
    rest = rest.removeprefix("```").lstrip() if fenced else rest
    if not rest.startswith(_CALL_END):
        return _skip_deepseek(text, end, f"expected {_CALL_END} after the arguments, got {rest[:20]!r}")
    stop = len(text) - len(rest) + len(_CALL_END)
    return stop, Call(text[:stop], name, value)


def _skip_deepseek(text: str, inside: int, reason: str) -> tuple[int, CallError]:
    """A malformed call, which runs to its end or to the next marker."""
    ends = [text.find(_CALL_END, inside) + len(_CALL_END)] if _CALL_END in text[inside:] else []
    ends += [at for at in (text.find(_CALL, inside), text.find(_CALLS_END, inside)) if at >= 0]
    stop = min(ends, default=len(text))
    return stop, CallError(text[:stop], reason)
