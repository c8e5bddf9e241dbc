"""From a configuration's name to the checked configuration of a pipeline, or to the list of all that is wrong."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from roll.configs.agentic import AgenticConfig
from roll.configs.agentic_rules import AGENTIC_RULES
from roll.configs.base import Config
from roll.configs.compose import Composed, compose_config
from roll.configs.engine_rules import ENGINE_RULES
from roll.configs.env import ALIASES, CustomEnvConfig, EnvManagerConfig
from roll.configs.obsolete import ENGINE_NAMES, OBSOLETE
from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem, Words
from roll.configs.rl import RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.rlvr_rules import RLVR_RULES
from roll.configs.rules import RULES, Rule, sections
from roll.configs.schema import expectation, leaf_paths, locate, nearest, section_at
from roll.configs.strategy import STRATEGY_CONFIGS

ConfigT = TypeVar("ConfigT", bound=RLConfig)

PIPELINE_RULES: dict[type[RLConfig], tuple[Rule, ...]] = {AgenticConfig: AGENTIC_RULES, RLVRConfig: RLVR_RULES}

LIBRARY = "custom_env"
"""Top-level mapping of tags that an included file defines and ``custom_envs`` picks from."""

_ENGINE_LIBRARY = re.compile(r"deepspeed_zero\w*")
"""Top-level mappings of included engine presets, of which a ``strategy_config`` links to one."""

MAX_LISTED_NAMES = 20

_SENTENCE = re.compile(r"(?P<key>[\w.]+): (?:seen )?(?P<seen>.*?),? expected (?P<expected>.*)", re.DOTALL)


def load_config(
    schema: type[ConfigT],
    config_name: str,
    config_path: str | Path = "examples/config",
    overrides: Sequence[str] = (),
    extra_checks: Sequence[Rule] = (),
) -> ConfigT:
    """Composes and validates a configuration.

    Args:
        schema: ``AgenticConfig`` or ``RLVRConfig``.
        config_name: file in ``config_path``, with or without ``.yaml``.
        config_path: folder of configurations.
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
    problems = list(composed.problems)
    problems += _library_problems(values.pop(LIBRARY, {}), values.get("custom_envs", {}))
    # A scalar that only serves interpolation is read, by whatever refers to it.
    variables = composed.referenced - set(schema.model_fields)
    values = {k: v for k, v in values.items() if k not in variables and not _ENGINE_LIBRARY.fullmatch(k)}
    return validate(schema, values, extra_checks, problems, variables)


def validate(
    schema: type[ConfigT],
    values: Mapping[str, Any],
    extra_checks: Sequence[Rule] = (),
    problems: Sequence[ConfigProblem] = (),
    variables: Sequence[str] | frozenset[str] = (),
) -> ConfigT:
    """Checks plain values against the classes, their own rules, the rules across sections, and ``extra_checks``.

    Args:
        schema: ``AgenticConfig`` or ``RLVRConfig``.
        values: what the configuration says, by top-level key.
        extra_checks: rules of upper layers.
        problems: those already known.
        variables: further valid top-level names, for suggestions.

    Raises:
        ConfigErrors: everything that is wrong, all at once.
    """
    found = list(problems)
    config, wrong = _parse(schema, values, variables)
    unknown_options, option_rules = _strategy_problems(config)
    found += wrong + unknown_options
    broken = _broken_paths(found)
    later = [*_section_problems(config), *option_rules]
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


def _parse(
    schema: type[Config], values: Mapping[str, Any], variables: Sequence[str] | frozenset[str] = ()
) -> tuple[Any, list[ConfigProblem]]:
    """The configuration with every wrong value replaced by its default, and a problem for each of those."""
    remaining = copy.deepcopy(dict(values))
    problems: dict[str, ConfigProblem] = {}
    while True:
        try:
            return schema.model_validate(remaining, strict=True), list(problems.values())
        except ValidationError as error:
            details = error.errors(include_url=False)
        for detail in details:
            path = _real_path(remaining, detail)
            problem = _problem(schema, path, detail, variables)
            problems.setdefault(problem.path, problem)
        before = copy.deepcopy(remaining)
        for detail in details:
            # A section without a required key goes as a whole, since it has no default.
            path = _real_path(remaining, detail)
            _delete(remaining, path[:-1] if detail["type"] == "missing" else path)
        assert remaining != before, f"cannot set aside what is wrong with {schema.__name__}: {details}"


def _real_path(values: Any, detail: Any) -> list[str | int]:
    """Pydantic's location without the names of the union branches that it tried."""
    path: list[str | int] = []
    node = values
    for i, part in enumerate(detail["loc"]):
        if isinstance(node, dict) and part in node:
            path.append(part)
            node = node[part]
        elif isinstance(node, dict) and (alias := _alias_of(part, node)):
            path.append(alias)
            node = node[alias]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            path.append(part)
            node = node[part]
        elif detail["type"] == "missing" and i == len(detail["loc"]) - 1:
            path.append(part)
    return path


def _alias_of(part: str | int, node: Mapping[str, Any]) -> str | None:
    return next((alias for alias, name in ALIASES.items() if name == part and alias in node), None)


def _problem(
    schema: type[Config], path: list[str | int], detail: Any, variables: Sequence[str] | frozenset[str]
) -> ConfigProblem:
    dotted = ".".join(map(str, path))
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(schema, path, detail["input"], variables)
    if kind == "value_error":
        return ConfigProblem(dotted, detail["input"], str(detail["ctx"]["error"]))
    found = locate(schema, [ALIASES.get(str(part), part) for part in path])
    expected = expectation(*found) if found else str(detail["msg"]).lower()
    return ConfigProblem(dotted, NOTHING if kind == "missing" else detail["input"], expected)


def _unknown_key(
    schema: type[Config], path: list[str | int], value: object, variables: Sequence[str] | frozenset[str]
) -> ConfigProblem:
    parent = section_at(schema, path[:-1]) or schema
    name, dotted = str(path[-1]), ".".join(map(str, path))
    if name in ALIASES and issubclass(parent, EnvManagerConfig):
        return ConfigProblem(dotted, value, f"one spelling: it is the same key as {ALIASES[name]}, given too")
    known = [*parent.model_fields, *(ALIASES if issubclass(parent, EnvManagerConfig) else ())]
    known += variables if len(path) == 1 else ()
    prefix = ".".join(map(str, path[:-1]))
    involves: tuple[str, ...] = ()
    if advice := OBSOLETE.get(name) or ENGINE_NAMES.get(name):
        hint = advice
    elif elsewhere := _elsewhere(schema, name):
        hint = f"did you mean {elsewhere}?"
    elif near := nearest(name, known):
        hint = f"did you mean {near}?"
        involves = (f"{prefix}.{near}" if prefix else near,)
    else:
        hint = f"known here: {', '.join(known)}" if len(known) <= MAX_LISTED_NAMES else "see docs/configuration.md"
    return ConfigProblem(dotted, value, "no such key", hint, involves)


def _elsewhere(schema: type[Config], name: str) -> str | None:
    """A key of this name in another section: the one that is read, where several roles have it."""
    paths = [path for path, _ in leaf_paths(schema) if path.rpartition(".")[2] == name]
    read = [path for path in paths if path.startswith("actor_infer" if ".generating_args." in path else "actor_train")]
    return next(iter([*read, *paths]), None)


def _library_problems(library: Any, chosen: Any) -> list[ConfigProblem]:
    """Mistakes in tags that are defined but not chosen; those of the chosen ones are found where they are used."""
    if not isinstance(library, dict):
        return [ConfigProblem(LIBRARY, library, "mapping of tag to section")]
    used = list(chosen.values()) if isinstance(chosen, dict) else []
    problems = []
    for tag, entry in library.items():
        path = f"{LIBRARY}.{tag}"
        if not isinstance(entry, dict):
            problems.append(ConfigProblem(path, entry, "section"))
        elif entry not in used:
            problems += [_under(path, problem) for problem in _parse_entry(entry)]
    return problems


def _parse_entry(entry: Mapping[str, Any]) -> list[ConfigProblem]:
    given = {"env_type": "?", **entry}
    missing = [] if "env_type" in entry else [ConfigProblem("env_type", NOTHING, "str", "is the tag spelt correctly?")]
    return missing + _parse(CustomEnvConfig, given)[1]


def _strategy_problems(config: RLConfig) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """Checks each role's ``strategy_config`` against the class of its strategy: wrong values, and rules broken."""
    wrong: list[ConfigProblem] = []
    rules: list[ConfigProblem] = []
    for role, worker in sections(config):
        schema = STRATEGY_CONFIGS.get(worker.strategy_args.strategy_name)
        if schema is None:
            continue
        base = f"{role}.strategy_args.strategy_config"
        options, problems = _parse(schema, worker.strategy_args.strategy_config)
        wrong += [_under(base, problem) for problem in problems]
        rules += [_from_sentence(text, f"{base}.", options) for text in options.problems()]
    return wrong, rules


def _section_problems(section: Config, prefix: str = "") -> Iterator[ConfigProblem]:
    """What each section's own ``problems()`` says, with the keys it mentions."""
    for text in section.problems():
        yield _from_sentence(text, prefix, section)
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Config):
            yield from _section_problems(value, f"{prefix}{name}.")
        elif isinstance(value, dict | list):
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(entry, Config):
                    yield from _section_problems(entry, f"{prefix}{name}.{key}.")


def _from_sentence(text: str, prefix: str, section: Config) -> ConfigProblem:
    """Splits ``key: seen …, expected …``; every key of the section that occurs in it counts as involved."""
    match = _SENTENCE.fullmatch(text)
    if match is None:
        key, _, rest = text.partition(": ")
        return ConfigProblem(prefix + key, NOTHING, rest)
    mentioned = set(re.findall(r"\w+", text)) & set(type(section).model_fields)
    involves = tuple(sorted(prefix + name for name in mentioned))
    return ConfigProblem(prefix + match["key"], Words(match["seen"]), match["expected"], involves=involves)


def _under(prefix: str, problem: ConfigProblem) -> ConfigProblem:
    involves = tuple(f"{prefix}.{key}" for key in problem.involves)
    path = f"{prefix}.{problem.path}" if problem.path else prefix
    return ConfigProblem(path, problem.seen, problem.expected, problem.hint, involves)


def _broken_paths(problems: Sequence[ConfigProblem]) -> list[str]:
    """Keys whose values are defaults only because what was given is wrong: also what a misspelt key was meant for."""
    paths = [path for problem in problems for path in (problem.path, *problem.involves)]
    return [_canonical(re.sub(rf"^{LIBRARY}\.", "custom_envs.", path)) for path in paths]


def _canonical(path: str) -> str:
    return ".".join(ALIASES.get(part, part) for part in path.split("."))


def _rests_on(problem: ConfigProblem, broken: Sequence[str]) -> bool:
    return any(_overlap(key, path) for key in (problem.path, *problem.involves) for path in broken)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _delete(values: Any, path: Sequence[str | int]) -> None:
    """Removes a key; of a list, the whole list, since its other elements mean little alone."""
    if not path:
        return
    keys = list(path)
    while keys and isinstance(keys[-1], int):
        keys.pop()
    for key in keys[:-1]:
        values = values.get(key) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(keys[-1], None)
