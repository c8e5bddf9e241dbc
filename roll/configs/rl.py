"""Every reinforcement-learning run: rollouts, the roles of its algorithm, the algorithm itself. Keys and rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from roll.configs.agent import AgentConfig
from roll.configs.algorithm import AlgorithmConfig, AlgorithmParts
from roll.configs.base import Config
from roll.configs.pipeline import TINY, PipelineConfig, WatchAction
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import REWARD_CLUSTER
from roll.configs.rewards import RewardFilterConfig
from roll.configs.rules import TRAINED, Rule
from roll.configs.teacher import OnPolicyDistillationConfig, TeacherTerm
from roll.configs.tools import ToolsConfig
from roll.configs.worker import DEFAULT_GENERATOR, DeviceMapping, EnvironmentVariables, StrategyArguments, WorkerConfig

VAL_INFER = "val_infer"
"""Name of their section and their cluster."""


class ValInferConfig(Config):
    """Generating workers only for evaluations; engine, options and size are those of actor_infer."""

    device_mapping: DeviceMapping = Field(
        default=None,
        description="Their devices, none of them actor_infer's; they can be those of a role that is idle during an "
        "evaluation, such as actor_train. null: one CPU process, outside the device plan.",
    )
    worker_cls: str | None = Field(
        default=None, description="package.module:Class of the process. null: that of actor_infer."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of these processes, over those of actor_infer."
    )

    def worker_config(self, actor_infer: WorkerConfig) -> WorkerConfig:
        """The cluster."""
        return actor_infer.model_copy(
            update={
                "device_mapping": self.device_mapping,
                "world_size": None,
                "worker_cls": self.worker_cls or actor_infer.worker_cls,
                "system_envs": {**actor_infer.system_envs, **self.system_envs},
            }
        )


class AdditionalPromptsConfig(Config):
    """Groups that a step starts beyond its need."""

    switches: ClassVar[tuple[str, ...]] = ("is_use_additional_prompts",)

    is_use_additional_prompts: bool = Field(
        default=False,
        description="Start more groups than the step needs; the first to finish form the batch, the others are sampled "
        "again in the next step.",
    )
    max_additional_running_prompts: int = Field(
        default=16, ge=0, description="Most groups started beyond the step's need (with is_use_additional_prompts)."
    )

    @property
    def extra_groups(self) -> int:
        """Groups that a training rollout starts beyond its need."""
        return self.max_additional_running_prompts if self.is_use_additional_prompts else 0


class OverlapConfig(Config):
    """Rollouts that run ahead of training: how far, and what happens to requests in flight."""

    switches: ClassVar[tuple[str, ...]] = ("async_generation_ratio",)

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

    @property
    def overlaps(self) -> bool:
        """Tells whether rollouts go on beside training."""
        return self.async_generation_ratio > 0


class RLConfig(OverlapConfig, AdditionalPromptsConfig, AlgorithmConfig, OnPolicyDistillationConfig, PipelineConfig):
    """The rollouts, the critic and the reference; pipelines add the source of their rollouts."""

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
        "tokens with the log-probs before the update, for rollout_replay_dir, roll replay and roll verify. "
        "null: they are not saved.",
    )
    rollout_dump_gb: float = Field(
        default=50.0,
        gt=0,
        description="Most 10^9 bytes that rollout_dump_dir keeps: beyond that the oldest steps are deleted, which is "
        "logged when it begins. The two newest always stay.",
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
    max_running_groups: int | None = Field(
        default=None, ge=1, description="Most training groups that run at once. null: no further limit."
    )

    probe: WatchAction = Field(
        default="stop",
        description="What follows if a generating worker, asked a fixed question after it was loaded or got new "
        "weights, reports log-probs that are not the trainer's: the run stops with the cause, or warns and continues. "
        "off: nothing is compared.",
    )
    probe_every: int = Field(
        default=10,
        ge=1,
        description="Steps from one probe to the next. The weights that a worker starts with, and the first that "
        "differ from them, are always probed.",
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
    def showing(self) -> list[str]:
        """Keys by which agent programs and tools may show pictures to the policy."""
        keys = [f"{key}.pictures" for key, agent in self.agents.items() if agent.pictures]
        return [*keys, *["tools.pictures"] * (self.tools is not None and self.tools.pictures)]

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
        chosen = self.estimator.has_critic or (self.critic is not None and ":" in self.adv_estimator)
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
    def teacher_term(self) -> TeacherTerm | None:
        """What the opinion of the teachers counts for; ``None`` without one."""
        if not self.teacher_roles:
            return None
        return TeacherTerm(
            form=self.opd_form,
            coefficient=self.opd_kl_coef,
            by_tag=tuple(self.teacher_coefficients) if self.teachers else (),
            clip=self.opd_token_kld_clip,
            least=self.opd_logprob_min,
            alone=self.is_pure_opd,
            comparable=self.teacher_temperature == self.scoring_temperature,
        )

    @property
    def parts(self) -> AlgorithmParts:
        return replace(super().parts, teacher=self.teacher_term)

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


def check_held_out_lengths(config: RLConfig) -> Iterator[ConfigProblem]:
    """A held-out prompt leaves room for an answer."""
    prompt, whole = config.lengths(held_out=True)
    if (prompt, whole) != config.lengths(held_out=False) and whole <= prompt:
        key = "val_prompt_length" if config.val_sequence_length is None else "val_sequence_length"
        expected = f"room for a response: held-out prompts of {prompt}, held-out samples of {whole} tokens"
        involved = ("val_prompt_length", "val_sequence_length", "prompt_length", "sequence_length")
        yield ConfigProblem(key, getattr(config, key), expected, involves=involved)


def check_rl_roles(config: RLConfig) -> Iterator[ConfigProblem]:
    """Roles that the algorithm needs are there."""
    if config.uses_critic and config.critic is None and not config.eval_only:
        expected = f"a section like actor_train, since adv_estimator {config.adv_estimator} needs values"
        yield ConfigProblem("critic", NOTHING, expected, involves=("adv_estimator",))
    if config.refers_to_actor and config.reference is not None:
        expected = "no section: with lora_target the reference is the actor without its adapter"
        lora = ("actor_train.model_args.lora_target",)
        yield ConfigProblem("reference", "a section", expected, involves=lora)
    if config.uses_reference and config.reference is None and not config.refers_to_actor:
        expected = f"a section whose strategy computes log-probs, since {config.why_reference} is switched on"
        involved = ("add_token_level_kl", "use_kl_loss", "kl_loss_coef")
        yield ConfigProblem("reference", NOTHING, expected, involves=involved)
    if (other := config.reference_pretrain) is not None and not config.uses_reference:
        expected = "null, since no KL term is switched on"
        yield ConfigProblem("reference_pretrain", other, expected, involves=("use_kl_loss",))
    if other is not None and config.uses_full_kl:
        expected = "an estimator such as k3: another model's hidden states do not fit the policy's output layer"
        yield ConfigProblem("kl_penalty", config.kl_penalty, expected, involves=("reference_pretrain",))
    if config.teacher_roles and config.opd_form == "reward" and config.adv_estimator == "gdpo":
        expected = "advantage or loss with adv_estimator gdpo, which reads rewards by name"
        yield ConfigProblem("opd_form", config.opd_form, expected, involves=("adv_estimator", "teacher"))
    if config.uses_lora and config.uses_full_kl:
        expected = "an estimator such as k3: with lora_target the reference returns no hidden states"
        yield ConfigProblem("kl_penalty", config.kl_penalty, expected, involves=("actor_train.model_args.lora_target",))


def check_batches(config: RLConfig) -> Iterator[ConfigProblem]:
    """Whole optimizer steps make up a rollout, and the critic takes as many as the actor."""
    for role in TRAINED:
        worker = config.roles.get(role)
        # An uneven split of the devices is the business of check_parallelism.
        if worker is None or worker.num_devices % worker.devices_per_copy:
            continue
        arguments, base = worker.training_args, f"{role}.training_args"
        batch, samples = worker.global_train_batch_size, config.trained_per_step
        words = (
            f"{arguments.per_device_train_batch_size} per device × {arguments.gradient_accumulation_steps} accumulated "
            f"× {worker.data_parallel_size} data-parallel = {batch}"
        )
        hint = ""
        if samples % batch:
            expected = f"the global batch ({words}) to divide {config.samples_in_words}"
            hint = _nearest_batch(worker, samples)
        elif role == "critic" and batch != config.actor_train.global_train_batch_size:
            expected = f"the global batch ({words}) to be that of actor_train"
        else:
            continue
        involves = [
            f"{name}.{key}"
            for name in {role, "actor_train"}
            for key in ("training_args.per_device_train_batch_size", "device_mapping", "world_size", "strategy_args")
        ]
        path, got = f"{base}.gradient_accumulation_steps", arguments.gradient_accumulation_steps
        involved = ("rollout_batch_size", "actor_train.training_args.gradient_accumulation_steps", *involves)
        yield ConfigProblem(path, got, expected, hint, involves=involved)


def check_overlap(config: RLConfig) -> Iterator[ConfigProblem]:
    """Rollouts beside training: what was sampled with older weights is weighted, and nothing is set in vain."""
    ratio = "async_generation_ratio"
    if not config.overlaps:
        return
    if not config.groups_ahead:
        least = math.ceil(1e4 / config.groups_per_step) / 1e4
        expected = f"0, or at least {least:g}: one of the {config.groups_per_step} groups of a step"
        yield ConfigProblem(ratio, config.async_generation_ratio, expected, involves=("rollout_batch_size",))
    if config.extra_groups and config.rollout_window:
        expected = "0 with is_use_additional_prompts: a step takes the first groups that finish"
        involved = ("is_use_additional_prompts",)
        yield ConfigProblem("rollout_window", config.rollout_window, expected, involves=involved)
    weights = config.train_infer_correction.is_weight
    has_ratio = config.bypasses_old_logprobs and config.variant.off_policy
    if not (weights.enabled or has_ratio or config.learns_from_any_policy):
        key = "train_infer_correction.is_weight.enabled"
        expected = f"true with {ratio} {config.async_generation_ratio:g}"
        hint = "rollouts are older than the policy that they train; their losses need importance weights"
        yield ConfigProblem(key, weights.enabled, expected, hint, involves=(ratio,))
    if (frequency := config.actor_train.model_update_frequency) > 1:
        key = "actor_train.model_update_frequency"
        yield ConfigProblem(key, frequency, f"1 with {ratio}", involves=(ratio,))
    name, card = config.actor_infer.strategy_args.strategy_name, config.actor_infer.strategy_args.card
    if config.kv_after_update == "keep" and card is not None and not card.keeps_kv:
        involved = ("actor_infer.strategy_args.strategy_name",)
        yield ConfigProblem("kv_after_update", "keep", f"recompute with {name}", involves=involved)
    if config.replay_schedule is not None:
        if card is None or not card.replays:
            key, hint = "actor_infer.strategy_args.strategy_name", f"{name} cannot hold a request until weights arrive"
            yield ConfigProblem(key, name, "hf_infer with replay_schedule", hint, involves=("replay_schedule",))
        if config.generate_opt_level != 1:
            key, expected = "generate_opt_level", "1 with replay_schedule"
            yield ConfigProblem(key, config.generate_opt_level, expected, involves=("replay_schedule",))


def check_found_rollouts(config: RLConfig) -> Iterator[ConfigProblem]:
    """Rollouts of another run are taken in the order of the steps."""
    beside = {
        "async_generation_ratio": config.overlaps,
        "is_use_additional_prompts": config.is_use_additional_prompts,
    }
    other = next((key for key, on in beside.items() if on), None)
    if config.rollout_replay_dir is not None and other is not None:
        expected = f"null with {other} {getattr(config, other)}: steps then take groups as they finish"
        yield ConfigProblem("rollout_replay_dir", config.rollout_replay_dir, expected, involves=(other,))


def check_teachers(config: RLConfig) -> Iterator[ConfigProblem]:
    """Each sample is judged by a teacher."""
    if not config.teachers:
        return
    if config.teacher is not None:
        yield ConfigProblem("teachers", "a section", "none with a section teacher", involves=("teacher",))
    if config.opd_form == "loss":
        expected = "advantage or reward with several teachers: the policy is compared with one output layer"
        yield ConfigProblem("opd_form", config.opd_form, expected, involves=("teachers",))
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}"
        if teacher.pretrain == TINY:
            expected = "a model folder or a name on the hub: only a single teacher can be tiny"
            yield ConfigProblem(f"{key}.pretrain", TINY, expected)
        if len(set(teacher.tag_included)) < len(teacher.tag_included):
            yield ConfigProblem(f"{key}.tag_included", teacher.tag_included, "every tag once")
        for tag in dict.fromkeys(teacher.tag_included):
            if tag not in config.tags:
                expected = f"existing tags: {', '.join(config.tags)}"
                yield ConfigProblem(
                    f"{key}.tag_included", teacher.tag_included, expected, involves=("rewards", "custom_envs")
                )
    involved = ["rewards", "train_env_manager.tags", *(f"teachers.{name}.tag_included" for name in config.teachers)]
    for tag in config.trained_tags:
        judging = [name for name, teacher in config.teachers.items() if teacher.judges(tag)]
        if not judging:
            expected = f"a teacher for every tag; {tag} has none"
            yield ConfigProblem("teachers", ", ".join(config.teachers), expected, involves=(*involved,))
            return
        if len(judging) > 1 and config.align_tokenizers is not None:
            expected = f"null where samples have several teachers, as those of {tag} have: {', '.join(judging)}"
            yield ConfigProblem("align_tokenizers", config.align_tokenizers, expected, involves=("teachers", *involved))
            return


def check_val_infer(config: RLConfig) -> Iterator[ConfigProblem]:
    """Replicas that evaluate hold whole copies of the policy, beside those of the rollouts."""
    if config.val_infer is None:
        return
    key, mapping = "val_infer.device_mapping", config.val_infer.device_mapping
    per_worker, taken = config.actor_infer.num_gpus_per_worker, config.actor_infer.device_mapping or []
    per_key = "actor_infer.num_gpus_per_worker"
    if len(mapping or [0]) % per_worker:
        expected = f"a multiple of {per_key} = {per_worker} devices"
    elif shared := sorted({*taken}.intersection(mapping or [])):
        expected = f"none of actor_infer's devices, such as {shared[0]}: rollouts continue there; or no val_infer"
    else:
        return
    involves = (per_key, "actor_infer.device_mapping")
    yield ConfigProblem(key, NOTHING if mapping is None else mapping, expected, involves=involves)


def check_scorers(config: RLConfig) -> Iterator[ConfigProblem]:
    """A reward model or judge that answers wait for is on its devices while others are trained on theirs."""
    if not config.overlaps:
        return
    others = [worker for role, worker in config.roles.items() if role != "actor_infer"]
    trained = {device for worker in others for device in worker.device_mapping or ()}
    ratio = "async_generation_ratio"
    expected = f"devices of no role that trains or computes log-probs, with {ratio}: responses would wait for it"
    for name, worker in config.clusters.items():
        if name.startswith(REWARD_CLUSTER) and trained.intersection(worker.device_mapping or ()):
            key = f"{config.key_of(name)}.device_mapping"
            yield ConfigProblem(key, worker.device_mapping, expected, involves=(ratio,))


def _nearest_batch(worker: WorkerConfig, samples: int) -> str:
    """Values that make whole optimizer steps of so many samples."""
    arguments, ranks = worker.training_args, worker.data_parallel_size
    if samples % ranks:
        near = min((n for n in range(1, samples + 1) if samples % n == 0), key=lambda n: abs(n - ranks))
        return f"{ranks} data-parallel ranks cannot share {samples} samples; the nearest is {near}"
    share = samples // ranks
    per_device, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if share % per_device:
        near = min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: abs(n - per_device))
        return f"per_device_train_batch_size {per_device} does not divide the {share} of a rank; the nearest is {near}"
    near = min((n for n in range(1, share + 1) if share // per_device % n == 0), key=lambda n: abs(n - steps))
    return f"the nearest is {near}"


RL_RULES: tuple[Rule, ...] = (
    check_held_out_lengths,
    check_rl_roles,
    check_batches,
    check_overlap,
    check_found_rollouts,
    check_teachers,
    check_val_infer,
    check_scorers,
)
