"""Model families that tests have compared with plain Transformers, by the engines that computed them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

FILE = Path(__file__).with_name("families.json")
"""Written by ``scripts/generate_model_docs.py`` from the figures of ``tests/parity/test_families.py``."""

TRAINERS = ("fsdp2_train", "deepspeed_train", "megatron_train")
GENERATORS = ("hf_infer", "vllm", "sglang")


class Family(TypedDict):
    """A row of the file."""

    title: str
    model_type: str
    engines: dict[str, dict[str, Any]]
    """By strategy and kind of comparison: its figures, the test that has them, or ``{"refused": why}``."""


class Families(TypedDict):
    """The file."""

    transformers: str
    families: dict[str, Family]


@functools.cache
def load_families() -> Families:
    found: Families = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def is_proved(model_types: Iterable[str], strategy: str) -> bool:
    """Tells whether a comparison of a family with a strategy's engine has succeeded.

    Args:
        model_types: of the model's ``config.json``, the text part's included.
        strategy: such as ``fsdp2_infer``, which computes as ``fsdp2_train`` does.
    """
    name = strategy if strategy in GENERATORS else strategy.replace("_infer", "_train")
    wanted = set(model_types)
    return any(
        family["model_type"] in wanted
        and any("refused" not in entry for entry in family["engines"].get(name, {}).values())
        for family in load_families()["families"].values()
    )
