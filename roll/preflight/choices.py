"""Checks of a configuration that need the plug-ins, the user's functions, the files and the devices; nothing heavy."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import roll.agentic.env as envs
from roll.agentic.tools.dialects import DIALECTS
from roll.agentic.tools.tool import check_tool
from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.arguments import argument_problems
from roll.configs.data import ATTRIBUTE_PATH
from roll.configs.distill import DistillConfig
from roll.configs.engines import strategy_names
from roll.configs.engines.card import VERBS, task_of
from roll.configs.offline import SFTConfig
from roll.configs.pipeline import TINIES, PipelineConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.problems import ConfigProblem, Words
from roll.configs.prompts import DataGeneratorConfig, PromptsConfig
from roll.configs.rl import RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.rules import Rule, sections
from roll.configs.schema import nearest
from roll.configs.tools import AUTO_DIALECT
from roll.configs.worker import WorkerConfig
from roll.distributed.cluster.errors import PlacementError
from roll.distributed.cluster.resources import RoleRequest, plan_placement, pretend_nodes
from roll.distributed.strategy import STRATEGIES
from roll.preflight.models import MODEL_CHECKS
from roll.preflight.templates import check_dialect, check_results
from roll.rollout.schedule import Schedule
from roll.tracking.trackers import TRACKERS, tracker_options
from roll.utils.foreign import Fault, describe_error
from roll.utils.registry import UnknownNameError, import_path

_ENV_MANAGERS = ("step", "traj")


def check_envs(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Environment types exist and understand their ``env_config``."""
    for tag, env in config.custom_envs.items():
        base = f"custom_envs.{tag}"
        yield from [problem.under(base) for problem in envs.check_env_config(env.env_type, env.env_config)]
        if env.env_manager_cls not in _ENV_MANAGERS:
            yield from _path_problems(f"{base}.env_manager_cls", env.env_manager_cls, _ENV_MANAGERS)
    yield from _tiny_problems(config)
    yield from _asking_problems(config)
    for name in MANAGERS:
        manager = getattr(config, name)
        for tag, env in config.played_envs(manager).items():
            for problem in envs.check_env_config(env.env_type, env.env_config) if manager.format_penalty else ():
                if problem.path == "env_config.format_penalty":
                    hint = f"{tag} ({env.env_type}) takes no format_penalty"
                    yield ConfigProblem(f"{name}.format_penalty", manager.format_penalty, "0", hint)


def _asking_problems(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Environments that ask have somebody to ask, and a model that nobody asks is not loaded."""
    played = {tag: env for name in MANAGERS for tag, env in config.played_envs(getattr(config, name)).items()}
    known = {
        tag: env
        for tag, env in played.items()
        if all(problem.path != "env_type" for problem in envs.check_env_config(env.env_type, env.env_config))
    }
    asking = [f"{tag} ({env.env_type})" for tag, env in known.items() if envs.asks_judge(env.env_type)]
    involved = tuple(f"custom_envs.{tag}" for tag in played)
    if asking and config.judge is None:
        expected = f"a section with the model that {' and '.join(asking)} asks"
        yield ConfigProblem("judge", None, expected, involves=involved)
    elif config.judge is not None and not asking and len(known) == len(played):
        expected = "null, since no environment calls a model (its class would set asks = True)"
        yield ConfigProblem("judge", Words("a section"), expected, involves=involved)


def _tiny_problems(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Games that the tiny model cannot be shown: its warm start plays them by the names of their actions."""
    for tag in config.train_env_manager.tags if config.pretrain in TINIES else ():
        env = config.custom_envs.get(tag)
        if env is None or envs.check_env_config(env.env_type, env.env_config) or envs.names_actions(env.env_type):
            continue
        expected = f"a model folder or a name on the hub: tiny works only with grid games, {tag} is {env.env_type}"
        hint = "the class of a game of your own may name its actions: action_names"
        involved = (f"custom_envs.{tag}.env_type", "train_env_manager.tags")
        yield ConfigProblem("pretrain", config.pretrain, expected, hint, involves=involved)


def check_verifiers(config: PromptsConfig) -> Iterator[ConfigProblem]:
    """Verifiers exist and understand their ``args``."""
    from roll.rewards.scorer import check_rewards

    for name, reward in config.rewards.items():
        yield from (problem.under(f"rewards.{name}") for problem in check_rewards(reward))


def check_reward_parts(config: RLVRConfig) -> list[ConfigProblem]:
    """Every domain has the verifiers whose scores are compared apart."""
    from roll.rewards.scorer import verifier_labels

    return [
        ConfigProblem(
            f"gdpo_reward_keys.{index}",
            key,
            f"a number of each domain: <verifier>/score or <verifier>/<part>, <verifier> one of {', '.join(labels)}",
            involves=(f"rewards.{name}",),
        )
        for name, reward in config.rewards.items()
        for labels in [verifier_labels(reward.verifiers)]
        for index, key in enumerate(config.gdpo_reward_keys)
        if key.partition("/")[0] not in labels or "/" not in key
    ]


def check_tools(config: RLConfig) -> Iterator[ConfigProblem]:
    """Tools exist, and so does the dialect in which they are called."""
    if config.tools is None:
        return
    for name, entry in config.tools.use.items():
        yield from (problem.under(f"tools.use.{name}") for problem in check_tool(entry.tool, entry.args))
    yield from _dialect_problems("tools.dialect", config.tools.dialect)


def check_told_tools(config: RLVRConfig) -> list[ConfigProblem]:
    """Tools that demonstrations tell of exist."""
    return [
        ConfigProblem(f"warm_start.tools.{index}", name, "a tool without arguments", problem.hint or problem.expected)
        for index, name in enumerate(config.warm_start.tools)
        for problem in check_tool(name, {})
    ]


def check_agents(config: RLConfig) -> Iterator[ConfigProblem]:
    """An agent's function and folders can be found, and so can the dialect in which the policy calls its tools."""
    for key, agent in config.agents.items():
        if agent.path is not None:
            yield from _path_problems(f"{key}.path", agent.path, (), files=True)
        yield from _dialect_problems(f"{key}.dialect", agent.dialect)
        folders = {f"{key}.cwd": agent.cwd, f"{key}.template": agent.template}
        yield from [
            ConfigProblem(name, path, "an existing folder")
            for name, path in folders.items()
            if path is not None and not Path(path).is_dir()
        ]
        yield from [
            ConfigProblem(f"{key}.sandbox.readable.{index}", path, "an existing file or folder")
            for index, path in enumerate(agent.sandbox.readable if agent.sandbox else ())
            if not Path(path).exists()
        ]


def check_user(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """The class of the user can be made."""
    from roll.rollout.prompt_worker import load_user

    if config.user is not None:
        try:
            made = import_path(config.user.path)
            wrong = argument_problems(cast("Callable[..., Any]", made), config.user.args) if callable(made) else []
            yield from (problem.under("user.args") for problem in wrong)
            if not wrong:
                load_user(config.user)
        except ValueError as error:
            yield ConfigProblem("user", Words(config.user.path), "a user", str(error))


def check_templates(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The chat templates of the policy's conversations are there."""
    from roll.data.templates import read_template

    data = config.actor_train.data_args
    named = {"template": data.template, **{f"tag_templates.{tag}": each for tag, each in data.tag_templates.items()}}
    for key, template in named.items():
        try:
            read_template(template)
        except (ValueError, OSError) as error:
            yield ConfigProblem(f"actor_train.data_args.{key}", template, "a chat template", str(error))


def check_data_plugins(config: PromptsConfig) -> Iterator[ConfigProblem]:
    """Dataset classes and the data generator can be found."""
    datasets = {"actor_train.data_args": config.actor_train.data_args}
    if config.validation is not None:
        datasets["validation.data_args"] = config.validation.data_args
    for key, data in datasets.items():
        # What is no path at all is said by the section itself.
        if data.dataset_cls and ATTRIBUTE_PATH.fullmatch(data.dataset_cls):
            yield from _path_problems(f"{key}.dataset_cls", data.dataset_cls, (), files=True)
    if config.data_generator is not None:
        yield from _generator_problems(config.data_generator)


def _generator_problems(generator: DataGeneratorConfig) -> Iterator[ConfigProblem]:
    """The function that makes the data is there, and takes its arguments; it is not called."""
    key = "data_generator.path"
    if wrong := list(_path_problems(key, generator.path, ())):
        yield from wrong
        return
    with Fault() as fault:
        make = import_path(generator.path, key)
    if fault.error is not None:
        yield ConfigProblem(key, generator.path, "a function that can be imported", describe_error(fault.error))
        return
    if not callable(make):
        yield ConfigProblem(key, generator.path, "a function, called as function(folder, **args)")
        return
    yield from (problem.under("data_generator.args") for problem in argument_problems(make, generator.args, given=1))


def check_replay(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The schedule to repeat is there, and it is that of a whole run under the same limits."""
    if not isinstance(config, RLConfig) or config.replay_schedule is None:
        return
    key, limits = "replay_schedule", (config.groups_per_step, config.groups_ahead, config.window)
    involved = ("max_steps", "rollout_batch_size", "async_generation_ratio", "rollout_window")
    try:
        schedule = Schedule.read(Path(config.replay_schedule))
    except (OSError, ValueError) as error:
        yield ConfigProblem(key, config.replay_schedule, "the schedule.jsonl of a run", str(error))
        return
    if schedule.limits != {limits}:
        expected = "a run with {} groups per step, {} ahead and a window of {} draws".format(*limits)
        recorded = " and ".join("{}, {} and {}".format(*some) for some in sorted(schedule.limits))
        yield ConfigProblem(key, config.replay_schedule, expected, f"it has {recorded}", involves=involved)
    if sorted(schedule.steps) != list(range(1, config.max_steps + 1)):
        recorded = f"it has {len(schedule.steps)} steps, the last is {max(schedule.steps, default=0)}"
        expected = f"all steps of a run of max_steps {config.max_steps}"
        yield ConfigProblem(key, config.replay_schedule, expected, recorded, involves=involved)


def _workers(config: PipelineConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """The key and section of everything that gets processes, and of roles that are given but not used."""
    clusters = {config.key_of(name): worker for name, worker in config.clusters.items()}
    yield from (dict(sections(config)) | clusters).items()


def check_strategies(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Strategies exist, and each does what its role needs."""
    for role, worker in sections(config):
        name, card, task = worker.strategy_args.strategy_name, worker.strategy_args.card, task_of(role)
        path, able = f"{role}.strategy_args.strategy_name", strategy_names(task)
        if card is None and name not in STRATEGIES:
            yield from _path_problems(path, name, able)
        elif card is not None and not card.strategy(name).plays(role):
            yield ConfigProblem(path, name, f"a strategy that {VERBS[task]}: {', '.join(able)}", _meant(name, able))


def check_engine_options(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Options that are passed on to an engine exist there. What the engine takes is read from its source."""
    for role, worker in sections(config):
        if (card := worker.strategy_args.card) is not None:
            for problem in card.option_problems(worker.strategy_args.strategy_config):
                yield problem.under(f"{role}.strategy_args.strategy_config")


def describe_options(config: PipelineConfig) -> list[str]:
    """Options that were compared with those of no engine, or of another version than this machine may have."""
    lines = []
    for role, worker in sections(config):
        options, card = worker.strategy_args.strategy_config, worker.strategy_args.card
        base = f"{role}.strategy_args.strategy_config"
        if card is None and options:
            lines.append(f"{base}: not checked, since {worker.strategy_args.strategy_name} has no card")
        elif card is not None and (keys := card.passed_on(options)) and (note := card.signature(options).note):
            lines.append(f"{base}: {', '.join(keys)}: {note}")
    return lines


def check_plugins(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Trackers are registered, and classes and functions given by path can be found."""
    for tracker in config.trackers:
        try:
            TRACKERS.check(tracker)
        except UnknownNameError as error:
            yield ConfigProblem("track_with", tracker, "a known tracker", str(error))
    try:
        tracker_options(config.trackers, config.tracker_kwargs)
    except UnknownNameError:
        pass  # said above, or by a run
    except ValueError as error:
        seen = Words(", ".join(config.tracker_kwargs))  # values may be secrets
        yield ConfigProblem("tracker_kwargs", seen, "options of the trackers", str(error))
    paths = {f"{role}.worker_cls": worker.worker_cls for role, worker in _workers(config)}
    for key, path in paths.items():
        if path is not None:
            yield from _path_problems(key, path, ())
    for key, path in config.functions.items() if isinstance(config, RLConfig) else ():
        yield from _path_problems(key, path, (), files=True)


def check_placement(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Every device exists, and a worker's devices lie on one node, if its engine cannot do otherwise."""
    nodes = pretend_nodes(config.num_nodes, config.num_gpus_per_node)
    for role, worker in _workers(config):
        mapping = worker.device_mapping
        # Division and world_size are checked with the section itself.
        if mapping is None or len(mapping) % worker.num_gpus_per_worker:
            continue
        request = RoleRequest(role, tuple(mapping), worker.num_gpus_per_worker, _spans_nodes(role, worker))
        try:
            plan_placement([request], nodes)
        except PlacementError as error:
            involved = ("num_nodes", "num_gpus_per_node", f"{role}.num_gpus_per_worker")
            path = f"{role}.device_mapping"
            expected = (
                f"ids from 0 to {config.num_devices - 1} (num_nodes {config.num_nodes} × num_gpus_per_node "
                f"{config.num_gpus_per_node}), each worker's on "
                f"{'one node or equally many on each' if request.spans_nodes else 'one node'}"
            )
            hint = "; ".join(error.problems)
            yield ConfigProblem(path, mapping, expected, hint, involves=involved)


def _spans_nodes(role: str, worker: WorkerConfig) -> bool:
    card = worker.strategy_args.card
    return card is not None and card.spans_nodes and task_of(role) == "generates"


def role_requests(config: PipelineConfig) -> list[RoleRequest]:
    """Requests of the clusters to the machines."""
    return [
        RoleRequest(
            name=name,
            device_mapping=tuple(worker.device_mapping) if worker.device_mapping else None,
            num_gpus_per_worker=worker.num_gpus_per_worker,
            spans_nodes=_spans_nodes(name, worker),
            world_size=worker.num_workers,
        )
        for name, worker in config.clusters.items()
    ]


def describe_placement(config: PipelineConfig) -> list[str]:
    """Placement of the roles on the nodes that the configuration speaks of, as a table."""
    nodes = pretend_nodes(config.num_nodes, config.num_gpus_per_node)
    return plan_placement(role_requests(config), nodes).describe()


_CHECKS: tuple[Rule, ...] = (
    check_strategies,
    check_engine_options,
    check_plugins,
    check_templates,
    *MODEL_CHECKS,
    check_placement,
    check_replay,
)
CHECKS: dict[type[PipelineConfig], tuple[Rule, ...]] = {
    AgenticConfig: (check_envs, check_tools, check_dialect, check_results, check_agents, *_CHECKS),
    RLVRConfig: (
        check_verifiers,
        check_reward_parts,
        check_data_plugins,
        check_user,
        check_tools,
        check_told_tools,
        check_dialect,
        check_results,
        check_agents,
        *_CHECKS,
    ),
    SFTConfig: (check_verifiers, check_data_plugins, *_CHECKS),
    DPOConfig: (check_verifiers, check_data_plugins, *_CHECKS),
    DistillConfig: (check_verifiers, check_data_plugins, *_CHECKS),
    RewardTrainingConfig: (check_data_plugins, *_CHECKS),
}
"""By the class of the configuration, for ``load_config``."""


def _dialect_problems(key: str, name: str) -> Iterator[ConfigProblem]:
    """A name that is no tool dialect."""
    if name == AUTO_DIALECT:
        return
    try:
        DIALECTS.get(name)
    except UnknownNameError as error:
        yield ConfigProblem(key, name, "a tool dialect", str(error))


def _path_problems(key: str, path: str, names: Sequence[str], files: bool = False) -> Iterator[ConfigProblem]:
    """A name that is none of ``names`` must be ``package.module:attribute`` in a package that can be found.

    With ``files`` it may be ``folder/file.py:attribute`` too, in a file that is there.
    """
    module, colon, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    known = ", ".join([*names, "package.module:attribute", *(["folder/file.py:attribute"] if files else [])])
    hint = _meant(path, names)
    if module.endswith(".py") and attribute.isidentifier() and files:
        if not Path(module).expanduser().is_file():
            yield ConfigProblem(key, path, f"an existing file; there is no {module}")
        return
    if not colon or not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield ConfigProblem(key, path, f"one of: {known}" if names else known, hint)
    elif not _exists(module):
        yield ConfigProblem(key, path, f"a module that can be imported; there is no {module}", hint)


def _meant(name: str, names: Sequence[str]) -> str:
    """A hint at the most similar of the names: one that begins alike before one that is spelt alike."""
    word = name.partition("_")[0]
    alike = [each for each in names if word and each.startswith(word)]
    near = nearest(name, alike) or next(iter(alike), None) or nearest(name, names)
    return f"did you mean {near}?" if near else ""


def _exists(module: str) -> bool:
    """Tells whether the module's file can be found; no package is imported to look for it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or []]
    if spec is None or not folders:
        return spec is not None and not rest
    for part in rest:
        found = [folder / part for folder in folders if (folder / part).is_dir() or any(folder.glob(f"{part}.*"))]
        if not found:
            return False
        folders = [folder for folder in found if folder.is_dir()]
    return True


_ARGUMENTS = {"adv_estimator": ("batch", "config"), "pg_variant": ("tokens", "config"), "path": ("group",)}
"""What a function is given, in this order, by the last word of its key."""


def check_functions(config: RLConfig) -> Iterator[ConfigProblem]:
    """Imports every function given by path and compares its signature with the call."""
    for key, path in config.functions.items():
        names = _ARGUMENTS[key.rpartition(".")[2]]
        expected = f"a function of {', '.join(names)}"
        try:
            function = import_path(path, key)
            if not callable(function):
                yield ConfigProblem(key, path, expected, f"it is {type(function).__name__}")
            else:
                inspect.signature(function).bind(*names)
        except UnknownNameError as error:
            yield ConfigProblem(key, path, "package.module:name that can be imported", str(error))
        except TypeError as error:
            yield ConfigProblem(key, path, expected, str(error))
        except ValueError:  # built-in functions have no signature to look at
            yield ConfigProblem(key, path, expected, "it is built in and has no known arguments")
