"""verl's on-policy distillation: teachers on devices of their own that judge what the policy samples."""

from __future__ import annotations

from typing import Any

from roll.extras.importers.common import GPUS_OF_A_NODE, devices
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.transforms import TRANSFORMS
from roll.extras.importers.verl_roles import ROLLOUT, set_engine

BASE = "distillation"
_LOSS = f"{BASE}.distillation_loss"
_ONE = "teacher_model"
"""Entry of ``teacher_models`` that counts where it is alone."""
_DIVERGENCES = {"forward_kl_topk": "forward_kl", "reverse_kl_topk": "reverse_kl", "jsd_topk": "js_divergence"}
_K1 = ("k1", "kl")


def set_distillation(draft: Draft) -> None:
    """The teachers of a run that has them switched on, and what their opinion counts for."""
    if not draft.theirs(f"{BASE}.enabled"):
        return
    sections = draft.theirs(f"{BASE}.teacher_models") or {}
    entries = {name: f"{BASE}.teacher_models.{name}" for name in sections if name != _ONE or len(sections) == 1}
    if not entries:
        entries = {_ONE: f"{BASE}.{_ONE}"}
    _set_devices(draft, entries)
    if len(entries) == 1:
        (theirs,) = entries.values()
        draft.derive(f"{theirs}.model_path", "teacher_pretrain", draft.theirs(f"{theirs}.model_path"))
        _set_role(draft, "teacher", theirs)
    else:
        _set_several(draft, entries)
    _set_loss(draft)


def _set_several(draft: Draft, entries: dict[str, str]) -> None:
    column, ours = draft.theirs(f"{BASE}.teacher_key"), "actor_train.data_args.tag"
    if column != draft.get(ours):
        note = f"a teacher's rows are known by their tag, the column {draft.get(ours)!r} (data_args.tag)"
        draft.tell(Kind.IMPOSSIBLE, f"{BASE}.teacher_key", column, ours, note=note)
    taught = {str(draft.theirs(f"{theirs}.key")) for theirs in entries.values()}
    for name, theirs in entries.items():
        role = f"teachers.{name}"
        draft.derive(f"{theirs}.model_path", f"{role}.pretrain", draft.theirs(f"{theirs}.model_path"))
        draft.derive(f"{theirs}.key", f"{role}.tag_included", [str(draft.theirs(f"{theirs}.key"))])
        _set_role(draft, role, theirs)
    for name, domain in (draft.get("rewards") or {}).items():
        tags = domain.get("tag_included") or []
        if kept := [tag for tag in tags if tag in taught]:
            draft.derive([], f"rewards.{name}.tag_included", kept, "those that have a teacher")


def _set_devices(draft: Draft, entries: dict[str, str]) -> None:
    """Devices behind those of the policy, which the teachers share out by what each takes."""
    keys = [f"{BASE}.n_gpus_per_node", f"{BASE}.nnodes"]
    gpus, nodes = int(draft.get("num_gpus_per_node", GPUS_OF_A_NODE)), int(draft.get("num_nodes", 1))
    own_gpus, own_nodes = (int(draft.theirs(key) or 0) for key in keys)
    first, count = gpus * nodes, own_gpus * own_nodes
    if not count:  # an earlier form of the section, where the teacher shares the policy's devices
        first, count = 0, first
    elif nodes == own_nodes == 1 and gpus + own_gpus <= GPUS_OF_A_NODE:
        draft.derive(keys, "num_gpus_per_node", gpus + own_gpus, "the teachers' behind the policy's")
    elif gpus == own_gpus or (own_gpus < gpus and own_nodes == 1):
        note = "the teachers' behind the policy's" + (
            "" if gpus == own_gpus else f": {own_gpus} devices of the last node"
        )
        draft.derive(keys, "num_nodes", nodes + own_nodes, note)
    else:
        note = "nodes of two sizes: give num_nodes, num_gpus_per_node and the teachers' device_mapping"
        draft.tell(Kind.TO_DO, f"{BASE}.n_gpus_per_node", own_gpus, note=note)
    for name, theirs in entries.items():
        role = "teacher" if len(entries) == 1 else f"teachers.{name}"
        size = int(draft.theirs(f"{theirs}.inference.tensor_model_parallel_size", 2))
        share = count if len(entries) == 1 else size * int(draft.theirs(f"{theirs}.num_replicas", 1) or 1)
        draft.derive(keys, f"{role}.device_mapping", devices(first, share))
        draft.derive(f"{theirs}.inference.tensor_model_parallel_size", f"{role}.num_gpus_per_worker", size)
        first += share


def _set_role(draft: Draft, role: str, theirs: str) -> None:
    """An engine that scores what the policy has sampled, by default of the policy's own kind."""
    inference = f"{theirs}.inference"
    name = draft.theirs(f"{inference}.name", draft.theirs(f"{ROLLOUT}.name"))
    draft.derive(f"{inference}.name", f"{role}.strategy_args.strategy_name", TRANSFORMS["generator"](name))
    dtype = draft.theirs(f"{inference}.dtype", draft.theirs(f"{ROLLOUT}.dtype"))
    draft.derive(f"{inference}.dtype", f"{role}.model_args.dtype", TRANSFORMS["dtype"](dtype))
    set_engine(draft, role, inference)


def _set_loss(draft: Draft) -> None:
    rewarded = draft.theirs(f"{_LOSS}.use_task_rewards", draft.theirs(f"{_LOSS}.use_policy_loss", True))
    draft.derive([f"{_LOSS}.use_task_rewards", f"{_LOSS}.use_policy_loss"], "is_pure_opd", not rewarded)
    coefficient = float(draft.theirs(f"{_LOSS}.distillation_loss_coef"))
    if rewarded and coefficient != 1:
        draft.derive(f"{_LOSS}.distillation_loss_coef", "opd_kl_coef", coefficient)
    mode, at_mode = draft.theirs(f"{_LOSS}.loss_mode"), f"{_LOSS}.loss_mode"
    if draft.theirs(f"{_LOSS}.use_policy_gradient"):
        draft.derive([f"{_LOSS}.use_policy_gradient", at_mode], "opd_form", "advantage")
        if mode not in _K1:
            _tell(draft, at_mode, mode, "opd_form", "the term of a sampled token is k1, which is unbiased: it is taken")
        if (bound := draft.theirs(f"{_LOSS}.loss_max_clamp")) is not None:
            weighted = float(bound) * (coefficient if rewarded else 1.0)
            draft.derive(f"{_LOSS}.loss_max_clamp", "opd_token_kld_clip", weighted, "with the coefficient")
        if float(draft.theirs(f"{_LOSS}.kd_temperature") or 1) != 1:
            note = "the term of a sampled token is at the temperature of sampling"
            _tell(draft, f"{_LOSS}.kd_temperature", draft.theirs(f"{_LOSS}.kd_temperature"), "kd_temperature", note)
        draft.carry(f"{_LOSS}.log_prob_min_clamp", "opd_logprob_min", float)
        return
    for key in ("loss_max_clamp", "log_prob_min_clamp"):
        if (seen := draft.theirs(f"{_LOSS}.{key}")) is not None:
            _tell(draft, f"{_LOSS}.{key}", seen, "opd_form", "a divergence over the vocabulary is not clamped")
    draft.derive(f"{_LOSS}.use_policy_gradient", "opd_form", "loss")
    objective = _DIVERGENCES.get(mode)
    if objective is None:
        _tell(draft, at_mode, mode, "kd_objective", "reverse_kl over the likeliest tokens is taken for an estimate")
        objective = "reverse_kl"
    draft.derive(at_mode, "kd_objective", objective, "all other tokens are one more outcome")
    draft.carry(f"{_LOSS}.topk", "logits_topk", int)
    if (warmth := draft.theirs(f"{_LOSS}.kd_temperature")) is not None and float(warmth) != 1:
        sampled = float(draft.get("actor_infer.generating_args.temperature", 1.0))
        note = f"it divides logits that the temperature of sampling, {sampled:g}, has divided" if sampled != 1 else ""
        draft.derive(f"{_LOSS}.kd_temperature", "kd_temperature", float(warmth) * sampled, note)
    if objective == "js_divergence" and draft.has(f"{_LOSS}.jsd_beta"):
        draft.carry(f"{_LOSS}.jsd_beta", "jsd_beta", float)


def _tell(draft: Draft, key: str, seen: Any, ours: str, note: str) -> None:
    draft.tell(Kind.IMPOSSIBLE, key, seen, ours, note=note)
