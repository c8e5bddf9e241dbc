"""From a configuration's name to the checked configuration of a pipeline, or to the list of all that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from roll.configs.agentic import AGENTIC_RULES, AgenticConfig
from roll.configs.base import Config
from roll.configs.compose import Composed, compose_config
from roll.configs.distill import DISTILL_RULES, DistillConfig
from roll.configs.engine_rules import ENGINE_RULES
from roll.configs.engines import card_of, cards
from roll.configs.env import ALIASES, CustomEnvConfig
from roll.configs.offline import SFT_RULES, SFTConfig
from roll.configs.parsing import Advise, nearest_key, overlap, parse, rules_broken, section_problems
from roll.configs.pipeline import PipelineConfig
from roll.configs.preference import DPO_RULES, REWARD_TRAINING_RULES, DPOConfig, RewardTrainingConfig
from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem
from roll.configs.rl import RL_RULES
from roll.configs.rlvr import RLVR_RULES, RLVRConfig
from roll.configs.rules import RULES, TRAINED, Rule, sections
from roll.configs.schema import element_of, leaf_paths, section_of
from roll.configs.worker import parse_device_mapping
from roll.utils.foreign import Fault, describe_error
from roll.utils.registry import extra, import_module

_ROLES = (*TRAINED, "actor_infer", "reference", "teacher")
_COLUMNS = ("prompt", "messages", "response", "tag", "id", "default_tag", "system_prompt", "system", "query")
_LENGTH = 1024
_DEVICES_PER_NODE = 8


def derive(values: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a configuration before it is checked.

    ``sequence_length`` is the sum of prompt and response, ``num_nodes``, where it is null, holds the largest device of
    a role, ``num_gpus_per_worker`` is a generator's or a reward model's tensor-parallel size, and held-out data has the
    columns of the training data. What is given stays, and so does what is wrong: the check finds it.
    """
    whole = dict(values)
    for role in _ROLES:
        if isinstance(section := whole.get(role), dict):
            whole[role] = _role(section)
    for key, complete in (("rewards", _domain), ("teachers", _role)):
        if isinstance(entries := whole.get(key), dict):
            whole[key] = {name: complete(each) if isinstance(each, dict) else each for name, each in entries.items()}
    if whole.get("sequence_length") is None:
        lengths = [whole.get(key, _LENGTH) for key in ("prompt_length", "response_length")]
        if all(type(length) is int for length in lengths):
            whole["sequence_length"] = sum(lengths)
        else:
            whole.pop("sequence_length", None)
    if "num_nodes" in whole and whole["num_nodes"] is None:
        whole["num_nodes"] = _nodes(whole)
    _columns(whole)
    return whole


def _role(section: Mapping[str, Any]) -> dict[str, Any]:
    role = dict(section)
    strategy = role.get("strategy_args")
    if not isinstance(strategy, dict):
        return role
    if "strategy_config" in strategy and strategy["strategy_config"] is None:
        role["strategy_args"] = strategy = {key: value for key, value in strategy.items() if key != "strategy_config"}
    options = strategy.get("strategy_config")
    if role.get("num_gpus_per_worker") is None:
        role.pop("num_gpus_per_worker", None)
        name = strategy.get("strategy_name")
        card = card_of(name) if isinstance(name, str) else None
        size = options.get(card.size_key) if card and card.size_key and isinstance(options, dict) else None
        if type(size) is int and size > 0 and role.get("device_mapping") is not None:
            role["num_gpus_per_worker"] = size
    return role


def _domain(section: Mapping[str, Any]) -> dict[str, Any]:
    domain = dict(section)
    if domain.get("num_gpus_per_worker") is None:
        domain.pop("num_gpus_per_worker", None)
        verifiers = domain.get("verifiers")
        entries = verifiers if isinstance(verifiers, list) else []
        given = [each.get("args") for each in entries if isinstance(each, dict)]
        sizes = [args.get("tensor_parallel_size") for args in given if isinstance(args, dict)]
        most = max((size for size in sizes if type(size) is int), default=1)
        if most > 1 and domain.get("device_mapping") is not None:
            domain["num_gpus_per_worker"] = most
    return domain


def _nodes(values: Mapping[str, Any]) -> int:
    """Machines that the devices of all roles need; 1 where that cannot be told."""
    per_node = values.get("num_gpus_per_node", _DEVICES_PER_NODE)
    if type(per_node) is not int or per_node < 1:
        return 1
    holders = [values.get(role) for role in (*_ROLES, "val_infer")]
    for section in (values.get("rewards"), values.get("teachers")):
        holders += list(section.values()) if isinstance(section, dict) else []
    last = 0
    for holder in holders:
        try:
            mapping = parse_device_mapping(holder.get("device_mapping")) if isinstance(holder, dict) else None
        except ValueError:
            return 1
        last = max([last, *(mapping or ())])
    return last // per_node + 1


def _columns(values: dict[str, Any]) -> None:
    held_out, trained = values.get("validation"), values.get("actor_train")
    data = held_out.get("data_args") if isinstance(held_out, dict) else None
    own = trained.get("data_args") if isinstance(trained, dict) else None
    if not isinstance(held_out, dict) or not isinstance(data, dict) or not isinstance(own, dict):
        return
    if data.get("prompt") is None and data.get("messages") is None:
        columns = {key: own[key] for key in _COLUMNS if key in own and key not in data}
        columns |= {key: own[key] for key in ("prompt", "messages") if own.get(key) is not None}
        values["validation"] = {**held_out, "data_args": {**data, **columns}}


ConfigT = TypeVar("ConfigT", bound=PipelineConfig)

PIPELINE_RULES: dict[type[PipelineConfig], tuple[Rule, ...]] = {
    AgenticConfig: (*RL_RULES, *AGENTIC_RULES),
    RLVRConfig: (*RL_RULES, *RLVR_RULES),
    SFTConfig: SFT_RULES,
    DPOConfig: DPO_RULES,
    DistillConfig: DISTILL_RULES,
    RewardTrainingConfig: REWARD_TRAINING_RULES,
}
"""The rules of each pipeline, in addition to the common ones; its keys are all kinds of configurations."""

LIBRARY = "custom_env"
"""Top-level mapping of tags that an included file defines and ``custom_envs`` picks from."""

_ENGINE_LIBRARY = re.compile(r"deepspeed_zero\w*")
"""Top-level mappings of included engine presets; a ``strategy_config`` can link to one."""


def load_config(
    schema: type[ConfigT],
    config_name: str,
    config_path: str | Path = "examples/config",
    overrides: Sequence[str] = (),
    extra_checks: Sequence[Rule] = (),
) -> ConfigT:
    """Composes and validates a configuration.

    Args:
        schema: a pipeline's class, see ``PIPELINE_RULES``.
        overrides: ``key=value`` texts in Hydra's syntax; ``+`` is not needed.
        extra_checks: rules of upper layers. They also run when other sections are wrong.

    Raises:
        ConfigErrors: everything that is wrong, all at once.
    """
    composed = compose_config(config_name, Path(config_path), overrides)
    return load_composed(schema, config_name, composed, extra_checks)


def load_composed(
    schema: type[ConfigT], config_name: str, composed: Composed, extra_checks: Sequence[Rule] = ()
) -> ConfigT:
    """Validates what ``compose_config`` returned; the arguments are those of ``load_config``.

    Raises:
        ConfigErrors: everything that is wrong, all at once.
    """
    values = dict(composed.values)
    values.setdefault("exp_name", Path(config_name).stem)
    problems = [*composed.problems, *plugin_problems(values.get("plugins"))]
    problems += _library_problems(values.pop(LIBRARY, {}), values.get("custom_envs", {}))
    variables = _read_by(composed.references, schema) - set(schema.model_fields)
    values = {k: v for k, v in values.items() if k not in variables and not _ENGINE_LIBRARY.fullmatch(str(k))}
    return validate(schema, values, extra_checks, problems, variables)


def plugin_problems(names: Any) -> list[ConfigProblem]:
    """Imports the packages of ``plugins``, before what they register is looked for; those that cannot be."""
    problems = []
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if not isinstance(name, str):
            continue  # said of its type
        with Fault() as fault:
            import_module(name)
        if fault.error is not None:
            reason = describe_error(fault.error)
            problems.append(ConfigProblem(f"plugins.{index}", name, "a package or file that can be imported", reason))
    return problems


def _read_by(references: Mapping[str, frozenset[str]], schema: type[PipelineConfig]) -> frozenset[str]:
    """Top-level keys that the configuration's own keys refer to, themselves or by way of others."""
    found: set[str] = set()
    waiting = [key for key in references if key in schema.model_fields or key == LIBRARY or _ENGINE_LIBRARY.match(key)]
    while waiting:
        new = references.get(waiting.pop(), frozenset()) - found
        found |= new
        waiting += new
    return frozenset(found)


def validate(
    schema: type[ConfigT],
    values: Mapping[str, Any],
    extra_checks: Sequence[Rule] = (),
    problems: Sequence[ConfigProblem] = (),
    variables: Sequence[str] | frozenset[str] = (),
) -> ConfigT:
    """Checks plain values against the classes, their own rules, the rules across sections, and ``extra_checks``.

    Args:
        schema: a pipeline's class, see ``PIPELINE_RULES``.
        values: what the configuration says, by top-level key.
        variables: further valid top-level names, for suggestions.

    Raises:
        ConfigErrors: everything that is wrong, all at once.
    """
    config, wrong = parse(schema, derive(values), advise=_adviser(schema, variables))
    assert config is not None, f"every section of {schema.__name__} has defaults"
    found = [*problems, *wrong, *_option_problems(config)]
    broken = _broken_paths(found)
    later = [*rules_broken(config), *_option_rules(config)]
    for rule in (*RULES, *ENGINE_RULES, *PIPELINE_RULES[schema], *extra_checks):
        later += rule(config)
    # A value that is wrong by itself counts as broken for the rules that combine it with others.
    alone = [problem for problem in later if set(problem.involves) <= {problem.path}]
    found += [problem for problem in alone if not _rests_on(problem, broken)]
    broken += _broken_paths(alone)
    found += [problem for problem in later if problem not in alone and not _rests_on(problem, broken)]
    if found:
        distinct = {str(problem): problem for problem in found}
        raise ConfigErrors(sorted(distinct.values(), key=lambda problem: problem.path))
    return config


def _adviser(schema: type[Config], variables: Sequence[str] | frozenset[str] = ()) -> Advise:
    """Advice for keys that the configuration of a pipeline does not know."""

    def advise(section: type[Config], path: Sequence[str | int], value: Any) -> tuple[str, str | None]:
        elsewhere = _belongs(str(path[0]), schema) if len(path) == 1 else None
        if hint := elsewhere or _elsewhere(schema, path) or extra("importers").advice([str(part) for part in path]):
            return hint, None
        return nearest_key(section, path, value, variables if len(path) == 1 else ())

    return advise


_PIPELINES: dict[type[PipelineConfig], str] = {
    AgenticConfig: "the agentic pipeline",
    RLVRConfig: "RLVR",
    SFTConfig: "SFT",
    DPOConfig: "preferences (DPO)",
    DistillConfig: "distillation on given responses",
    RewardTrainingConfig: "reward models",
}
_INSTEAD: dict[type[PipelineConfig], dict[str, str]] = {
    AgenticConfig: {
        "num_return_sequences_in_group": "here train_env_manager.group_size makes several episodes",
        "is_num_return_sequences_expand": "here each turn gets one response",
        "teacher_prompt": "this pipeline has no rows for a teacher's prompt",
        "rewards": "here the environments give the rewards",
        "validation": "here val_env_manager",
    },
    RLVRConfig: {
        "custom_envs": "this pipeline uses rewards and data_args instead",
        "train_env_manager": "use num_return_sequences_in_group",
        "val_env_manager": "here validation",
        "distill_on_prompt": "this pipeline trains only on the policy's responses",
    },
}
"""What a pipeline has in the place of other pipelines' top-level keys."""


def _belongs(key: str, schema: type[Config]) -> str | None:
    """Hint at the pipelines that know a top-level key which this one does not."""
    owners = [_PIPELINES[other] for other in PIPELINE_RULES if key in other.model_fields]
    if key in schema.model_fields or not owners:
        return None
    instead = next((texts.get(key) for known, texts in _INSTEAD.items() if known is schema), None)
    return f"it belongs to {' and '.join(owners)}" + (f"; {instead}" if instead else "")


def _elsewhere(schema: type[Config], path: Sequence[str | int]) -> str | None:
    """Hint at a key of this name: in the role, where it is read, among an engine's options, in entries of a mapping."""
    name, role = str(path[-1]), f"{path[0]}."
    paths = [known for known, _ in leaf_paths(schema) if known.rpartition(".")[2] == name]
    if name in paths:
        return f"{name} belongs to the top level" if len(path) > 1 else None
    here = [known for known in paths if known.startswith(role)]
    read = [each for each in paths if each.startswith("actor_infer" if ".generating_args." in each else "actor_train")]
    if found := next(iter([*here, *read, *paths]), None):
        return f"did you mean {found}?"
    owners = [each for card in cards() if name in card.options.model_fields for each in card.strategies]
    if owners and "strategy_config" not in path:
        return f"it belongs to strategy_args.strategy_config of a role with {' or '.join(owners)}"
    entries = ((field, section_of(element_of(info.annotation))) for field, info in schema.model_fields.items())
    known = [field for field, entry in entries if entry is not None and name in entry.model_fields]
    return f"did you mean {name} of an entry of {' or '.join(known)}?" if known else None


def _library_problems(library: Any, chosen: Any) -> Iterator[ConfigProblem]:
    """Mistakes in tags that are defined but not chosen; those of the chosen ones are found where they are used."""
    if not isinstance(library, dict):
        yield ConfigProblem(LIBRARY, library, "mapping of tag to section")
        return
    used = list(chosen.values()) if isinstance(chosen, dict) else []
    for tag, entry in library.items():
        path = f"{LIBRARY}.{tag}"
        if not isinstance(entry, dict):
            yield ConfigProblem(path, entry, "section")
        elif entry not in used:
            if "env_type" not in entry:
                yield ConfigProblem(f"{path}.env_type", NOTHING, "str", "is the tag spelt correctly?")
            found = section_problems(CustomEnvConfig, {"env_type": "?", **entry}, advise=_adviser(CustomEnvConfig))
            yield from [problem.under(path) for problem in found]


def _option_problems(config: PipelineConfig) -> list[ConfigProblem]:
    """Wrong values in each role's ``strategy_config``, which are taken out of it: rules see a valid one."""
    found = []
    for role, worker in sections(config):
        strategy = worker.strategy_args
        if strategy.card is None:
            continue
        schema = strategy.card.options
        options, problems = parse(schema, strategy.strategy_config, advise=_adviser(schema))
        assert options is not None, f"{schema.__name__} has defaults"
        if problems:
            strategy.strategy_config = options.model_dump(exclude_unset=True)
        found += [problem.under(f"{role}.strategy_args.strategy_config") for problem in problems]
    return found


def _option_rules(config: PipelineConfig) -> list[ConfigProblem]:
    """Rules that the keys of a ``strategy_config`` break among themselves."""
    return [
        problem.under(f"{role}.strategy_args.strategy_config")
        for role, worker in sections(config)
        for problem in rules_broken(worker.strategy_args.typed())
    ]


def _broken_paths(problems: Sequence[ConfigProblem]) -> list[str]:
    """Keys whose values are defaults only because what was given is wrong: also what a misspelt key was meant for."""
    paths = [path for problem in problems for path in (problem.path, *problem.involves)]
    whole = [re.sub(rf"^{LIBRARY}\.", "custom_envs.", path) for path in paths]
    return [".".join(ALIASES.get(part, part) for part in path.split(".")) for path in whole]


def _rests_on(problem: ConfigProblem, broken: Sequence[str]) -> bool:
    return any(overlap(key, path) for key in (problem.path, *problem.involves) for path in broken)
