"""``rewards``: which verifiers score which domain, their workers, and judges on the run's own devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.engines import strategy_names
from roll.configs.problems import ConfigProblem
from roll.configs.worker import (
    DEFAULT_GENERATOR,
    DeviceMapping,
    EnvironmentVariables,
    ModelArguments,
    StrategyArguments,
    WorkerConfig,
)


class VerifierConfig(Config):
    """One verifier of a domain."""

    name: str = Field(min_length=1, description="Registered verifier (math, gsm8k, format …) or package.module:Class.")
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Factor of its score in the domain's sum.")
    decides: bool | None = Field(
        default=None,
        description="true: a sample counts as solved only if this verifier says so. null: the first of the list "
        "decides, the others only add to the reward.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="The verifier's keys.")


class RewardFilterConfig(Config):
    """Filter for groups worth training on, by their rewards or by your own function."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = Field(
        default="no_filter",
        description="`mean_filter` keeps groups whose mean reward is strictly between `low` and `high`; `std_filter` "
        "those whose standard deviation is strictly between them.",
    )
    low: float = Field(default=0.0, description="Lower bound.")
    high: float | None = Field(default=None, description="Upper bound; null is none.")
    path: str | None = Field(
        default=None,
        description="package.module:function or folder/file.py:function that gets a group "
        "(roll.rollout.types.RolloutGroup) and returns whether to train on it; called for groups that pass `type`.",
    )

    @property
    def keeps_all(self) -> bool:
        return self.type == "no_filter" and self.path is None

    def problems(self) -> Iterator[ConfigProblem]:
        if self.high is not None and self.high <= self.low:
            yield self.problem("high", f"more than low = {self.low}", "low")


class RewardWorkers(Config):
    """The processes that compute rewards or host a judge."""

    world_size: int | None = Field(
        default=None, ge=1, le=10_000, description="Worker processes. null: devices, else 1."
    )
    device_mapping: DeviceMapping = Field(
        default=None, description="Devices of the workers, for the models in them. null: CPU processes."
    )
    num_gpus_per_worker: int = Field(
        default=1,
        ge=1,
        description="Devices of one worker. null or missing: the tensor_parallel_size of the domain's reward model.",
    )
    worker_cls: str | None = Field(
        default=None, description="package.module:Class of the worker process. null: the default class."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of these processes, over the global ones."
    )

    def worker_config(self) -> WorkerConfig:
        """The processes as a cluster."""
        return WorkerConfig.model_validate({key: getattr(self, key) for key in RewardWorkers.model_fields})

    def problems(self) -> Iterator[ConfigProblem]:
        yield from self.worker_config().problems()


class RewardConfig(RewardWorkers):
    """A reward domain: the tags it scores, its verifiers and its worker cluster."""

    tag_included: list[str] = Field(min_length=1, description="Tags of the prompts that this domain scores.")
    verifiers: list[VerifierConfig] = Field(min_length=1, description="The reward is the weighted sum of their scores.")
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds for one verifier on one sample. Waiting for a free sandbox or connection does not count.",
    )
    timeout_score: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Score of a verifier that timed out in every attempt, as not solved; the share of such samples is "
        "reward/<name>/<verifier>/timeout. null: the sample has no reward.",
    )
    retries: int = Field(default=1, ge=0, description="Retries of a verifier that failed or timed out.")
    max_concurrency: int = Field(default=64, ge=1, description="Samples that one worker scores at the same time.")
    num_processes: int = Field(
        default=1,
        ge=1,
        description="Child processes of one worker for rules; one is killed when its rule takes too long.",
    )
    max_error_rate: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="The run stops when more than this share of a step's samples could not be scored.",
    )
    query_filter_config: RewardFilterConfig = Field(
        default_factory=RewardFilterConfig,
        description="Dynamic sampling: groups outside the bounds are replaced by new prompts.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if len(set(self.tag_included)) < len(self.tag_included):
            yield self.problem("tag_included", "every tag once")


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
    pictures: bool = Field(
        default=False,
        description='Questions may have pictures: parts `{"type": "image", "image": …}`, as in observations.',
    )
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
