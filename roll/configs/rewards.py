"""``rewards``: which verifiers score which domain, and the workers that they run in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.configs.worker import DeviceMapping, EnvironmentVariables, WorkerConfig


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
