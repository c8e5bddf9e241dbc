"""Rows of files that are to be answered: what is asked in them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.configs.data import DataArguments
from roll.data.files.read import read_rows
from roll.data.files.rows import Problems, Row
from roll.data.prompt_rows import Message, RowError, lookup, row_messages, row_tools
from roll.data.tool_messages import Tool

PROMPTS = ("messages", "prompt")
"""Columns that a question is looked for in."""
ANSWERS = "answers"
"""Column that answers are written to, and looked for in."""

CONVERSATION = "conversation"
"""Entry of an episode's info: the messages of a question that is more than one, as JSON."""


@dataclass(frozen=True)
class Asked:
    """A question."""

    messages: tuple[Message, ...]
    """The conversation to go on with; the last is the user's."""
    tools: tuple[Tool, ...] | None
    """Functions that the row tells of."""
    is_text: bool
    """The row holds a text and no conversation: ``messages`` has it as its last."""

    @property
    def text(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]


def read_asked(
    files: Sequence[str], column: str | None, problems: Problems, *, system: str | None = None, without: str = ANSWERS
) -> Iterator[tuple[Row, Asked]]:
    """The questions of files, in order; what is wrong goes to ``problems``.

    Args:
        files: see ``read_rows``.
        column: of the question, a text or a list of messages; ``None``: the first of ``PROMPTS`` that there is.
        system: message of the system, for the rows that have none.
        without: a column that the rows must not have, as it will be written.
    """
    for row in read_rows(files, problems):
        try:
            if without in row.values:
                raise RowError(f"column {without!r} is there already; expected a name that is free: --answer-key NAME")
            yield row, asked(row.values, column, system)
        except RowError as error:
            problems.add(row.place, str(error))


def asked(values: Mapping[str, Any], column: str | None, system: str | None = None) -> Asked:
    """The question of a row.

    Raises:
        RowError: there is none, or it is no text and no list of messages that ends with the user's.
    """
    if column is None:
        column = next((name for name in PROMPTS if name in values), None)
        if column is None:
            names = ", ".join(map(repr, values)) or "none"
            raise RowError(f"no column {' or '.join(map(repr, PROMPTS))}, the row has {names}; name it: --prompt-key")
    talks = column == PROMPTS[0] or isinstance(lookup(values, column), list)
    args = _columns(column, talks, system)
    return Asked(row_messages(values, args), row_tools(values, args), is_text=not talks)


def asked_in(info: Mapping[str, Any], observation: str) -> list[Message]:
    """The messages of the question of an episode that a run has written.

    Raises:
        RowError: they are no JSON.
    """
    if CONVERSATION not in info:
        return [{"role": "user", "content": observation}]
    try:
        messages: list[Message] = json.loads(info[CONVERSATION])
    except (TypeError, ValueError) as error:
        raise RowError(f"info.{CONVERSATION}: {info[CONVERSATION]!r:.60}, expected JSON ({error})") from error
    return messages


@functools.cache
def _columns(column: str, talks: bool, system: str | None) -> DataArguments:
    return DataArguments(**{"messages" if talks else "prompt": column}, system_prompt=system)  # type: ignore[arg-type]
