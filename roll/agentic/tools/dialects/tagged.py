"""Dialects with each argument between tags of its own: Qwen3-Coder, GLM."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from roll.agentic.tools.dialects.base import Call, Found, Schemas, ThinkingDialect, read_json, to_json
from roll.agentic.tools.tool import CallError, ToolCall
from roll.data.tool_messages import CALL_END as _END
from roll.data.tool_messages import CALL_START as _START


class TaggedDialect(ThinkingDialect):
    """A call between ``<tool_call>`` tags, which a family's pattern takes apart.

    Arguments are bare words. The schema says their types: a string is taken as it stands. Without a schema what reads
    as JSON is JSON, and all else a string.

    Attributes:
        whole: pattern of all that stands between the tags, with the groups ``name`` and ``arguments``.
        argument: pattern of an argument, with the groups ``key`` and ``value``.
        shape: what ``whole`` expects, in words.
    """

    whole: re.Pattern[str]
    argument: re.Pattern[str]
    shape: str

    def read(self, said: str, schemas: Schemas) -> tuple[str, list[Found]]:
        words, found, position = "", list[Found](), 0
        while (start := said.find(_START, position)) >= 0:
            words += said[position:start]
            inside = start + len(_START)
            another = said.find(_START, inside)
            limit = len(said) if another < 0 else another
            closing = said.find(_END, inside, limit)
            if closing < 0:
                position = limit
                found.append(CallError(said[start:position], f"expected {_END}, got none: it was cut off"))
                continue
            position = closing + len(_END)
            found.append(self._read_call(said[start:position], said[inside:closing], schemas))
        return words + said[position:], found

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        return "\n".join([*filter(None, [content]), *map(self.write_call, calls)])

    @abstractmethod
    def write_call(self, call: ToolCall) -> str:
        """A call and its tags."""

    def _read_call(self, text: str, inside: str, schemas: Schemas) -> Found:
        whole = self.whole.fullmatch(inside.strip())
        if not whole:
            return CallError(text, f"expected {self.shape}, got {inside.strip()[:40]!r}")
        name, position, arguments = whole["name"].strip(), 0, dict[str, Any]()
        properties = schemas.get(name, {}).get("properties") or {}
        written = whole["arguments"].strip()
        while position < len(written):
            found = self.argument.match(written, position)
            if not found:
                return CallError(text, f"expected {self.shape}, got {written[position : position + 40]!r}")
            key, position = found["key"].strip(), found.end()
            if key in arguments:
                return CallError(text, f"expected every argument once, got {key!r} twice")
            arguments[key] = read_bare(found["value"], properties.get(key))
        return Call(text, name, arguments)


def read_bare(words: str, schema: object) -> Any:
    """The value that bare words stand for.

    Args:
        schema: JSON schema of the value, if there is one.
    """
    kinds, bare = _kinds(schema), words.strip()
    if "null" in kinds and bare in ("null", "None"):
        return None
    if kinds and kinds <= {"string", "null"}:
        return words
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        value, end = read_json(words)
    except ValueError:
        return words
    return value if not words[end:].strip() else words


def _kinds(schema: object) -> frozenset[str]:
    """Types of JSON that a schema allows, as far as it says so."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type", [])
    said = {kind} if isinstance(kind, str) else {each for each in kind if isinstance(each, str)}
    choices = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    return frozenset(said.union(*map(_kinds, choices)))


def write_bare(value: object) -> str:
    """The words that ``read_bare`` reads as the value without a schema: a string stands bare where it can."""
    if (
        isinstance(value, str)
        and read_bare(value, None) == value
        and not _MARKUP.search(value)
        and value == value.strip()
    ):
        return value
    return to_json(value).replace("</", "<\\/").replace(_START, "\\u003c" + _START[1:])


_MARKUP = re.compile(f"</|{re.escape(_START)}|^$")


class Qwen3CoderDialect(TaggedDialect):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""

    name = "qwen3_coder"
    example = f"{_START}\n<function=<name>>\n<parameter=<key>>\n<value>\n</parameter>\n</function>\n{_END}"
    whole = re.compile(r"<function=(?P<name>[^>\n]*)>(?P<arguments>.*)</function>", re.DOTALL)
    argument = re.compile(r"<parameter=(?P<key>[^>\n]*)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)
    shape = "<function=name> with <parameter=key>value</parameter> in it and </function>"

    def write_call(self, call: ToolCall) -> str:
        arguments = "".join(
            f"<parameter={key}>\n{write_bare(value)}\n</parameter>\n" for key, value in call.arguments.items()
        )
        return f"{_START}\n<function={call.name}>\n{arguments}</function>\n{_END}"


class GlmDialect(TaggedDialect):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.5 and later."""

    name = "glm"
    example = f"{_START}<name>\n<arg_key><key></arg_key>\n<arg_value><value></arg_value>\n{_END}"
    whole = re.compile(r"(?P<name>[^<>\n]*)(?P<arguments>(?:\s*<arg_key>.*</arg_value>)?)", re.DOTALL)
    argument = re.compile(r"<arg_key>(?P<key>[^<\n]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL)
    shape = "a name, then <arg_key>key</arg_key> and <arg_value>value</arg_value> for every argument"

    def write_call(self, call: ToolCall) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{write_bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return f"{_START}{call.name}\n{''.join(pairs)}{_END}"
