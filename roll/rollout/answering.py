"""Questions of a file to answers, by any generator: several to each, every one with a seed of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from roll.data.asked import Asked
from roll.data.columns import IntArray
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, GenerateFn, GenerateRequest, SamplingParams
from roll.utils.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answerer:
    """Has questions answered."""

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

    async def answer(self, index: int, question: Asked) -> Sequence[Completion | ValueError]:
        """Samples the answers to question number ``index``: the same ones each time, whatever else is asked beside it.

        Returns:
            The completions; or, for each, why there is none: the prompt is too long, or the template refuses it.
        """
        try:
            prompt_ids = self.prompt_ids(question)
        except (TemplateError, ValueError) as error:
            return [ValueError(f"the chat template refuses the messages: {error}")] * self.num_answers
        requests = (
            GenerateRequest(
                f"{index}/{number}", prompt_ids, replace(self.params, seed=derive_seed(self.seed, index, number))
            )
            for number in range(self.num_answers)
        )
        return await asyncio.gather(*map(self._sample, requests))

    async def _sample(self, request: GenerateRequest) -> Completion | ValueError:
        try:
            return await self.generate(request)
        except ValueError as error:  # of this request alone
            return ValueError(str(error).partition(": ")[2] or str(error))

    def prompt_ids(self, question: Asked) -> IntArray:
        """Token ids: of the text as it is, or of the messages by the chat template.

        Raises:
            ValueError: messages, and no template; or it refuses them.
        """
        if question.is_text and not self.chats:
            return np.asarray(self.tokenizer(question.text)["input_ids"], dtype=np.int64)
        assert self.renderer is not None, "checked before"
        return self.renderer.prompt(question.messages, question.tools)

    def text(self, completion: Completion) -> str:
        """Words of an answer, special tokens removed."""
        return str(self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
