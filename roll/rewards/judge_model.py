"""A judge on devices of the run itself: its keys, and what the verifier needs of the engine that samples it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from pydantic import Field

from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.model import ModelArguments
from roll.configs.problems import ConfigProblem
from roll.configs.strategy import StrategyArguments
from roll.configs.worker import WorkerConfig
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.data.templates import ChatTemplate
from roll.models.tokenizer import load_tokenizer
from roll.rewards.types import RewardError
from roll.utils.seeding import derive_seed


class JudgeEngine(Config):
    """Engine that samples the judge, with ``judge_model_type: inference``."""

    strategy_args: StrategyArguments = Field(
        default_factory=lambda: StrategyArguments(strategy_name="hf_infer"), description="The engine and its options."
    )
    model_args: ModelArguments = Field(default_factory=ModelArguments, description="How it loads the judge's weights.")
    template: str = Field(default="native", description="The judge's chat template, as in data_args.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the template, such as enable_thinking: false."
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of question and judgement. null: as many as the model has, to 8192.",
    )

    def problems(self) -> list[ConfigProblem]:
        name, card = self.strategy_args.strategy_name, self.strategy_args.card
        if card is None or (known := card.strategies.get(name)) is None or known.generates:
            return []
        return [self.problem("strategy_args.strategy_name", "an engine that generates: hf_infer, vllm or sglang")]

    def worker(self, num_gpus_per_worker: int) -> WorkerConfig:
        """The engine as a role of its own."""
        return WorkerConfig(
            strategy_args=self.strategy_args,
            model_args=self.model_args,
            data_args=DataArguments(template=self.template, chat_template_kwargs=self.chat_template_kwargs),
            num_gpus_per_worker=num_gpus_per_worker,
        )


class HostedModel(Protocol):
    """A model that this process hosts."""

    async def generate(self, request: GenerateRequest) -> Completion: ...
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...
    async def close(self) -> None: ...


HostModel = Callable[[str, JudgeEngine, int], HostedModel]
"""Starts the engine of a model (folder or name on the hub) for so many requests at a time; blocks."""


class HostedJudge:
    """Asks a judge that this process hosts.

    Args:
        model: folder in Hugging Face format, or a name on the hub.
        engine: see ``JudgeEngine``.
        sampling: temperature and length of what it says.
    """

    def __init__(self, model: str, engine: JudgeEngine, sampling: SamplingParams, most: int, host: HostModel) -> None:
        self._model = host(model, engine, most)
        template = ChatTemplate(engine.template, engine.chat_template_kwargs)
        self._renderer = ChatRenderer(
            load_tokenizer(model, trust_remote_code=engine.model_args.trust_remote_code), template
        )
        self._sampling = sampling
        self._numbers = itertools.count()

    async def ask(self, text: str, attempt: int = 0) -> tuple[str, bool]:
        """The judge's words about a user's message, and whether its length cut them off.

        They depend on the message and the attempt, not on what else is asked.

        Raises:
            RewardError: the message leaves the judge no room.
        """
        prompt_ids = self._renderer.prompt([{"role": "user", "content": text}])
        sampling = replace(self._sampling, seed=derive_seed("judge", text, attempt))
        request = GenerateRequest(f"judge-{next(self._numbers)}", prompt_ids, sampling)
        try:
            completion = await self._model.generate(request)
        except ValueError as error:
            raise RewardError(f"judge: {error}") from error
        words = self._renderer.decode(completion.token_ids)
        return words, completion.finish_reason is FinishReason.LENGTH

    async def offload(self) -> None:
        """Leaves the device; questions wait."""
        await self._model.offload()

    async def onload(self) -> None:
        """Comes back."""
        await self._model.onload()

    async def close(self) -> None:
        """Ends the engine."""
        await self._model.close()
