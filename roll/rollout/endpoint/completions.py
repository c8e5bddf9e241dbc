"""``/v1/completions``: OpenAI's older API, which goes on with a text or with token ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from pydantic import Field

from roll.data.renderer import ChatRenderer
from roll.rollout.endpoint.errors import ApiError, unsupported
from roll.rollout.endpoint.messages import Several
from roll.rollout.endpoint.sampling import DONE, SamplingRequest, event, head, texts_of, usage
from roll.rollout.endpoint.session import Answer, Session


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
            message = f"prompt: seen a token id outside 0 to {vocabulary - 1}"
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
