"""A conversation with a model, whose words come as they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

import numpy as np

from roll.data.columns import IntArray
from roll.data.renderer import ChatRenderer, Message
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.utils.seeding import derive_seed

POLL_S = 0.03
"""Between two looks at what has been sampled."""
_TORN = "\N{REPLACEMENT CHARACTER}"
"""End of a text whose last character is not whole yet."""


class StreamingEngine(Protocol):
    """A generator that shows what it has of a request in flight (``hf_infer``)."""

    async def generate(self, request: GenerateRequest) -> Completion: ...
    def sampled(self, request_id: str) -> list[int]: ...


class Conversation:
    """Turns of a user and a model. What was sampled is never tokenised again.

    Args:
        params: of every answer; each has a seed of its own.
        system: the system's message, if there is one.
    """

    def __init__(
        self, engine: StreamingEngine, renderer: ChatRenderer, params: SamplingParams, system: str | None, seed: int
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._params = params
        self._system = system
        self._seed = seed
        self._turns = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all that was said, but for the system's message."""
        self._ids: IntArray | None = None
        self._said = np.zeros(0, dtype=np.int64)
        self.finish_reason: FinishReason | None = None
        """Reason why the last answer ended."""

    async def answer(self, words: str) -> AsyncGenerator[str]:
        """Says something and yields the answer, piece by piece. If the caller stops, what was sampled by then counts.

        Raises:
            ValueError: the conversation has become longer than the model takes; it is as it was before.
        """
        message: Message = {"role": "user", "content": words}
        if self._ids is None:
            system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
            prompt_ids = self._renderer.prompt([*system, message])
        else:
            prompt_ids = np.concatenate([self._ids, self._renderer.continuation([message], self._said)])
        self._turns += 1
        params = replace(self._params, seed=derive_seed(self._seed, self._turns))
        request = GenerateRequest(f"turn-{self._turns}", prompt_ids, params)
        task = asyncio.create_task(self._engine.generate(request))
        tokens: list[int] = []
        shown = ""
        try:
            while not task.done():
                await asyncio.wait([task], timeout=POLL_S)
                tokens = self._engine.sampled(request.request_id) or tokens
                text = self._decode(tokens)
                if not task.done() and len(text) > len(shown) and not text.endswith(_TORN):
                    yield text[len(shown) :]
                    shown = text
            completion = await task
            tokens, self.finish_reason = completion.token_ids.tolist(), completion.finish_reason
            if rest := self._decode(tokens)[len(shown) :]:
                yield rest
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if tokens:
                self._said = np.asarray(tokens, dtype=np.int64)
                self._ids = np.concatenate([prompt_ids, self._said])

    def _decode(self, tokens: list[int]) -> str:
        return self._renderer.decode(np.asarray(tokens, dtype=np.int64))
