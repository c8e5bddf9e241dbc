"""A judge on the run's own devices: its engine, and the section ``judge`` of environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.engines import strategy_names
from roll.configs.problems import ConfigProblem
from roll.configs.rewards import RewardWorkers
from roll.configs.rl import DEFAULT_GENERATOR
from roll.configs.worker import ModelArguments, StrategyArguments, WorkerConfig


class JudgeEngine(Config):
    """Engine of a judge on the run's own devices."""

    strategy_args: StrategyArguments = Field(
        default_factory=lambda: StrategyArguments(strategy_name=DEFAULT_GENERATOR),
        description="The engine and its options.",
    )
    model_args: ModelArguments = Field(default_factory=ModelArguments, description="How it loads the judge's weights.")
    template: str = Field(default="native", description="The judge's chat template, as in data_args.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the template, such as enable_thinking: false."
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of question and judgement. null: the model's maximum, up to 8192.",
    )

    def problems(self) -> list[ConfigProblem]:
        name, card = self.strategy_args.strategy_name, self.strategy_args.card
        if card is None or (known := card.strategies.get(name)) is None or known.generates:
            return []
        expected = f"an engine that generates: {', '.join(strategy_names('generates'))}"
        return [self.problem("strategy_args.strategy_name", expected)]

    def worker(self, num_gpus_per_worker: int) -> WorkerConfig:
        """The engine as a role of its own."""
        return WorkerConfig(
            strategy_args=self.strategy_args,
            model_args=self.model_args,
            data_args=DataArguments(template=self.template, chat_template_kwargs=self.chat_template_kwargs),
            num_gpus_per_worker=num_gpus_per_worker,
        )


class AskedModelConfig(RewardWorkers):
    """A model that environments can call (``TextEnv.ask``)."""

    model: str = Field(min_length=1, description="A folder in Hugging Face format, or an org/name on the hub.")
    engine: JudgeEngine = Field(default_factory=JudgeEngine, description="The engine, one in each worker.")
    temperature: float = Field(
        default=0.0, ge=0, description="Sampling temperature; the same question gets the same reply at any temperature."
    )
    max_tokens: int = Field(default=512, ge=1, description="Most tokens of a reply.")
    max_concurrency: int = Field(default=64, ge=1, description="Questions that one worker handles at the same time.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.engine.max_length is not None and self.engine.max_length <= self.max_tokens:
            expected = f"less than engine.max_length = {self.engine.max_length}, which holds the question too"
            yield self.problem("max_tokens", expected, "engine.max_length")
