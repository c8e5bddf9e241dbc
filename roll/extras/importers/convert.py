"""Converts files of another system to the text of a configuration, with a report on each key."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from roll.configs.base import Config
from roll.configs.engines import card_of
from roll.configs.engines.vllm import CARD as VLLM
from roll.configs.loader import load_config
from roll.configs.pipeline import PipelineConfig
from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem, show
from roll.configs.rules import TRAINED, Rule
from roll.configs.schema import element_of, locate, section_of, type_text
from roll.configs.worker import StrategyArguments
from roll.extras.importers import SYSTEMS, chatlearn, mindspeed, roll, verl, verl_supervised
from roll.extras.importers.common import drop_nulls, leaves
from roll.extras.importers.draft import Draft, Kind, Outcome, value_at
from roll.extras.importers.reading import Given, UnreadableError, read
from roll.extras.importers.recognise import (
    WORDS_ALONE,
    asks_for_videos,
    is_translated,
    media_in,
    picture_family,
    variant_of,
)
from roll.extras.importers.roll_offline import read_students

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


DERIVE: dict[str, Callable[[Draft], type[PipelineConfig]]] = {
    "roll": roll.derive,
    "verl": verl.derive,
    "verl_sft": verl_supervised.derive,
    "chatlearn": chatlearn.derive,
    "mindspeed": mindspeed.derive,
}
"""By system: what its keys say together, and for which pipeline."""

PREPARE: dict[str, Callable[[Given], None]] = {"roll": read_students, "mindspeed": mindspeed.prepare}
"""By system: what is done to the files' contents before their keys are looked up."""

_PATHS = (
    "pretrain",
    "reward_pretrain",
    "teacher_pretrain",
    "resume_from_checkpoint",
    "actor_train.data_args.template",
)
"""Keys with the paths of another machine."""
_PATH_ENDS = dict.fromkeys(SYSTEMS, (".args.model_path", ".pretrain")) | {
    "verl": (".args.model_path", ".pretrain", ".custom.verifiers.0.args.path")
}
"""By system: endings of such keys. A function that scores is a file of theirs, or yours to write."""

_OPEN = (".strategy_config.", ".env_config.")
_UNKNOWN = ("no such key", "an option of ", "an argument of ")
"""Beginnings of what is expected instead of an option that is not known, in the sections that pass options on."""

_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")
_UNSET = "/variable-that-is-not-set"
_PRESET = re.compile(r"\$\{(deepspeed_zero\w*)\}")


@dataclass(frozen=True)
class Imported:
    """A converted configuration."""

    text: str
    """YAML."""
    schema: type[PipelineConfig]
    outcomes: tuple[Outcome, ...]
    problems: tuple[ConfigProblem, ...]
    """Problems that keep it from being valid."""
    notes: tuple[str, ...]
    """Findings from reading the files."""

    @property
    def exit_code(self) -> int:
        """1 when something that changes results, or may change them, could not be carried over."""
        return int(bool(self.problems) or any(each.kind in (Kind.IMPOSSIBLE, Kind.UNKNOWN) for each in self.outcomes))


def convert(
    system: str,
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    checks: Mapping[type[PipelineConfig], Sequence[Rule]] | None = None,
    name: str = "imported",
    variables: Mapping[str, str] | None = None,
) -> Imported:
    """Reads the files of a system and writes the configuration of ours that asks for the same.

    Args:
        system: a key of ``SYSTEMS``.
        files: YAML files and launch scripts, each over those before it.
        overrides: ``key=value`` texts with their keys.
        checks: further rules that the result is checked against, by pipeline.
        name: of the configuration, where the files give it none.
        variables: of a launch script's environment.

    Raises:
        UnreadableError: a file that is missing, no YAML, or a script without the system's command; a value that the
            system itself would not take.
    """
    system = variant_of(system, files)
    given = read(system, files, overrides, variables)
    if prepare := PREPARE.get(system):
        prepare(given)
    draft = Draft(system, given)
    schema = _derived(draft, files)
    draft.tell_unused()
    _settle_unknown(draft, schema)
    _refuse_pictures(draft)
    drop_nulls(draft, lambda key: _takes_null(schema, key))
    draft.ours.setdefault("exp_name", name)
    header = f"Imported from {SYSTEMS[system]}: {' '.join(file.name for file in files)}"
    values, text = _written(draft, schema, header)
    rules = [*(checks or {}).get(schema, ())]
    if media := media_in(draft):
        rules.append(functools.partial(_check_engines_see, videos=asks_for_videos(media)))
    found = problems_of(text, schema, rules)
    if _leave_out(draft, found):
        values, text = _written(draft, schema, header)
        found = problems_of(text, schema, rules)
    problems = []
    for key, value in leaves(values):
        if _unset(str(value)):
            draft.tell(Kind.TO_DO, key, value, note="set the variable before the run")
    for problem in found:
        if _UNSET in str(problem.got):
            continue
        if problem.path in _PATHS or problem.path.endswith(_PATH_ENDS[system.removesuffix("_sft")]):
            draft.tell(Kind.TO_DO, problem.path, problem.got, note="there is no such file or folder on this machine")
        elif problem.path.startswith("plugins.") or (
            problem.path.startswith("tools.use.") and problem.path.endswith(".tool")
        ):
            draft.tell(Kind.TO_DO, problem.path, problem.got, note="it cannot be imported on this machine")
        elif problem.expected.startswith("the package "):
            draft.tell(Kind.TO_DO, problem.path, problem.got, note=f"it needs {problem.expected}: {problem.hint}")
        else:
            problems.append(problem)
    written = [
        each for each in draft.outcomes if each.kind != Kind.THEIRS or value_at(values, each.ours) is not NOTHING
    ]
    text = annotate(text, [*_comments(written), *((each.path, f"TODO: {each}") for each in problems)])
    return Imported(text, schema, tuple(written), tuple(problems), tuple(given.notes))


def _comments(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    """What is lost and what is left to do, for the place in the result; without values, which may be secret."""
    words = {Kind.IMPOSSIBLE: "lost", Kind.UNKNOWN: "lost", Kind.TO_DO: "TODO"}
    for each in outcomes:
        if word := words.get(each.kind):
            note = each.note or ("unknown to the importer" if each.kind == Kind.UNKNOWN else "")
            yield each.ours or each.key, f"{word}: {each.key}{f': {note}' if note else ''}"


def _derived(draft: Draft, files: Sequence[Path]) -> type[PipelineConfig]:
    """Takes all keys, and returns the pipeline; a value of another kind than its key has there is told."""
    try:
        draft.take_all()
        return DERIVE[draft.system](draft)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        names, told = " ".join(map(str, files)), f"{type(error).__name__}: {error}, near {draft.last_read}"
        raise UnreadableError(
            f"{names}: a value has another type than {SYSTEMS[draft.system]} takes: {told}"
        ) from error


def _written(draft: Draft, schema: type[PipelineConfig], header: str) -> tuple[dict[str, Any], str]:
    """Returns what differs from the defaults, as values and as text."""
    values = shorten(schema, draft.ours)
    if presets := sorted(set(_PRESET.findall(str(values)))):
        values["defaults"] = [*(f"{preset}@_here_" for preset in presets), "_self_"]
    return values, text_of(values, [header])


def _leave_out(draft: Draft, problems: Sequence[ConfigProblem]) -> bool:
    """Takes out options that an engine or an environment does not have here, and says so; whether there were some."""
    lost = [
        problem
        for problem in problems
        if any(part in problem.path for part in _OPEN)
        and problem.expected.startswith(_UNKNOWN)
        and draft.get(problem.path) is not None
    ]
    for problem in lost:
        what = "no such key here" if problem.expected.startswith("no such key") else f"it is not {problem.expected}"
        note = f"{what}; {problem.hint}" if problem.hint else what
        known = ".env_config." in problem.path or "belongs to" in note
        kind = Kind.IMPOSSIBLE if known else Kind.UNKNOWN
        draft.retell(problem.path, kind, note, draft.remove(problem.path))
    return bool(lost)


def _settle_unknown(draft: Draft, schema: type[PipelineConfig]) -> None:
    """Keys without a row: some are ours; values that links read stand where these are; the rest is not known."""
    for key, value in draft.unknown:
        if draft.system == "roll" and locate(schema, key.split(".")) is not None:
            draft.keep(key, value)
        elif draft.given.is_read_by_a_link(key):
            draft.tell(Kind.DROPPED, key, value, note="its value is written where links read it")
        elif key.rpartition(".")[2] == "_target_":
            draft.tell(Kind.DROPPED, key, value, note="it names a class of the other library")
        else:
            draft.tell(Kind.UNKNOWN, key, value)


_WITH_VIDEOS = "qwen3_vl"
_WITH_PICTURES = ("roll", "verl", "verl_sft")
"""Systems whose keys of pictures are translated."""
_NO_MEDIA = (
    "there is no sound here, videos are for Qwen3-VL alone, and pictures are for models of the families Qwen2.5-VL, "
    "Qwen3-VL, Qwen3.5 without experts, GLM-4.1V, Gemma 3, LLaVA 1.5 and Mistral Small 3.1, of files of ROLL and verl"
)


def _refuse_pictures(draft: Draft) -> None:
    """Says of each key that asks for video, sound or pictures that are not there here, in place of all else."""
    asking = media_in(draft)
    if draft.system in _WITH_PICTURES:
        asking = {key: value for key, value in asking.items() if not is_translated(key, value)}
    draft.outcomes = [each for each in draft.outcomes if each.key not in asking or each.ours]
    for key, value in asking.items():
        draft.tell(Kind.IMPOSSIBLE, key, value, note=_NO_MEDIA)


def _check_engines_see(config: PipelineConfig, *, videos: bool = False) -> Iterator[ConfigProblem]:
    """Every role's engine is given pictures, and videos; a run asks only once the model's files are there."""
    family = picture_family(config.pretrain)
    if WORDS_ALONE.search(config.pretrain.lower()):
        key, column = "actor_train.data_args.image", config.actor_train.data_args.image
        yield ConfigProblem(key, column, "null: Qwen3.5 is trained on pictures without experts alone")
    if videos and family is not None and family != _WITH_VIDEOS:
        key, column = "actor_train.data_args.video", config.actor_train.data_args.video
        yield ConfigProblem(key, column, f"null: videos are for {_WITH_VIDEOS} alone, not for {family}")
    for role, worker in config.roles.items():
        card, name = worker.strategy_args.card, worker.strategy_args.strategy_name
        if card is None:
            continue
        why, generator = card.no_pictures(worker), "vllm"
        if not why and family and (why := card.blind_to(family, worker)):
            generator = "vllm" if family in (VLLM.pictured or ()) else "hf_infer"
        if not why and videos and (why := card.no_videos(worker)):
            generator = "hf_infer"
        if why:
            other = generator if role == "actor_infer" else "fsdp2_train" if role in TRAINED else "fsdp2_infer"
            shown = "videos" if videos else "pictures"
            expected = f"a strategy that takes {shown}, such as {other} ({name} {why})"
            yield ConfigProblem(f"{role}.strategy_args.strategy_name", name, expected)


def _takes_null(schema: type[PipelineConfig], key: str) -> bool:
    found = locate(schema, key.split("."))
    return found is not None and ".strategy_config." not in key and "null" in type_text(found[0], found[1])


def problems_of(text: str, schema: type[PipelineConfig], checks: Sequence[Rule] = ()) -> list[ConfigProblem]:
    """Problems of a configuration, read back as ``roll train`` would read it.

    Variables of the environment that are not set stand for places: without them the rules would judge another model.
    """
    variables = {name: f"{_UNSET}/{name}" for name in _unset(text)}
    with tempfile.TemporaryDirectory() as folder, _environment(variables):
        Path(folder, "imported.yaml").write_text(text, encoding="utf-8")
        try:
            load_config(schema, "imported", folder, extra_checks=checks)
        except ConfigErrors as errors:
            return errors.problems
    return []


def _unset(text: str) -> set[str]:
    """Variables of the environment that a text needs and that are not set."""
    return {name for name in _VARIABLE.findall(text) if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


WIDTH = 110

_MEANINGS = {
    Kind.IMPOSSIBLE: "changes results, and has no equivalent here",
    Kind.UNKNOWN: "no rule here knows the key: see what it does, and whether it is spelled right",
    Kind.TO_DO: "outside of the configuration",
    Kind.RENAMED: "another key, the same value",
    Kind.TRANSLATED: "another value, the same meaning",
    Kind.DERIVED: "follows from several keys",
    Kind.THEIRS: "not given; written out, since the default here differs",
    Kind.DROPPED: "no effect here",
    Kind.KEPT: "the same key here",
}
"""In the order of the report: what a user must look at comes first."""
_FIRST = (Kind.IMPOSSIBLE, Kind.UNKNOWN, Kind.TO_DO)


def report(imported: Imported, everything: bool = False) -> str:
    """What is lost and what is left to do, then what became of the other keys, and a summary.

    Args:
        imported: the result.
        everything: also names the keys that are kept as they are.
    """
    return "\n".join(_lines(imported, everything)) + "\n"


def _lines(imported: Imported, everything: bool) -> Iterator[str]:
    for note in imported.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")
    for kind in _FIRST:
        yield from _section(imported, kind)
    if imported.problems:
        count = len(imported.problems)
        yield f"the result needs {count} {'edit' if count == 1 else 'edits'}:"
        for problem in imported.problems:
            yield from textwrap.wrap(str(problem), WIDTH, initial_indent="  ", subsequent_indent="    ")
    for kind in _MEANINGS:
        if kind not in _FIRST and (everything or kind != Kind.KEPT):
            yield from _section(imported, kind)
    yield ", ".join(f"{sum(each.kind == kind for each in imported.outcomes)} {kind}" for kind in _MEANINGS)
    if not imported.problems:
        yield "the result is valid"


def _section(imported: Imported, kind: Kind) -> Iterator[str]:
    outcomes = [each for each in imported.outcomes if each.kind == kind]
    if not outcomes:
        return
    yield f"{kind} ({len(outcomes)}): {_MEANINGS[kind]}"
    if kind == Kind.KEPT:
        keys = ", ".join(each.key for each in outcomes)
        yield from textwrap.wrap(keys, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    else:
        yield from _told(outcomes)


def _told(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line for each key, notes below where they are long; what has the same note is told together."""
    together: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.ours:
            got = "" if outcome.got is NOTHING else f" {show(outcome.got)}"
            value = "" if outcome.value is NOTHING else f": {show(outcome.value)}"
            line = f"{outcome.key}{got} → {outcome.ours}{value}"
            note = f" ({outcome.note})" if outcome.note else ""
            yield from textwrap.wrap(
                line + note, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False
            )
        else:
            together.setdefault(outcome.note, []).append(outcome.key)
    for note, keys in together.items():
        line = f"{', '.join(keys)}{f': {note}' if note else ''}"
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
