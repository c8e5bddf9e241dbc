"""Completion in a shell: configurations, keys with the names that a configuration gives, and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs import SHIPPED, config_groups
from roll.pipeline.cli import locate
from roll.pipeline.programs import PROGRAMS, configurations, key_names
from roll.utils.registry import import_path

if TYPE_CHECKING:
    from roll.configs.base import Config

Values = Mapping[str, Any]


def completed_by(action: argparse.Action, completer: Callable[..., Iterable[str]]) -> None:
    """Gives an argument the function that argcomplete asks: of ``prefix`` and ``parsed_args``."""
    action.completer = completer  # type: ignore[attr-defined]


def names(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Configurations of the folder that is asked for."""
    return list(configurations(Path(getattr(parsed_args, "config_path", SHIPPED)).expanduser()))


def overrides(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> Iterator[str]:
    """Groups with their choices, the keys of a configuration, and behind ``key=`` its values."""
    name, folder = locate(parsed_args.config, parsed_args.config_path)
    yield from _of_configuration(prefix, name, folder, parsed_args.overrides)


def overrides_of_run(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> Iterator[str]:
    """The same for the configuration of ``--config``, or of the run in the folder that is named."""
    run = Path(getattr(parsed_args, "run", None) or parsed_args.model).expanduser()
    folders = [folder for folder in (run, *run.parents) if (folder / "config.yaml").is_file()]
    if (config := getattr(parsed_args, "config", None)) is not None:
        yield from _of_configuration(prefix, *locate(config, str(SHIPPED)), parsed_args.overrides)
    elif folders:
        yield from _of_configuration(prefix, "config", folders[0], parsed_args.overrides)


def generator_keys(prefix: str, **_: Any) -> Iterator[str]:
    """Keys of a generator outside of a run."""
    from roll.pipeline.commands.engine import GeneratorSection

    yield from _words(prefix, GeneratorSection, {})


def verifiers(**_: Any) -> list[str]:
    """Registered verifiers."""
    from roll.rewards import VERIFIERS

    return VERIFIERS.names()


def generators(**_: Any) -> list[str]:
    """Strategies that generate."""
    from roll.configs.engines import strategy_names

    return strategy_names("generates")


def devices(**_: Any) -> list[str]:
    """Kinds of devices that a plan is made for."""
    from roll.utils.gpus import GPUS

    return ["CPU", *GPUS]


def environments(**_: Any) -> list[str]:
    """Registered environments."""
    import roll.agentic.env as envs

    return envs.registered()


def explained(**_: Any) -> Iterator[str]:
    """Keys by any of their parts: whole ones, and the names that begin as the word does."""
    for place in key_names():
        yield place
        yield place.rpartition(".")[2]


def _of_configuration(prefix: str, name: str, folder: Path, given: Sequence[str]) -> Iterator[str]:
    from roll.configs.base import Config

    yield from (f"{group}={choice}" for group, choices in config_groups(folder).items() for choice in choices)
    pipeline, _comment = configurations(folder).get(name, (None, ""))
    if pipeline is not None:
        schema = import_path(PROGRAMS[pipeline].schema)
        assert isinstance(schema, type) and issubclass(schema, Config), "an entry of PROGRAMS"
        yield from _words(prefix, schema, _composed(name, folder, given) if "." in prefix else {})


def _composed(name: str, folder: Path, given: Sequence[str]) -> Values:
    """What the configuration says so far, for the names in it; nothing where it cannot be read."""
    from roll.configs.compose import compose_config
    from roll.configs.problems import ConfigErrors

    try:
        return compose_config(name, folder, [word for word in given if "=" in word]).values
    except ConfigErrors:
        return {}


def _words(prefix: str, schema: type[Config], values: Values) -> Iterator[str]:
    from roll.configs.schema import choices

    key, given, _value = prefix.partition("=")
    for place, annotation in _keys(schema, values):
        if not given:
            yield f"{place}="
        elif place == key:
            yield from (f"{place}={choice}" for choice in choices(annotation) or _registered(key))


def _keys(section: type[Config], values: Values, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below a section that is none itself; entries of mappings and lists by what the configuration has."""
    from roll.configs.schema import element_of, section_of

    for name, field in section.model_fields.items():
        place, inner = f"{above}{name}", values.get(name)
        below = section_of(field.annotation)
        entry = section_of(element_of(field.annotation))
        if below is not None:
            yield from _keys(below, inner if isinstance(inner, Mapping) else {}, f"{place}.")
        elif name == "strategy_config":
            yield from _engine_keys(values.get("strategy_name"), f"{place}.")
        elif entry is not None and inner and isinstance(inner, Mapping | list):
            for label, item in inner.items() if isinstance(inner, Mapping) else enumerate(inner):
                yield from _keys(entry, item if isinstance(item, Mapping) else {}, f"{place}.{label}.")
        else:
            yield place, field.annotation


def _engine_keys(strategy: Any, above: str) -> Iterator[tuple[str, Any]]:
    """Options of the engine that is chosen, else of all."""
    from roll.configs.engines import card_of, cards

    chosen = card_of(strategy) if isinstance(strategy, str) and ":" not in strategy else None
    for card in [chosen] if chosen else cards():
        yield from _keys(card.options, {}, above)


def _registered(key: str) -> Iterable[str]:
    """The names that a key takes beside a path of the user's."""
    from roll.configs.algorithm import ADV_ESTIMATORS
    from roll.configs.engines import strategy_names
    from roll.configs.policy_loss import PG_VARIANTS
    from roll.tracking.trackers import TRACKERS

    if key.endswith("strategy_args.strategy_name"):
        return strategy_names()
    if key.endswith(".name") and ".verifiers." in key:
        return verifiers()
    if key.endswith(".env_type"):
        return environments()
    known: dict[str, Iterable[str]] = {
        "adv_estimator": ADV_ESTIMATORS,
        "pg_variant": PG_VARIANTS,
        "track_with": TRACKERS.names(),
    }
    return known.get(key, ())
