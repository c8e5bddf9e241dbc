"""Rules that concern several sections of a configuration at once, for every pipeline.

A rule is a function from the configuration to the problems it finds. Rules also run on a configuration whose other
parts are wrong: those parts then hold their defaults, and a problem that ``involves`` one of them is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from roll.configs.data import DataArguments
from roll.configs.generating import GeneratingArguments
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rl import RLConfig
from roll.configs.strategy import MegatronConfig
from roll.configs.training import TrainingArguments
from roll.configs.worker import WorkerConfig

Rule = Callable[[Any], list[ConfigProblem]]
"""Takes the configuration of the pipeline that it is a rule of."""

_TRAINED = ("actor_train", "critic")


def sections(config: RLConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """The role sections that are present, used or not."""
    for role in ("actor_train", "actor_infer", "critic", "reference"):
        worker = getattr(config, role)
        if worker is not None:
            yield role, worker


def check_lengths(config: RLConfig) -> list[ConfigProblem]:
    """No answer is longer than ``response_length``; a token budget holds the longest sample."""
    path = "actor_infer.generating_args.max_new_tokens"
    problems = too_many_tokens(config, {path: config.actor_infer.generating_args.max_new_tokens})
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            budget = getattr(worker, key := f"max_tokens_per_microbatch_in_{phase}")
            if 0 < budget < config.sequence_length:
                expected = f"at least sequence_length = {config.sequence_length}, so that one sample fits"
                problems.append(ConfigProblem(f"{role}.{key}", budget, expected, involves=("sequence_length",)))
    return problems


def too_many_tokens(config: RLConfig, limits: Mapping[str, int | None]) -> list[ConfigProblem]:
    """Those of the sampling limits, given by key, that are beyond ``response_length``."""
    expected = f"at most response_length = {config.response_length}"
    return [
        ConfigProblem(key, tokens, expected, involves=("response_length",))
        for key, tokens in limits.items()
        if tokens is not None and tokens > config.response_length
    ]


def check_roles(config: RLConfig) -> list[ConfigProblem]:
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
            expected = "the same as actor_train.data_args, which is what is read, or nothing"
            problems.append(
                ConfigProblem(f"{role}.data_args", "a section", expected, involves=("actor_train.data_args",))
            )
    return problems


def check_sampling(path: str, arguments: GeneratingArguments) -> list[ConfigProblem]:
    """Training answers are sampled: equal ones have nothing to compare."""
    if arguments.do_sample and arguments.temperature > 0:
        return []
    expected = "do_sample true and a temperature above 0: greedy rollouts have nothing to compare"
    seen = {"do_sample": arguments.do_sample, "temperature": arguments.temperature}
    return [ConfigProblem(path, seen, expected)]


def check_parallelism(config: RLConfig) -> list[ConfigProblem]:
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


def check_batches(config: RLConfig) -> list[ConfigProblem]:
    """Whole optimizer steps make up a rollout, and the critic takes as many as the actor."""
    problems = []
    for role in _TRAINED:
        worker = config.roles.get(role)
        # An uneven split of the devices is the business of check_parallelism.
        if worker is None or (options := _valid_options(worker)) is None or _leftover_devices(worker, options):
            continue
        arguments, base = worker.training_args, f"{role}.training_args"
        batch, samples = worker.global_train_batch_size, config.samples_per_step
        words = (
            f"{arguments.per_device_train_batch_size} per device × {arguments.gradient_accumulation_steps} accumulated "
            f"× {worker.data_parallel_size} data-parallel = {batch}"
        )
        if samples % batch:
            expected = f"the global batch ({words}) to divide {config.samples_in_words}"
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


RULES: tuple[Rule, ...] = (check_lengths, check_roles, check_parallelism, check_batches)


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
