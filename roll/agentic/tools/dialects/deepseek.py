"""DeepSeek: calls between markers of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.agentic.tools.dialects.base import Call, Found, Schemas, ThinkingDialect, read_json, to_json
from roll.agentic.tools.types import CallError, ToolCall

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"([^\n]*)\n```json\n")


class DeepSeekDialect(ThinkingDialect):
    """Calls between DeepSeek's markers: with a type and a code fence in V3 and R1, bare as they are written in V3.1."""

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
                return words, [*found, CallError(rest, f"expected {_CALL} or {_CALLS_END}, saw {rest.strip()[:20]!r}")]
            rest = rest.lstrip()
            end, call = _read_deepseek(rest)
            found.append(call)
            rest = rest[end:]
        if found and isinstance(found[-1], CallError):  # which was cut off itself
            return words, found
        return words, [*found, CallError(_CALLS, f"expected {_CALLS_END}, saw the end: it was cut off")]

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
        return _skip_deepseek(text, inside, f"expected {_SEP} behind the name")
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
        return _skip_deepseek(text, end, f"expected ``` behind the arguments, saw {rest[:20]!r}")
    rest = rest.removeprefix("```").lstrip() if fenced else rest
    if not rest.startswith(_CALL_END):
        return _skip_deepseek(text, end, f"expected {_CALL_END} behind the arguments, saw {rest[:20]!r}")
    stop = len(text) - len(rest) + len(_CALL_END)
    return stop, Call(text[:stop], name, value)


def _skip_deepseek(text: str, inside: int, reason: str) -> tuple[int, CallError]:
    """A malformed call, which runs to its end or to the next marker."""
    ends = [text.find(_CALL_END, inside) + len(_CALL_END)] if _CALL_END in text[inside:] else []
    ends += [at for at in (text.find(_CALL, inside), text.find(_CALLS_END, inside)) if at >= 0]
    stop = min(ends, default=len(text))
    return stop, CallError(text[:stop], reason)
