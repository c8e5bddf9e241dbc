"""Keys of every reinforcement-learning run: rollouts, the roles of its algorithm, and the algorithm itself."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from roll.configs.agent import AgentConfig
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.rewards import RewardFilterConfig
from roll.configs.strategy import StrategyArguments
from roll.configs.teacher import OnPolicyDistillationConfig
from roll.configs.tools import ToolsConfig
from roll.configs.val_infer import VAL_INFER, ValInferConfig
from roll.configs.worker import WorkerConfig

DEFAULT_GENERATOR = "hf_infer"
"""The engine that answers, where nobody names one."""


class RLConfig(AlgorithmConfig, OnPolicyDistillationConfig, PipelineConfig):
    """The rollouts, the critic and the reference; pipelines add where their rollouts come from."""

    rollout_batch_size: int = Field(
        default=128, ge=1, le=1_000_000, description="Episodes (agentic) or prompts (RLVR) of a step."
    )
    val_prompt_length: int | None = Field(
        default=None, ge=1, description="Most tokens of a held-out first prompt. null: prompt_length."
    )
    val_sequence_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of a whole held-out sample, which is never trained on; with it the evaluation's "
        "max_new_tokens can exceed response_length. null: sequence_length.",
    )
    is_use_additional_prompts: bool = Field(
        default=False, description="Start more groups than the step needs; the late ones are abandoned."
    )
    max_additional_running_prompts: int = Field(
        default=16, ge=0, description="Most groups started beyond the step's need (with is_use_additional_prompts)."
    )
    max_filtered_batches: int = Field(
        default=5,
        ge=1,
        description="Dynamic sampling (query_filter_config) samples at most this many times the step's groups in a "
        "step. If about one group in that many passes, a batch still fills; if fewer do, the search ends earlier "
        "and the step trains on those it found.",
    )
    learned_share: float | None = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Dynamic sampling: if a step finds too few groups to train on, and the mean reward of everything "
        "it sampled is at least this share of the maximum, and that of an evaluation too, the run ends as "
        "learned. The maximum is known if all verifiers of a domain have one; otherwise the success rate counts. "
        "null: the run continues to max_steps.",
    )
    num_written_groups: int = Field(
        default=2,
        ge=0,
        description="Groups of each step written in full to trajectories/train-<step>.jsonl, trained ones first. A "
        "run's files take at most 64 MB: beyond that every other older file is deleted. 0: none.",
    )
    rollout_dump_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for every step's training rollouts: step-<n>/episodes.jsonl to read, and all of their "
        "tokens, for rollout_replay_dir. null: they are not saved.",
    )
    rollout_replay_dir: str | None = Field(
        default=None,
        min_length=1,
        description="rollout_dump_dir of a run with the same batches, whose rollouts replace sampling step by step: "
        "to debug, or to compare only training settings.",
    )
    reward_pretrain: str | None = Field(default=None, description="Model that the critic starts from. null: pretrain.")
    reference_pretrain: str | None = Field(
        default=None,
        description="Reference model of the KL, with pretrain's vocabulary. null: the policy's initial weights.",
    )

    tools: ToolsConfig | None = Field(
        default=None,
        description="Tools that the policy can call in its episodes. null: none; a prompt has one response.",
    )
    actor_infer: WorkerConfig = Field(
        default_factory=lambda: WorkerConfig(strategy_args=StrategyArguments(strategy_name=DEFAULT_GENERATOR)),
        description="The policy that generates.",
    )
    val_infer: ValInferConfig | None = Field(
        default=None,
        description="Separate workers that evaluate, so that asynchronous rollouts continue meanwhile; they get the "
        "weights before each evaluation. null: actor_infer evaluates.",
    )
    critic: WorkerConfig | None = Field(default=None, description="The value model; needed by adv_estimator gae.")
    async_generation_ratio: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="How far rollouts run ahead of training, in batches: 0 is synchronous; 1 samples the groups of "
        "the next step while this one trains; a fraction is that share of a batch, at least one group.",
    )
    rollout_window: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="With async_generation_ratio: share of the started groups, from the oldest unfinished on, among "
        "which a step can choose. 0 takes groups strictly in order, so a slow one delays its step; 1 takes any "
        "that finish.",
    )
    max_running_groups: int | None = Field(
        default=None, ge=1, description="Most training groups that run at once. null: no further limit."
    )
    partial_rollout: bool = Field(
        default=True,
        description="With async_generation_ratio: requests in flight continue with new weights. false: weights are "
        "published when those are done, and new requests wait; each response then has one version.",
    )
    kv_after_update: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="With async_generation_ratio: whether the KV cache of requests in flight is recomputed with new "
        "weights, or kept from the weights that sampled them.",
    )
    replay_schedule: str | None = Field(
        default=None,
        description="With async_generation_ratio: schedule.jsonl of a run that this one repeats, step by step and "
        "token by token, on CPUs bit for bit. The configuration must be the same; a worker that dies ends the run.",
    )

    tokenization_sanity_check: Literal["strict", "ignore_strippable", "disable"] = Field(
        default="ignore_strippable",
        description="For conversations of several turns (tools, traj environments, agents), one per training group: "
        "whether the trained tokens are compared with the same conversation rendered and tokenised at once. "
        "strict counts all differences, ignore_strippable those beyond white space and other tokens for the same "
        "text. They are metrics, rollout/tokens/*, and each kind is a warning once; the sampled tokens do not "
        "change.",
    )

    reference: WorkerConfig | None = Field(
        default=None, description="The frozen initial policy; needed by any KL term (use_kl_loss, add_token_level_kl)."
    )

    @property
    def agents(self) -> dict[str, AgentConfig]:
        """The agent programs by the key of their section."""
        return {}

    @property
    def functions(self) -> dict[str, str]:
        """Functions of the user's in the training step, ``package.module:function``, by key."""
        named = {"adv_estimator": self.adv_estimator, "pg_variant": self.pg_variant}
        chosen = {f"{key}.query_filter_config.path": each.path for key, each in self.group_filters.items()}
        return {key: path for key, path in named.items() if ":" in path} | {
            key: path for key, path in chosen.items() if path is not None
        }

    @property
    def group_filters(self) -> dict[str, RewardFilterConfig]:
        """Filters of the groups to train on, by the key of their section."""
        return {}

    @property
    def filters_groups(self) -> bool:
        """Tells whether dynamic sampling turns groups down."""
        return any(not each.keeps_all for each in self.group_filters.values())

    @property
    def samples_per_step(self) -> int:
        """Episodes that one rollout collects."""
        return self.rollout_batch_size

    @property
    def samples_in_words(self) -> str:
        """Origin of ``trained_per_step`` in words, for messages."""
        return f"rollout_batch_size = {self.rollout_batch_size}"

    @property
    def trained_per_step(self) -> int:
        """Number of samples, or of pairs of them, that a step trains on."""
        return self.samples_per_step

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of each of these."""
        return 1

    @property
    def groups_per_step(self) -> int:
        """Rollout groups that one step takes."""
        return self.rollout_batch_size

    @property
    def extra_groups(self) -> int:
        """Groups that a training rollout starts beyond its need."""
        return self.max_additional_running_prompts if self.is_use_additional_prompts else 0

    @property
    def overlaps(self) -> bool:
        """Tells whether rollouts go on beside training."""
        return self.async_generation_ratio > 0

    @property
    def learns_from_any_policy(self) -> bool:
        """Tells whether no loss asks which policy sampled what it learns from: there is no policy gradient."""
        return not self.estimates_advantages and self.divergence is not None

    @property
    def worker_restarts(self) -> int:
        return super().worker_restarts if self.replay_schedule is None else 0

    @property
    def groups_ahead(self) -> int:
        """Groups that may be started before the step that takes them begins."""
        return math.floor(self.async_generation_ratio * self.groups_per_step) + self.extra_groups

    @property
    def window(self) -> int:
        """Number of draws, from the oldest one under way on, that a step may choose its groups from."""
        if self.extra_groups:  # the first that finish
            return self.groups_per_step + self.groups_ahead
        return max(1, math.floor(self.rollout_window * (self.groups_per_step + self.groups_ahead)))

    @property
    def max_lag(self) -> int:
        """Most steps between the start of a group and the step that takes it."""
        if not self.overlaps:
            return 0
        return min(self.max_steps - 1, math.ceil((self.groups_ahead + self.window - 1) / self.groups_per_step))

    def lengths(self, *, held_out: bool) -> tuple[int, int]:
        if not held_out:
            return super().lengths(held_out=held_out)
        return self.val_prompt_length or self.prompt_length, self.val_sequence_length or self.sequence_length

    @property
    def optimizer_steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return self.trained_per_step // self.actor_train.global_train_batch_size

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of the learning-rate schedules."""
        return self.max_steps * self.ppo_epochs * self.optimizer_steps_per_epoch

    @property
    def scoring_temperature(self) -> float:
        """Scores are those of the distribution that the rollouts were sampled from."""
        return self.actor_infer.generating_args.temperature

    @property
    def teacher_temperature(self) -> float:
        return self.scoring_temperature if self.kd_temperature is None else self.kd_temperature

    @property
    def uses_critic(self) -> bool:
        chosen = self.adv_estimator == "gae" or (self.critic is not None and ":" in self.adv_estimator)
        return chosen and self.estimates_advantages

    @property
    def overlong_max_length(self) -> int:
        """The limit that ``overlong_buffer`` counts from: its own, or that of a turn."""
        return self.overlong_buffer.max_length or self.response_length

    @property
    def uses_reference(self) -> bool:
        return self.add_token_level_kl or (self.use_kl_loss and self.kl_loss_coef > 0)

    @property
    def why_reference(self) -> str:
        """Term that compares the policy with the reference, for messages."""
        return "a KL term"

    @property
    def teacher_loss_coef(self) -> float:
        return 0.0 if self.divergence is None else self.opd_kl_coef

    @property
    def models(self) -> dict[str, str]:
        models = super().models
        if self.reward_pretrain is not None and self.uses_critic:
            models["reward_pretrain"] = self.reward_pretrain
        if self.reference_pretrain is not None:
            models["reference_pretrain"] = self.reference_pretrain
        return {**models, **self.teacher_models}

    def model_of(self, role: str) -> str:
        if role.startswith("teachers."):
            return self.teacher_models[f"{role}.pretrain"]
        own = {
            "critic": self.reward_pretrain,
            "reference": self.reference_pretrain,
            "teacher": self.teacher_pretrain,
        }
        return own.get(role) or self.pretrain

    def section_of(self, role: str) -> WorkerConfig | None:
        return self.teacher_roles.get(role) or super().section_of(role)

    @property
    def tags(self) -> list[str]:
        """All tags of samples, as a batch's ``tag_B`` counts them."""
        return []

    @property
    def trained_tags(self) -> list[str]:
        """Those of the samples that are trained on."""
        return self.tags

    @property
    def teacher_coefficients(self) -> list[float]:
        """By tag, as a batch's ``tag_B`` counts them: what all its teachers' opinions count for together."""
        return [
            sum(self.teacher_coefficient(name) for name, each in self.teachers.items() if each.judges(tag))
            for tag in self.tags
        ]

    @property
    def refers_to_actor(self) -> bool:
        """Tells whether the reference is the actor without its adapter."""
        return self.uses_lora and self.reference_pretrain is None

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The model roles that this run starts, by name."""
        roles = super().roles
        if self.uses_critic and self.critic is not None:
            roles["critic"] = self.critic
        if self.uses_reference and self.reference is not None and not self.refers_to_actor:
            roles["reference"] = self.reference
        return {**roles, **self.teacher_roles}

    @property
    def clusters(self) -> dict[str, WorkerConfig]:
        """Everything that gets worker processes: the model roles, and replicas that evaluate."""
        if self.val_infer is None:
            return super().clusters
        return {**super().clusters, VAL_INFER: self.val_infer.worker_config(self.actor_infer)}
