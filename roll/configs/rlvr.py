"""An RLVR run, prompts from datasets and rewards that can be verified: its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from roll.configs.agent import AgentConfig
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.base import Config
from roll.configs.pipeline import TINIES, PromptWarmStartConfig
from roll.configs.preference import PreferenceConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import (
    TRAIN_DATA,
    VAL_DATA,
    PromptsConfig,
    check_datasets,
    check_templates,
    check_tiny_teacher,
)
from roll.configs.rewards import RewardFilterConfig
from roll.configs.rl import RLConfig
from roll.configs.rules import Rule, check_sampling, too_many_tokens
from roll.configs.schema import did_you_mean
from roll.configs.teacher import TinyTeacherConfig
from roll.configs.tools import placed_path, tool_tag_problems
from roll.configs.worker import GeneratingArguments


class UserConfig(Config):
    """Your class that writes the user's messages."""

    path: str = Field(
        min_length=1,
        description="package.module:Class or folder/file.py:Class with `async respond(messages, prompt)`, which "
        "returns the user's message, the reward of the policy's last turn, and whether the conversation is over.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of its constructor.")
    max_turns: int = Field(
        default=4,
        ge=1,
        description="Most messages of the user after the prompt; the next assistant message is the answer.",
    )
    timeout: float = Field(default=30.0, gt=0, description="Seconds for one message of the user.")
    retries: int = Field(default=1, ge=0, description="Retries of an episode whose user failed.")

    def placed(self) -> UserConfig:
        """The section with a path that is the same in every folder."""
        return self.model_copy(update={"path": placed_path(self.path)})


class RLVRConfig(TinyTeacherConfig, RLConfig, PromptsConfig):
    """All keys of an RLVR run (``examples/start_rlvr_pipeline.py``)."""

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
            yield self.problem("rewards", "at least one reward domain", got=NOTHING)


def check_online_dpo(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Pairs are of answers to one prompt, and no key is set that only policy gradients read."""
    if config.online_dpo is None:
        return
    involved, loss = ("online_dpo",), config.online_dpo.preference_loss
    if not config.online_dpo.in_pairs:
        expected = "a loss on pairs"
        yield ConfigProblem("online_dpo.preference_loss", loss, expected)
    if config.num_return_sequences_in_group < 2:
        got, expected = config.num_return_sequences_in_group, "at least 2 with online_dpo: the best and the worst"
        yield ConfigProblem("num_return_sequences_in_group", got, expected, involves=involved)
    for key in ("agent", "tools", "user", "teacher", "teachers"):
        if getattr(config, key):
            expected = "null with online_dpo, which compares two one-turn responses"
            yield ConfigProblem(key, "a section", expected, involves=involved)
    for key, field in AlgorithmConfig.model_fields.items():
        if key != "ppo_epochs" and getattr(config, key) != field.get_default(call_default_factory=True):
            expected = "no such key with online_dpo, which has no policy gradient"
            yield ConfigProblem(key, getattr(config, key), expected, involves=involved)


def check_shares(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Domains are mixed in training only, and they are those of the rewards."""
    if not config.eval_only:
        expected = f"reward domains: {', '.join(config.rewards) or 'there is none'}"
        yield from [
            ConfigProblem(f"{TRAIN_DATA}.domain_interleave_probs", domain, expected, involves=("rewards",))
            for domain in config.actor_train.data_args.domain_interleave_probs or ()
            if domain not in config.rewards
        ]
    held_out = config.validation.data_args.domain_interleave_probs if config.validation else None
    if held_out is not None:
        expected = "null: all held-out prompts are used, in the order of the files"
        yield ConfigProblem(f"{VAL_DATA}.domain_interleave_probs", held_out, expected)


def check_tag_templates(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Templates are given to tags that there are, whose prompts are answered in one turn."""
    key, templates = f"{TRAIN_DATA}.tag_templates", config.actor_train.data_args.tag_templates
    known = list(config.domains)
    for tag in templates:
        if tag not in known:
            expected = f"tags of rewards: {', '.join(known) or 'there is none'}"
            yield ConfigProblem(f"{key}.{tag}", templates[tag], expected, did_you_mean(tag, known), ("rewards",))
    for section in ("tools", "agent", "user"):
        if templates and getattr(config, section) is not None:
            expected = f"null with {key}: conversations of several turns have one template"
            yield ConfigProblem(section, "a section", expected)


def check_user(config: RLVRConfig) -> list[ConfigProblem]:
    """The turns between two of the policy's are the user's."""
    expected = "null with user, whose messages come between the policy's turns"
    return [
        ConfigProblem(key, "a section", expected)
        for key in ("tools", "agent")
        if config.user is not None and getattr(config, key) is not None
    ]


def check_demonstrations(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """The tiny model has something to imitate."""
    if config.pretrain in TINIES and not config.warm_start.file_name:
        expected = "demonstrations to warm-start the tiny model with"
        yield ConfigProblem("warm_start.file_name", NOTHING, expected, involves=("pretrain",))


def check_teacher_prompt(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """A prompt of the teacher's own stands before one answer."""
    if config.teacher_prompt is None:
        if config.teacher_column_length is not None:
            key, expected = "teacher_column_length", "null without teacher_prompt"
            yield ConfigProblem(key, config.teacher_column_length, expected, involves=("teacher_prompt",))
        return
    if config.teacher is None:
        expected = "null without a single section teacher" if config.teachers else "null without teacher"
        yield ConfigProblem("teacher_prompt", config.teacher_prompt, expected, involves=("teacher", "teachers"))
    for key in ("agent", "tools", "user"):
        if getattr(config, key):
            expected = f"null with {key}: teacher_prompt replaces the prompt of a single response"
            yield ConfigProblem("teacher_prompt", config.teacher_prompt, expected, involves=(key,))
    if config.actor_train.data_args.tag_templates:
        expected = "null with tag_templates: the teacher's prompts all have one template"
        involved = ("actor_train.data_args.tag_templates",)
        yield ConfigProblem("teacher_prompt", config.teacher_prompt, expected, involves=involved)
    if config.rollout_replay_dir is not None:
        expected = "null with rollout_replay_dir, whose responses may belong to other rows"
        yield ConfigProblem("teacher_prompt", config.teacher_prompt, expected, involves=("rollout_replay_dir",))


def check_answers(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Rules on the number of answers, their length, and their sampling."""
    path = "actor_infer.generating_args"
    count, size = config.actor_infer.generating_args.num_return_sequences, config.num_return_sequences_in_group
    if not config.eval_only:
        most = config.train_infer_correction.replay_kept_sets
        yield from check_sampling(path, config.actor_infer.generating_args, most)
    if count not in (1, size):
        expected = f"1 or num_return_sequences_in_group = {size}"
        involved = ("num_return_sequences_in_group",)
        yield ConfigProblem(f"{path}.num_return_sequences", count, expected, involves=involved)
    for name, reward in config.rewards.items():
        if size == 1 and reward.query_filter_config.type == "std_filter":
            expected = "another filter: one answer has no spread, so every prompt would be dropped"
            key = f"rewards.{name}.query_filter_config.type"
            yield ConfigProblem(key, "std_filter", expected, involves=("num_return_sequences_in_group",))
    own = config.validation.generating_args if config.validation else None
    if own is not None and config.val_sequence_length is None:
        yield from too_many_tokens(config, {"validation.generating_args.max_new_tokens": own.max_new_tokens})


def check_estimator(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Episodes of one turn have no states to compare."""
    if config.estimator.by_state:
        expected = "an estimator of one-turn episodes, such as grpo, rloo or reinforce_plus_plus"
        yield ConfigProblem("adv_estimator", config.adv_estimator, expected)


def check_evaluation(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Replicas that evaluate have something to do."""
    if config.val_infer is not None and config.validation is None:
        yield ConfigProblem("val_infer", "a section", "null without validation", involves=("validation",))


def check_tool_tags(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Tools are given to tags that there are."""
    return tool_tag_problems(config.tools, list(config.domains), "rewards")


def check_renders(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Nothing is drawn of answers, which the run's page shows as text."""
    if config.num_renders not in (0, RLVRConfig.model_fields["num_renders"].default):
        yield ConfigProblem("num_renders", config.num_renders, "no such key in RLVR, where no environment is drawn")


def check_agent(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """An agent program has tools of its own, and the order of its requests is not repeated."""
    if config.agent is None:
        return
    if config.tools is not None:
        expected = "null with agent, whose program offers its own tools"
        yield ConfigProblem("tools", "a section", expected, involves=("agent",))
    if config.replay_schedule is not None:
        expected = "null with agent: the order of a program's requests is not recorded"
        yield ConfigProblem("replay_schedule", config.replay_schedule, expected, involves=("agent",))


RLVR_RULES: tuple[Rule, ...] = (
    check_online_dpo,
    check_datasets,
    check_shares,
    check_tag_templates,
    check_user,
    check_templates,
    check_demonstrations,
    check_tiny_teacher,
    check_teacher_prompt,
    check_answers,
    check_estimator,
    check_evaluation,
    check_tool_tags,
    check_renders,
    check_agent,
)
