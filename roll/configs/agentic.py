"""The whole configuration of an agentic run."""

from __future__ import annotations

from pydantic import Field

from roll.configs.algorithm import AlgorithmConfig
from roll.configs.base import Config
from roll.configs.env import CustomEnvConfig, EnvManagerConfig
from roll.configs.generating import GeneratingArguments
from roll.configs.pipeline import RunConfig
from roll.configs.strategy import StrategyArguments
from roll.configs.worker import WorkerConfig

TINY = "tiny"
"""The value of ``pretrain`` that makes a small model on the spot."""


MANAGERS = ("train_env_manager", "val_env_manager")


class WarmStartConfig(Config):
    """Supervised start of the tiny model on generated demonstrations, before any reinforcement learning."""

    demonstrations: int = Field(default=2000, ge=1, description="Turns of generated play to learn from.")
    expert_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of them played by the solver; the others are random but valid."
    )
    min_success: float = Field(default=0.15, ge=0, le=1, description="Training goes on until success reaches this …")
    max_success: float = Field(
        default=0.40, ge=0, le=1, description="… and a start beyond this is an error: nothing to learn."
    )
    min_valid: float = Field(default=0.90, ge=0, le=1, description="Least share of turns with a valid action.")
    learning_rate: float = Field(default=2e-3, gt=0, description="Peak learning rate.")
    batch_size: int = Field(default=32, ge=1, description="Turns per optimizer step.")
    max_steps: int = Field(default=220, ge=1, description="Most optimizer steps.")
    eval_steps: int = Field(default=20, ge=1, description="Optimizer steps between two measurements of success.")
    eval_episodes: int = Field(default=256, ge=1, description="Episodes of one measurement.")

    def problems(self) -> list[str]:
        if self.min_success >= self.max_success:
            return [f"min_success: seen {self.min_success}, expected less than max_success = {self.max_success}"]
        return []


class AgenticConfig(AlgorithmConfig, RunConfig):
    """Everything that ``examples/start_agentic_pipeline.py`` reads."""

    pretrain: str = Field(
        default=TINY,
        min_length=1,
        description="Model to train: a folder in Hugging Face format, an org/name on the hub, or tiny, which makes a "
        "small one and warm-starts it.",
    )
    reward_pretrain: str | None = Field(default=None, description="Model that the critic starts from. null: pretrain.")
    warm_start: WarmStartConfig = Field(
        default_factory=WarmStartConfig, description="Supervised start of the tiny model; read when pretrain is tiny."
    )

    custom_envs: dict[str, CustomEnvConfig] = Field(
        default_factory=dict, description="Environments by tag; usually ${custom_env.<Tag>} out of traj_envs.yaml."
    )
    train_env_manager: EnvManagerConfig = Field(
        default_factory=EnvManagerConfig, description="Environments of the training rollouts."
    )
    val_env_manager: EnvManagerConfig = Field(
        default_factory=EnvManagerConfig, description="Environments of the evaluations."
    )

    actor_train: WorkerConfig = Field(default_factory=WorkerConfig, description="The policy being trained.")
    actor_infer: WorkerConfig = Field(
        default_factory=lambda: WorkerConfig(strategy_args=StrategyArguments(strategy_name="hf_infer")),
        description="The policy that generates.",
    )
    critic: WorkerConfig | None = Field(default=None, description="The value model; needed by adv_estimator gae.")
    reference: WorkerConfig | None = Field(
        default=None, description="The frozen starting policy; needed by any KL term (use_kl_loss, add_token_level_kl)."
    )

    @property
    def optimizer_steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return self.rollout_batch_size // self.actor_train.global_train_batch_size

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of the learning-rate schedules."""
        return self.max_steps * self.ppo_epochs * self.optimizer_steps_per_epoch

    @property
    def uses_critic(self) -> bool:
        return self.adv_estimator == "gae" or (self.critic is not None and ":" in self.adv_estimator)

    @property
    def uses_reference(self) -> bool:
        return self.add_token_level_kl or (self.use_kl_loss and self.kl_loss_coef > 0)

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The clusters that this run starts, by name."""
        roles = {"actor_train": self.actor_train, "actor_infer": self.actor_infer}
        if self.uses_critic and self.critic is not None:
            roles["critic"] = self.critic
        if self.uses_reference and self.reference is not None:
            roles["reference"] = self.reference
        return roles

    @property
    def clusters(self) -> dict[str, WorkerConfig]:
        """Everything that gets worker processes: the model roles and the environment managers."""
        managers = {name: getattr(self, name).worker_config() for name in MANAGERS}
        return {**self.roles, **managers}

    def sampling(self, manager: EnvManagerConfig) -> GeneratingArguments:
        """How the manager's episodes are sampled: its own arguments or those of ``actor_infer``, bounds filled in."""
        arguments = manager.generating_args or self.actor_infer.generating_args
        return arguments.model_copy(update={"max_new_tokens": arguments.max_new_tokens or self.response_length})
