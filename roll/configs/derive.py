"""Keys that follow from others where a configuration leaves them out, or says null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.devices import parse_device_mapping
from roll.configs.engines import card_of
from roll.configs.rules import TRAINED

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
