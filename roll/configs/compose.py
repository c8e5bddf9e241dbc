"""YAML files, defaults lists, interpolation and command-line overrides: from a name to a plain dictionary."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.configs import SHIPPED, config_groups, config_names
from roll.configs.overrides import Override, check_expansion, parse_overrides
from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem
from roll.configs.schema import did_you_mean

REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)")
_OPTIONAL_ROLES = ("critic", "reference")


@dataclass(frozen=True)
class Composed:
    """A configuration before validation."""

    values: dict[str, Any]
    """Plain values, interpolations resolved."""
    references: dict[str, frozenset[str]]
    """By top-level key: the top-level keys that a ``${...}`` in it reads."""
    problems: list[ConfigProblem]
    """Overrides and interpolations that could not be understood."""


def compose_config(config_name: str, config_path: Path, overrides: Sequence[str]) -> Composed:
    """Reads ``config_name`` from the folder ``config_path`` and applies ``key=value`` overrides.

    Defaults lists find other files beside the configuration and relative to the folder above, so that both
    ``traj_envs@_here_`` and ``config/traj_envs@_here_`` work. An override may name any key, without ``+``; one that
    goes inside a section given by ``${...}`` changes that key and keeps the section's others. ``train=megatron`` lays
    the file ``train/megatron.yaml`` over the configuration, before all other overrides.

    Raises:
        ConfigErrors: the folder or file does not exist or is no valid YAML.
    """
    config_name = config_name.removesuffix(".yaml")
    tree = _read(config_name, config_path)
    parsed, problems = parse_overrides(overrides)
    groups = config_groups(config_path)
    problems = [_no_choice(each.path, each.got, groups) if each.path in groups else each for each in problems]
    chosen = [item for item in parsed if item.key in groups]
    for item in chosen:
        problems += _choose(tree, item, groups, config_path)
    before = _references(tree)
    # Overrides inside a linked section wait until those of the section it links to are applied.
    others = [item for item in parsed if item not in chosen]
    for override in sorted(others, key=lambda item: any(True for _ in _links_on(tree, item.path))):
        problems += apply_override(tree, override)
    references = _references(tree)
    for key, names in before.items():  # what an override has replaced was read by the file
        references[key] = references.get(key, frozenset()) | names
    return Composed(_resolve(tree, "", problems), references, problems)


def _read(config_name: str, config_path: Path) -> DictConfig:
    if not config_path.is_dir():
        raise ConfigErrors([ConfigProblem("--config_path", str(config_path), "an existing folder")])
    if not (config_path / f"{config_name}.yaml").is_file():
        names = config_names(config_path)
        if config_name and (config_path / config_name).is_file():
            raise ConfigErrors([ConfigProblem("--config_name", config_name, "a file whose name ends in .yaml")])
        known = f"one of the files in {config_path}: {', '.join(names) or 'none'}"
        raise ConfigErrors([ConfigProblem("--config_name", config_name, known, did_you_mean(config_name, names))])
    return _compose(config_name, config_path)


def _compose(name: str, config_path: Path) -> DictConfig:
    """One file with what its defaults list includes, from its own folder, the one above and the shipped ones."""
    folder = config_path.resolve()
    check_expansion(name, [folder, folder.parent, SHIPPED, SHIPPED.parent])
    search_path = f"hydra.searchpath=['file://{folder.parent}','file://{SHIPPED}','file://{SHIPPED.parent}']"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            tree = compose(name, overrides=[search_path])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        unlike = _unlike(name, folder, search_path) if "Cannot merge" in str(error) else None
        if unlike is None:
            raise ConfigErrors([_uncomposable(name, folder, error)]) from error
        tree = unlike
    OmegaConf.set_struct(tree, False)
    return tree


def _unlike(name: str, folder: Path, search_path: str) -> DictConfig | None:
    """A file that has a list where one that it includes has a mapping, or the reverse, which Hydra cannot lay over
    each other: its own value counts, and is told with all else that is wrong. ``None`` if the file is not to blame."""
    own: Any = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"), resolve=False)
    included = {"defaults": [each for each in own.pop("defaults", []) if each != "_self_"]}
    with tempfile.TemporaryDirectory() as alone, contextlib.suppress(HydraException, OmegaConfBaseException):
        file = Path(alone) / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(included), encoding="utf-8")
        with initialize_config_dir(config_dir=alone, version_base="1.3"):
            tree = compose(name, overrides=[search_path.replace("=[", f"=['file://{folder}',")])
        OmegaConf.set_struct(tree, False)
        _drop_unlike(tree, own)
        merged = OmegaConf.merge(tree, own)
        assert isinstance(merged, DictConfig)
        return merged
    return None


def _drop_unlike(tree: DictConfig, own: Mapping[str, Any]) -> None:
    """Takes out what is of the other kind in ``own``."""
    for key, value in own.items():
        there = tree._get_node(key)
        if isinstance(there, DictConfig) and isinstance(value, Mapping) and not there._is_interpolation():
            _drop_unlike(there, value)
        elif isinstance(there, DictConfig | ListConfig) and isinstance(value, Mapping | list):
            tree.pop(key)


def _uncomposable(name: str, folder: Path, error: Exception) -> ConfigProblem:
    """The reason why a file, or one that it includes, makes no configuration."""
    path, missing = f"{name}.yaml", getattr(error, "missing_cfg_file", None)
    if isinstance(missing, str):
        names = config_names(folder) + config_names(SHIPPED)
        known = f"files that exist in the defaults list; looked in {folder}, {folder.parent} and {SHIPPED}"
        return ConfigProblem(path, missing, known, did_you_mean(missing, names))
    if isinstance(error, RecursionError):
        return ConfigProblem(path, NOTHING, "no file, link or value that refers to itself or is nested too deeply")
    told: BaseException = error
    while not str(told).strip() and (cause := told.__cause__ or told.__context__):
        told = cause  # Hydra raises errors without words, of those that have some
    key = getattr(told, "full_key", None)
    message = re.sub(r"\s+", " ", re.sub(r"\n\s*(full_key|object_type)[:=].*", "", str(told))).strip()
    return ConfigProblem(path, NOTHING, f"a file that can be composed: {message}{f' at {key}' if key else ''}")


def _choose(
    tree: DictConfig, item: Override, groups: Mapping[str, Sequence[str]], config_path: Path
) -> list[ConfigProblem]:
    """Lays the chosen file of a group over the configuration."""
    group, choice = item.key, item.value
    if item.deletes or choice not in groups[group]:
        return [_no_choice(group, choice, groups)]
    own = (config_path / group / f"{choice}.yaml").is_file()
    file = _compose(f"{group}/{choice}", config_path if own else SHIPPED)
    for role in _OPTIONAL_ROLES:
        if tree.get(role) is None:  # an engine for a role that the configuration does without
            file.pop(role, None)
    _drop_replaced_engines(tree, file)
    tree.merge_with(file)
    return []


def _no_choice(group: str, choice: object, groups: Mapping[str, Sequence[str]]) -> ConfigProblem:
    known = f"one of: {', '.join(groups[group])}"
    return ConfigProblem(group, choice, known, did_you_mean(str(choice), groups[group]))


def _drop_replaced_engines(tree: DictConfig, file: DictConfig) -> None:
    """Removes the options of every engine that the file replaces: they mean nothing to another."""
    for role, section in file.items():
        strategy = section.get("strategy_args") if isinstance(section, DictConfig) else None
        if strategy is None or not isinstance(tree.get(role), DictConfig):
            continue
        # A copy of the section, links inside intact: it may be linked to from another role.
        tree[role] = OmegaConf.create(OmegaConf.to_container(tree[role], resolve=False))
        if OmegaConf.select(tree[role], "strategy_args.strategy_name") != strategy.strategy_name:
            tree[role].pop("strategy_args", None)


def _references(tree: DictConfig) -> dict[str, frozenset[str]]:
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): frozenset(REFERENCE.findall(str(value))) for key, value in plain.items()}


def _links_on(tree: DictConfig, path: Sequence[str]) -> Iterator[tuple[DictConfig, str]]:
    """Nodes above the last key that are interpolations, outermost first."""
    node: Any = tree
    for part in path[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            return
        if OmegaConf.is_interpolation(node, part):
            yield node, part
        node = node[part] if not OmegaConf.is_missing(node, part) else None


def apply_override(tree: DictConfig, override: Override) -> list[ConfigProblem]:
    """Changes the tree; what cannot be set there is a problem."""
    path, key, value = override.path, override.key, override.value
    try:
        for parent, part in _links_on(tree, path):
            # A copy of the target, its own links intact, so that this section alone changes.
            parent[part] = OmegaConf.create(OmegaConf.to_container(parent[part], resolve=False))
        if not override.deletes:
            held = OmegaConf.select(tree, key, throw_on_resolution_failure=False)
            merge = isinstance(value, dict) and isinstance(held, DictConfig)
            OmegaConf.update(tree, key, value, merge=merge, force_add=True)
            return []
        parent_node = OmegaConf.select(tree, ".".join(path[:-1])) if len(path) > 1 else tree
        if not isinstance(parent_node, DictConfig) or path[-1] not in parent_node:
            return [ConfigProblem(key, NOTHING, "a key that exists, since ~ deletes it")]
        del parent_node[path[-1]]
    except (OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        return [ConfigProblem(key, value, f"a key that can be set here: {str(error).splitlines()[0]}")]
    return []


def mapping_of(words: Sequence[str]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """``key=value`` words as a mapping of their own, and what is wrong with them."""
    tree = OmegaConf.create({})
    overrides, problems = parse_overrides(words)
    for override in overrides:
        problems += apply_override(tree, override)
    return _resolve(tree, "", problems), problems


def _resolve(node: DictConfig, prefix: str, problems: list[ConfigProblem]) -> dict[str, Any]:
    """Plain values of a mapping; a link or a home that leads nowhere becomes a problem and its key is left out."""
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
                continue
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
            if lost := next(_homeless(plain), None):
                problems.append(ConfigProblem(path, lost, "a path that begins with ~/, or with a user of this machine"))
            else:
                values[key] = plain
        except (OmegaConfBaseException, RecursionError) as error:
            link = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
            reason = str(error).splitlines()[0]
            problems.append(ConfigProblem(path, link, f"a link to a key that exists: {reason}"))
    return values


def _homeless(value: Any) -> Iterator[str]:
    """Paths below the home of a user whom this machine does not know."""
    if isinstance(value, str) and re.match(r"~[\w.-]+/", value) and os.path.expanduser(value) == value:
        yield value
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _homeless(inside)
