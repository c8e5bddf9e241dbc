"""verl's configurations: keys that are converted together, with on-policy distillation and asynchronous trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import ROLES
from roll.extras.importers.common import (
    GPUS_OF_A_NODE,
    devices,
    drop_unread,
    leaves,
    profiler_of_verl,
    sequence_ranks,
    set_batch,
    set_budget,
    tidy_engines,
    to_do,
    trust_code,
)
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.recognise import media_in, picture_family
from roll.extras.importers.table import DROP, TRANSFORMS, Omitted, Partial, Untranslatable, usual
from roll.extras.importers.verl_algorithm import CORRECTION, set_algorithm, set_bypass, set_optimizer, set_rewards
from roll.extras.importers.verl_roles import (
    ACTOR,
    CRITIC,
    PER_GPU,
    REF,
    ROLLOUT,
    per_device,
    set_critic,
    set_engine,
    set_roles,
)
from roll.extras.importers.verl_tools import set_tools

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
        draft.derive(keys, "num_gpus_per_node", gpus + own_gpus, "the teachers' after the policy's")
    elif gpus == own_gpus or (own_gpus < gpus and own_nodes == 1):
        note = "the teachers' after the policy's" + (
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
        if (got := draft.theirs(f"{_LOSS}.{key}")) is not None:
            _tell(draft, f"{_LOSS}.{key}", got, "opd_form", "a divergence over the vocabulary is not clamped")
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


def _tell(draft: Draft, key: str, got: Any, ours: str, note: str) -> None:
    draft.tell(Kind.IMPOSSIBLE, key, got, ours, note=note)


PROJECTS = {"wandb": "project", "swanlab": "project", "trackio": "project", "mlflow": "experiment_name"}
"""By tracker: its name for a project."""
_SKIPPED = (
    (f"{ROLLOUT}.skip_rollout", f"{ROLLOUT}.skip_dump_dir"),
    (f"{ROLLOUT}.skip.enable", f"{ROLLOUT}.skip.dump_dir"),
    *((f"skip.{name}.enable", f"skip.{name}.dump_dir") for name in ("rollout", "rollout_tq", "async_rollout")),
)
_ENGINES = (0, 8)
"""The release since which engines train, in place of workers for FSDP and for Megatron."""
_RECIPES = ("algorithm.filter_groups.", "data.gen_batch_size", "async_training.", "rollout.", f"{ACTOR}.use_rollout")
"""Keys that recipes had before the releases did."""
_NAMED = re.compile(r"[^\w.+-]+")
_LINK = re.compile(r"(\$\{oc\.env:\w+\})")


def derive(draft: Draft) -> type[RLVRConfig]:
    """Everything that no row of the table says by itself; returns whose configuration it is."""
    _length(draft)
    set_run(draft, f"{ACTOR}.checkpoint", ("actor_rollout_ref.model.external_lib", "critic.model.external_lib"))
    _data(draft)
    _skipped_rollouts(draft)
    set_roles(draft)
    set_algorithm(draft)
    set_asynchronous(draft)
    updates = updates_of_a_batch(draft)
    set_optimizer(draft, f"{ACTOR}.optim", "actor_train", updates)
    set_rewards(draft)
    set_tools(draft)
    set_distillation(draft)
    _validation(draft)
    if draft.get("adv_estimator") == "gae":
        set_critic(draft, updates)
    _batches(draft)
    drop_unread(draft)
    policy = ["data.trust_remote_code", "actor_rollout_ref.model.trust_remote_code"]
    if draft.get("reward_pretrain") is None:
        trust_code(draft, policy, ROLES)
    else:
        trust_code(draft, policy)
        trust_code(draft, ["critic.model.trust_remote_code"], ("critic",))
    tidy_engines(draft)
    profiler_of_verl(draft)
    _tell_release(draft)
    _tell_first_releases(draft)
    return RLVRConfig


def _tell_release(draft: Draft) -> None:
    """Notes what hangs on the release that a file is for, known by its keys: before engines train, or since."""
    older, newer = releases_of(draft)
    if older and newer:
        draft.given.notes.append(
            f"keys of releases up to 0.7 ({_some(older)}) with keys of 0.8 and later ({_some(newer)}): no release of "
            "verl reads all of them; here each is read as its own release does"
        )
    if draft.get("loss_agg_mode", "token-mean") == "token-mean" and (older or not newer):
        which = f"as {_some(older)} says" if older else "if it is for one of these, which the file does not say"
        draft.given.notes.append(
            f"in releases up to 0.7, {which}, token-mean is a mean over the tokens of each micro-batch, these means "
            "weighted by samples; since 0.8, and here, it is the mean over all tokens of an optimizer step"
        )


def _tell_first_releases(draft: Draft) -> None:
    """Notes what releases before 0.3 do with a file that gives a coefficient of the KL, and no switch for it."""
    switched = draft.has("algorithm.use_kl_in_reward") or draft.theirs(f"{ACTOR}.use_kl_loss")
    if not switched and draft.has(key := "algorithm.kl_ctrl.kl_coef") and draft.theirs(key):
        draft.given.notes.append(
            f"releases before 0.3 take a KL of {key} = {draft.theirs(key):g} from the reward wherever use_kl_loss is "
            "off, later ones only with algorithm.use_kl_in_reward: if the file is for one of the first, give "
            "algorithm.use_kl_in_reward=true, actor_rollout_ref.actor.entropy_coeff=0.001, their default, and "
            "know that their loss has no dual clip, and long prompts are left out"
        )


def releases_of(draft: Draft) -> tuple[list[str], list[str]]:
    """The keys of a file that only releases before engines train have, and those of only later ones."""
    older, newer = list[str](), ["model_engine"] if draft.has("model_engine") else []
    for key, _ in leaves(draft.given.values):
        releases = usual(draft.system, key).releases
        since = {tuple(map(int, each.split("."))) >= _ENGINES for each in releases}
        if len(since) == 1 and not key.startswith(_RECIPES):
            (newer if True in since else older).append(key)
    return older, newer


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")


def _length(draft: Draft) -> None:
    steps, epochs = draft.theirs("trainer.total_training_steps"), draft.theirs("trainer.total_epochs")
    if is_streaming(draft):
        set_versions(draft)
    elif steps:
        draft.derive(["trainer.total_training_steps", "trainer.total_epochs"], "max_steps", int(steps))
    else:
        draft.derive("trainer.total_epochs", "total_epochs", int(epochs))
    frequency = draft.theirs(key := key_of_evaluations(draft)) or 0
    if not isinstance(frequency, str) and int(frequency) <= 0:
        draft.derive(key, "val_after_train", False)
    if kept := draft.theirs("trainer.max_actor_ckpt_to_keep"):
        draft.derive("trainer.max_actor_ckpt_to_keep", "max_ckpt_to_keep", int(kept))
    elif draft.theirs("trainer.remove_previous_ckpt_in_save"):
        draft.derive("trainer.remove_previous_ckpt_in_save", "max_ckpt_to_keep", 1)


def set_run(draft: Draft, checkpoint: str, libraries: Sequence[str]) -> None:
    """Name, trackers, plugins and checkpoints, which all of verl's trainers read alike.

    Args:
        checkpoint: their section of what is saved.
        libraries: their keys of packages that are imported first.
    """
    if name := draft.theirs("trainer.experiment_name"):
        parts = _LINK.split(str(name))  # links stay as they are
        clean = "".join(part if part.startswith("${") else _NAMED.sub("_", part) for part in parts)
        draft.derive("trainer.experiment_name", "exp_name", clean.strip("_") or "verl")
    if (saved := draft.get("checkpoint_config.save_contents")) and not draft.get("checkpoint_config.load_contents"):
        draft.derive(f"{checkpoint}.save_contents", "checkpoint_config.load_contents", saved, "as it is saved")
    try:
        draft.derive("trainer.logger", "track_with", TRANSFORMS["trackers"](draft.theirs("trainer.logger")))
    except Partial as some:
        draft.derive("trainer.logger", "track_with", some.value, str(some))
    except Omitted as why:
        draft.derive("trainer.logger", "track_with", "stdout", str(why))
    named = {key: draft.theirs(key) for key in libraries}
    if plugins := list(dict.fromkeys(lib for libs in named.values() for lib in _listed(libs))):
        draft.derive([key for key, libs in named.items() if libs], "plugins", plugins)
    trackers = draft.get("track_with")
    for name in _listed(trackers):
        if ours := PROJECTS.get(name):
            key = f"tracker_kwargs.{name}.{ours}" if isinstance(trackers, list) else f"tracker_kwargs.{ours}"
            draft.derive("trainer.project_name", key, str(draft.theirs("trainer.project_name")))
    draft.carry_set("trainer.default_local_dir", "checkpoint_config.output_dir")
    if draft.get("resume_from_checkpoint") == "resume_path":
        path = draft.theirs("trainer.resume_from_path")
        draft.derive("trainer.resume_from_path", "resume_from_checkpoint", path)
        to_do(draft, "trainer.resume_from_path", "checkpoints of verl are not read: give one of this library", path)


def _listed(names: object) -> list[str]:
    return [str(name) for name in (names if isinstance(names, list) else [names]) if name]


def _data(draft: Draft) -> None:
    data = "actor_train.data_args"
    draft.derive("data.reward_fn_key", f"{data}.response", "reward_model.ground_truth", "where verl's rows have it")
    drop = draft.theirs("data.filter_overlong_prompts")
    truncation = draft.theirs("data.truncation")
    try:
        overflow = "drop" if drop else TRANSFORMS["truncation"](truncation)
        draft.derive(["data.filter_overlong_prompts", "data.truncation"], f"{data}.prompt_overflow", overflow)
    except Untranslatable as error:
        draft.tell(Kind.IMPOSSIBLE, "data.truncation", truncation, note=str(error))
    if draft.has("data.image_key") and (column := draft.theirs("data.image_key")) != "images":
        draft.derive("data.image_key", f"{data}.image", column)
    if draft.has("data.video_key") and (column := draft.theirs("data.video_key")) != "videos":
        draft.derive("data.video_key", f"{data}.video", column)
    if draft.theirs(key := "actor_rollout_ref.actor.freeze_vision_tower") and media_in(draft):
        if picture_family(str(draft.get("pretrain"))) in ("gemma3", "llava", "mistral3"):
            draft.tell(Kind.DROPPED, key, True, note="verl freezes towers that are called visual alone")
        else:
            draft.derive(key, "actor_train.model_args.freeze_module_prefix", "model.visual")
    if draft.has("data.seed"):
        draft.carry("data.seed", "seed", int)
    whole = int(draft.get("prompt_length", 512)) + int(draft.get("response_length", 512))
    draft.derive(["data.max_prompt_length", "data.max_response_length"], "sequence_length", whole)
    if not draft.get("actor_train.data_args.dataset_filter.num_samples", 1):
        draft.remove("actor_train.data_args.dataset_filter.num_samples")


def _skipped_rollouts(draft: Draft) -> None:
    """Rollouts that a first run keeps, and that later ones take in place of generating."""
    for switch, folder in _SKIPPED:
        if not draft.theirs(switch):
            continue
        where = str(draft.theirs(folder) or draft.theirs(_SKIPPED[0][1]))
        if draft.get("rollout_dump_dir"):
            where = str(draft.get("rollout_dump_dir"))
            draft.tell(Kind.DERIVED, switch, True, "rollout_dump_dir", where)
        else:
            draft.derive([switch, folder], "rollout_dump_dir", where)
        note = f"theirs are not read: once {where} has every step, give rollout_replay_dir in place of rollout_dump_dir"
        to_do(draft, switch, note, True, "rollout_replay_dir")


def _validation(draft: Draft) -> None:
    if not draft.get("validation.data_args.file_name"):
        draft.remove("validation")
        return
    base, theirs = "validation.generating_args", f"{ROLLOUT}.val_kwargs"
    said, warm = bool(draft.theirs(f"{theirs}.do_sample")), float(draft.theirs(f"{theirs}.temperature")) > 0
    samples = warm and (said or draft.theirs(f"{ROLLOUT}.mode") != "sync")
    note = "" if samples == said else "the temperature decides there, unless rollout.mode is sync"
    draft.derive([f"{theirs}.do_sample", f"{theirs}.temperature"], f"{base}.do_sample", samples, note)
    draft.derive(f"{theirs}.n", f"{base}.num_return_sequences", int(draft.theirs(f"{theirs}.n")))
    for key, kind in (("temperature", float), ("top_p", float), ("top_k", int)) if samples else ():
        draft.derive(f"{theirs}.{key}", f"{base}.{key}", kind(draft.theirs(f"{theirs}.{key}")))
    most = draft.theirs("data.val_max_samples", -1)
    words = "all of the held-out prompts"
    bound = int(most) if most and int(most) > 0 else None
    draft.derive("data.val_max_samples", "val_batch_size", bound, "" if bound else words)


def _batches(draft: Draft) -> None:
    answers = counted = int(draft.get("num_return_sequences_in_group", 1))
    if (copies := int(draft.theirs(f"{ROLLOUT}.n_agent", 1) or 1)) > 1:  # which ppo_mini_batch_size does not count
        answers *= copies
        draft.derive([f"{ROLLOUT}.n_agent", f"{ROLLOUT}.n"], "num_return_sequences_in_group", answers)
    per_step = int(draft.get("rollout_batch_size", 1024)) * answers
    samples = int(draft.theirs(f"{ACTOR}.ppo_mini_batch_size")) * counted
    for role, theirs in (("actor_train", ACTOR), ("critic", CRITIC)):
        if role not in draft.ours:
            continue
        dynamic = draft.theirs(f"{theirs}.use_dynamic_bsz", draft.theirs(f"{ACTOR}.use_dynamic_bsz"))
        size = f"{theirs}.ppo_micro_batch_size"
        micro = None if dynamic else per_device(draft, size)
        keys = [f"{theirs}.ppo_mini_batch_size", f"{size}{PER_GPU}", size]
        set_batch(draft, role, samples, micro, keys, per_step)
        if dynamic:
            key = f"{theirs}.ppo_max_token_len_per_gpu"
            tokens = int(draft.theirs(key, 16384)) * sequence_ranks(draft, role)
            set_budget(draft, role, "train", tokens, [f"{theirs}.use_dynamic_bsz", key])
    scoring = {"actor_train": (ROLLOUT, "log_prob"), "reference": (REF, "log_prob"), "critic": (CRITIC, "forward")}
    for role, (theirs, word) in scoring.items():
        if role not in draft.ours:
            continue
        switch, key = f"{theirs}.{word}_use_dynamic_bsz", f"{theirs}.{word}_max_token_len_per_gpu"
        dynamic = draft.theirs(switch, draft.theirs(f"{ACTOR}.use_dynamic_bsz"))
        if dynamic:
            budget = draft.theirs(key) or draft.theirs(f"{ACTOR}.ppo_max_token_len_per_gpu")
            set_budget(draft, role, "infer", int(budget) * sequence_ranks(draft, role), [switch, key])
        elif role != "critic" and (share := per_device(draft, size := f"{theirs}.log_prob_micro_batch_size")):
            draft.derive([f"{size}{PER_GPU}", size], f"{role}.infer_batch_size", share)
    if (packs := draft.get("actor_train.use_sequence_packing")) is not None and "reference" in draft.ours:
        draft.set("reference.use_sequence_packing", packs)


_SECTION = "trainer.v1"
_MODE = f"{_SECTION}.trainer_mode"
_OLDEST, _SYNC, _AHEAD = "max_off_policy_threshold", "parameter_sync_step", "num_warmup_batches"
SHARED, APART = "colocate_async", "separate_async"
_READ = (_OLDEST, _SYNC, _AHEAD, "max_off_policy_strategy")
_THEIR_SYNC = 4
"""Shares of a batch that devices apart train on before the generator is updated, by default."""
_THEIR_OLDEST = 8
"""Versions that an answer may span by default; null bounds nothing."""


def mode_of(draft: Draft) -> str:
    """The mode that runs, ``sync`` where the newer trainer is switched off."""
    return "sync" if draft.theirs("trainer.use_v1") is False else str(draft.theirs(_MODE) or "sync")


def shares_of_a_batch(draft: Draft) -> int:
    """Shares of a batch that are trained on one after another, after all of which the generator is updated."""
    if mode_of(draft) != APART:
        return 1
    return max(1, int(_found(draft, _SYNC)[1] or _THEIR_SYNC))


def set_mode(draft: Draft) -> None:
    """How far rollouts go on beside training; devices are set elsewhere."""
    mode, given = mode_of(draft), draft.theirs(_MODE)
    if mode == "sync":
        if given not in (None, "sync"):
            draft.tell(Kind.DROPPED, _MODE, given, note="trainer.use_v1 is false")
        return
    if mode not in (SHARED, APART):
        note = f"there are sync, {SHARED} and {APART}"
        draft.tell(Kind.IMPOSSIBLE, _MODE, mode, "async_generation_ratio", note=note)
        return
    if (count := shares_of_a_batch(draft)) > 1:
        _tell_shares(draft, count)
    (oldest_key, oldest), (ahead_key, ahead) = _found(draft, _OLDEST), _found(draft, _AHEAD)
    keys = [_MODE, *(key for key in (ahead_key, oldest_key) if key)]
    steps = 1.0 if ahead is None else float(ahead)
    unbounded = draft.has(f"{_SECTION}.sampler.{_OLDEST}") and oldest is None
    bound = math.inf if unbounded else int(_THEIR_OLDEST if oldest is None else oldest)
    if min(steps, bound) <= 0:
        draft.derive(keys, "async_generation_ratio", 0.0, "no answer is older: generation and training take turns")
    else:
        note = f"so many batches ahead as {_AHEAD}; nothing is dropped for its age"
        draft.derive(keys, "async_generation_ratio", float(min(steps, bound)), note)
        if bound >= 2 * math.ceil(steps) + 1:  # the lag of groups that a step may choose from
            draft.derive(keys, "rollout_window", 1.0, "a step takes the groups that finish first, here within a window")
        draft.derive(_MODE, "partial_rollout", True, "answers in flight go on under new weights")
    _tell_others(draft, mode)


def _tell_shares(draft: Draft, count: int) -> None:
    """A batch is ``parameter_sync_step`` mini-batches there, each an optimizer step, as a step's are here."""
    key = _found(draft, _SYNC)[0] or _MODE
    prompts, size = int(draft.get("rollout_batch_size", 1024)), int(draft.theirs(f"{ACTOR}.ppo_mini_batch_size"))
    if prompts != count * size:
        note = f"there train_batch_size, {prompts}, has to be parameter_sync_step × ppo_mini_batch_size, {count * size}"
        draft.tell(Kind.IMPOSSIBLE, key, count, "rollout_batch_size", note=note)
    if (passes := int(draft.theirs(f"{ACTOR}.ppo_epochs"))) > 1:
        note = (
            f"each share of a batch is gone over {passes} times there, and a step's {prompts} prompts as a whole here"
        )
        draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.ppo_epochs", passes, "ppo_epochs", note=note)


def _tell_others(draft: Draft, mode: str) -> None:
    """Notes the keys of the mode that are not read here: what they do is not known."""
    for key, value in _given(draft):
        own = key.removeprefix(f"{_SECTION}.").split(".")
        other = {SHARED, APART, "sync"} - {mode}
        if own[-1] not in (*_READ, "trainer_mode") and own[0] not in other and _is_asked(draft, key, value):
            draft.tell(Kind.IMPOSSIBLE, key, value, note=f"nothing is known of it here: see what it does in {mode}")


def _is_asked(draft: Draft, key: str, value: Any) -> bool:
    """Tells whether a key asks for something that no rule drops, other than its default."""
    return draft.rule(key) not in ("", DROP) and not draft.is_usual(key, value)


def _found(draft: Draft, name: str) -> tuple[str, Any]:
    """A key of the newer trainer by its last part, wherever a release has it, and its value."""
    other = {SHARED: APART, APART: SHARED}.get(mode_of(draft), "")
    for key, value in _given(draft):
        if key.endswith(f".{name}") and not key.startswith(f"{_SECTION}.{other}."):
            return key, value
    return "", None


def _given(draft: Draft) -> Iterator[tuple[str, Any]]:
    """Keys of the newer trainer that say something, with their values."""
    found = leaves(draft.theirs(_SECTION) or {}, f"{_SECTION}.")
    return ((key, value) for key, value in found if value not in (None, {}))


_ASYNC = "async_training"
_POOL = "rollout"
"""Section of the devices that generate; releases from 2026 on have them in ``actor_rollout_ref.rollout`` too."""
_TRAINING = ("trainer.nnodes", "trainer.n_gpus_per_node")
_APART = "actor_rollout_ref.hybrid_engine"
_WEIGHT = "train_infer_correction.is_weight"
_AT_ONCE = (f"{_ASYNC}.concurrent_samples_per_replica", f"{_POOL}.max_concurrent_samples_per_replica")
_THEIR_BOUND = 2.0
"""Bound at which verl truncates importance weights by default."""


def is_streaming(draft: Draft) -> bool:
    """Tells whether the fully asynchronous trainer runs: it counts versions of the weights, and prompts one by one."""
    return draft.has(_ASYNC) or _starts(draft, "fully_async")


def is_apart(draft: Draft) -> bool:
    """Tells whether the generator has devices of its own."""
    pool = draft.has(f"{_POOL}.n_gpus_per_node")
    return is_streaming(draft) or pool or _starts(draft, "one_step_off") or mode_of(draft) == APART


def _starts(draft: Draft, name: str) -> bool:
    return any(name in each for each in (draft.given.program, *draft.given.missing))


def updates_of_a_batch(draft: Draft) -> int:
    """Optimizer steps of a batch, after which their schedules of the learning rate go on by one."""
    prompts = int(draft.get("rollout_batch_size", 1024)) * int(draft.theirs(f"{ROLLOUT}.n_agent", 1) or 1)
    if is_streaming(draft):
        prompts //= int(draft.theirs(f"{_ASYNC}.trigger_parameter_sync_step"))
    prompts //= shares_of_a_batch(draft)
    passes = int(draft.theirs(f"{ACTOR}.ppo_epochs"))
    return max(1, prompts // int(draft.theirs(f"{ACTOR}.ppo_mini_batch_size"))) * passes


def key_of_evaluations(draft: Draft) -> str:
    """Their key of the steps between two evaluations."""
    own = f"{_POOL}.test_freq"  # of releases until 2026, which read it before the other
    return own if is_streaming(draft) and draft.has(own) else "trainer.test_freq"


def set_versions(draft: Draft) -> None:
    """Steps of the fully asynchronous trainer: what is trained between two updates of the generator is one."""
    keys = [f"{_ASYNC}.trigger_parameter_sync_step", f"{_ASYNC}.require_batches", f"{ACTOR}.ppo_mini_batch_size"]
    fetches, batches, size = (int(draft.theirs(key)) for key in keys)
    prompts = fetches * batches * size
    draft.retell("rollout_batch_size", Kind.DROPPED, f"not read there: {', '.join(keys)} are")
    each = f"{fetches} fetches × {batches} batches × {size} prompts"
    draft.derive(keys, "rollout_batch_size", prompts, f"{each} between two updates of the generator, which is a step")
    _set_end(draft, prompts)
    if (key := key_of_evaluations(draft)).startswith(_POOL):
        draft.retell("eval_steps", Kind.DROPPED, f"{key} is read")
        draft.derive(key, "eval_steps", max(0, int(draft.theirs(key))), "in updates of the generator, which are steps")
    if fetches > 1 and (warm := int(draft.theirs("trainer.critic_warmup") or 0)):
        draft.forget("critic_warmup")
        draft.derive("trainer.critic_warmup", "critic_warmup", -(-warm // fetches), f"{warm} fetches, {fetches} a step")
    if fetches > 1 and (passes := int(draft.theirs(f"{ACTOR}.ppo_epochs"))) > 1:
        note = f"each fetch is gone over {passes} times there, and a step's {prompts} prompts as a whole here"
        draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.ppo_epochs", passes, "ppo_epochs", note=note)


def _set_end(draft: Draft, prompts: int) -> None:
    """Sets the end of a run whose steps have so many prompts."""
    key, epochs = f"{_POOL}.total_rollout_steps", [f"{_POOL}.total_epochs", "trainer.total_epochs"]
    unread = ["trainer.total_training_steps"]
    if total := draft.theirs(key):
        note = f"{total} prompts in steps of {prompts}; the end of the epochs, if it comes first, ends a run there"
        draft.derive(key, "max_steps", max(1, int(total) // prompts), note)
        unread += epochs
    else:
        draft.derive(epochs, "total_epochs", int(draft.theirs(epochs[0]) or draft.theirs(epochs[1])))
    for other in unread:
        if draft.has(other):
            why = f"{key} is read" if total else "the epochs are read"
            draft.tell(Kind.DROPPED, other, draft.theirs(other), note=why)


def set_asynchronous(draft: Draft) -> None:
    """Devices of the two sides, how far generation runs ahead, and the loss of what older weights sampled."""
    mode = mode_of(draft)
    set_mode(draft)
    if mode == SHARED:
        _set_correction(draft)
        return
    if not is_apart(draft):
        if draft.theirs(_APART) is False:
            note = "of trainers that generate while they train: async_generation_ratio, with devices for actor_infer"
            draft.tell(Kind.IMPOSSIBLE, _APART, False, "actor_infer.device_mapping", note=note)
        return
    _set_devices_of_mode(draft)
    if is_streaming(draft):
        _set_staleness(draft)
        _set_concurrency(draft)
    elif mode != APART:
        note = "a batch is generated while the one before it is trained on"
        draft.derive(_APART, "async_generation_ratio", 1.0, note)
        draft.derive(_APART, "partial_rollout", False, "weights come between two batches")
    _set_correction(draft)


def _set_devices_of_mode(draft: Draft) -> None:
    """Beside each other on every node where both fit, else on nodes of their own."""
    own = (f"{_POOL}.nnodes", f"{_POOL}.n_gpus_per_node")
    other = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
    generating = other if draft.has(other[1]) and not any(draft.has(key) for key in own) else own
    nodes, gpus = (int(draft.theirs(key, 1)) for key in _TRAINING)
    own_nodes, own_gpus = (int(draft.theirs(key, 1)) for key in generating)
    if together := nodes == own_nodes and gpus + own_gpus <= GPUS_OF_A_NODE:
        size, total = gpus + own_gpus, nodes
        train, infer = _places(0, nodes, size, 0, gpus), _places(0, nodes, size, gpus, own_gpus)
    else:
        size, total = max(gpus, own_gpus), nodes + own_nodes
        train, infer = _places(0, nodes, size, 0, gpus), _places(nodes, own_nodes, size, 0, own_gpus)
    for role in [role for role, section in draft.roles() if "device_mapping" in section]:
        keys, mapping = ((*generating, _APART), infer) if role == "actor_infer" else (_TRAINING, train)
        draft.forget(f"{role}.device_mapping")
        draft.derive(keys, f"{role}.device_mapping", mapping)
    note = "those that train and those that generate" + (" on each node" if together else ", on nodes of their own")
    for ours, at, value in (("num_nodes", 0, total), ("num_gpus_per_node", 1, size)):
        draft.forget(ours)
        draft.derive([_TRAINING[at], generating[at]], ours, value, note)


def _places(first: int, nodes: int, size: int, offset: int, count: int) -> str:
    """A ``device_mapping`` of so many devices on each of some nodes of a size."""
    if count == size:
        return devices(first * size, nodes * size)
    return " + ".join(devices(node * size + offset, count) for node in range(first, first + nodes))


def _set_staleness(draft: Draft) -> None:
    """Sets how far rollouts run ahead: their threshold bounds what was begun before the weights came, as ours does."""
    key, partial = f"{_ASYNC}.staleness_threshold", f"{_ASYNC}.partial_rollout"
    threshold, groups = float(draft.theirs(key)), int(draft.get("rollout_batch_size"))
    if int(threshold * groups) < 1:
        draft.derive(key, "async_generation_ratio", 0.0, "less than a group ahead: generation and training take turns")
        if draft.has(partial):
            draft.tell(Kind.DROPPED, partial, draft.theirs(partial), note=f"read with {key}")
        return
    draft.derive(key, "async_generation_ratio", threshold, f"at most {int(threshold * groups)} groups ahead in both")
    draft.derive(key, "rollout_window", 1.0, "a step takes the groups that finish first, here within a window")
    draft.derive(partial, "partial_rollout", bool(draft.theirs(partial)))


def _set_concurrency(draft: Draft) -> None:
    """Groups at once, which their generator bounds by its engines."""
    key = next((each for each in _AT_ONCE if draft.has(each)), _AT_ONCE[0])
    groups, ratio = int(draft.get("rollout_batch_size")), float(draft.get("async_generation_ratio"))
    gpus = int(draft.theirs(f"{_POOL}.nnodes")) * int(draft.theirs(f"{_POOL}.n_gpus_per_node"))
    engines = max(1, gpus // int(draft.get("actor_infer.num_gpus_per_worker", 1)))
    most = int(draft.theirs(key)) * engines
    if most < groups + int(ratio * groups):
        draft.derive(key, "max_running_groups", most, f"at each of {engines} engines there, of all of them here")
    elif draft.has(key):
        draft.tell(Kind.DROPPED, key, draft.theirs(key), note="no more groups than that are under way")


def _bypasses(draft: Draft) -> bool:
    """Tells whether their loss compares with the policy that sampled where the files do not say."""
    of_theirs = is_streaming(draft) or draft.given.program.startswith("verl.")
    return of_theirs and mode_of(draft) not in (SHARED, APART)


def _set_correction(draft: Draft) -> None:
    """Sets the loss's old policy, where the files leave it to a release, and weights where it needs them."""
    if draft.get("train_infer_correction.bypass"):
        return
    said, scored = f"{CORRECTION}.bypass_mode", f"{_ASYNC}.compute_prox_log_prob"
    sampled = [f"{_ASYNC}.use_rollout_log_probs", f"{ACTOR}.use_rollout_log_probs"]
    asked = [scored] if draft.theirs(scored) else [key for key in sampled if draft.theirs(key) is False]
    if asked:
        note = "the trainer computes log-probs of its samples under the weights that a step begins with"
        draft.derive(asked, "train_infer_correction.bypass", False, note)
    elif draft.theirs(said) is None and _bypasses(draft):
        set_bypass(draft, [said, *sampled], "on there by default", rejects=not draft.has(sampled[0]))
        return
    if draft.get("async_generation_ratio") and not draft.get(f"{_WEIGHT}.enabled"):
        draft.set(_WEIGHT, {"enabled": True, "weight_type": "token", "upper_bound": _THEIR_BOUND})
        note = "samples of older weights count there as if they were new; here they need importance weights, set so"
        key = f"{CORRECTION}.rollout_is"
        draft.tell(Kind.IMPOSSIBLE, key, draft.theirs(key), f"{_WEIGHT}.enabled", note=note)
