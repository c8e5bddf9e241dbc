"""Messages and tools in the form of OpenAI's chat API, checked and simplified for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, FailFast, Field

from roll.agentic.tools.tool import AssistantTurn
from roll.data.renderer import Message, Tool
from roll.rollout.endpoint.errors import ApiError, unsupported


class _FailFast(FailFast):
    """As pydantic's, and it can be a part of a union."""

    __hash__ = object.__hash__


T = TypeVar("T")
Several = Annotated[list[T], _FailFast()]
"""A list that is refused at its first wrong member, whatever comes behind."""


class Part(BaseModel):
    """A piece of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str = "{}"


class Call(BaseModel):
    id: str | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[Part] | None = None
    name: str | None = None
    tool_calls: Several[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(BaseModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(BaseModel):
    type: Literal["function"] = "function"
    function: Function


def plain_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The conversation for a chat template.

    Raises:
        ApiError: a message has something else than text.
    """
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: ChatMessage, where: str) -> Message:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": join_text(message.content, f"{where}.content"),
    }
    if message.reasoning_content and message.role == "assistant":
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if message.role != "assistant":
            raise ApiError(
                400, f"{where}.tool_calls: only the assistant calls", code="invalid_value", param=f"{where}.tool_calls"
            )
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in message.tool_calls
        ]
    if message.role == "tool":
        plain |= {key: value for key in ("tool_call_id", "name") if (value := getattr(message, key)) is not None}
    return plain


def named_results(messages: Sequence[Message]) -> list[Message]:
    """Results with the names of the tools that they are from, which clients leave out and some templates write."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def join_text(content: str | Sequence[Part] | None, where: str) -> str:
    """The text of a content.

    Raises:
        ApiError: there is something else in it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.text is None:
            raise unsupported(f"{where}.{index}.type", part.type, "text: the policy reads nothing else")
    return "".join(part.text or "" for part in content)


def plain_tools(tools: Sequence[ToolParam] | None) -> list[Tool]:
    """Tools as chat templates take them."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools or ()]


def openai_message(turn: AssistantTurn) -> dict[str, Any]:
    """An answer as the API's message: arguments are JSON texts, no words beside calls are ``null``."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in turn.calls
        ]
    return message
