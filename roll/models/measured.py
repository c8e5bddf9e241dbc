"""What has been measured of model families: which may share a row, and which agree with plain Transformers.

``packing.json``, made by ``scripts/generate_packing.py``, lists the families whose sequences stay separate in a row:
for each the values, as far as they were measured, of those entries of its configuration that say how tokens see each
other (kinds of layers, positions, windows). ``positions: false`` marks those that need a plan of attention, because
they do not hand positions to what makes their masks. Everything else is refused: a layer with a memory, or with
positions of its own, runs on from one sequence into the next without an error.

``families.json``, made by ``scripts/generate_model_docs.py``, has the figures of ``tests/parity/test_families.py`` by
engine. A run with a family that it lacks starts with a warning.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


FILE = Path(__file__).with_name("packing.json")

_WATCHED = re.compile(
    r".*(layer_types|block|pattern|alibi|position|rope|rotary|window|sliding|chunk|causal|decoder|attn|attention"
    r"|recurrent|bidirectional|index|memor|compress|ngram|shift|cross|sparse|sink|linear|conv|mamba).*"
)
_HARMLESS = re.compile(
    r".*(bias|_act$|kernel|output_|softmax|scale_attn|upcast|dtype|token|softcap|multiplier|norm|dropout|implementation"
    r"|problem_type|original_|encoder_decoder|mtp_|embedding_dim).*"
)
"""Entries that say nothing about which token sees which, though their names are like those that do."""


@functools.cache
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def packing_problem(config: PreTrainedConfig, *, own_code: bool = False, kernel: str | None = None) -> str:
    """Why sequences of this model may not stand in one row, in words that follow its name; empty if they may.

    Args:
        config: of the whole model, not of its text part alone.
        own_code: the model is computed by Python files that come with it.
        kernel: of attention; ``None``: the loaded model's.
    """
    if own_code:
        return "has its own code, which was not measured"
    family, measured = config.model_type, _measured()
    if (known := measured["families"].get(family)) is None:
        seen = measured["others"].get(family)
        return "has not been measured" if seen is None else seen
    kernel = kernel or getattr(config.get_text_config(), "_attn_implementation", None)
    if known.get("positions") is False and kernel in ("fa2", "flash_attention_2"):
        return "keeps the sequences of a row apart with attn_implementation sdpa and eager alone, not with fa2"
    values = config.get_text_config().to_dict()
    for name, allowed in known["values"].items():
        if strange := [kind for kind in kinds(values.get(name)) if kind not in allowed]:
            return f"has been measured with {name} of {json.dumps(allowed)} alone, not with {json.dumps(strange[0])}"
    return ""


def check_packing(model: PreTrainedModel, role: str) -> None:
    """Refuses to pack a model that has been loaded.

    Raises:
        ValueError: it is not known to keep the sequences of a row apart.
    """
    if problem := packing_problem(model.config, own_code=has_own_code(model)):
        raise ValueError(f"{role}.use_sequence_packing: true, expected false: {model.config.model_type} {problem}")


def has_own_code(of: object) -> bool:
    """Tells a model, or a configuration, whose class is none of Transformers'."""
    return not type(of).__module__.startswith("transformers.models.")


def watched(config: PreTrainedConfig) -> list[str]:
    """Entries of a configuration on which it may depend whether sequences of a row see each other."""
    values = config.get_text_config().to_dict().items()
    names = {name for name, value in values if value is None or isinstance(value, bool | str | list)}
    names |= {"sliding_window", "rope_parameters"} & config.get_text_config().to_dict().keys()
    return sorted(name for name in names if _WATCHED.fullmatch(name) and not _HARMLESS.fullmatch(name))


def kinds(value: Any) -> list[Any]:
    """What an entry's value is, where only its kind matters: ``number`` for any; of a list, its elements'."""
    if isinstance(value, bool | str) or value is None:
        return [value]
    if isinstance(value, list | tuple):
        return sorted({kind for each in value for kind in kinds(each)}, key=str)
    if isinstance(value, dict):
        types = value if "rope_type" in value else {"rope_type": "default"}
        nested = [kind for each in value.values() if isinstance(each, dict) for kind in kinds(each)]
        return sorted(set(nested)) or [types["rope_type"]]
    return ["number"]


FAMILIES = Path(__file__).with_name("families.json")
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
    sglang: str
    """When its figures were measured, and with which version."""
    families: dict[str, Family]


@functools.cache
def load_families() -> Families:
    found: Families = json.loads(FAMILIES.read_text(encoding="utf-8"))
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
