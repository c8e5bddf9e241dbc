"""The whole configuration of an agentic run."""

from __future__ import annotations

from pydantic import Field

from roll.configs.agent import AgentConfig
from roll.configs.env import CustomEnvConfig, EnvManagerConfig
from roll.configs.generating import GeneratingArguments
from roll.configs.judge import AskedModelConfig
from roll.configs.prompts import REWARD_CLUSTER
from roll.configs.rewards import RewardFilterConfig
from roll.configs.rl import RLConfig
from roll.configs.warm_start import WarmStartConfig
from roll.configs.worker import WorkerConfig

MANAGERS = ("train_env_manager", "val_env_manager")
JUDGE_CLUSTER = f"{REWARD_CLUSTER}judge"
"""Name of the cluster of ``judge``; it takes turns on its devices as rewards do."""


class AgenticConfig(RLConfig):
    """Everything that ``examples/start_agentic_pipeline.py`` reads."""

    val_batch_size: int = Field(default=128, ge=1, description="Episodes of an evaluation.")
    warm_start: WarmStartConfig = Field(
        default_factory=WarmStartConfig, description="Supervised start of the tiny model; read when pretrain is tiny."
    )

    custom_envs: dict[str, CustomEnvConfig] = Field(
        default_factory=dict, description="Environments by tag; usually ${custom_env.<Tag>} from traj_envs.yaml."
    )
    train_env_manager: EnvManagerConfig = Field(
        default_factory=EnvManagerConfig, description="Environments of the training rollouts."
    )
    val_env_manager: EnvManagerConfig = Field(
        default_factory=EnvManagerConfig, description="Environments of the evaluations."
    )
    judge: AskedModelConfig | None = Field(
        default=None, description="A model on the run's own devices that environments can call. null: none."
    )

    @property
    def clusters(self) -> dict[str, WorkerConfig]:
        """Everything that gets worker processes: the model roles and the environment managers."""
        managers = {name: getattr(self, name).worker_config() for name in MANAGERS}
        judge = {} if self.judge is None else {JUDGE_CLUSTER: self.judge.worker_config()}
        return {**super().clusters, **managers, **judge}

    @property
    def models(self) -> dict[str, str]:
        return super().models | ({} if self.judge is None else {"judge.model": self.judge.model})

    def key_of(self, cluster: str) -> str:
        return "judge" if cluster == JUDGE_CLUSTER else cluster

    @property
    def tags(self) -> list[str]:
        return list(self.custom_envs)

    @property
    def trained_tags(self) -> list[str]:
        return self.train_env_manager.tags

    @property
    def agents(self) -> dict[str, AgentConfig]:
        return {f"custom_envs.{tag}.agent": env.agent for tag, env in self.custom_envs.items() if env.agent is not None}

    @property
    def group_filters(self) -> dict[str, RewardFilterConfig]:
        return {"train_env_manager": self.train_env_manager.query_filter_config}

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size // self.train_env_manager.group_size

    def played_envs(self, manager: EnvManagerConfig) -> dict[str, CustomEnvConfig]:
        """The manager's tags as it plays them: its ``format_penalty`` holds where ``env_config`` names none."""
        penalty = {"format_penalty": manager.format_penalty} if manager.format_penalty else {}
        return {
            tag: env.model_copy(update={"env_config": {**penalty, **env.env_config}})
            for tag in manager.tags
            if (env := self.custom_envs.get(tag)) is not None
        }

    def sampling(self, manager: EnvManagerConfig) -> GeneratingArguments:
        """Sampling of the manager's episodes: its own arguments or those of ``actor_infer``, bounds filled in."""
        arguments = manager.generating_args or self.actor_infer.generating_args
        return arguments.model_copy(update={"max_new_tokens": arguments.max_new_tokens or self.response_length})
