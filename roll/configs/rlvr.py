"""The whole configuration of an RLVR run: prompts from datasets, rewards that can be verified."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from roll.configs.agent import AgentConfig
from roll.configs.generating import GeneratingArguments
from roll.configs.preference import PreferenceConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import PromptsConfig
from roll.configs.rewards import RewardFilterConfig
from roll.configs.rl import RLConfig
from roll.configs.teacher import TinyTeacherConfig
from roll.configs.user import UserConfig
from roll.configs.warm_start import PromptWarmStartConfig


class RLVRConfig(TinyTeacherConfig, RLConfig, PromptsConfig):
    """Everything that ``examples/start_rlvr_pipeline.py`` reads."""

    num_return_sequences_in_group: int = Field(
        default=1, ge=1, description="Responses sampled for each prompt: the group that baselines compare."
    )
    total_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes over the training prompts, instead of max_steps; rounded down to whole rollouts.",
    )
    online_dpo: PreferenceConfig | None = Field(
        default=None,
        description="Instead of policy gradients, train with this preference loss (any for pairs) on the best and the "
        "worst response to each prompt, with the section reference. Batches of actor_train count pairs. null: "
        "policy gradients.",
    )
    teacher_prompt: str | None = Field(
        default=None,
        min_length=1,
        description="Replaces the last message of a prompt for the teacher, before the policy's response: a text with "
        "{prompt}, that message, and columns of the row, such as {solution}, which the policy does not see. This "
        "prompt and a response must fit into sequence_length. null: the teacher reads the policy's prompt.",
    )
    teacher_column_length: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of a column in teacher_prompt; the rest is cut off. null: nothing is cut, and a "
        "prompt that is too long is an error.",
    )
    agent: AgentConfig | None = Field(
        default=None,
        description="A program that runs the prompts through an endpoint. null: the policy responds directly.",
    )
    user: UserConfig | None = Field(
        default=None,
        description="A simulated user that replies to the policy, turn by turn; the last assistant message is scored. "
        "null: none; a prompt has one response.",
    )
    warm_start: PromptWarmStartConfig = Field(
        default_factory=PromptWarmStartConfig,
        description="Supervised start of the tiny model; read when pretrain is tiny.",
    )

    def with_length(self, prompts: int) -> RLVRConfig:
        """The configuration with the ``max_steps`` that ``total_epochs`` of so many prompts make, in its place."""
        if self.total_epochs is None:
            return self
        steps = max(1, self.total_epochs * prompts // self.rollout_batch_size)
        return self.model_copy(update={"max_steps": steps, "total_epochs": None})

    @property
    def tags(self) -> list[str]:
        return list(self.domains)

    @property
    def agents(self) -> dict[str, AgentConfig]:
        return {} if self.agent is None else {"agent": self.agent}

    @property
    def group_filters(self) -> dict[str, RewardFilterConfig]:
        return {f"rewards.{name}": reward.query_filter_config for name, reward in self.rewards.items()}

    @property
    def samples_per_step(self) -> int:
        return self.rollout_batch_size * self.num_return_sequences_in_group

    @property
    def trained_per_step(self) -> int:
        return self.samples_per_step if self.online_dpo is None else self.rollout_batch_size

    @property
    def sequences_per_sample(self) -> int:
        return 1 if self.online_dpo is None else 2

    @property
    def estimates_advantages(self) -> bool:
        return self.online_dpo is None and super().estimates_advantages

    @property
    def learns_from_any_policy(self) -> bool:
        return self.online_dpo is not None or super().learns_from_any_policy

    @property
    def leaves_rollouts_unscored(self) -> bool:
        return self.online_dpo is not None or super().leaves_rollouts_unscored

    @property
    def uses_reference(self) -> bool:
        compares = self.online_dpo is not None and self.online_dpo.compares_with_reference
        return compares or super().uses_reference

    @property
    def why_reference(self) -> str:
        return super().why_reference if self.online_dpo is None else "online_dpo"

    @property
    def samples_in_words(self) -> str:
        if self.online_dpo is not None:
            return f"rollout_batch_size = {self.rollout_batch_size} pairs"
        return (
            f"rollout_batch_size = {self.rollout_batch_size} × num_return_sequences_in_group = "
            f"{self.num_return_sequences_in_group} = {self.samples_per_step} samples"
        )

    @property
    def train_sampling(self) -> GeneratingArguments:
        """Sampling of training answers."""
        return self.bounded(self.actor_infer.generating_args)

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if not self.rewards:
            yield self.problem("rewards", "at least one reward domain", seen=NOTHING)
