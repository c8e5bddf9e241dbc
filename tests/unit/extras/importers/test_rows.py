"""Every row of the tables at work: a key there, given a value, becomes the key here that the row names."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from roll.configs.agentic import AgenticConfig
from roll.configs.distill import DistillConfig
from roll.configs.dpo import DPOConfig
from roll.configs.engines import cards
from roll.configs.offline import SFTConfig
from roll.configs.problems import NOTHING
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import locate
from roll.extras.importers import SYSTEMS
from roll.extras.importers.convert import DERIVE
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import Given, read
from roll.extras.importers.table import DERIVE as DERIVED
from roll.extras.importers.table import DROP, IMPOSSIBLE, SECTION, TRANSFORMS, Row, fill, rows

FILES = Path(__file__).parent / "files"
GIVEN = {
    "roll": FILES / "roll" / "run" / "rlvr.yaml",
    "verl": FILES / "run_verl.sh",
    "verl_sft": FILES / "run_verl_sft.sh",
    "chatlearn": FILES / "chatlearn.yaml",
    "mindspeed": FILES / "mindspeed.yaml",
}
NAMES = {"<role>": "actor_train", "<domain>": "sums", "<tag>": "Boxes", "**": "a"}
OPTIONS = "strategy_args.strategy_config."
SAMPLES: dict[str, Any] = {
    "opposite": True,
    "commas": ["q_proj", "v_proj"],
    "bf16-or-fp32": True,
    "unless-true": False,
    "positive": 20,
    "never": 20,
    "period": 20,
    "all": 20,
    "first": ["one"],
    "parts": ["model", "extra"],
    "trackers": ["console"],
    "attention": "flash_attention_2",
    "schedule": "cosine",
    "optimizer": "Muon",
    "replay": "R2",
    "wsd-fall": "1-sqrt",
    "resume": "auto",
    "dtype": "bfloat16",
    "trainer": "megatron",
    "generator": "vllm",
    "env-manager": "StepEnvManager",
    "grouping": "tags",
    "divergence": "reverse_kl",
    "normalisation": "mean_std",
    "estimator": "group_norm",
    "listed": "moe, mlp",
    "policy-loss": "geo_mean",
    "cut": "right",
    "unbounded": 2,
    "truncation": "left",
    "text-none": "batch",
}
"""Values that mean something to each transformation."""


def filled(row: Row) -> tuple[str, str]:
    """The key there and here, names in place of what is in angle brackets."""
    key = fill(row.key, {f"{name}": value for name, value in NAMES.items()})
    return key, fill(row.ours, NAMES) or key


def field_of(key: str) -> tuple[Any, Any] | None:
    """Annotation and metadata of a key of ours."""
    _, options, rest = key.partition(OPTIONS)
    if options:
        return next((found for card in cards() if (found := locate(card.options, rest.split(".")))), None)
    schemas = (RLVRConfig, AgenticConfig, DistillConfig, DPOConfig, SFTConfig)
    return next((found for schema in schemas if (found := locate(schema, key.split(".")))), None)


def value_of(row: Row, ours: str) -> Any:
    """What a user may write there: a value of the kind that the key here takes, where nothing is known."""
    if row.how and row.how != "above-zero":
        return SAMPLES[row.how]
    field = field_of(ours)
    if field is None:
        return "text"
    annotation, metadata = field
    kinds = [annotation, *get_args(annotation)]
    choices = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    adapter = TypeAdapter(Annotated[annotation, *metadata] if metadata else annotation)
    for value in [row.default, *choices, True, 3, 1, 0.5, 0, -0.5, "text", ["text"], [3], {"a": 1}, {"a": "1"}]:
        with suppress(ValidationError):
            if value is not NOTHING and value is not None and (value or not row.how):
                adapter.validate_python(value, strict=True)
                return value
    return {}


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


TRANSLATED = [
    pytest.param(system, row, id=f"{system}:{row.key}")
    for system in SYSTEMS
    for row in rows(system)
    if row.how not in (SECTION, DERIVED, DROP, IMPOSSIBLE)
]


def test_every_transformation_has_a_sample() -> None:
    assert SAMPLES.keys() | {"above-zero"} == TRANSFORMS.keys()


@pytest.mark.parametrize(("system", "row"), TRANSLATED)
def test_a_key_there_becomes_the_key_here(system: str, row: Row) -> None:
    key, ours = filled(row)
    value = value_of(row, ours)
    expected = TRANSFORMS[row.how](value) if row.how else value
    values = nested(key, value)
    draft = Draft(system, Given(values, values, frozenset()))
    draft.take_all()
    assert draft.get(ours, "nothing") == expected
    for setting in row.beside:
        assert draft.get(fill(setting.key, NAMES)) == setting.value
    (outcome,) = (each for each in draft.outcomes if each.key == key)
    assert outcome.kind in (Kind.KEPT, Kind.RENAMED, Kind.TRANSLATED) and outcome.ours == ours
    field = field_of(ours)
    if field is not None and expected != {}:
        annotation, metadata = field
        TypeAdapter(Annotated[annotation, *metadata] if metadata else annotation).validate_python(expected)


@pytest.mark.parametrize("system", SYSTEMS)
def test_of_what_is_read_together_nothing_goes_without_a_word(system: str) -> None:
    """Each derived key beside a whole run of its system: told of, and the derivation takes it or says why not."""
    silent, whole = [], read(system, [GIVEN[system]], [])
    for row in rows(system):
        if row.how != DERIVED or "<" in row.key or row.key.endswith("**") or ":" in row.key:
            continue
        given = copy.deepcopy(whole)
        value = given.values
        *above, last = row.key.split(".")
        for part in above:
            value = value.setdefault(part, {}) if isinstance(value.get(part, {}), dict) else {}
        if last not in value and row.default is NOTHING:
            continue  # nothing says what a user would write there
        value.setdefault(last, row.default)
        draft = Draft(system, given)
        draft.take_all()
        DERIVE[system](draft)
        draft.tell_unused()
        told = {name for outcome in draft.outcomes for name in outcome.key.split(", ")}
        above_or_below = (f"{row.key}.".startswith(f"{name}.") or name.startswith(f"{row.key}.") for name in told)
        if not any(above_or_below):
            silent.append(row.key)
    assert silent == []
