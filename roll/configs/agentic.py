"""An agentic run: its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from roll.configs.agent import AgentConfig
from roll.configs.data import PICTURE_BOUNDS
from roll.configs.env import CustomEnvConfig, EnvManagerConfig
from roll.configs.pipeline import TINY, WarmStartConfig
from roll.configs.problems import ConfigProblem
from roll.configs.prompts import REWARD_CLUSTER
from roll.configs.rewards import AskedModelConfig, RewardFilterConfig
from roll.configs.rl import RLConfig
from roll.configs.rules import Rule, check_sampling, too_many_tokens
from roll.configs.schema import did_you_mean
from roll.configs.tools import tool_tag_problems
from roll.configs.worker import GeneratingArguments, WorkerConfig

MANAGERS = ("train_env_manager", "val_env_manager")
JUDGE_CLUSTER = f"{REWARD_CLUSTER}judge"
"""Name of the cluster of ``judge``; it takes turns on its devices as rewards do."""


class AgenticConfig(RLConfig):
    """All keys of an agentic run (``examples/start_agentic_pipeline.py``)."""

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


_MANAGERS = {"train_env_manager": "rollout_batch_size", "val_env_manager": "val_batch_size"}


def managers(config: AgenticConfig) -> Iterator[tuple[str, EnvManagerConfig, str, int]]:
    """Each environment manager's key and section, with the key and value of the episodes that it collects."""
    for key, episodes_key in _MANAGERS.items():
        yield key, getattr(config, key), episodes_key, getattr(config, episodes_key)


def check_tags(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Every tag that a manager plays is an entry of ``custom_envs``."""
    known = list(config.custom_envs)
    for key, manager, _, _ in managers(config):
        for i, tag in enumerate(manager.tags):
            if tag in config.custom_envs:
                continue
            yield ConfigProblem(
                f"{key}.tags.{i}",
                tag,
                f"a key of custom_envs: {', '.join(known) or 'which is empty'}",
                did_you_mean(tag, known) or f"add custom_envs.{tag}: ${{custom_env.{tag}}}",
                involves=(f"custom_envs.{tag}", f"{key}.tags"),
            )


def check_groups(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Episodes come in whole groups, and the environments may play as many as a step needs."""
    for key, manager, episodes_key, episodes in managers(config):
        size = manager.group_size
        if episodes % size:
            yield ConfigProblem(
                episodes_key,
                episodes,
                f"a multiple of {key}.group_size = {size}",
                f"the nearest are {_multiples_around(episodes, size)}",
                involves=(f"{key}.group_size",),
            )
        most = manager.max_traj_per_env * manager.env_groups * size
        if 0 < most < episodes:
            yield ConfigProblem(
                f"{key}.max_traj_per_env",
                manager.max_traj_per_env,
                f"-1, or at least {-(-episodes // (manager.env_groups * size))}: {manager.env_groups} groups of "
                f"{size} run {most} episodes of the {episodes} that {episodes_key} requires",
                involves=(episodes_key, f"{key}.env_groups", f"{key}.group_size"),
            )


def check_filter(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Training groups alone are filtered, and have a spread where that is asked for."""
    key, val = "query_filter_config.type", config.val_env_manager.query_filter_config
    if val.type != "no_filter":
        expected = "no_filter: an evaluation counts all of its episodes"
        yield ConfigProblem(f"val_env_manager.{key}", val.type, expected)
    if val.path is not None:
        expected = "null: an evaluation counts all of its episodes"
        yield ConfigProblem("val_env_manager.query_filter_config.path", val.path, expected)
    manager = config.train_env_manager
    if manager.group_size == 1 and manager.query_filter_config.type == "std_filter":
        expected = "another filter: one episode has no spread, so every group would be dropped"
        involved = ("train_env_manager.group_size",)
        yield ConfigProblem(f"train_env_manager.{key}", "std_filter", expected, involves=involved)


def check_samples(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Estimators that compare states need one state per sample."""
    if not config.estimator.by_state:
        return
    why = f"with adv_estimator {config.adv_estimator}, which compares the states that turns start from"
    involved = ("adv_estimator",)
    played = {tag: config.custom_envs[tag] for tag in config.train_env_manager.tags if tag in config.custom_envs}
    for tag, env in played.items():
        if env.env_manager_cls == "traj":
            yield ConfigProblem(f"custom_envs.{tag}.env_manager_cls", "traj", f"step {why}", involves=involved)
        if env.agent is not None:
            yield ConfigProblem(f"custom_envs.{tag}.agent", "a section", f"null {why}", involves=involved)


def check_tool_managers(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """The policy sees what its tools have answered."""
    if config.tools is None:
        return
    yield from tool_tag_problems(config.tools, list(config.custom_envs), "custom_envs")
    instead, involved = "; or leave the tag out of their tags", ("tools",)
    for tag, env in config.custom_envs.items():
        if not config.tools.reaches(tag):
            continue
        if env.agent is not None:
            expected = f"null with tools, since the program has its own{instead}"
            yield ConfigProblem(f"custom_envs.{tag}.agent", "a section", expected, involves=involved)
        elif env.env_manager_cls == "step":
            expected = f"traj with tools, whose results are part of the conversation{instead}"
            yield ConfigProblem(f"custom_envs.{tag}.env_manager_cls", "step", expected, involves=involved)


def check_agents(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """The order of a program's requests is not repeated."""
    if config.replay_schedule is not None and config.agents:
        expected = "null with agent: the order of a program's requests is not recorded"
        yield ConfigProblem("replay_schedule", config.replay_schedule, expected, involves=tuple(config.agents))


def check_turn_lengths(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """No turn may be longer than ``response_length``."""
    turns = {
        f"custom_envs.{tag}.max_tokens_per_step": env.max_tokens_per_step for tag, env in config.custom_envs.items()
    }
    for key, arguments in _own_sampling(config).items():
        if key == "val_env_manager" and config.val_sequence_length is not None:
            continue
        turns[f"{key}.generating_args.max_new_tokens"] = arguments.max_new_tokens
    yield from too_many_tokens(config, turns)


def check_one_answer(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Each environment asks for one completion."""
    expected = "1: group_size sets the episodes per start state"
    for key, arguments in {"actor_infer": config.actor_infer.generating_args, **_own_sampling(config)}.items():
        if (count := arguments.num_return_sequences) != 1:
            yield ConfigProblem(f"{key}.generating_args.num_return_sequences", count, expected)


def _own_sampling(config: AgenticConfig) -> dict[str, GeneratingArguments]:
    """Sampling arguments of the managers that have their own."""
    return {key: manager.generating_args for key, manager, _, _ in managers(config) if manager.generating_args}


def check_no_dataset(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """The environments are the data."""
    data = config.actor_train.data_args
    default = type(data)(template=data.template, chat_template_kwargs=data.chat_template_kwargs)
    default = default.model_copy(update={key: getattr(data, key) for key in PICTURE_BOUNDS})
    expected = "no such key in the agentic pipeline: the environments are the data"
    for key in type(data).model_fields:
        if (got := getattr(data, key)) != getattr(default, key):
            yield ConfigProblem(f"actor_train.data_args.{key}", got, expected)


def check_temperature(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Training scores divide the logits by the temperature that the rollouts were sampled with."""
    arguments, general = config.train_env_manager.generating_args, config.actor_infer.generating_args
    path = "train_env_manager.generating_args.temperature"
    if arguments is not None and arguments.temperature != general.temperature:
        expected = f"actor_infer.generating_args.temperature = {general.temperature}, which training log-probs use"
        involved = ("actor_infer.generating_args.temperature",)
        yield ConfigProblem(path, arguments.temperature, expected, involves=involved)
    path = f"{'train_env_manager' if arguments else 'actor_infer'}.generating_args"
    yield from check_sampling(path, arguments or general, config.train_infer_correction.replay_kept_sets)


def check_teacher(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Nothing teaches a tiny teacher here."""
    expected = "a model folder or a name on the hub: only RLVR and distillation can create a tiny teacher"
    if config.teacher_pretrain == TINY:
        yield ConfigProblem("teacher_pretrain", TINY, expected)


AGENTIC_RULES: tuple[Rule, ...] = (
    check_tags,
    check_groups,
    check_filter,
    check_samples,
    check_tool_managers,
    check_agents,
    check_turn_lengths,
    check_one_answer,
    check_no_dataset,
    check_temperature,
    check_teacher,
)


def _multiples_around(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} and {below + of}" if below else str(of)
