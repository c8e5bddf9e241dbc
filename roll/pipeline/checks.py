"""Checks of a configuration that need to know the plug-ins, the files and the devices. Nothing heavy is imported."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import roll.agentic.env as envs
from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.base import Config
from roll.configs.env import CustomEnvConfig
from roll.configs.problems import NOTHING, ConfigProblem, Words
from roll.configs.rl import TINY, RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.rules import Rule, sections, valid_options
from roll.configs.schema import nearest
from roll.configs.strategy import GENERATORS, STRATEGY_CONFIGS, TRAINERS, EngineConfig, MegatronConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.executor.errors import PlacementError
from roll.distributed.executor.resources import RoleRequest, plan_placement, pretend_nodes
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.engines import PACKAGES
from roll.tracking import TRACKERS
from roll.utils.registry import UnknownNameError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ENV_MANAGERS = ("step", "traj")


def check_envs(config: AgenticConfig) -> list[ConfigProblem]:
    """Environment types exist and understand their ``env_config``."""
    problems: list[ConfigProblem] = []
    for tag, env in config.custom_envs.items():
        base = f"custom_envs.{tag}"
        problems += [_env_problem(base, env, text) for text in envs.check_env_config(env.env_type, env.env_config)]
        if env.env_manager_cls not in _ENV_MANAGERS:
            problems += _path_problems(f"{base}.env_manager_cls", env.env_manager_cls, _ENV_MANAGERS)
    for name in MANAGERS:
        manager = getattr(config, name)
        for tag, env in config.played_envs(manager).items():
            for text in envs.check_env_config(env.env_type, env.env_config) if manager.format_penalty else ():
                if text.startswith("format_penalty: "):
                    hint = f"{tag} ({env.env_type}) takes no format_penalty"
                    problems.append(ConfigProblem(f"{name}.format_penalty", manager.format_penalty, "0", hint))
    return problems


def _env_problem(base: str, env: CustomEnvConfig, text: str) -> ConfigProblem:
    """An environment's sentence, ``key: what was seen, what was expected``, with the key's full path."""
    key, _, rest = text.partition(": ")
    if key == "env_type":
        return ConfigProblem(f"{base}.env_type", env.env_type, "a known environment", rest)
    path = f"{base}.env_config" if key == "env_config" else f"{base}.env_config.{key}"
    involved = (f"{base}.env_config", f"{base}.env_type")
    seen = env.env_config.get(key, NOTHING)
    if rest.startswith("unknown key; "):
        return ConfigProblem(path, seen, "no such key", rest.removeprefix("unknown key; "), involved)
    return ConfigProblem(path, seen, rest.rpartition("expected ")[2], involves=involved)


def check_verifiers(config: RLVRConfig) -> list[ConfigProblem]:
    """Verifiers exist and understand their ``args``."""
    from roll.rewards.scorer import check_rewards

    return [
        _sentence_problem(f"rewards.{name}.", text)
        for name, reward in config.rewards.items()
        for text in check_rewards(reward)
    ]


def check_data_plugins(config: RLVRConfig) -> list[ConfigProblem]:
    """Dataset classes and the data generator can be found."""
    paths = {"actor_train.data_args.dataset_cls": config.actor_train.data_args.dataset_cls}
    if config.validation is not None:
        paths["validation.data_args.dataset_cls"] = config.validation.data_args.dataset_cls
    if config.data_generator is not None:
        paths["data_generator.path"] = config.data_generator.path
    return [problem for key, path in paths.items() if path is not None for problem in _path_problems(key, path, ())]


def _sentence_problem(prefix: str, text: str) -> ConfigProblem:
    """``key: what was seen, expected what`` with the key's full path."""
    key, _, rest = text.partition(": ")
    key = key.split()[0]
    seen, _, expected = rest.removeprefix("seen ").rpartition(", expected ")
    return ConfigProblem(prefix + key, Words(seen) if seen else NOTHING, expected or rest)


def _workers(config: RLConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """The key and section of everything that gets processes, and of roles that are given but not used."""
    yield from (
        dict(sections(config)) | {config.key_of(name): worker for name, worker in config.clusters.items()}
    ).items()


def check_strategies(config: RLConfig) -> list[ConfigProblem]:
    """Strategies exist, and each does what its role needs."""
    names = sorted({*STRATEGIES.names(), *STRATEGY_CONFIGS})
    problems: list[ConfigProblem] = []
    for role, worker in sections(config):
        name, path = worker.strategy_args.strategy_name, f"{role}.strategy_args.strategy_name"
        if name not in names:
            problems += _path_problems(path, name, names)
        elif role in ("actor_train", "critic") and name in STRATEGY_CONFIGS and name not in TRAINERS:
            problems.append(ConfigProblem(path, name, f"a strategy that trains: {', '.join(sorted(TRAINERS))}"))
        elif role == "actor_infer" and name in STRATEGY_CONFIGS and name not in GENERATORS:
            problems.append(ConfigProblem(path, name, f"a strategy that generates: {', '.join(sorted(GENERATORS))}"))
    return problems


def check_engine_options(config: RLConfig) -> list[ConfigProblem]:
    """Options that are passed on to an engine exist there. What the engine takes is read from its source."""
    problems: list[ConfigProblem] = []
    for role, worker in sections(config):
        name, options = worker.strategy_args.strategy_name, worker.strategy_args.strategy_config
        if options and issubclass(STRATEGY_CONFIGS.get(name, Config), EngineConfig):
            check = getattr(import_module(STRATEGIES.get(name).__module__), "check_engine_options")  # noqa: B009
            prefix = f"{role}.strategy_args.strategy_config."
            problems += [_sentence_problem(prefix, text) for text in check(options)]
    return problems


def check_fit(config: RLConfig) -> list[ConfigProblem]:
    """The model's sizes divide into the parallel layout, for models whose configuration is on this machine."""
    problems: list[ConfigProblem] = []
    for role, worker in sections(config):
        name, options = worker.strategy_args.strategy_name, valid_options(worker)
        split = 1 if options is None else worker.devices_per_copy
        sizes = _model_config(config, role) if split > 1 or isinstance(options, MegatronConfig) else None
        if sizes is None:
            continue
        if isinstance(options, MegatronConfig):
            from roll.distributed.strategy.megatron.strategy import check_model_fit

            for text in check_model_fit(sizes, options):
                key = text.partition(":")[0].split()[0]
                if key in MegatronConfig.model_fields:
                    problems.append(_sentence_problem(f"{role}.strategy_args.strategy_config.", text))
                else:
                    expected = "a strategy that can run the model, such as fsdp2_train"
                    problems.append(ConfigProblem(f"{role}.strategy_args.strategy_name", name, expected, text))
        elif sizes.num_attention_heads % split:
            heads = sizes.num_attention_heads
            nearest_size = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - split))
            ulysses = worker.model_args.ulysses_size > 1
            key = "model_args.ulysses_size" if ulysses else "strategy_args.strategy_config.tensor_parallel_size"
            seen = worker.model_args.ulysses_size if ulysses else split
            hint = f"the nearest is {nearest_size} in all"
            problems.append(
                ConfigProblem(f"{role}.{key}", seen, f"sizes that divide the {heads} attention heads", hint)
            )
    return problems


def _model_config(config: RLConfig, role: str) -> Any:
    """The configuration of a role's model; ``None`` if it is not on this machine or cannot be read."""
    from roll.models.loading import load_config
    from roll.models.tiny import tiny_config

    path = config.reward_pretrain if role == "critic" and config.reward_pretrain else config.pretrain
    if path == TINY:
        return tiny_config(config.tiny_num_heads)
    if not (Path(path).expanduser() / "config.json").is_file():
        return None
    try:
        return load_config(path, getattr(config, role).model_args.model_config_kwargs).get_text_config()
    except (OSError, ValueError):
        return None  # loading it will say what is wrong


def check_plugins(config: RLConfig) -> list[ConfigProblem]:
    """Trackers are registered, and classes and functions given by path can be found."""
    problems = []
    for tracker in config.trackers:
        try:
            TRACKERS.check(tracker)
        except UnknownNameError as error:
            problems.append(ConfigProblem("track_with", tracker, "a known tracker", str(error)))
    paths = {f"{role}.worker_cls": worker.worker_cls for role, worker in _workers(config)}
    plug_ins = {"adv_estimator": config.adv_estimator, "pg_variant": config.pg_variant}
    paths |= {key: name if ":" in name else None for key, name in plug_ins.items()}
    for key, path in paths.items():
        if path is not None:
            problems += _path_problems(key, path, ())
    return problems


def check_models(config: RLConfig) -> list[ConfigProblem]:
    """Models are ``tiny``, a folder in Hugging Face format, or look like a name on the hub (which is not asked)."""
    problems = []
    models = {"pretrain": config.pretrain}
    if config.reward_pretrain is not None and config.uses_critic:
        models["reward_pretrain"] = config.reward_pretrain
    for key, model in models.items():
        folder = Path(model)
        if model == TINY or (folder / "config.json").is_file():
            continue
        if folder.exists():
            problems.append(ConfigProblem(key, model, "a folder that holds a config.json in Hugging Face format"))
        elif not _HUB_ID.fullmatch(model):
            near = nearest(folder.name, [path.name for path in folder.parent.glob("*")])
            hint = f"did you mean {folder.parent / near}?" if near else "there is nothing at this path"
            problems.append(
                ConfigProblem(key, model, "tiny, an existing model folder, or an org/name on the hub", hint)
            )
    generator = config.actor_infer.strategy_args.strategy_name
    if config.pretrain == TINY and generator == "vllm" and config.tiny_num_heads > 2:
        expected = "2 with vllm, whose attention kernels take heads of 32 units at least"
        involved = ("pretrain", "actor_infer.strategy_args.strategy_name")
        problems.append(ConfigProblem("tiny_num_heads", config.tiny_num_heads, expected, involves=involved))
    if isinstance(config.resume_from_checkpoint, str) and not Path(config.resume_from_checkpoint).is_dir():
        seen = config.resume_from_checkpoint
        problems.append(ConfigProblem("resume_from_checkpoint", seen, "true, false or an existing checkpoint folder"))
    return problems


def check_placement(config: RLConfig) -> list[ConfigProblem]:
    """Every device exists, and a worker's devices lie on one node."""
    nodes = pretend_nodes(config.num_nodes, config.num_gpus_per_node)
    problems = []
    for role, worker in _workers(config):
        mapping = worker.device_mapping
        # Division and world_size are checked with the section itself.
        if mapping is None or len(mapping) % worker.num_gpus_per_worker:
            continue
        request = RoleRequest(role, tuple(mapping), worker.num_gpus_per_worker)
        try:
            plan_placement([request], nodes)
        except PlacementError as error:
            involved = ("num_nodes", "num_gpus_per_node", f"{role}.num_gpus_per_worker")
            path = f"{role}.device_mapping"
            expected = (
                f"ids from 0 to {config.num_devices - 1} (num_nodes {config.num_nodes} × num_gpus_per_node "
                f"{config.num_gpus_per_node}), each worker's on one node"
            )
            hint = "; ".join(error.problems)
            problems.append(ConfigProblem(path, mapping, expected, hint, involves=involved))
    return problems


def missing_engines(config: RLConfig) -> list[ConfigProblem]:
    """Strategies whose package is not installed here; such a configuration can be checked, but not run."""
    return [
        ConfigProblem(
            f"{role}.strategy_args.strategy_name",
            name,
            f"the package {package.module} to be installed",
            f"pip install 'roll-rl[{package.extra}]'; --validate-only checks a configuration without it",
        )
        for role, worker in config.roles.items()
        if (package := PACKAGES.get(name := worker.strategy_args.strategy_name)) is not None
        and not package.installed
        and not worker.strategy_args.strategy_config.get("python_executable")  # an environment of its own
    ]


def role_requests(config: RLConfig) -> list[RoleRequest]:
    """What each cluster asks of the machines."""
    return [
        RoleRequest(
            name=name,
            device_mapping=tuple(worker.device_mapping) if worker.device_mapping else None,
            num_gpus_per_worker=worker.num_gpus_per_worker,
            world_size=worker.num_workers,
        )
        for name, worker in config.clusters.items()
    ]


def describe_files(config: RLConfig) -> list[str]:
    """Which data files are on this machine; a run asks for them, a plan made elsewhere does not."""
    if not isinstance(config, RLVRConfig):
        return []
    made = config.data_generator
    lines = [] if made is None else [f"data: made by {made.path} in {made.folder}, if it is not there"]
    names = config.actor_train.data_args.file_names
    names += config.validation.data_args.file_names if config.validation else []
    for name in names:
        found = len(glob.glob(str(Path(name).expanduser()), recursive=True))
        where = f"{found} found" if found else "nothing here yet"
        lines.append(f"data: {name}: {where}")
    return lines


def describe_placement(config: RLConfig) -> list[str]:
    """Where the roles would sit on the nodes that the configuration speaks of, as a table."""
    nodes = pretend_nodes(config.num_nodes, config.num_gpus_per_node)
    return plan_placement(role_requests(config), nodes).describe()


_CHECKS: tuple[Rule, ...] = (
    check_strategies,
    check_engine_options,
    check_fit,
    check_plugins,
    check_models,
    check_placement,
)
CHECKS: dict[type[RLConfig], tuple[Rule, ...]] = {
    AgenticConfig: (check_envs, *_CHECKS),
    RLVRConfig: (check_verifiers, check_data_plugins, *_CHECKS),
}
"""By the class of the configuration, for ``load_config``."""


def _path_problems(key: str, path: str, names: tuple[str, ...] | list[str]) -> Iterator[ConfigProblem]:
    """A name that is none of ``names`` must be ``package.module:attribute`` in a package that can be found."""
    module, colon, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    known = ", ".join([*names, "package.module:attribute"])
    near = nearest(path, names)
    hint = f"did you mean {near}?" if near else ""
    if not colon or not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield ConfigProblem(key, path, f"one of: {known}" if names else known, hint)
    elif not _exists(module):
        yield ConfigProblem(key, path, f"a module that can be imported; there is no {module}", hint)


def _exists(module: str) -> bool:
    """Whether the module's top package can be found; parents of a module are not imported to look deeper."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None
