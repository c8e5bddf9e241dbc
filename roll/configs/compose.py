"""YAML files, defaults lists, interpolation and command-line overrides: from a name to a plain dictionary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem
from roll.configs.schema import nearest

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)")
_PREFIX = re.compile(r"^\+{1,2}")


@dataclass(frozen=True)
class Composed:
    """A configuration before validation."""

    values: dict[str, Any]
    """Plain values, interpolations resolved."""
    referenced: frozenset[str]
    """Top-level keys that some ``${...}`` reads."""
    problems: list[ConfigProblem]
    """Overrides and interpolations that could not be understood."""


def config_names(config_path: Path) -> list[str]:
    """The configurations in a folder, without their suffix."""
    return sorted(path.stem for path in config_path.glob("*.yaml"))


def compose_config(config_name: str, config_path: Path, overrides: Sequence[str]) -> Composed:
    """Reads ``config_name`` from the folder ``config_path`` and applies ``key=value`` overrides.

    Defaults lists find other files beside the configuration and relative to the folder above, so that both
    ``traj_envs@_here_`` and ``config/traj_envs@_here_`` work. An override may name any key, without ``+``; one that
    goes inside a section given by ``${...}`` changes that key and keeps the section's others.

    Raises:
        ConfigErrors: the folder or file does not exist or is no valid YAML.
    """
    config_name = config_name.removesuffix(".yaml")
    tree = _read(config_name, config_path)
    OmegaConf.set_struct(tree, False)
    referenced = _references(tree)
    parsed, problems = _parse_overrides(overrides)
    # Overrides inside a linked section wait until those of the section it links to are applied.
    for override in sorted(parsed, key=lambda item: _crosses_link(tree, _path(item))):
        problems += _apply(tree, override)
    return Composed(_resolve(tree, "", problems), referenced | _references(tree), problems)


def _read(config_name: str, config_path: Path) -> DictConfig:
    if not config_path.is_dir():
        raise ConfigErrors([ConfigProblem("--config_path", str(config_path), "an existing folder")])
    if not (config_path / f"{config_name}.yaml").is_file():
        names = config_names(config_path)
        near = nearest(config_name, names)
        known = f"one of the files in {config_path}: {', '.join(names) or 'none'}"
        raise ConfigErrors(
            [ConfigProblem("--config_name", config_name, known, f"did you mean {near}?" if near else "")]
        )
    folder = config_path.resolve()
    search_path = f"hydra.searchpath=['file://{folder.parent}']"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            return compose(config_name, overrides=[search_path])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        message = re.sub(r"\s+", " ", str(error)).strip()
        path = f"{config_name}.yaml"
        raise ConfigErrors([ConfigProblem(path, NOTHING, f"a file that can be composed: {message}")]) from error


def _references(tree: DictConfig) -> frozenset[str]:
    return frozenset(_REFERENCE.findall(OmegaConf.to_yaml(tree)))


def _parse_overrides(texts: Sequence[str]) -> tuple[list[tuple[Override, Any]], list[ConfigProblem]]:
    """Hydra's grammar for keys and values; a value outside of it, as ``list(range(0,2))``, is taken as a string."""
    parser = OverridesParser.create()
    parsed, problems = [], []
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            override = parser.parse_override(text)
            if override.is_sweep_override():
                raise HydraException("sweep")
            parsed.append((override, override.value()))
        except HydraException:
            if equals and re.fullmatch(r"\+{0,2}[\w.]+", key):
                parsed.append((parser.parse_override(f"{key}=null"), value))
            else:
                problems.append(ConfigProblem(text, NOTHING, "key=value", "the command line takes key=value overrides"))
    return parsed, problems


def _path(item: tuple[Override, Any]) -> list[str]:
    return _PREFIX.sub("", item[0].key_or_group).split(".")


def _crosses_link(tree: DictConfig, path: list[str]) -> bool:
    return any(True for _ in _links_on(tree, path))


def _links_on(tree: DictConfig, path: list[str]) -> Iterator[tuple[DictConfig, str]]:
    """Nodes above the last key that are interpolations, outermost first."""
    node: Any = tree
    for part in path[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            return
        if OmegaConf.is_interpolation(node, part):
            yield node, part
        node = node[part] if not OmegaConf.is_missing(node, part) else None


def _apply(tree: DictConfig, item: tuple[Override, Any]) -> list[ConfigProblem]:
    override, value = item
    path = _path(item)
    key = ".".join(path)
    try:
        for parent, part in _links_on(tree, path):
            # A copy of the target, its own links intact, so that this section alone changes.
            parent[part] = OmegaConf.create(OmegaConf.to_container(parent[part], resolve=False))
        if not override.is_delete():
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
            return []
        parent_node = OmegaConf.select(tree, ".".join(path[:-1])) if len(path) > 1 else tree
        if not isinstance(parent_node, DictConfig) or path[-1] not in parent_node:
            return [ConfigProblem(key, NOTHING, "a key that exists, since ~ deletes it")]
        del parent_node[path[-1]]
    except (OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        return [ConfigProblem(key, value, f"a key that can be set here: {str(error).splitlines()[0]}")]
    return []


def _resolve(node: DictConfig, prefix: str, problems: list[ConfigProblem]) -> dict[str, Any]:
    """Plain values of a mapping; a link that leads nowhere becomes a problem and its key is left out."""
    values: dict[Any, Any] = {}
    for key in node:
        path = f"{prefix}{key!s}"
        if OmegaConf.is_missing(node, key):
            problems.append(ConfigProblem(path, "???", "a value; the file leaves this key open"))
            continue
        try:
            value = node[key]
            if isinstance(value, DictConfig):
                values[key] = _resolve(value, f"{path}.", problems)
            else:
                values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            link = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
            reason = str(error).splitlines()[0]
            problems.append(ConfigProblem(path, link, f"a link to a key that exists: {reason}"))
    return values
