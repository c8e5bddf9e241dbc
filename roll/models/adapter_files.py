"""Names in an adapter's folder, as peft has them. Imports little, so that folders can be looked at without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CLASSIFIES = "SEQ_CLS"
GENERATES = "CAUSAL_LM"
"""The tasks of a classifier and of a language model (``task_type``)."""

_UNUSUAL = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias")
"""Keys of peft whose values would change what an adapter adds; the trainers write none but a classifier's head."""
_HEADS = {"score", "classifier"}
"""Names of heads that peft keeps as ``modules_to_save`` of a classifier, whichever it has."""


def unusual_entry(config: Mapping[str, Any]) -> str | None:
    """The first entry by which an adapter is more than alpha / rank · B · A added to its layers; ``None``: there is
    none."""
    found = [key for key in _UNUSUAL if config.get(key)] + ["bias"] * (config.get("bias", "none") != "none")
    if config.get("task_type") == CLASSIFIES and _HEADS.issuperset(config.get("modules_to_save") or ()):
        found = [key for key in found if key != "modules_to_save"]
    return f"{found[0]} is {config[found[0]]!r}" if found else None
