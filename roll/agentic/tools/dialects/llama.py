"""Llama 3: JSON objects for an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.agentic.tools.dialects.base import Found, Schemas, ThinkingDialect, call_of, read_json, to_json
from roll.agentic.tools.types import CallError, ToolCall

_PYTHON_TAG = "<|python_tag|>"
_MESSAGE_END = "<|eom_id|>"  # instead of the end of turn, where the model waits for a tool
_LLAMA_CALL = re.compile(r'\s*\{\s*"(name|parameters|arguments|type)"\s*:')


class LlamaJsonDialect(ThinkingDialect):
    """``{"name": …, "parameters": {…}}`` as the whole answer: Llama 3.1 and 3.2. Semicolons stand between several.

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
                return words, [*found, CallError(behind, f"expected ';' and another call, saw {behind[:20]!r}")]
            position = len(rest) - len(behind) + 1

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = "; ".join(to_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)
        return f"{content}{_PYTHON_TAG}{written}" if content else written
