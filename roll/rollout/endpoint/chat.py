"""``/v1/chat/completions``: OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from roll.data.renderer import ChatRenderer
from roll.rollout.endpoint.errors import unsupported
from roll.rollout.endpoint.messages import ChatMessage, Several, ToolParam, openai_message, plain_messages, plain_tools
from roll.rollout.endpoint.sampling import DONE, SamplingRequest, bytes_of, event, head, texts_of, usage
from roll.rollout.endpoint.session import Answer, Session


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
