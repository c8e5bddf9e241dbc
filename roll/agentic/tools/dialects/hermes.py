"""Hermes and Qwen: a JSON object between tags, as many as there are calls."""

from __future__ import annotations

from collections.abc import Sequence

from roll.agentic.tools.dialects.base import Found, Schemas, ThinkingDialect, call_of, read_json, to_json
from roll.agentic.tools.types import CallError, ToolCall
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
    seen = repr(said[closing : closing + 20]) if closing < len(said) else "the end: it was cut off"
    return _skip(said, start, end, f"expected {_END} behind the object, saw {seen}")


def _skip(said: str, start: int, inside: int, reason: str) -> tuple[int, Found]:
    """A malformed call, which ends with its tag or where another begins."""
    another = said.find(_START, inside)
    limit = len(said) if another < 0 else another
    closing = said.find(_END, inside, limit)
    stop = limit if closing < 0 else closing + len(_END)
    return stop, CallError(said[start:stop], reason)
