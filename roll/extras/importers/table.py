"""The tables of other systems' keys, one file each: the rows that a key is found in, and how they change values."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.configs.problems import NOTHING
from roll.configs.schema import ROLES, ends_with, same_part
from roll.extras.importers import SYSTEMS

Transform = Callable[[Any], Any]


class Untranslatable(ValueError):
    """A value without a counterpart here. The message says why."""


class Omitted(Exception):
    """A value that is expressed here by omitting the key. The message says why."""


class Partial(Exception):
    """A value with a counterpart for only a part of it."""

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(why)
        self.value = value


def _choice(names: Mapping[Any, Any], why: str = "") -> Transform:
    def choose(value: Any) -> Any:
        if value in names:
            return names[value]
        known = ", ".join(map(str, names))
        raise Untranslatable(f"{value} has no counterpart here{f': {why}' if why else ''} (there are those of {known})")

    return choose


def _commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _parts(value: Any) -> Any:
    """Parts of a checkpoint."""
    names = {"model": "model", "hf_model": "model", "optimizer": "optimizer", "extra": "rng"}
    given = [names[name] for name in value or () if name in names]
    if "model" not in given:
        raise Untranslatable("a checkpoint holds the model at least")
    return list(dict.fromkeys(given))


def _unless_true(value: Any) -> Any:
    """A switch of the chat template, which is on where it is not given."""
    if value is None or value is True:
        raise Omitted("templates do so by themselves")
    return value


def _switch(value: Any) -> Any:
    """A coefficient that is only read when it is above 0."""
    if not value:
        raise Omitted("0 switches it off")
    return value


def _positive(value: Any) -> Any:
    """A bound that null, -1 and 0 switch off."""
    if value is None or value <= 0:
        raise Omitted(f"{value} sets no bound")
    return value


def _steps(value: Any) -> Any:
    if isinstance(value, str):
        raise Untranslatable(f"{value}: a period is counted in steps")
    return value


def _never(value: Any) -> Any:
    """A period in steps, -1 or 0 for never."""
    value = _steps(value)
    return value if value and value > 0 else None


def _period(value: Any) -> Any:
    """A period of evaluations or checkpoints, where 0 is after the last step alone."""
    if value == "after_each_epoch":
        raise Partial(0, "an epoch has rows / global batch steps: write that number; until then after the last step")
    return max(0, _steps(value) or 0)


def _first_of(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _listed(value: Any) -> Any:
    """Names in a list, or behind one another with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_TRACKERS = ("stdout", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")


def _trackers(value: Any) -> Any:
    given = ["stdout" if name == "console" else name for name in ([value] if isinstance(value, str) else value or [])]
    kept = [name for name in given if name in _TRACKERS]
    if unknown := [name for name in given if name not in _TRACKERS]:
        if kept:
            raise Partial(_first_of(kept), f"no tracker {', '.join(unknown)} here")
        raise Omitted(f"no tracker {', '.join(unknown)} here; package.module:Class may name your own")
    return _first_of(kept)


def _optimizer(value: Any) -> Any:
    """A class or name of an optimizer; null is AdamW."""
    names = {"adam": "adamw", "adamw": "adamw", "muon": "muon"}
    return _choice(names)("adamw" if value is None else str(value).lower())


def _env_manager(value: Any) -> Any:
    name = str(value).rpartition(".")[2]
    known = {
        "TrajEnvManager": "traj",
        "VLTrajEnvManager": "traj",
        "StepEnvManager": "step",
        "StepConcatEnvManager": "step",
        "AgentNativeStepEnvManager": "step",
        "ProxyEnvManager": "traj",
        "traj": "traj",
        "step": "step",
    }
    if name in known:
        return known[name]
    if str(value).startswith("roll."):
        raise Untranslatable(f"{name} has no counterpart here: there are traj and step")
    return value


TRANSFORMS: dict[str, Transform] = {
    "opposite": lambda value: not value,
    "commas": _commas,
    "bf16-or-fp32": lambda value: "bf16" if value else "fp32",
    "above-zero": _switch,
    "positive": _positive,
    "parts": _parts,
    "unless-true": _unless_true,
    "never": _never,
    "period": _period,
    "all": lambda value: None if value is None or value < 0 else value,
    "text-none": lambda value: None if value in ("None", "none", "null") else value,
    "trackers": _trackers,
    "attention": _choice(
        {
            "fa2": "fa2",
            "flash_attention_2": "fa2",
            "sdpa": "sdpa",
            "auto": "auto",
            "eager": "eager",
            "disabled": "eager",
            None: "auto",
            False: "auto",
        }
    ),
    "schedule": _choice(
        {
            "constant": "constant_with_warmup",
            "constant_with_warmup": "constant_with_warmup",
            "linear": "linear",
            "cosine": "cosine",
            "cosine_with_min_lr": "cosine",
            "inverse_sqrt": "inverse_sqrt",
            "inverse_square_root": "inverse_sqrt",
            "inverse-square-root": "inverse_sqrt",
            "warmup_stable_decay": "wsd",
            "wsd": "wsd",
            "WSD": "wsd",
            None: "constant_with_warmup",
        },
        "no such schedule",
    ),
    "optimizer": _optimizer,
    "resume": lambda value: {"auto": True, "disable": False}.get(value, value),
    "first": _first_of,
    "listed": _listed,
    "replay": _choice({"disabled": "disable", "disable": "disable", "R2": "R2", "R3": "R3"}),
    "wsd-fall": _choice({"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}),
    "dtype": _choice(
        {
            "bf16": "bf16",
            "bfloat16": "bf16",
            "fp16": "fp16",
            "float16": "fp16",
            "half": "fp16",
            "fp32": "fp32",
            "float32": "fp32",
            "auto": None,
        }
    ),
    "trainer": _choice(
        {"fsdp": "fsdp2_train", "fsdp2": "fsdp2_train", "megatron": "megatron_train", "veomni": "fsdp2_train"}
    ),
    "generator": _choice(
        {"vllm": "vllm", "vllm_async": "vllm", "sglang": "sglang", "sglang_async": "sglang", "hf": "hf_infer"}
    ),
    "env-manager": _env_manager,
    "grouping": _choice(
        {
            "state": "state",
            "batch": "batch",
            "inductive": "inductive",
            "traj_group_id": "state",
            "state_hash": "state",
            "tags": "inductive",
        }
    ),
    "divergence": _choice(
        {name: name for name in ("forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl")}
    ),
    "normalisation": _choice({name: name for name in ("asym_clip", "identity", "mean", "mean_std")}),
    "estimator": lambda value: {
        "group_norm": "grpo",
        "agentic_reinforce": "reinforce",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    }.get(value, value),
    "policy-loss": _choice(
        {
            "vanilla": "ppo",
            "gspo": "ppo",
            "clip_cov": "clip_cov",
            "kl_cov": "kl_cov",
            "gpg": "vanilla",
            "geo_mean": "gmpo",
            "cispo": "cispo",
            "sapo": "sapo",
            "dppo_tv": "dppo_tv",
            "dppo_kl": "dppo_kl",
        }
    ),
    "cut": _choice({"error": "error", "right": "truncate"}, "a conversation loses its end"),
    "unbounded": lambda value: value or 0,
    "truncation": _choice({"error": "error", "left": "left", "right": "right"}, "prompts are cut at one end"),
}
"""By name: from a value there to the one here. They raise ``Untranslatable``, ``Omitted`` or ``Partial``."""


FOLDER = Path(__file__).parent / "tables"

_ROLE, _REST = "<role>", "**"
_MOST_MEANINGS = 3
"""A name with more of them, such as ``enable``, says nothing without the sections around it."""

SECTION, DERIVE, DROP, IMPOSSIBLE = "section", "derive", "drop", "impossible"
_VERBS = (SECTION, DERIVE, DROP, IMPOSSIBLE)
_CHOICE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Setting:
    """A key that a row sets in addition to its own, e.g. ``use_pg_clip_range: true``."""

    key: str
    value: Any


@dataclass(frozen=True)
class Row:
    """Rule for what becomes of a key of another system."""

    key: str
    """Dotted. A part ``<role>`` stands for a model role, ``<…>`` for any name, a last ``**`` for all keys below.

    ``**`` is for sections whose keys are anybody's, e.g. arguments of an engine: it would hide what is not known."""
    default: Any
    """Value that it has there when it is not given, where its absence would mean something else here; ``NOTHING``."""
    ours: str
    """The key here, with the same parts in angle brackets; empty: none, or several that are derived."""
    beside: tuple[Setting, ...]
    """Settings that the key here is read with."""
    how: str
    """``""``: the value as it is. ``section``: its keys have rows. ``derive``: several keys are read together.
    ``drop``: it would change nothing here. ``impossible``: it would change results. Else a name in ``TRANSFORMS``."""
    harmless: tuple[Any, ...]
    """Values of an impossible key that ask for what happens here anyway."""
    note: str
    """Difference in meaning, or the reason."""

    @functools.cached_property
    def parts(self) -> list[str]:
        return self.key.split(".")

    @functools.cached_property
    def name(self) -> str:
        """The key's last part that is a name."""
        return [part for part in self.parts if part != _REST][-1]

    def match(self, path: Sequence[str]) -> dict[str, str] | None:
        """Names that parts in angle brackets stand for, if the row is about this path; ``**`` is the rest, dotted."""
        parts, found = self.parts, dict[str, str]()
        if parts[-1] == _REST:
            if len(path) < len(parts):
                return None
            found[_REST], path = ".".join(path[len(parts) - 1 :]), path[: len(parts) - 1]
            parts = parts[:-1]
        if len(path) != len(parts):
            return None
        for part, name in zip(parts, path, strict=True):
            if part == _ROLE and name not in ROLES:
                return None
            if part.startswith("<"):
                found[part] = name
            elif part != name:
                return None
        return found

    @property
    def verdict(self) -> str:
        """One word for what becomes of the key: same, renamed, translated, derived, dropped, impossible or section."""
        if self.how == "":
            return "same" if self.ours in ("", self.key) and not self.beside else "renamed"
        known = {SECTION: "section", DERIVE: "derived", DROP: "dropped", IMPOSSIBLE: "impossible"}
        return known.get(self.how, "translated")

    @property
    def here(self) -> str:
        """The key here, also where it is the same; empty as ``ours``."""
        return self.ours or (self.key if self.verdict == "same" else "")

    @property
    def advice(self) -> str:
        """The hint for a configuration that has the key where it is not known."""
        if not self.ours:
            return f"remove it: {self.note}" if self.how == DROP and self.note else self.note
        key = self.ours.removeprefix(f"{_ROLE}.")
        words = f"use {key} of the role" if key != self.ours else f"use {key}"
        words += "".join(f" with {setting.key}: {yaml_text(setting.value)}" for setting in self.beside)
        return f"{words}; {self.note}" if self.note else words


def fill(template: str, found: dict[str, str]) -> str:
    """The key here, its parts in angle brackets replaced by what they stand for."""
    for part, name in found.items():
        template = template.replace(part, name)
    return template


@functools.cache
def rows(system: str) -> tuple[Row, ...]:
    """The table of a system, in the order of its file."""
    with (FOLDER / f"{system}.tsv").open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(_row({**line, "key": key}) for line in lines for key in spread(line["key"]))


def spread(key: str) -> list[str]:
    """Keys that one with braces stands for, as in a shell: ``a.{b,c}`` is ``a.b`` and ``a.c``."""
    parts = [part.split(",") if number % 2 else [part] for number, part in enumerate(_CHOICE.split(key))]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


@dataclass(frozen=True)
class Usual:
    """The default that releases of a system use if a key is not given."""

    values: tuple[Any, ...]
    releases: frozenset[str]
    """Those that have the key."""


@functools.cache
def _usual(system: str) -> dict[str, Usual]:
    found: dict[str, Usual] = {}
    if (path := FOLDER / f"{system}_defaults.tsv").is_file():
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                known = found.get(line["key"], Usual((), frozenset()))
                value, releases = _value(line["value"]), frozenset(line["releases"].split())
                found[line["key"]] = Usual((*known.values, value), known.releases | releases)
    return found


def usual(system: str, key: str) -> Usual:
    """What is known of a key's defaults, from the sources of the releases; nothing for a key without a line."""
    known, (_, _, rest) = _usual(system), key.partition(".")
    names = (key, f"{_ROLE}.{rest}", f"rewards.<domain>.{rest.partition('.')[2]}")
    return next((known[name] for name in names if name in known), Usual((), frozenset()))


def _value(text: str) -> Any:
    """A value of a table, read by libyaml where it is there: four times as quick, of some thousand values."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _row(line: dict[str, str]) -> Row:
    ours, *beside = (line["ours"] or "").split("; ")
    how, _, harmless = (line["how"] or "").partition(" unless ")
    if how not in (*_VERBS, *TRANSFORMS, ""):
        raise ValueError(f"{line['key']}: how is {how!r}, not one of {', '.join([*_VERBS, *TRANSFORMS])}")
    return Row(
        key=line["key"],
        default=_value(line["default"]) if line["default"] else NOTHING,
        ours=ours,
        beside=tuple(Setting(key, _value(value)) for key, _, value in (each.partition("=") for each in beside)),
        how=how,
        harmless=tuple(_value(f"[{harmless}]")) if harmless else (),
        note=line["note"] or "",
    )


@functools.cache
def _by_precision(system: str) -> tuple[dict[str, Row], tuple[Row, ...]]:
    """Rows about one key, and those with angle brackets or ``**``: the fewest brackets and the most names first."""
    exact = {row.key: row for row in rows(system) if "<" not in row.key and row.parts[-1] != _REST}
    others = (row for row in rows(system) if row.key not in exact)
    return exact, tuple(sorted(others, key=lambda row: (row.parts[-1] == _REST, row.key.count("<"), -len(row.parts))))


def find(system: str, path: Sequence[str]) -> tuple[Row, dict[str, str]] | None:
    """The row about a key, and what its parts in angle brackets stand for."""
    exact, others = _by_precision(system)
    if (row := exact.get(".".join(path))) is not None:
        return row, {}
    for row in others:
        if (found := row.match(path)) is not None:
            return row, found
    return None


@functools.cache
def _by_name() -> dict[str, list[Row]]:
    known: dict[str, list[Row]] = {}
    for system in SYSTEMS:
        for row in rows(system):
            if row.parts[-1] != _REST and (row.how != SECTION or row.note):
                known.setdefault(row.name, []).append(row)
    return known


def advice(path: Sequence[str]) -> str | None:
    """The hint for an unknown key; ``None`` where no system is known to call one so.

    Of several rows with its name, that counts whose last parts are the most alike; then the order of ``SYSTEMS``.
    """
    candidates = [row for row in _by_name().get(path[-1], ()) if row.advice and row.ours.split(".") != list(path)]
    if not candidates:
        return None
    best = max(candidates, key=lambda row: (_alike(row.parts, path), bool(row.ours)))
    meanings = {row.ours.rpartition(".")[2] for row in candidates if row.ours}
    if len(meanings) > _MOST_MEANINGS and _alike(best.parts, path) == 1:
        return None
    role = path[0] if path[0] in ROLES and len(path) > 1 else None
    words = best.advice
    if role is not None and re.search(r"\b(actor_train|actor_infer|reference|critic)\.", words):
        head, _, rest = words.removeprefix("use ").partition(".")
        words = f"use {rest} of the role" if head in ROLES and ";" not in rest else words
    return words


def _alike(parts: Sequence[str], path: Sequence[str]) -> int:
    """Last parts that are the same."""
    pairs = zip(reversed(parts), reversed(path), strict=False)
    same = (part == name or (part == _ROLE and name in ROLES) for part, name in pairs)
    return sum(1 for _ in itertools.takewhile(bool, same))


@dataclass(frozen=True)
class Foreign:
    """Key of another system that means one of ours, or has its name."""

    system: str
    """In print."""
    row: Row

    def means(self, name: str, places: Sequence[str]) -> bool:
        """Tells whether the row writes the key ``name`` here, which stands at ``places``.

        A row that stands for all below a section does not.
        """
        last = self.row.here.rpartition(".")[2]
        if last in ("", "**") or (last != name and not last.startswith("<")):
            return False
        concrete = [place.replace(_ROLE, ROLES[0]).split(".") for place in places]
        return self.row.here in places or any(_pattern(self.row.here).match(place) is not None for place in concrete)


def called(path: Sequence[str]) -> list[Foreign]:
    """Keys of other systems that are called so, by their last parts."""
    return [each for each in _ending("key", path[-1]) if _calls(each.row, path)]


def meaning(name: str, places: Sequence[str]) -> list[Foreign]:
    """Keys of other systems that mean the key ``name`` here, which stands at ``places``."""
    return [each for each in _ending("here", name) if each.means(name, places)]


def key_names() -> set[str]:
    """Last parts of the keys of all systems."""
    return {each.row.name for each in _foreign() if not each.row.name.startswith("<")}


@functools.cache
def _foreign() -> tuple[Foreign, ...]:
    return tuple(Foreign(title, row) for system, title in SYSTEMS.items() for row in rows(system))


def _ending(column: str, name: str) -> list[Foreign]:
    """Those whose key in a column ends with a name, or with what stands for any name; in the order of the tables."""
    by_end = _by_end(column)
    return [_foreign()[number] for number in sorted([*by_end.get(name, ()), *by_end.get("<", ())])]


@functools.cache
def _by_end(column: str) -> Mapping[str, Sequence[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(_foreign()):
        end = getattr(each.row, column).rpartition(".")[2]
        found["<" if end.startswith(("<", "**")) else end].append(number)
    return dict(found)


def _calls(row: Row, path: Sequence[str]) -> bool:
    if (row.how == SECTION and not row.note) or not same_part(row.parts[-1].replace("**", "<"), path[-1]):
        return False
    return row.match(path) is not None or (row.parts[-1] == path[-1] and ends_with(row.key, path))


@functools.cache
def _pattern(target: str) -> Row:
    return Row(target, None, "", (), "", (), "")


def yaml_text(value: Any) -> str:
    """A value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
