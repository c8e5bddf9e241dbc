"""Names in an adapter's folder, as peft has them. Imports little, so that folders can be looked at without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CLASSIFIES = "SEQ_CLS"
GENERATES = "CAUSAL_LM"
"""The tasks of a classifier and of a language model (``task_type``)."""

_PLAIN: dict[str, object] = {
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "init_lora_weights": True,
    "modules_to_save": None,
    "peft_type": "LORA",
    "rank_pattern": {},
}
_SAYS_NOTHING = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Keys of peft by which an adapter stays alpha / rank · B · A beside its layers, whatever they are."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights as they are; PiSSA, OLoRA, CorDA, LoftQ and others change them."""
_HEADS = {"score", "classifier"}
"""Names of heads that peft keeps as ``modules_to_save`` of a classifier, whichever it has."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter: its rank is a count, its alpha a number, its base a name where it has one.

    Raises:
        ValueError: there is none, or an entry of it is something else.
    """
    file = folder / ADAPTER_CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}; expected what peft writes") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: got {type(found).__name__}, expected a mapping, as peft writes one")
    base, rank, alpha = (found.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha"))
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{file}: r: got {rank!r}, expected a whole number from 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{file}: lora_alpha: got {alpha!r}, expected a number")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{file}: base_model_name_or_path: got {base!r}, expected a folder or a name on the hub")
    return found


def matrix_shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's tensors, by their names in its file.

    Raises:
        ValueError: there is no such file, or it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    file = folder / ADAPTER_FILE
    try:
        with safe_open(str(file), framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: {error}; expected a whole safetensors file") from error


def is_target(config: Mapping[str, Any], layer: str) -> bool:
    """Tells whether an adapter's configuration means a layer: another's matrices peft would leave out."""
    targets = config.get("target_modules")
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def unusual_entry(config: Mapping[str, Any]) -> str | None:
    """The first entry by which an adapter is more than alpha / rank · B · A added to its base; ``None``: there is none.

    An entry that is not known is one, if it is set.
    """
    init = config.get("init_lora_weights", True)
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in _KEEPS_BASE):
        return (
            f"init_lora_weights is {init!r}, which changed the weights that it adapts, so that it fits no model that "
            "is saved (peft turns it into a plain one: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    heads = set(config.get("modules_to_save") or ())
    for key, value in config.items():
        if key in _SAYS_NOTHING or key == "init_lora_weights" or not value or value == _PLAIN.get(key):
            continue
        if key == "modules_to_save" and config.get("task_type") == CLASSIFIES and heads <= _HEADS:
            continue
        if key.endswith("_config") and str(init).lower() in ("eva",):
            continue  # how it was initialised
        return f"{key} is {value!r}"
    return None
