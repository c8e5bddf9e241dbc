"""Names in an adapter's folder, as peft has them. Imports little, so that folders can be looked at without torch."""

from __future__ import annotations

from collections.abc import Mapping
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
