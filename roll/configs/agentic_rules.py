"""Rules between the sections of an agentic configuration (see ``roll.configs.rules``)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import STATE_ESTIMATORS
from roll.configs.env import EnvManagerConfig
from roll.configs.pipeline import TINY
from roll.configs.problems import ConfigProblem
from roll.configs.rules import Rule, check_sampling, too_many_tokens
from roll.configs.schema import nearest
from roll.configs.tools import tool_tag_problems

_MANAGERS = {"train_env_manager": "rollout_batch_size", "val_env_manager": "val_batch_size"}


def managers(config: AgenticConfig) -> Iterator[tuple[str, EnvManagerConfig, str, int]]:
    """Each environment manager's key and section, with the key and value of the episodes that it collects."""
    for key, episodes_key in _MANAGERS.items():
        yield key, getattr(config, key), episodes_key, getattr(config, episodes_key)


def check_tags(config: AgenticConfig) -> list[ConfigProblem]:
    """Every tag that a manager plays is an entry of ``custom_envs``."""
    known = list(config.custom_envs)
    problems = []
    for key, manager, _, _ in managers(config):
        for i, tag in enumerate(manager.tags):
            if tag in config.custom_envs:
                continue
            near = nearest(tag, known)
            problems.append(
                ConfigProblem(
                    f"{key}.tags.{i}",
                    tag,
                    f"a key of custom_envs: {', '.join(known) or 'which is empty'}",
                    f"did you mean {near}?" if near else f"add custom_envs.{tag}: ${{custom_env.{tag}}}",
                    involves=(f"custom_envs.{tag}", f"{key}.tags"),
                )
            )
    return problems


def check_groups(config: AgenticConfig) -> list[ConfigProblem]:
    """Episodes come in whole groups, and the environments may play as many as a step needs."""
    problems = []
    for key, manager, episodes_key, episodes in managers(config):
        size = manager.group_size
        if episodes % size:
            problems.append(
                ConfigProblem(
                    episodes_key,
                    episodes,
                    f"a multiple of {key}.group_size = {size}",
                    f"the nearest are {_multiples_around(episodes, size)}",
                    involves=(f"{key}.group_size",),
                )
            )
        most = manager.max_traj_per_env * manager.env_groups * size
        if 0 < most < episodes:
            problems.append(
                ConfigProblem(
                    f"{key}.max_traj_per_env",
                    manager.max_traj_per_env,
                    f"-1, or at least {-(-episodes // (manager.env_groups * size))}: {manager.env_groups} groups of "
                    f"{size} play {most} episodes of the {episodes} that {episodes_key} asks for",
                    involves=(episodes_key, f"{key}.env_groups", f"{key}.group_size"),
                )
            )
    return problems


def check_filter(config: AgenticConfig) -> list[ConfigProblem]:
    """Training groups alone are filtered, and have a spread where that is asked for."""
    problems, key = [], "query_filter_config.type"
    if (seen := config.val_env_manager.query_filter_config.type) != "no_filter":
        expected = "no_filter: an evaluation counts all of its episodes"
        problems.append(ConfigProblem(f"val_env_manager.{key}", seen, expected))
    manager = config.train_env_manager
    if manager.group_size == 1 and manager.query_filter_config.type == "std_filter":
        expected = "another filter: one episode has no spread, so every group would be dropped"
        involved = ("train_env_manager.group_size",)
        problems.append(ConfigProblem(f"train_env_manager.{key}", "std_filter", expected, involves=involved))
    return problems


def check_samples(config: AgenticConfig) -> list[ConfigProblem]:
    """Estimators that compare states need one state per sample."""
    if config.adv_estimator not in STATE_ESTIMATORS:
        return []
    return [
        ConfigProblem(
            f"custom_envs.{tag}.env_manager_cls",
            "traj",
            f"step with adv_estimator {config.adv_estimator}, which compares the states that turns start from",
            involves=("adv_estimator",),
        )
        for tag in config.train_env_manager.tags
        if tag in config.custom_envs and config.custom_envs[tag].env_manager_cls == "traj"
    ] + [
        ConfigProblem(
            f"custom_envs.{tag}.agent",
            "a section",
            f"null with adv_estimator {config.adv_estimator}, which compares the states that turns start from",
            involves=("adv_estimator",),
        )
        for tag in config.train_env_manager.tags
        if tag in config.custom_envs and config.custom_envs[tag].agent is not None
    ]


def check_tool_managers(config: AgenticConfig) -> list[ConfigProblem]:
    """The policy sees what its tools have answered."""
    if config.tools is None:
        return []
    expected = "traj with tools, whose answers are part of the conversation; or leave the tag out of their tags"
    return (
        tool_tag_problems(config.tools, list(config.custom_envs), "custom_envs")
        + [
            ConfigProblem(f"custom_envs.{tag}.env_manager_cls", "step", expected, involves=("tools",))
            for tag, env in config.custom_envs.items()
            if env.env_manager_cls == "step" and env.agent is None and config.tools.reaches(tag)
        ]
        + [
            ConfigProblem(
                f"custom_envs.{tag}.agent",
                "a section",
                "null where there are tools, as its program has tools of its own; or leave the tag out of their tags",
                involves=("tools",),
            )
            for tag, env in config.custom_envs.items()
            if env.agent is not None and config.tools.reaches(tag)
        ]
    )


def check_agents(config: AgenticConfig) -> list[ConfigProblem]:
    """The order of a program's requests is not repeated."""
    if config.replay_schedule is None or not config.agents:
        return []
    expected = "null with agent: which request of a program came first is not recorded"
    return [ConfigProblem("replay_schedule", config.replay_schedule, expected, involves=tuple(config.agents))]


def check_turn_lengths(config: AgenticConfig) -> list[ConfigProblem]:
    """No turn may be longer than ``response_length``."""
    turns = {
        f"custom_envs.{tag}.max_tokens_per_step": env.max_tokens_per_step for tag, env in config.custom_envs.items()
    }
    turns |= {
        f"{key}.generating_args.max_new_tokens": manager.generating_args.max_new_tokens
        for key, manager, _, _ in managers(config)
        if manager.generating_args
    }
    return too_many_tokens(config, turns)


def check_one_answer(config: AgenticConfig) -> list[ConfigProblem]:
    """Each environment asks for one completion."""
    arguments = {"actor_infer": config.actor_infer.generating_args}
    arguments |= {key: manager.generating_args for key, manager, _, _ in managers(config) if manager.generating_args}
    return [
        ConfigProblem(
            f"{key}.generating_args.num_return_sequences", count, "1: group_size makes several episodes of one start"
        )
        for key, value in arguments.items()
        if (count := value.num_return_sequences) != 1
    ]


def check_no_dataset(config: AgenticConfig) -> list[ConfigProblem]:
    """The environments are the data."""
    data = config.actor_train.data_args
    default = type(data)(template=data.template, chat_template_kwargs=data.chat_template_kwargs)
    unread = [key for key in type(data).model_fields if getattr(data, key) != getattr(default, key)]
    expected = "no such key in the agentic pipeline: the environments are the data"
    return [ConfigProblem(f"actor_train.data_args.{key}", getattr(data, key), expected) for key in unread]


def check_temperature(config: AgenticConfig) -> list[ConfigProblem]:
    """Training scores divide the logits by the temperature that the rollouts were sampled with."""
    problems = []
    arguments, general = config.train_env_manager.generating_args, config.actor_infer.generating_args
    path = "train_env_manager.generating_args.temperature"
    if arguments is not None and arguments.temperature != general.temperature:
        expected = f"actor_infer.generating_args.temperature = {general.temperature}, which the training scores use"
        involved = ("actor_infer.generating_args.temperature",)
        problems.append(ConfigProblem(path, arguments.temperature, expected, involves=involved))
    path = f"{'train_env_manager' if arguments else 'actor_infer'}.generating_args"
    return problems + check_sampling(path, arguments or general)


def check_teacher(config: AgenticConfig) -> list[ConfigProblem]:
    """Nothing teaches a tiny teacher here."""
    if config.teacher_pretrain != TINY:
        return []
    expected = "a model folder or a name on the hub: a tiny teacher is made in RLVR and in the distillation pipeline"
    return [ConfigProblem("teacher_pretrain", TINY, expected)]


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
