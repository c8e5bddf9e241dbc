"""Rules that concern several sections of an agentic configuration at once.

A rule is a function from the configuration to the problems it finds. Rules also run on a configuration whose other
parts are wrong: those parts then hold their defaults, and a problem that ``involves`` one of them is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import STATE_ESTIMATORS
from roll.configs.data import DataArguments
from roll.configs.env import EnvManagerConfig
from roll.configs.generating import GeneratingArguments
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.schema import nearest
from roll.configs.strategy import MegatronConfig
from roll.configs.training import TrainingArguments
from roll.configs.worker import WorkerConfig

Rule = Callable[[AgenticConfig], list[ConfigProblem]]

_MANAGERS = {"train_env_manager": "rollout_batch_size", "val_env_manager": "val_batch_size"}
_TRAINED = ("actor_train", "critic")


def managers(config: AgenticConfig) -> Iterator[tuple[str, EnvManagerConfig, str, int]]:
    """Each environment manager's key and section, with the key and value of the episodes that it collects."""
    for key, episodes_key in _MANAGERS.items():
        yield key, getattr(config, key), episodes_key, getattr(config, episodes_key)


def sections(config: AgenticConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """The role sections that are present, used or not."""
    for role in ("actor_train", "actor_infer", "critic", "reference"):
        worker = getattr(config, role)
        if worker is not None:
            yield role, worker


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
    ]


def check_lengths(config: AgenticConfig) -> list[ConfigProblem]:
    """No turn may be longer than ``response_length``; a token budget must hold the longest sample."""
    problems = []
    limit = config.response_length
    turns = {
        f"custom_envs.{tag}.max_tokens_per_step": env.max_tokens_per_step for tag, env in config.custom_envs.items()
    }
    arguments = {"actor_infer": config.actor_infer.generating_args} | {
        key: manager.generating_args for key, manager, _, _ in managers(config) if manager.generating_args
    }
    turns |= {f"{key}.generating_args.max_new_tokens": value.max_new_tokens for key, value in arguments.items()}
    for key, tokens in turns.items():
        if tokens is not None and tokens > limit:
            expected = f"at most response_length = {limit}"
            problems.append(ConfigProblem(key, tokens, expected, involves=("response_length",)))
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            budget = getattr(worker, key := f"max_tokens_per_microbatch_in_{phase}")
            if 0 < budget < config.sequence_length:
                expected = f"at least sequence_length = {config.sequence_length}, so that one sample fits"
                problems.append(ConfigProblem(f"{role}.{key}", budget, expected, involves=("sequence_length",)))
    return problems


def check_roles(config: AgenticConfig) -> list[ConfigProblem]:
    """Roles that the algorithm needs are there, and no role is told what it never reads."""
    problems = []
    if config.uses_critic and config.critic is None:
        expected = f"a section like actor_train, since adv_estimator {config.adv_estimator} needs values"
        problems.append(ConfigProblem("critic", NOTHING, expected, involves=("adv_estimator",)))
    if config.uses_reference and config.reference is None:
        expected = "a section with a scoring strategy, since a KL term is switched on"
        involved = ("add_token_level_kl", "use_kl_loss", "kl_loss_coef")
        problems.append(ConfigProblem("reference", NOTHING, expected, involves=involved))
    for role, worker in sections(config):
        if worker.training_args != TrainingArguments() and role not in _TRAINED:
            problems.append(_unread(role, "training_args", "only actor_train and critic are trained"))
        if worker.generating_args != GeneratingArguments() and role != "actor_infer":
            problems.append(
                _unread(role, "generating_args", "move it to actor_infer; its temperature holds everywhere")
            )
        if worker.data_args not in (DataArguments(), config.actor_train.data_args):
            template = config.actor_train.data_args.template
            expected = f"the same as actor_train.data_args.template = {template}, or nothing"
            path = f"{role}.data_args.template"
            same = "actor_train.data_args.template"
            problems.append(ConfigProblem(path, worker.data_args.template, expected, involves=(same,)))
    return problems


def check_temperature(config: AgenticConfig) -> list[ConfigProblem]:
    """Training scores divide the logits by the temperature that the rollouts were sampled with."""
    problems = []
    arguments, general = config.train_env_manager.generating_args, config.actor_infer.generating_args
    path = "train_env_manager.generating_args.temperature"
    if arguments is not None and arguments.temperature != general.temperature:
        expected = f"actor_infer.generating_args.temperature = {general.temperature}, which the training scores use"
        involved = ("actor_infer.generating_args.temperature",)
        problems.append(ConfigProblem(path, arguments.temperature, expected, involves=involved))
    sampling = arguments or general
    if not sampling.do_sample or sampling.temperature == 0:
        path = f"{'train_env_manager' if arguments else 'actor_infer'}.generating_args"
        expected = "do_sample true and a temperature above 0: greedy rollouts have nothing to compare"
        seen = {"do_sample": sampling.do_sample, "temperature": sampling.temperature}
        problems.append(ConfigProblem(path, seen, expected))
    return problems


def check_parallelism(config: AgenticConfig) -> list[ConfigProblem]:
    """Devices divide into copies of the model, and one worker holds as many as its engine splits itself over."""
    problems = []
    for role, worker in sections(config):
        name, options = worker.strategy_args.strategy_name, _valid_options(worker)
        base = f"{role}.strategy_args.strategy_config"
        involves = (f"{role}.device_mapping", f"{role}.world_size", f"{role}.strategy_args.strategy_name")
        if isinstance(options, MegatronConfig) and _leftover_devices(worker, options):
            problems.append(
                ConfigProblem(
                    f"{base}.tensor_model_parallel_size",
                    options.tensor_model_parallel_size,
                    f"tensor × pipeline × context parallel size = {options.model_parallel_size} to divide the "
                    f"{worker.num_devices} devices of {role}",
                    involves=(*involves, f"{base}.pipeline_model_parallel_size", f"{base}.context_parallel_size"),
                )
            )
        sharded = getattr(options, "fsdp_size", -1)
        if sharded > 0 and worker.num_workers % sharded:
            expected = f"-1 or a divisor of the {worker.num_workers} workers of {role}"
            problems.append(ConfigProblem(f"{base}.fsdp_size", sharded, expected, involves=involves))
        for key in ("tensor_parallel_size", "tp_size"):
            size = getattr(options, key, None)
            if size is not None and size != worker.num_gpus_per_worker:
                expected = f"{role}.num_gpus_per_worker = {worker.num_gpus_per_worker}, or nothing"
                also = f"{role}.num_gpus_per_worker"
                problems.append(ConfigProblem(f"{base}.{key}", size, expected, involves=(*involves, also)))
        if worker.num_gpus_per_worker > 1 and name.endswith(("_train", "_infer")):
            expected = f"1: {name} runs one process per device"
            involved = (f"{role}.strategy_args.strategy_name",)
            problems.append(
                ConfigProblem(f"{role}.num_gpus_per_worker", worker.num_gpus_per_worker, expected, involves=involved)
            )
    return problems


def check_batches(config: AgenticConfig) -> list[ConfigProblem]:
    """Whole optimizer steps make up a rollout, and the critic takes as many as the actor."""
    problems = []
    for role in _TRAINED:
        worker = config.roles.get(role)
        # An uneven split of the devices is the business of check_parallelism.
        if worker is None or (options := _valid_options(worker)) is None or _leftover_devices(worker, options):
            continue
        arguments, base = worker.training_args, f"{role}.training_args"
        batch, episodes = worker.global_train_batch_size, config.rollout_batch_size
        words = (
            f"{arguments.per_device_train_batch_size} per device × {arguments.gradient_accumulation_steps} accumulated "
            f"× {worker.data_parallel_size} data-parallel = {batch}"
        )
        if episodes % batch:
            expected = f"the global batch ({words}) to divide rollout_batch_size = {episodes}"
        elif role == "critic" and batch != config.actor_train.global_train_batch_size:
            expected = f"the global batch ({words}) to be that of actor_train"
        else:
            continue
        involves = [
            f"{name}.{key}"
            for name in {role, "actor_train"}
            for key in ("training_args.per_device_train_batch_size", "device_mapping", "world_size", "strategy_args")
        ]
        path, seen = f"{base}.gradient_accumulation_steps", arguments.gradient_accumulation_steps
        involved = ("rollout_batch_size", "actor_train.training_args.gradient_accumulation_steps", *involves)
        problems.append(ConfigProblem(path, seen, expected, involves=involved))
    return problems


RULES: tuple[Rule, ...] = (
    check_tags,
    check_groups,
    check_samples,
    check_lengths,
    check_roles,
    check_temperature,
    check_parallelism,
    check_batches,
)


def _valid_options(worker: WorkerConfig) -> object | None:
    """The strategy's options, or ``None`` when they are wrong (which is reported elsewhere) or not ours."""
    try:
        return worker.strategy_args.typed()
    except ValueError:
        return None


def _leftover_devices(worker: WorkerConfig, options: object) -> int:
    """Devices that are too few to hold one more copy of the model."""
    return worker.num_devices % options.model_parallel_size if isinstance(options, MegatronConfig) else 0


def _unread(role: str, section: str, hint: str) -> ConfigProblem:
    return ConfigProblem(f"{role}.{section}", "a section", f"no {section}, since {role} does not read it", hint)


def _multiples_around(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} and {below + of}" if below else str(of)
