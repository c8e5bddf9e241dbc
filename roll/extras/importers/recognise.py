"""Recognises which system a file is for, by its sections, and whether it trains on pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roll.extras.importers import SYSTEMS

if TYPE_CHECKING:
    from roll.extras.importers.draft import Draft

_SECTIONS = {
    "actor_rollout_ref": "verl",
    "optim": "verl_sft",
    "runtime_args": "chatlearn",
    "megatron_training": "mindspeed",
    "rl_config": "mindspeed",
    "generate_config": "mindspeed",
}
_STAGES = {"sft": "sft", "reward": "orm"}
"""Sections that MindSpeed RL's training on given samples has alone, and what their ``stage`` says."""
_SUPERVISED = re.compile(r"\b(?:engine@engine|optim@optim)\b")
"""Entries of the defaults list of verl's ``sft_trainer_engine``."""
_ROLL = ("roll.pipeline.", "roll.distributed.", "/config/deepspeed_zero", "/config/traj_envs", "/config/envs")
"""Parts of values that only ROLL's own files have."""


def system_of(file: Path) -> str | None:
    """A key of ``SYSTEMS``; ``None`` for a file of ours, or one that cannot be read."""
    from roll.extras.importers.reading import ENTRIES  # with Hydra, which `roll explain` does without

    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".sh":
            words = [word.strip("\"'{}()") for word in text.replace("=", " ").split()]
            return next((name for name in SYSTEMS if any(ENTRIES[name][0].search(word) for word in words)), None)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    found = next((system for key, system in _SECTIONS.items() if key in content), None)
    if found is None and any(_said(content, name, "stage") == stage for name, stage in _STAGES.items()):
        return "mindspeed"
    if found is None and _SUPERVISED.search(str(content.get("defaults"))):
        return "verl_sft"
    return found or ("roll" if any(sign in text for sign in _ROLL) else None)


def _said(content: dict[str, Any], section: str, key: str) -> Any:
    inside = content.get(section)
    return inside.get(key) if isinstance(inside, dict) else None


def variant_of(system: str, files: Sequence[Path]) -> str:
    """The table that files of a system are read by: verl's supervised training has one of its own."""
    supervised = system == "verl" and any(system_of(file) == "verl_sft" for file in files)
    return "verl_sft" if supervised else system


def command_for(file: Path) -> str | None:
    """Hint for a user of another system's file; ``None`` for a file of ours."""
    system = system_of(file)
    if system is None:
        return None
    return f"it is a configuration of {SYSTEMS[system]}: roll import {system} {file} -o mine.yaml"


_SEEN_OR_HEARD = r"(?<![a-z])(?:images?|videos?|audios?|vision|vqa|multi_?modal|vlm?)(?![a-z])"
_DATA = re.compile(r"(?:^|_)(?:files?|file_name|data_path|dataset|tags?|tag_included|additional_keys)(?:_|$)")
_SIGNS = (
    (re.compile(r"(?:(?:^|_)(?:images?|videos?|audio|mm|multi_?modal)(?:_|$))|^processor(?:_|$)"), re.compile("")),
    (
        re.compile(r"(?:^|_)(?:path|pretrain|model|load|tokenizer)(?:_|$)|^model_(?:name|type)"),
        re.compile(
            _SEEN_OR_HEARD
            + r"|(?<![a-z])omni(?![a-z])|internvl|smolvlm|llava|mllama|pixtral|paligemma|idefics|ui-?tars"
            r"|minicpm-?[ov](?![a-z])|glm-?\d(?:\.\d)?v(?![a-z])"
        ),
    ),
    (
        _DATA,
        re.compile(_SEEN_OR_HEARD + r"|(?<![a-z])(?:geo(?:metry)?3k|mm(?=[_-])|mathvista|virl39k|mmk12|deepeyes|coco)"),
    ),
    (
        re.compile(r"(?:_cls|_func|^class_path|^class_name|^render_mode)$"),
        re.compile(_SEEN_OR_HEARD + r"|detection|rgb"),
    ),
)
"""Names of keys, and what their values say where pictures, video or sound are meant: anything, for the first."""
_HARMLESS = (
    "freeze_vision_tower",
    "freeze_vision_model",
    "freeze_vision_projection",
    "image_patch_size",
    "moe_use_grouped_mm",
)
"""Keys that files have with their defaults, whatever is trained, and one of multiplying matrices."""


_OTHER_MEDIA = re.compile(r"audio|omni")
_VIDEO = re.compile(r"(?:^|_)videos?(?:_|$)")
FAMILIES = {
    "qwen2_5_vl": re.compile(r"qwen-?2[._]5-?vl"),
    "qwen3_vl_moe": re.compile(r"qwen-?3-?vl-?\d+b-?a\d+b"),
    "qwen3_vl": re.compile(r"qwen-?3-?vl"),
    "qwen3_5": re.compile(r"qwen-?3[._]5(?!-?\d+b-?a\d+b)"),
    "glm4v": re.compile(r"glm-?4[._]?1v"),
    "gemma3": re.compile(r"gemma-?3-"),
    "llava": re.compile(r"llava-v?1[._]5"),
    "mistral3": re.compile(r"mistral-small-3[._][12]"),
}
"""Names of models that are trained on pictures here, by ``model_type``; the first that fits."""
WORDS_ALONE = re.compile(r"qwen-?3[._]5-?\d+b-?a\d+b")
"""Names of models whose tower is left alone here, since their names do not tell them from text models."""


def picture_family(name: str) -> str | None:
    """``model_type`` of a model with pictures, by its name."""
    return next((family for family, pattern in FAMILIES.items() if pattern.search(name.lower())), None)


def is_translated(key: str, value: Any) -> bool:
    """Tells whether what a key of ROLL's or verl's asks for (``pictures_in``) is there: pictures, known models."""
    name = key.rpartition(".")[2].lower()
    text = f"{name} {value}".lower()
    names_model = bool(_SIGNS[1][0].search(name) and _SIGNS[1][1].search(str(value).lower()))
    return not _OTHER_MEDIA.search(text) and (not names_model or picture_family(text) is not None)


def asks_for_videos(media: Mapping[str, Any]) -> bool:
    """Tells whether some of the keys of ``media_in`` ask for videos, by their names or by those of the data."""
    named = ((key.rpartition(".")[2].lower(), str(value).lower()) for key, value in media.items())
    return any(_VIDEO.search(name) or (_DATA.search(name) and "video" in said) for name, said in named)


def pictures_in(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of any system that ask for pictures, video or sound, by their names and by the names of models and data."""
    from roll.extras.importers.common import leaves

    for key, value in leaves(values):
        name = key.rpartition(".")[2].lower().replace("-", "_")
        if not value or name in _HARMLESS or key.partition(".")[0] in ("hydra", "system_envs"):
            continue
        texts = [str(each) for each in (value if isinstance(value, list) else [value])]
        last = " ".join("/".join(text.split("/")[-2:]) for text in texts).lower()
        if any(named.search(name) and said.search(last) for named, said in _SIGNS):
            yield key, value


def media_in(draft: Draft) -> dict[str, Any]:
    """The keys of a configuration that ask for pictures, video or sound; a default that is written out does not."""
    return {key: value for key, value in pictures_in(draft.given.values) if not draft.is_usual(key, value)}
