"""Rules that concern several sections of a configuration at once, for every pipeline.

A rule is a function from the configuration to the problems it finds. Rules also run on a configuration whose other
parts are wrong: those parts then hold their defaults, and a problem that ``involves`` one of them is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from roll.configs.arguments import none_problems, plain_problems
from roll.configs.data import DataArguments
from roll.configs.engines import cards
from roll.configs.engines.card import EngineCard
from roll.configs.pipeline import PipelineConfig
from roll.configs.problems import ConfigProblem
from roll.configs.schema import ROLES
from roll.configs.worker import GeneratingArguments, ModelArguments, TrainingArguments, WorkerConfig

Rule = Callable[[Any], Iterable[ConfigProblem]]
"""Takes the configuration of the pipeline that it is a rule of."""

TRAINED = ("actor_train", "critic")


def sections(config: PipelineConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """The role sections that are present, used or not."""
    for role in ROLES:
        worker = getattr(config, role, None)
        if worker is not None:
            yield role, worker
    teachers: dict[str, WorkerConfig] = getattr(config, "teacher_roles", {})
    yield from ((role, worker) for role, worker in teachers.items() if role != "teacher")


def check_lengths(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """No answer is longer than ``response_length``; a token budget holds the longest sample."""
    if config.actor_infer is not None:
        path = "actor_infer.generating_args.max_new_tokens"
        yield from too_many_tokens(config, {path: config.actor_infer.generating_args.max_new_tokens})
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            budget = getattr(worker, key := f"max_tokens_per_microbatch_in_{phase}")
            if 0 < budget < config.sequence_length:
                expected = f"at least sequence_length = {config.sequence_length}, so that one sample fits"
                yield ConfigProblem(f"{role}.{key}", budget, expected, involves=("sequence_length",))


def too_many_tokens(config: PipelineConfig, limits: Mapping[str, int | None]) -> Iterator[ConfigProblem]:
    """Those of the sampling limits, given by key, that are beyond ``response_length``."""
    expected = f"at most response_length = {config.response_length}"
    for key, tokens in limits.items():
        if tokens is not None and tokens > config.response_length:
            yield ConfigProblem(key, tokens, expected, involves=("response_length",))


def check_roles(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """No role is told what it never reads."""
    for role, worker in sections(config):
        if worker.training_args != TrainingArguments() and role not in TRAINED:
            yield _unread(role, "training_args", "only actor_train and critic are trained")
        if worker.generating_args != GeneratingArguments() and role != "actor_infer":
            yield _unread(role, "generating_args", "move it to actor_infer; its temperature applies everywhere")
        own, actor = (args.model_config_kwargs for args in (worker.model_args, config.actor_train.model_args))
        if role in ("actor_infer", "reference") and own != actor and config.model_of(role) == config.pretrain:
            key, expected = "model_args.model_config_kwargs", "the same as actor_train's, whose model it is"
            yield ConfigProblem(f"{role}.{key}", own, f"{expected}: {actor}", involves=(f"actor_train.{key}",))
        key, same = "model_args.trust_remote_code", role != "actor_train" and config.model_of(role) == config.pretrain
        if same and (own_trust := config.trusts(role)) != config.trusts("actor_train"):
            expected, actor_key = "the same as actor_train's, whose model it is", f"actor_train.{key}"
            yield ConfigProblem(f"{role}.{key}", own_trust, expected, involves=(actor_key, "pretrain"))
        if worker.data_args not in (DataArguments(), config.actor_train.data_args):
            expected = "the same as actor_train.data_args, which is read instead, or nothing"
            yield ConfigProblem(f"{role}.data_args", "a section", expected, involves=("actor_train.data_args",))


def check_sampling(path: str, arguments: GeneratingArguments, max_kept: int) -> Iterator[ConfigProblem]:
    """Training answers are sampled: equal ones have nothing to compare.

    Args:
        max_kept: ``replay_kept_sets``; with it they are sampled from a part of the distribution that a trainer has.
    """
    if arguments.is_greedy:
        name, expected = ("temperature", "more than 0") if arguments.do_sample else ("do_sample", "true")
        why = "greedy rollouts have nothing to compare"
        yield ConfigProblem(f"{path}.{name}", getattr(arguments, name), f"{expected}: {why}")
    if not max_kept:
        return
    key = "train_infer_correction.replay_kept_sets"
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "first_token_temperature"):
        got, neutral = getattr(arguments, name), GeneratingArguments.model_fields[name].default
        if got != neutral:
            expected = f"{'null' if neutral is None else neutral} with {key}"
            hint = "training takes log-probs of the model's logits at one temperature"
            yield ConfigProblem(f"{path}.{name}", got, expected, hint, involves=(key,))
    if not arguments.truncates:
        involved = tuple(f"{path}.{name}" for name in ("top_p", "top_k", "min_p"))
        yield ConfigProblem(
            key, max_kept, "0 without top_p, top_k and min_p: every token can be sampled", involves=involved
        )


def check_frozen(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Only what is trained has parts that are not."""
    for role, worker in sections(config):
        if role not in TRAINED and (got := worker.model_args.freeze_module_prefix) is not None:
            yield ConfigProblem(f"{role}.model_args.freeze_module_prefix", got, f"null: {role} trains nothing")


def check_parallelism(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Devices divide into copies of the model, and one worker holds as many as its engine splits itself over."""
    for role, worker in sections(config):
        name, card = worker.strategy_args.strategy_name, worker.strategy_args.card
        involves = (f"{role}.device_mapping", f"{role}.world_size", f"{role}.strategy_args.strategy_name")
        ulysses = worker.model_args.ulysses_size
        if ulysses > 1 and not (card and card.trains_modules):
            having = ", ".join(each for other in cards() if other.trains_modules for each in other.strategies)
            instead = card.ulysses_instead if card else ""
            expected = f"1 with {name}" + (f", whose {instead}" if instead else f"; those that have it: {having}")
            yield ConfigProblem(f"{role}.model_args.ulysses_size", ulysses, expected, involves=involves)
        elif worker.num_devices % worker.devices_per_copy:
            yield _undivided(role, worker, involves)
        if card is not None:
            yield from _size_problems(role, worker, card, involves)


def _size_problems(
    role: str, worker: WorkerConfig, card: EngineCard, involves: tuple[str, ...]
) -> Iterator[ConfigProblem]:
    """Options and devices of one worker that do not agree with what its engine is."""
    name, devices = worker.strategy_args.strategy_name, worker.num_gpus_per_worker
    if worker.model_args.use_liger_kernel and not card.trains_modules:
        expected = f"false with {name}: it has its own kernels"
        yield ConfigProblem(f"{role}.model_args.use_liger_kernel", True, expected, involves=involves)
    if card.size_key is None and devices > 1:
        expected = f"1: {name} runs one process per device"
        yield ConfigProblem(f"{role}.num_gpus_per_worker", devices, expected, involves=involves[2:])
    size = getattr(worker.strategy_args.typed(), card.size_key) if card.size_key else None
    if size is not None and size != devices:
        key, also = f"{role}.strategy_args.strategy_config.{card.size_key}", f"{role}.num_gpus_per_worker"
        yield ConfigProblem(key, size, f"{also} = {devices}, or nothing", involves=(*involves, also))


def check_engines(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The rules on each role's engine card."""
    for role, worker in sections(config):
        if (card := worker.strategy_args.card) is not None:
            yield from card.rules(role, worker, config)


def check_lora(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Adapters belong to the actor alone."""
    actor = config.actor_train.model_args
    for role, worker in sections(config):
        args, key = worker.model_args, f"{role}.model_args.lora_target"
        involves = ("actor_train.model_args.lora_target", f"{role}.strategy_args.strategy_name")
        if not args.lora_targets:
            continue
        if role == "actor_infer" and _adapter(args) != _adapter(actor):
            expected = f"null, or the adapter of actor_train: {_adapter(actor)}"
        elif role not in ("actor_train", "actor_infer"):
            expected = "null: only the actor has an adapter"
        else:
            continue
        yield ConfigProblem(key, args.lora_target, expected, involves=involves)


def check_deltas(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Deltas of weights have somewhere to go, and weights to be of."""
    reasons = {
        "actor_infer": "nothing generates" if config.actor_infer is None else "",
        "num_nodes": "every generating worker is on the trainer's node" if config.num_nodes == 1 else "",
        "actor_train.model_args.lora_target": "with LoRA only the adapter is sent" if config.uses_lora else "",
    }
    for key, reason in reasons.items() if config.weight_update_deltas else ():
        if reason:
            yield ConfigProblem("weight_update_deltas", True, f"false: {reason}", involves=(key,))


def check_profiler(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Recordings are of steps, roles and ranks that there are."""
    profiler = config.profiler
    known = {role: worker.num_workers for role, worker in config.roles.items()}
    if absent := [role for role in profiler.roles if role not in known]:
        yield ConfigProblem("profiler.roles", absent[0], f"some of {', '.join(known)}")
    largest = max((known[role] for role in profiler.roles or known if role in known), default=1)
    if wrong := [rank for rank in profiler.ranks or () if rank >= largest]:
        yield ConfigProblem("profiler.ranks", wrong[0], f"ranks below {largest}, as the roles have them")
    if late := [step for step in profiler.steps if step > config.max_steps]:
        expected = f"steps of the run, at most {config.max_steps}"
        yield ConfigProblem("profiler.steps", late[0], expected, involves=("max_steps",))


def _adapter(args: ModelArguments) -> dict[str, object]:
    """Arguments that must be the same of every copy of an adapter."""
    return {key: getattr(args, key) for key in ("lora_target", "lora_exclude", "lora_rank", "lora_alpha")}


RULES: tuple[Rule, ...] = (
    plain_problems,
    none_problems,
    check_lengths,
    check_roles,
    check_frozen,
    check_parallelism,
    check_lora,
    check_deltas,
    check_profiler,
    check_engines,
)


def _undivided(role: str, worker: WorkerConfig, involves: tuple[str, ...]) -> ConfigProblem:
    """Devices are left over that are too few to hold one more copy of the model."""
    base = f"{role}.strategy_args.strategy_config"
    sizes = {f"{base}.{key}": size for key, size in worker.strategy_args.typed().parallel_sizes.items()}
    sizes[f"{role}.model_args.ulysses_size"] = worker.model_args.ulysses_size
    wrong = max(sizes, key=lambda key: sizes[key])
    words = " × ".join(f"{key.rpartition('.')[2]} {size}" for key, size in sizes.items() if size > 1)
    fits = [n for n in range(1, worker.num_devices + 1) if worker.num_devices % n == 0]
    others = worker.devices_per_copy // sizes[wrong]
    near = [n for n in fits if worker.num_devices % (n * others) == 0]
    expected = f"{words} = {worker.devices_per_copy} to divide the {worker.num_devices} devices of {role}"
    hint = f"the nearest size that fits is {min(near, key=lambda n: abs(n - sizes[wrong]))}" if near else ""
    return ConfigProblem(wrong, sizes[wrong], expected, hint, involves=(*involves, *(sizes.keys() - {wrong})))


def _unread(role: str, section: str, hint: str) -> ConfigProblem:
    return ConfigProblem(f"{role}.{section}", "a section", f"no {section}, since {role} does not read it", hint)
