"""What every reinforcement-learning run has: a policy, the roles that train and serve it, and an algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.algorithm import AlgorithmConfig
from roll.configs.pipeline import RunConfig
from roll.configs.strategy import StrategyArguments
from roll.configs.worker import WorkerConfig

TINY = "tiny"
"""The value of ``pretrain`` that makes a small model on the spot."""


class RLConfig(AlgorithmConfig, RunConfig):
    """The model roles and the algorithm; pipelines add where their rollouts come from."""

    pretrain: str = Field(
        default=TINY,
        min_length=1,
        description="Model to train: a folder in Hugging Face format, an org/name on the hub, or tiny, which makes a "
        "small one and warm-starts it.",
    )
    tiny_num_heads: Literal[1, 2, 4] = Field(
        default=4,
        description="Attention heads of the tiny model, which share 64 units. vLLM takes heads of at least 32: 2.",
    )
    reward_pretrain: str | None = Field(default=None, description="Model that the critic starts from. null: pretrain.")

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
    def samples_per_step(self) -> int:
        """Episodes that one rollout collects."""
        return self.rollout_batch_size

    @property
    def samples_in_words(self) -> str:
        """Where ``samples_per_step`` comes from, for messages."""
        return f"rollout_batch_size = {self.rollout_batch_size}"

    @property
    def optimizer_steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return self.samples_per_step // self.actor_train.global_train_batch_size

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of the learning-rate schedules."""
        return self.max_steps * self.ppo_epochs * self.optimizer_steps_per_epoch

    @property
    def uses_critic(self) -> bool:
        return self.adv_estimator == "gae" or (self.critic is not None and ":" in self.adv_estimator)

    @property
    def overlong_max_length(self) -> int:
        """The limit that ``overlong_buffer`` counts from: its own, or that of a turn."""
        return self.overlong_buffer.max_length or self.response_length

    @property
    def uses_reference(self) -> bool:
        return self.add_token_level_kl or (self.use_kl_loss and self.kl_loss_coef > 0)

    @property
    def uses_lora(self) -> bool:
        """The actor trains an adapter; without it, the actor is the reference."""
        return bool(self.actor_train.model_args.lora_targets)

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The model roles that this run starts, by name."""
        roles = {"actor_train": self.actor_train, "actor_infer": self.actor_infer}
        if self.uses_critic and self.critic is not None:
            roles["critic"] = self.critic
        if self.uses_reference and self.reference is not None and not self.uses_lora:
            roles["reference"] = self.reference
        return roles

    @property
    def clusters(self) -> dict[str, WorkerConfig]:
        """Everything that gets worker processes."""
        return self.roles

    def key_of(self, cluster: str) -> str:
        """The configuration key of a cluster's section."""
        return cluster
