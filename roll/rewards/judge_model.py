"""A judge on the run's own devices: the interface to the engine that hosts it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from roll.configs.judge import JudgeEngine
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest, JudgeQuestion, SamplingParams
from roll.data.templates import ChatTemplate
from roll.models.tokenizer import load_tokenizer
from roll.rewards.types import RewardError
from roll.utils.hashing import derive_seed


class HostedModel(Protocol):
    """A model that this process hosts."""

    async def generate(self, request: GenerateRequest) -> Completion: ...
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...
    async def close(self) -> None: ...


HostModel = Callable[[str, JudgeEngine, int], HostedModel]
"""Starts the engine of a model (folder or name on the hub) for so many requests at a time; blocks."""


class HostedJudge:
    """Calls a judge that this process hosts.

    Args:
        model: folder in Hugging Face format, or a name on the hub.
        engine: see ``JudgeEngine``.
        sampling: temperature and length of what it says.
    """

    def __init__(self, model: str, engine: JudgeEngine, sampling: SamplingParams, most: int, host: HostModel) -> None:
        self.model = host(model, engine, most)
        template = ChatTemplate(engine.template, engine.chat_template_kwargs)
        self._renderer = ChatRenderer(
            load_tokenizer(model, trust_remote_code=engine.model_args.trust_remote_code), template
        )
        self._sampling = sampling
        self._numbers = itertools.count()

    async def ask(self, question: JudgeQuestion, attempt: int = 0) -> tuple[str, bool]:
        """The judge's words about a question, and whether its length cut them off.

        They depend on the question and the attempt, not on what else is asked.

        Raises:
            RewardError: the question leaves the judge no room, or its chat template refuses it.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        try:
            prompt_ids = self._renderer.prompt(messages)
            text = question if isinstance(question, str) else json.dumps(question)
        except Exception as error:  # a chat template may raise anything about messages that it does not know
            raise RewardError(f"judge: {type(error).__name__}: {error}") from error
        sampling = replace(self._sampling, seed=derive_seed("judge", text, attempt))
        request = GenerateRequest(f"judge-{next(self._numbers)}", prompt_ids, sampling)
        try:
            completion = await self.model.generate(request)
        except ValueError as error:
            raise RewardError(f"judge: {error}") from error
        words = self._renderer.decode(completion.token_ids)
        return words, completion.finish_reason is FinishReason.LENGTH
