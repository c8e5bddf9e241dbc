"""OpenAI's APIs: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/responses``.

Completions go on with a text or with token ids; requests of the newest API are items and may name the answer that they
go on from.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel, Field, PrivateAttr

from roll.data.renderer import ChatRenderer, Message, Tool
from roll.rollout.endpoint.errors import ApiError, unsupported
from roll.rollout.endpoint.messages import (
    ChatMessage,
    Part,
    Several,
    ToolParam,
    openai_message,
    plain_messages,
    plain_tools,
    read_content,
)
from roll.rollout.endpoint.sampling import DONE, ApiRequest, SamplingRequest, bytes_of, event, head, texts_of, usage
from roll.rollout.endpoint.session import Answer, Session, Wanted


class ChatRequest(SamplingRequest):
    messages: Several[ChatMessage] = Field(min_length=1)
    tools: Several[ToolParam] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None

    async def ask(self, session: Session) -> list[Answer]:
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", self.tool_choice, "auto or none: the policy is not forced to call")
        if (self.response_format or {}).get("type", "text") != "text":
            raise unsupported("response_format", self.response_format, "text: answers are not constrained")
        if self.top_logprobs:
            raise unsupported("top_logprobs", self.top_logprobs, "0: the sampled token's alone is known")
        wanted = self.wanted(self.max_completion_tokens or self.max_tokens)
        tools = [] if self.tool_choice == "none" else plain_tools(self.tools)
        return await session.chat(plain_messages(self.messages), tools, wanted)

    def whole(self, answers: Sequence[Answer], renderer: ChatRenderer) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": openai_message(answer.turn),
                "finish_reason": answer.finish_reason,
                "logprobs": self._logprobs(answer, renderer),
            }
            for index, answer in enumerate(answers)
        ]
        return {**head("chat.completion", "chatcmpl", self.model), "choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[Answer], renderer: ChatRenderer) -> Iterator[str]:
        """The answer as a stream: for each choice all that it says, then why it ended."""
        top = head("chat.completion.chunk", "chatcmpl", self.model)
        for index, answer in enumerate(answers):
            delta = openai_message(answer.turn)
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta.get("tool_calls", ()))]
            if not delta["tool_calls"]:
                del delta["tool_calls"]
            said = {"index": index, "delta": delta, "logprobs": self._logprobs(answer, renderer), "finish_reason": None}
            yield event({**top, "choices": [said]})
            yield event({**top, "choices": [{"index": index, "delta": {}, "finish_reason": answer.finish_reason}]})
        if self.wants_usage:
            yield event({**top, "choices": [], "usage": usage(answers)})
        yield DONE

    def _logprobs(self, answer: Answer, renderer: ChatRenderer) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        ids, values = answer.completion.token_ids, answer.completion.logprobs.tolist()
        tokens = [
            {"token": text, "logprob": value, "bytes": bytes_of(renderer, token, text), "top_logprobs": []}
            for token, text, value in zip(ids.tolist(), texts_of(renderer, ids), values, strict=True)
        ]
        return {"content": tokens, "refusal": None}


class CompletionRequest(SamplingRequest):
    prompt: str | Several[int] | Several[str] | Several[Several[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)

    async def ask(self, session: Session) -> list[Answer]:
        if self.logprobs is not None and self.logprobs > 1:
            raise unsupported("logprobs", self.logprobs, "0 or 1: the sampled token's alone is known")
        wanted, prompt = self.wanted(self.max_tokens), self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise unsupported("prompt", f"{len(prompt)} prompts", "one; send a request for each")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await session.complete(prompt, wanted)
        tokens, vocabulary = cast("list[int]", prompt), len(session.policy.renderer.tokenizer)
        if not all(0 <= token < vocabulary for token in tokens):
            message = f"prompt: got a token id outside 0 to {vocabulary - 1}"
            raise ApiError(400, message, code="invalid_value", param="prompt")
        return await session.complete(np.array(tokens, dtype=np.int64), wanted)

    def whole(self, answers: Sequence[Answer], renderer: ChatRenderer) -> dict[str, Any]:
        choices = [self._choice(index, answer, renderer) for index, answer in enumerate(answers)]
        return {**head("text_completion", "cmpl", self.model), "choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[Answer], renderer: ChatRenderer) -> Iterator[str]:
        """The answer as a stream, one chunk for each choice."""
        top = head("text_completion", "cmpl", self.model)
        for index, answer in enumerate(answers):
            yield event({**top, "choices": [self._choice(index, answer, renderer)]})
        if self.wants_usage:
            yield event({**top, "choices": [], "usage": usage(answers)})
        yield DONE

    def _choice(self, index: int, answer: Answer, renderer: ChatRenderer) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": answer.turn.content,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        if self.logprobs is not None:
            texts, values = texts_of(renderer, answer.completion.token_ids), answer.completion.logprobs.tolist()
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": values,
                "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)],
                "text_offset": [0, *itertools.accumulate(map(len, texts))][:-1],
            }
        return choice


_ELSEWHERE = {
    "background": "the answer comes with the response",
    "conversation": "previous_response_id goes on from an answer",
    "prompt": "templates are a provider's",
    "top_logprobs": "the sampled token's alone is known",
}
"""Fields that ask for what the endpoint does not have, and the reason."""


class Item(BaseModel):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Several[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Several[Part] | None = None


class ResponseTool(BaseModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseRequest(ApiRequest):
    input: str | Several[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Several[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    text: dict[str, Any] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None

    _id: str = PrivateAttr(default_factory=lambda: f"resp_{uuid.uuid4().hex}")

    async def ask(self, session: Session) -> list[Answer]:
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", self.tool_choice, "auto or none: the policy is not forced to call")
        for name, reason in _ELSEWHERE.items():
            if seen := getattr(self, name):
                raise unsupported(name, seen, f"nothing: {reason}")
        form = (self.text or {}).get("format") or {}
        if form.get("type", "text") != "text":
            raise unsupported("text.format", form, "text: answers are not constrained")
        earlier: tuple[Message, ...] = ()
        if self.previous_response_id is not None:
            if (known := session.conversations.get(self.previous_response_id)) is None:
                message = f"previous_response_id: got {self.previous_response_id!r}, expected one of this episode"
                raise ApiError(404, message, code="previous_response_not_found", param="previous_response_id")
            earlier = known
        said = [*earlier, *_plain_input(self.input)]
        if not said:
            raise unsupported("input", self.input, "at least one message")
        first: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [] if self.tool_choice == "none" else [_tool(tool, i) for i, tool in enumerate(self.tools or ())]
        wanted = Wanted(1, self.max_output_tokens, self.temperature, self.top_p)
        answers = await session.chat([*first, *said], tools, wanted)
        session.conversations[self._id] = (*said, answers[0].turn.as_openai())
        return answers

    def whole(self, answers: Sequence[Answer], renderer: ChatRenderer) -> dict[str, Any]:
        (answer,) = answers
        cut_off = answer.finish_reason == "length"
        sampled = len(answer.completion.token_ids)
        return self._head("incomplete" if cut_off else "completed") | {
            "output": _items(answer),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + sampled,
            },
        }

    def events(self, answers: Sequence[Answer], renderer: ChatRenderer) -> Iterator[str]:
        """The answer as a stream, one delta for each item."""
        whole, count = self.whole(answers, renderer), itertools.count()

        def tell(kind: str, **data: Any) -> str:
            return event({"type": kind, "sequence_number": next(count), **data}, kind)

        yield tell("response.created", response=self._head("in_progress"))
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            yield tell("response.output_item.added", output_index=index, item=_begun(item))
            if item["type"] == "message":
                (part,) = item["content"]
                place |= {"content_index": 0}
                yield tell("response.content_part.added", **place, part=part | {"text": ""})
                yield tell("response.output_text.delta", **place, delta=part["text"], logprobs=[])
                yield tell("response.output_text.done", **place, text=part["text"], logprobs=[])
                yield tell("response.content_part.done", **place, part=part)
            elif item["type"] == "function_call":
                written = item["arguments"]
                yield tell("response.function_call_arguments.delta", **place, delta=written)
                yield tell("response.function_call_arguments.done", **place, name=item["name"], arguments=written)
            yield tell("response.output_item.done", output_index=index, item=item)
        yield tell(f"response.{whole['status']}", response=whole)

    def _head(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": time.time(),
            "status": status,
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "previous_response_id": self.previous_response_id,
            "parallel_tool_calls": True,
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "temperature": self.temperature,
            "top_p": self.top_p,
        }


def _plain_input(items: str | Sequence[Item]) -> list[Message]:
    """Items as messages: what the assistant says and calls in a row is one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    plain: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input.{index}"
        if item.type == "reasoning":
            continue
        if item.type == "function_call_output":
            output = read_content(item.output, f"{where}.output", "tool")
            plain.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "function_call" and item.name:
            if not (plain and plain[-1]["role"] == "assistant"):
                plain.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            plain[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "message" and item.role:
            role = "system" if item.role == "developer" else item.role
            plain.append({"role": role, "content": read_content(item.content, f"{where}.content", role)})
        else:
            raise unsupported(f"{where}.type", item.type, "message, function_call, function_call_output or reasoning")
    return list(plain)


def _tool(tool: ResponseTool, index: int) -> Tool:
    if tool.type != "function" or not tool.name:
        raise unsupported(f"tools.{index}.type", tool.type, "function: the program runs them all")
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _items(answer: Answer) -> list[dict[str, Any]]:
    turn = answer.turn
    items: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        thought = {"type": "reasoning_text", "text": turn.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [thought]})
    if turn.content or not turn.calls:
        text = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{uuid.uuid4().hex}",
                "role": "assistant",
                "status": "incomplete" if answer.finish_reason == "length" else "completed",
                "content": [text],
            }
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            "status": "completed",
        }
        for call in turn.calls
    ]
    return items


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as a stream announces it."""
    match item["type"]:
        case "message":
            return item | {"content": [], "status": "in_progress"}
        case "function_call":
            return item | {"arguments": "", "status": "in_progress"}
        case _:
            return item
