"""Responses without a run: to the questions of a file, several each, and chats with a person."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jinja2 import TemplateError

from roll.data.columns import IntArray, Item
from roll.data.pictures import PictureError
from roll.data.questions import Question
from roll.data.renderer import ChatRenderer, Message, items_of
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.data.row_pictures import with_items
from roll.data.tool_messages import joined
from roll.utils.hashing import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answerer:
    """Generates responses to questions."""

    generate: GenerateFn
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer | None
    """``None``: there is no chat template, and every question is a text."""
    params: SamplingParams
    num_answers: int
    """To each question."""
    seed: int
    chats: bool = False
    """Texts are asked as messages too."""

    async def answer(self, index: int, question: Question) -> Sequence[Completion | ValueError]:
        """Samples the answers to question number ``index``: the same ones each time, whatever else is asked beside it.

        Returns:
            The completions; or, for each, why there is none: the prompt is too long, or the template refuses it.
        """
        try:
            prompt_ids, items = self.prompt(question)
        except PictureError as error:
            return [error] * self.num_answers
        except (TemplateError, ValueError) as error:
            return [ValueError(f"the chat template cannot render the messages: {error}")] * self.num_answers
        seeds = [derive_seed(self.seed, index, number) for number in range(self.num_answers)]
        requests = (
            GenerateRequest(f"{index}/{number}", prompt_ids, replace(self.params, seed=seed), items=items)
            for number, seed in enumerate(seeds)
        )
        return await asyncio.gather(*map(self._sample, requests))

    async def _sample(self, request: GenerateRequest) -> Completion | ValueError:
        try:
            return await self.generate(request)
        except ValueError as error:  # of this request alone
            return ValueError(str(error).partition(": ")[2] or str(error))

    def prompt(self, question: Question) -> tuple[IntArray, tuple[Item, ...]]:
        """Token ids, of the text as it is or of the messages by the chat template, and the pictures in them.

        Raises:
            PictureError: one cannot be used.
            ValueError: the template refuses the messages.
        """
        if question.is_text and not self.chats:
            return np.asarray(self.tokenizer(question.text)["input_ids"], dtype=np.int64), ()
        assert self.renderer is not None, "checked before"
        messages = with_items(question.messages, self.renderer.pictures)
        return self.renderer.prompt(messages, question.tools), items_of(messages)

    def text(self, completion: Completion) -> str:
        """Words of an answer, special tokens removed."""
        return str(self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))


POLL_S = 0.03
"""Between two looks at what has been sampled."""
_TORN = "\N{REPLACEMENT CHARACTER}"
"""End of a text whose last character is not whole yet."""


class StreamingEngine(Protocol):
    """A generator that can stream a request in flight (``hf_infer``)."""

    async def generate(self, request: GenerateRequest) -> Completion: ...
    def sampled(self, request_id: str) -> list[int]: ...


class Conversation:
    """Turns of a user and a model. Sampled tokens are never tokenised again.

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
        self._items: tuple[Item, ...] = ()
        self._said = np.zeros(0, dtype=np.int64)
        self.finish_reason: FinishReason | None = None
        """Reason why the last answer ended."""

    async def answer(self, words: str, pictures: Sequence[Item] = ()) -> AsyncGenerator[str]:
        """Says something and yields the answer, piece by piece. If the caller stops, what was sampled by then counts.

        Args:
            pictures: in front of the words.

        Raises:
            ValueError: the conversation has become longer than the model takes; it is as it was before.
        """
        content = joined([{"type": "image", "image": item} for item in pictures], words)
        message: Message = {"role": "user", "content": content}
        items = tuple(dict.fromkeys([*self._items, *pictures]))
        if self._ids is None:
            system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
            prompt_ids = self._renderer.prompt([*system, message])
        else:
            prompt_ids = np.concatenate([self._ids, self._renderer.continuation([message], self._said)])
        self._turns += 1
        params = replace(self._params, seed=derive_seed(self._seed, self._turns))
        request = GenerateRequest(f"turn-{self._turns}", prompt_ids, params, items=items)
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
                self._ids, self._items = np.concatenate([prompt_ids, self._said]), items

    def _decode(self, tokens: list[int]) -> str:
        return self._renderer.decode(np.asarray(tokens, dtype=np.int64))
