"""A configuration as text: what differs from the defaults, in the order and the groups of the examples."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from roll.configs.base import Config
from roll.configs.engines import card_of
from roll.configs.schema import element_of, section_of
from roll.configs.worker import StrategyArguments

WIDTH = 110

GROUPS: tuple[tuple[str, ...], ...] = (
    ("defaults",),
    (
        "exp_name",
        "seed",
        "output_dir",
        "logging_dir",
        "render_save_dir",
        "system_envs",
        "track_with",
        "tracker_kwargs",
        "checkpoint_config",
        "ray_init",
        "profiler",
        "num_nodes",
        "num_gpus_per_node",
    ),
    (
        "max_steps",
        "total_epochs",
        "eval_steps",
        "val_before_train",
        "val_after_train",
        "eval_only",
        "save_steps",
        "logging_steps",
        "max_ckpt_to_keep",
        "resume_from_checkpoint",
    ),
    (
        "rollout_batch_size",
        "num_return_sequences_in_group",
        "is_num_return_sequences_expand",
        "val_batch_size",
        "prompt_length",
        "response_length",
        "sequence_length",
        "max_running_requests",
        "async_generation_ratio",
        "rollout_window",
        "partial_rollout",
        "max_running_groups",
    ),
    ("pretrain", "tokenizer_path", "reward_pretrain", "reference_pretrain", "teacher_pretrain"),
    ("rewards",),
    ("adv_estimator",),  # and the other keys of the algorithm
    ("custom_envs",),
    ("train_env_manager",),
    ("val_env_manager",),
    ("validation",),
    ("actor_train",),
    ("critic",),
    ("reference",),
    ("teacher",),
    ("actor_infer",),
)
_ALGORITHM = 6
ALWAYS = {
    "exp_name",
    "pretrain",
    "max_steps",
    "rollout_batch_size",
    "adv_estimator",
    "preference_loss",
    "train_on",
    "strategy_name",
    "learning_rate",
}
"""Keys that are written even where they have their default: a reader looks for them, or a pipeline is known by them."""


def shorten(section: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that a section has anyway."""
    short: dict[str, Any] = {}
    if section is StrategyArguments and isinstance(values.get("strategy_config"), dict):
        card = card_of(str(values.get("strategy_name")))
        options = values["strategy_config"]
        values = {**values, "strategy_config": shorten(card.options, options) if card else options}
    for name, value in values.items():
        field = section.model_fields.get(name)
        if field is None:
            short[name] = value
            continue
        inner, entry = section_of(field.annotation), section_of(element_of(field.annotation))
        if inner is not None and isinstance(value, dict):
            left = shorten(inner, value)
            if left or field.default is None:
                short[name] = left
        elif entry is not None and isinstance(value, dict):
            short[name] = {key: shorten(entry, each) if isinstance(each, dict) else each for key, each in value.items()}
        elif name in ALWAYS or not _is_default(field, value):
            short[name] = value
    return short


def _is_default(field: FieldInfo, value: Any) -> bool:
    if field.is_required():
        return False
    default = field.get_default(call_default_factory=True, validated_data={})
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def text_of(values: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """YAML in blocks, an empty line between two groups."""
    grouped = [{key: values[key] for key in group if key in values} for group in GROUPS]
    named = {key for group in GROUPS for key in group}
    grouped[_ALGORITHM] |= {key: value for key, value in values.items() if key not in named}
    blocks = [
        yaml.dump(_ordered(group), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
        for group in grouped
        if group
    ]
    return "".join(f"# {line}\n" for line in header) + "\n".join(blocks)


def annotate(text: str, comments: Sequence[tuple[str, str]]) -> str:
    """Text with comments above the keys that they are about: the deepest of a dotted key that is there, else the top.

    Args:
        text: YAML.
        comments: dotted keys, and a line about each.
    """
    lines, root = text.splitlines(), yaml.compose(text)
    top = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    above: dict[int, list[str]] = {}
    for key, words in comments:
        number, indent, node = top, 0, root
        for part in key.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = next(((name, value) for name, value in pairs if name.value == part), None)
            if found is None:
                break
            mark, node = found[0].start_mark, found[1]
            if mark.line == number and number != top:  # inside of a line
                break
            number, indent = mark.line, mark.column
        wrapped = textwrap.wrap(words, WIDTH - indent - 4, break_long_words=False, break_on_hyphens=False)
        above.setdefault(number, []).extend(
            f"{' ' * indent}# {'  ' if n else ''}{line}" for n, line in enumerate(wrapped)
        )
    return "".join(f"{line}\n" for number, line in enumerate(lines) for line in [*above.get(number, ()), line])


_ROLE_ORDER = (
    "env_type",
    "env_manager_cls",
    "model_args",
    "training_args",
    "data_args",
    "generating_args",
    "strategy_args",
    "device_mapping",
    "num_gpus_per_worker",
)


def _ordered(values: Any) -> Any:
    """The keys of a role in the order of the examples."""
    if not isinstance(values, dict):
        return values
    keys = [key for key in _ROLE_ORDER if key in values] + [key for key in values if key not in _ROLE_ORDER]
    if "strategy_name" in values:
        keys = ["strategy_name", *(key for key in keys if key != "strategy_name")]
    return {key: _ordered(values[key]) for key in keys}


class _Dumper(yaml.SafeDumper):
    """Lists of plain values on one line, texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    flat = all(not isinstance(value, dict | list) for value in values)
    flat = flat and sum(len(str(value)) for value in values) < WIDTH
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flat)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _text)
