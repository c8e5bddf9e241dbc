"""Messages and tools in the form of OpenAI's chat API, checked and simplified for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, FailFast, Field

from roll.agentic.tools.tool import AssistantTurn
from roll.data.pictures import PictureError
from roll.data.renderer import Message, Tool
from roll.data.row_pictures import PARTS, REFUSED, SHOWING, picture_part
from roll.data.tool_messages import Content, joined
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
    image_url: str | dict[str, Any] | None = None
    """A picture in OpenAI's APIs."""
    source: dict[str, Any] | None = None
    """A picture in Anthropic's."""


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
    """The conversation for a chat template; its pictures are ``Source``s.

    Raises:
        ApiError: a message has something else than text and pictures.
    """
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: ChatMessage, where: str) -> Message:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": read_content(message.content, f"{where}.content", message.role),
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


def read_content(content: str | Sequence[Part] | None, where: str, role: str) -> Content:
    """A content as messages have it: a text, or parts where there is a picture in it.

    Args:
        role: of users and tools there may be pictures.

    Raises:
        ApiError: there is something else in it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return joined(*(read_part(part, f"{where}.{index}", role) for index, part in enumerate(content)))


def read_part(part: Part, where: str, role: str) -> Content:
    """A part as messages have it.

    Raises:
        ApiError: it is neither text nor a picture that this role may show.
    """
    if part.text is not None and part.type not in PARTS:
        return part.text
    if part.type not in PARTS or role not in SHOWING:
        expected = "text, or pictures of users and tools" if part.type in PARTS else "text or a picture"
        raise unsupported(f"{where}.type", part.type, f"{expected}{_why(part.type)}")
    try:
        shown = picture_part(part.model_dump(exclude_none=True), where, None)
    except PictureError as error:
        raise picture_refused(error) from error
    if shown["image"] is None:
        message = f"{where}: got no picture, expected a data URI in image_url, or base64 in source"
        raise ApiError(400, message, code="invalid_value", param=where)
    return [shown]


def _why(kind: str) -> str:
    return f": {REFUSED[kind]}" if kind in REFUSED else ""


def picture_refused(error: PictureError) -> ApiError:
    """Of a picture that cannot be used; the reason begins with its place."""
    return ApiError(400, str(error), code="invalid_image", param=str(error).partition(": ")[0])


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
