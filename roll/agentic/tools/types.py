"""Tool calls, turns and schemas, in no family's notation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A valid call.

    Attributes:
        id: what the answer refers to; nine letters and digits where the family writes none (``call_id``).
        name: of the tool, known or not.
        arguments: a JSON object.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]

    def as_openai(self) -> dict[str, Any]:
        """An entry of a message's ``tool_calls``, its arguments as an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True, slots=True)
class CallError:
    """A malformed call.

    Attributes:
        text: what the model wrote.
        reason: what was expected and what it got.
    """

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """Text and calls of a model in one turn.

    Attributes:
        content: its words, without calls and reasoning, stripped.
        calls: in the order in which they were written.
        errors: the malformed ones; a turn may have both.
        reasoning: what it thought aloud before, stripped; ``None`` where it did not.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()
    reasoning: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """The turn as a message that chat templates take, without keys that would be empty."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as it is described to the model.

    Attributes:
        name: letters, digits, ``_`` and ``-``.
        description: what it does and when to call it.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def as_openai(self) -> dict[str, Any]:
        """The function dict that chat templates and OpenAI-compatible servers take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def call_id(index: int) -> str:
    """The id of the ``index``-th call of a turn whose family writes none: nine characters, as Mistral's templates ask.

    >>> call_id(2)
    'call00002'
    """
    return f"call{index:05d}"
