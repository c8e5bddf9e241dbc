"""ROLL's training on given samples (supervised, preferences) and its distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from roll.configs.distill import DistillConfig
from roll.configs.offline import OfflineConfig, SFTConfig
from roll.configs.preference import DPOConfig
from roll.configs.worker import WorkerConfig
from roll.extras.importers.common import drop_unread, drop_unread_of_roles, tidy_engines, to_do
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import Given
from roll.extras.importers.recognise import media_in

_PREFERENCES = ("chosen_key", "rejected_key", "ipo")
_SUPERVISED = ("sft_train", "prompt_key", "response_key")
_DATA = "actor_train.data_args"
_EPOCHS = "actor_train.training_args.num_train_epochs"


def offline_schema(draft: Draft) -> type[OfflineConfig] | None:
    """The pipeline of a configuration that trains on given samples; ``None``: another."""
    if any(draft.has(key) for key in _PREFERENCES):
        return DPOConfig
    return SFTConfig if any(draft.has(key) for key in _SUPERVISED) else None


def set_offline(draft: Draft, schema: type[OfflineConfig]) -> None:
    """The keys that ROLL's supervised and preference pipelines read with others, or with defaults of their own."""
    if schema is DPOConfig:
        _preferences(draft)
    else:
        _imitation(draft)
    by_steps = schema is SFTConfig and draft.get("actor_train.strategy_args.strategy_name") == "megatron_train"
    set_extent(draft, by_steps=by_steps)
    if draft.get("validation.data_args.file_name"):
        draft.derive("val_batch_size", "val_batch_size", None, "all samples that are held out")
    drop_unread_of_roles(draft)
    for key in [key for key in draft.ours if key not in schema.model_fields]:
        draft.drop_ours(key, "a run on given samples does not read it")
    for key in ("actor_infer", "prompt_length", "response_length"):
        draft.drop_ours(key, "nothing is generated")


def set_extent(draft: Draft, *, by_steps: bool = False) -> None:
    """Length of the run and of its samples, which are read by one process.

    Args:
        by_steps: a number of steps goes before one of epochs, where it is given.
    """
    if by_steps and draft.has("max_steps") and int(draft.theirs("max_steps")) > 0:
        note = "max_steps goes before it with megatron_train; releases up to 0.3.0 read num_train_epochs alone"
        draft.tell(Kind.DROPPED, _EPOCHS, draft.theirs(_EPOCHS), note=note)
    elif draft.theirs(_EPOCHS) is not None:
        draft.carry(_EPOCHS, "num_train_epochs", int)
        draft.drop_ours("max_steps", "num_train_epochs is how long the run is")
    if (whole := draft.theirs("sequence_length")) is not None:
        draft.keep("sequence_length", int(whole))
    draft.drop_ours(f"{_DATA}.preprocessing_num_workers", "rows are read by one process")


def _imitation(draft: Draft) -> None:
    for key, default in (("prompt", "instruction"), ("response", "output")):
        draft.derive(f"{key}_key", f"{_DATA}.{key}", str(draft.theirs(f"{key}_key") or default))
    draft.derive("sft_train", "train_on", "all", "the answer of each row")
    draft.derive("sft_train", f"{_DATA}.shuffle", False, "rows come in the order of the files there")


def _preferences(draft: Draft) -> None:
    loss = "ipo" if draft.theirs("ipo") else "sigmoid"
    draft.derive("ipo", "preference_loss", loss)
    if loss == "ipo":
        draft.drop_ours("label_smoothing", "ipo does not read it")
    for key in ("chosen", "rejected"):
        draft.derive(f"{key}_key", f"preferences.{key}", str(draft.theirs(f"{key}_key") or key))
    if not draft.get(f"{_DATA}.prompt") and not draft.get(f"{_DATA}.messages"):
        draft.set(f"{_DATA}.prompt", "prompt")
        to_do(draft, "chosen_key", f"name the column of the question: {_DATA}.prompt", ours=f"{_DATA}.prompt")
    draft.drop_ours(f"{_DATA}.response", "the answers are the preferences' columns")
    if draft.get("actor_train.model_args.lora_target"):
        draft.drop_ours("reference", "with an adapter the reference is the policy without it")
    elif "reference" not in draft.ours:
        draft.derive("reference", "precompute_reference", True, "the untrained policy is the reference")


_STUDENTS = {
    "student_train": "actor_train",
    "student_infer": "actor_infer",
    "student": "actor_train",
    "sft_train": "actor_train",
}
"""Sections of the trained model under other names."""
_SKEWED = ("skewed_forward_kl", "skewed_reverse_kl")
_THEIR_TOPK, _THEIR_WEIGHT = 64, 0.5
_SOLUTION = "reference_solution"
"""Column in which ROLL looks for a solution."""
_TEACHER_PROMPT = "{prompt}\n\nA right solution:\n\n{solution}\n\nSolve the problem in your own words."


def read_students(given: Given) -> None:
    """Gives the sections of a student, or of a model under supervision, the policy's names, where these are free.

    ROLL's script for on-policy distillation sets ``is_pure_opd``, which its files do not.
    """
    values = given.values
    students = {"student_train", "student_infer", "teacher"} <= values.keys() and "student_pretrain" not in values
    scripted = students or bool(values.get("pure_opd_pipeline_type"))
    if scripted and "is_pure_opd" not in values and not values.get("use_opd"):
        values["is_pure_opd"] = True
        given.notes.append("is_pure_opd is true: ROLL's script for on-policy distillation sets it")
    for theirs, ours in _STUDENTS.items():
        if theirs in given.values and ours not in given.values:
            given.values[ours] = given.values.pop(theirs)
            if theirs in given.links:
                given.links[ours] = given.links.pop(theirs)
            given.notes.append(f"{theirs} is read as {ours}")
    teacher = given.values.get("teacher")
    if isinstance(teacher, dict) and teacher and not teacher.keys() & WorkerConfig.model_fields.keys():
        for tree in (given.values, given.links):
            if "teacher" in tree:
                tree["teachers"] = tree.pop("teacher")


def is_distillation(draft: Draft) -> bool:
    """Tells whether the configuration is that of ROLL's distillation pipeline."""
    on_policy = draft.theirs("is_pure_opd") or draft.theirs("use_opd")
    return draft.has("student_pretrain") and not on_policy


def set_teacher(draft: Draft) -> None:
    """On-policy distillation: the teacher of an RL run is there where it is switched on."""
    privileged = draft.theirs("opsd_mode")
    _set_tags(draft)
    if privileged:
        _set_teacher_prompt(draft)
    if draft.theirs("use_opd") or draft.theirs("is_pure_opd") or privileged:
        if draft.has("use_opd"):
            draft.tell(Kind.DROPPED, "use_opd", draft.theirs("use_opd"), note="a section teacher switches it on")
        return
    for key in ("teacher", "teachers", "opd_kl_coef", "teacher_pretrain", "is_pure_opd"):
        draft.drop_ours(key, "use_opd is off")


def _set_tags(draft: Draft) -> None:
    """The tags of a single teacher, which judges all samples."""
    key = "teacher.tag_included"
    if not (tags := draft.theirs(key)):
        return
    domains = draft.theirs("rewards") or {}
    others = {str(tag) for domain in domains.values() for tag in domain.get("tag_included") or ()} - set(tags)
    if others:
        note = f"a single teacher judges all samples, those of {', '.join(sorted(others))} too: see teachers"
        draft.tell(Kind.IMPOSSIBLE, key, tags, "teachers", note=note)
    else:
        draft.tell(Kind.DROPPED, key, tags, note="they are all the tags that there are")


def _set_teacher_prompt(draft: Draft) -> None:
    """A teacher that is told the solution."""
    column, given = draft.theirs("opsd_solution_key", _SOLUTION), draft.theirs("opsd_teacher_template")
    text = (given or _TEACHER_PROMPT).replace("{problem}", "{prompt}").replace("{solution}", f"{{{column}}}")
    draft.derive(["opsd_mode", "opsd_teacher_template", "opsd_solution_key"], "teacher_prompt", text)
    draft.carry("opsd_max_solution_length", "teacher_column_length", int)
    if given is None:
        note = "the words of teacher_prompt are this library's own: see that they suit the policy"
        draft.tell(Kind.TO_DO, "opsd_teacher_template", None, note=note)
    elif "{{" in given or "}}" in given:
        draft.tell(Kind.TO_DO, "opsd_teacher_template", given, note="double braces stay double: write single ones")
    if not draft.theirs("use_opd"):
        draft.derive("opsd_mode", "is_pure_opd", True)


def set_teachers(draft: Draft, take_role: Callable[[Draft], None]) -> None:
    """Several teachers, each as if it were the only one.

    Args:
        take_role: derives the keys of model roles.
    """
    for name, section in (draft.theirs("teachers") or {}).items():
        role, links = dict(section), draft.link(f"teachers.{name}")
        own_keys = {"tag_included": role.pop("tag_included", []), "opd_kl_coef": float(role.pop("opd_kl_coef", 1.0))}
        own = Draft(draft.system, Given({"teacher": role}, {"teacher": links}, frozenset()))
        own.take_all()
        take_role(own)
        drop_unread(own)
        tidy_engines(own)
        model = own.ours.pop("teacher_pretrain", None)
        draft.set(f"teachers.{name}", own.get("teacher", {}) | {"pretrain": model})
        for each in own.outcomes:
            if each.key.startswith("teacher."):
                ours = each.ours.replace("teacher_pretrain", "teacher.pretrain").replace(
                    "teacher.", f"teachers.{name}."
                )
                key = each.key.replace("teacher.", f"teacher.{name}.")
                draft.outcomes.append(replace(each, key=key, ours=ours))
        for key, value in own_keys.items():
            draft.derive("teachers", f"teachers.{name}.{key}", value)


def set_picture_columns(draft: Draft, columns: Mapping[str, str], most: int) -> None:
    """What a pipeline of ROLL reads of rows with pictures, and its own bounds of these where the files do not say.

    Those of held-out prompts follow.

    Args:
        columns: by the key that names them here.
        most: pixels of a side of the largest square.
    """
    for key, column in columns.items():
        if draft.get(f"{_DATA}.{key}") != column:
            draft.derive(f"{_DATA}.{key}", f"{_DATA}.{key}", column, "what ROLL reads of rows with pictures")
    note = "set by that pipeline of ROLL" if most < 1024 else "ROLL's default; releases without the key: 1024 × 1024"
    held_out = draft.theirs("validation.data_args.file_name")
    for name, pixels in (("image_max_pixels", most * most), ("image_min_pixels", 56 * 56)):
        key = f"actor_train.data_args.{name}"
        if draft.theirs(key) is None:
            draft.derive(key, key, pixels, note)
        elif held_out and draft.theirs(f"validation.data_args.{name}") is None:
            draft.given.notes.append(f"{name} holds for held-out pictures too; there these have ROLL's default")


def set_distillation(draft: Draft) -> None:
    """The keys that ROLL's distillation reads with others, or with defaults of its own."""
    if not draft.has("distill_loss_weight"):
        draft.derive("distill_loss_weight", "distill_loss_weight", _THEIR_WEIGHT, "ROLL's default")
    if top_k := draft.theirs("logits_topk", _THEIR_TOPK):
        draft.derive("logits_topk", "logits_topk", int(top_k))
    warmth, theirs = (float(draft.theirs(key, 1.0)) for key in ("kd_temperature", "teacher_temperature"))
    if warmth != theirs:
        draft.tell(Kind.IMPOSSIBLE, "teacher_temperature", theirs, note=f"kd_temperature {warmth:g} divides both")
    if draft.get("kd_objective") in _SKEWED and draft.has("skew_lambda"):
        draft.derive("skew_lambda", "skew_lambda", draft.theirs("skew_lambda"))
    for key in ("actor_train.data_args.prompt", "actor_train.data_args.response"):
        if not draft.get(key):
            name = "question" if key.endswith("prompt") else "answer"
            draft.derive(f"{name}_key", key, name, "ROLL's default")
    if media_in(draft):
        _set_pictures(draft)
    set_extent(draft)
    draft.derive("sequence_length", "sample_overflow", "truncate", "a sample that is too long loses its end")
    unread = ("actor_infer", "prompt_length", "response_length")
    for key in [*unread, *(key for key in draft.ours if key not in DistillConfig.model_fields)]:
        draft.drop_ours(key, "a distillation of given answers does not read it")


def _set_pictures(draft: Draft) -> None:
    """Distillation with pictures: its columns and bounds, whatever the keys say."""
    columns = {"prompt": "problem", "response": "solution", "image": "image"}
    for key in columns:
        draft.forget(f"{_DATA}.{key}")
    set_picture_columns(draft, columns, 1024)
    note = "ROLL asks for the answer in a tag <answer> behind every question: write it into the rows"
    draft.tell(Kind.TO_DO, f"{_DATA}.prompt", "problem", note=note)
