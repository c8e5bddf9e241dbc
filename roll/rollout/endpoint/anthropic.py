"""``/v1/messages``: Anthropic's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from roll.data.renderer import ChatRenderer, Message, Tool
from roll.data.tool_messages import Content, joined
from roll.rollout.endpoint.errors import ApiError, as_anthropic, unsupported
from roll.rollout.endpoint.messages import Part, Several, read_content, read_part
from roll.rollout.endpoint.sampling import MAX_STOPS, ApiRequest, event
from roll.rollout.endpoint.session import Answer, Session, Wanted

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_THOUGHTS = ("thinking", "redacted_thinking")


class Block(Part):
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Several[Part] | None = None


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant"]
    content: str | Several[Block]


class AnthropicTool(BaseModel):
    type: str | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessageRequest(ApiRequest):
    messages: Several[AnthropicMessage] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | Several[Part] | None = None
    tools: Several[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop_sequences: Several[str] = Field(default_factory=list, max_length=MAX_STOPS)

    error_body: ClassVar[Callable[[ApiError], dict[str, Any]]] = staticmethod(as_anthropic)

    async def ask(self, session: Session) -> list[Answer]:
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise unsupported("tool_choice.type", choice, "auto or none: the policy is not forced to call")
        if "" in self.stop_sequences:
            raise unsupported("stop_sequences", self.stop_sequences, "texts that are not empty")
        system = read_content(self.system, "system", "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(self.messages):
            messages += _plain(message, f"messages.{index}.content")
        tools = [] if choice == "none" else [_tool(tool, index) for index, tool in enumerate(self.tools or ())]
        stop = tuple(self.stop_sequences)
        return await session.chat(messages, tools, Wanted(1, self.max_tokens, self.temperature, self.top_p, stop))

    def whole(self, answers: Sequence[Answer], renderer: ChatRenderer) -> dict[str, Any]:
        (answer,) = answers
        return self._head(answer) | {"content": _blocks(answer)} | self._end(answer)

    def events(self, answers: Sequence[Answer], renderer: ChatRenderer) -> Iterator[str]:
        """The answer as a stream, one delta for each block."""
        (answer,) = answers
        start = self._head(answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(answer)):
            empty, delta = _pieces(block)
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=self._end(answer), usage=_usage(answer))
        yield _event("message_stop")

    def _head(self, answer: Answer) -> dict[str, Any]:
        name = f"msg_{uuid.uuid4().hex}"
        return {"id": name, "type": "message", "role": "assistant", "model": self.model, "usage": _usage(answer)}

    def _end(self, answer: Answer) -> dict[str, Any]:
        reason = _STOP_REASONS[answer.finish_reason]
        stop = answer.stop if reason == "end_turn" and answer.stop in self.stop_sequences else None
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}


def _plain(message: AnthropicMessage, where: str) -> list[Message]:
    """A message as OpenAI's: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    plain: list[Message] = []
    said: list[Content] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        place = f"{where}.{index}"
        if (block.type == "text" and block.text is not None) or (block.type == "image" and message.role == "user"):
            said.append(read_part(block, place, message.role))
        elif block.type == "tool_result" and message.role == "user":
            content = read_content(block.content, f"{place}.content", "tool")
            plain.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif block.type == "tool_use" and message.role == "assistant" and block.name:
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not (block.type in _THOUGHTS and message.role == "assistant"):
            raise unsupported(f"{place}.type", block.type, f"what the policy can read of the {message.role}")
    if said or calls or not plain:
        spoken: dict[str, Any] = {"role": message.role, "content": joined(*said)}
        plain.append(spoken | {"tool_calls": calls} if calls else spoken)
    return plain


def _tool(tool: AnthropicTool, index: int) -> Tool:
    if tool.input_schema is None:
        raise unsupported(f"tools.{index}.type", tool.type, "a tool with an input_schema: the program runs them all")
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    turn = answer.turn
    blocks: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.content or not turn.calls:
        blocks.append({"type": "text", "text": turn.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn.calls
    ]
    return blocks


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as a stream begins it, and what is added to it."""
    match block["type"]:
        case "tool_use":
            written = json.dumps(block["input"], ensure_ascii=False)
            return block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        case kind:
            return block | {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.completion.token_ids)}


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, kind)
