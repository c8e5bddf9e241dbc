"""Mistral: an array of calls, or name after name, behind a marker."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.agentic.tools.dialects.base import Call, Found, Schemas, ThinkingDialect, call_of, read_json, to_json
from roll.agentic.tools.types import CallError, ToolCall

_MISTRAL, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_ID_LENGTH = 9
_NAMED = re.compile(r"([^\[\]{}]*)(?:\[CALL_ID\]([^\[\]{}]*))?" + re.escape(_ARGS))


class MistralDialect(ThinkingDialect):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]``, in which it is written, for it has ids.

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
        return CallError(found.text, f"expected an id of {_ID_LENGTH} letters or digits, saw {str(found.id)[:40]!r}")
    return found


def _read_list(rest: str) -> list[Found]:
    """Calls in an array."""
    try:
        value, end = read_json(rest)
    except ValueError as error:
        return [CallError(rest, str(error))]
    if rest[end:].strip():
        return [CallError(rest, f"expected nothing behind the array, saw {rest[end:].strip()[:20]!r}")]
    return [call_of(each, _MISTRAL + rest) for each in (value if isinstance(value, list) else [value])]


def _read_named(rest: str) -> list[Found]:
    """Calls that each begin with the marker, a name and ``[ARGS]``."""
    found: list[Found] = []
    while rest:
        head = _NAMED.match(rest)
        if not head:
            stop = rest.find(_MISTRAL)
            piece = rest if stop < 0 else rest[:stop]
            found.append(CallError(_MISTRAL + piece, f"expected a name and {_ARGS}, saw {piece[:20]!r}"))
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
            found.append(CallError(behind, f"expected {_MISTRAL}, saw {behind[:20]!r}"))
            behind = ""
        rest = behind.removeprefix(_MISTRAL)
    return found
