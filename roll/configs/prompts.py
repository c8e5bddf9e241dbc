"""Prompts and rewards: keys and rules of RLVR, and of the evaluations of other pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from roll.configs.base import Config
from roll.configs.data import PICTURE_BOUNDS, VIDEO_RULES, DataArguments
from roll.configs.pipeline import TINY, PipelineConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rewards import RewardConfig
from roll.configs.teacher import TinyTeacherConfig
from roll.configs.worker import EnvironmentVariables, GeneratingArguments, WorkerConfig

ROLLOUT_CLUSTER = "rollout"
"""Name of the rollout workers' cluster."""
REWARD_CLUSTER = "reward_"
"""Start of the names of the reward domains' clusters."""


class DataGeneratorConfig(Config):
    """Generates the data of ``file_name`` if it does not exist."""

    path: str = Field(min_length=1, description="package.module:function, called as function(folder, **args).")
    folder: str = Field(min_length=1, description="Folder that it writes to; regenerated when path or args change.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")


class ValidationConfig(Config):
    """The held-out prompts and the sampling of their responses."""

    data_args: DataArguments = Field(
        default_factory=DataArguments,
        description="The held-out dataset. Its columns default to those of actor_train.data_args if neither prompt "
        "nor messages is given.",
    )
    generating_args: GeneratingArguments | None = Field(
        default=None,
        description="Sampling of the responses; num_return_sequences is the n of mean@n. null: actor_infer's.",
    )


class RolloutWorkersConfig(Config):
    """The processes between the engines and the rewards."""

    world_size: int = Field(default=1, ge=1, le=10_000, description="Number of processes.")
    worker_cls: str | None = Field(
        default=None, description="package.module:Class of the process. null: the default class."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of these processes, over the global ones."
    )


class PromptsConfig(PipelineConfig):
    """Rewards, held-out prompts, and the processes that collect rollouts."""

    rewards: dict[str, RewardConfig] = Field(default_factory=dict, description="Reward domains by name.")
    validation: ValidationConfig | None = Field(default=None, description="Held-out prompts; null: no evaluation.")
    rollout_workers: RolloutWorkersConfig = Field(
        default_factory=RolloutWorkersConfig,
        description="Processes that send prompts to engines and responses to rewards.",
    )
    data_generator: DataGeneratorConfig | None = Field(
        default=None, description="Generates the data before the run; for the built-in demonstrations."
    )
    is_num_return_sequences_expand: bool = Field(
        default=False,
        description="true: the responses to one prompt are spread over all generating workers. false: they stay on "
        "one, which stores the prompt's KV cache once.",
    )

    @property
    def num_val_samples(self) -> int:
        """Answers to each held-out prompt: the n of mean@n."""
        return self.val_sampling.num_return_sequences

    @property
    def domains(self) -> dict[str, str]:
        """The reward domain of each tag."""
        return {tag: name for name, reward in self.rewards.items() for tag in reward.tag_included}

    @property
    def clusters(self) -> dict[str, WorkerConfig]:
        """Everything that gets worker processes: the model roles, the rollout workers and the rewards."""
        if self.actor_infer is None:
            return super().clusters
        rollout = WorkerConfig.model_validate(dict(self.rollout_workers))
        rewards = {f"{REWARD_CLUSTER}{name}": reward.worker_config() for name, reward in self.rewards.items()}
        return {**super().clusters, ROLLOUT_CLUSTER: rollout, **rewards}

    def key_of(self, cluster: str) -> str:
        if cluster == ROLLOUT_CLUSTER:
            return "rollout_workers"
        return f"rewards.{cluster.removeprefix(REWARD_CLUSTER)}" if cluster.startswith(REWARD_CLUSTER) else cluster

    @property
    def val_sampling(self) -> GeneratingArguments:
        """Sampling of answers to held-out prompts; one each unless ``validation.generating_args`` says otherwise."""
        own = self.validation.generating_args if self.validation else None
        if own is None:
            assert self.actor_infer is not None, "nothing is generated"
            own = self.actor_infer.generating_args.model_copy(update={"num_return_sequences": 1})
        return self.bounded(own)

    def bounded(self, arguments: GeneratingArguments) -> GeneratingArguments:
        """The arguments with their bound on the answer's length filled in."""
        return arguments.model_copy(update={"max_new_tokens": arguments.max_new_tokens or self.response_length})

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        owners: dict[str, str] = {}
        for name, reward in self.rewards.items():
            for tag in reward.tag_included:
                if owners.setdefault(tag, name) != name:
                    key, other = f"rewards.{name}.tag_included", f"rewards.{owners[tag]}.tag_included"
                    expected = f"every tag in one domain; {tag} is in {owners[tag]} already"
                    yield self.problem(key, expected, other, got=reward.tag_included)
        if self.eval_only and self.validation is None:
            yield self.problem("eval_only", "false, or a validation section", "validation")


TRAIN_DATA, VAL_DATA = "actor_train.data_args", "validation.data_args"


def check_datasets(config: PromptsConfig) -> Iterator[ConfigProblem]:
    """There is something to train on and to evaluate on."""
    datasets = {} if config.eval_only else {TRAIN_DATA: config.actor_train.data_args}
    if config.validation is not None:
        datasets[VAL_DATA] = config.validation.data_args
    for path, data in datasets.items():
        if not data.has_dataset and data.file_name is None:
            yield ConfigProblem(f"{path}.file_name", NOTHING, "a file, several, a glob, or dataset_cls")


def check_templates(config: PromptsConfig) -> Iterator[ConfigProblem]:
    """Held-out data is rendered like that of training."""
    if config.validation is None:
        return
    default = DataArguments()
    for key in ("template", "chat_template_kwargs", "tag_templates", *PICTURE_BOUNDS, *VIDEO_RULES):
        unset = getattr(default, key)
        trained = getattr(config.actor_train.data_args, key)
        if (held_out := getattr(config.validation.data_args, key)) not in (unset, trained):
            expected = f"the same as {TRAIN_DATA}.{key} = {trained}, or nothing"
            yield ConfigProblem(f"{VAL_DATA}.{key}", held_out, expected, involves=(f"{TRAIN_DATA}.{key}",))


def check_tiny_teacher(config: TinyTeacherConfig) -> Iterator[ConfigProblem]:
    """A teacher that is made on the spot has something to imitate."""
    if config.teacher_pretrain == TINY and not config.teacher_warm_start.file_name:
        expected = "demonstrations to train a tiny teacher on"
        yield ConfigProblem("teacher_warm_start.file_name", NOTHING, expected, involves=("teacher_pretrain",))
