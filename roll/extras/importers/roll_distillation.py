"""ROLL's distillation: of answers that are there before, and on the policy's own samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from roll.configs.distill import DistillConfig
from roll.configs.worker import WorkerConfig
from roll.extras.importers.common import drop_unread, tidy_engines
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import Given
from roll.extras.importers.roll_offline import set_extent

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
    """Gives the sections of a student, or of a model under supervision, the policy's names, where these are free."""
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
    set_extent(draft)
    draft.derive("sequence_length", "sample_overflow", "truncate", "what is too long loses its end")
    unread = ("actor_infer", "prompt_length", "response_length")
    for key in [*unread, *(key for key in draft.ours if key not in DistillConfig.model_fields)]:
        draft.drop_ours(key, "a distillation of given answers does not read it")
