"""verl's algorithm: losses, rejection of tokens and sequences, KL, optimizer, rewards."""

from __future__ import annotations

import math
from typing import Any

from roll.configs.problems import NOTHING
from roll.configs.worker import parse_device_mapping
from roll.extras.importers.common import DOMAINS, public_domains, to_do
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.table import Untranslatable

NO_BOUND = 1e9
"""Above every ratio, which is at most exp(20)."""
_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
_K1 = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_OF_TOKENS = ("token_k2", "token_k3", "seq_max_k2", "seq_max_k3")


def filter_of(level: str, low: float, high: float, *, whole_rows: bool = False) -> dict[str, Any]:
    """An entry of ``train_infer_correction.filters``."""
    found = {"enabled": True, "agg_type": level, "ratio_low": low, "ratio_high": high}
    return found | {"whole_rows": True} if whole_rows else found


def rejections(options: Any, bounds: Any, least: Any) -> list[dict[str, Any]]:
    """The filters of ``rollout_rs``, ``rollout_rs_threshold`` and (of earlier releases) ``…_threshold_lower``.

    ``token``, ``sequence`` and ``geometric`` bound the ratio r itself, ``*_k1`` its inverse, ``*_k2`` (log r)² / 2 and
    ``*_k3`` r - 1 - log r from above.

    Raises:
        Untranslatable: an option is no bound of a ratio.
    """
    names = [name.strip() for name in str(options or "").split(",") if name.strip()]
    given = [each.strip() for each in str(2.0 if bounds is None else bounds).split(",")]
    if len(given) not in (1, len(names)) and names:
        raise Untranslatable(f"{len(given)} thresholds for {len(names)} options")
    return [_filter(name, given[0 if len(given) == 1 else i], least) for i, name in enumerate(names)]


def _filter(name: str, bound: str, least: Any) -> dict[str, Any]:
    low, _, high = bound.rpartition("_")
    upper = float(high)
    lower = float(low) if low else 1 / upper
    if name in _LEVELS:
        return filter_of(_LEVELS[name], lower if least is None else float(least), upper)
    if name in _K1:
        return filter_of(_K1[name], 1 / upper, 1 / lower)
    if name not in _OF_TOKENS:
        raise Untranslatable(f"{name} is no bound of a ratio: there are {', '.join([*_LEVELS, *_K1, *_OF_TOKENS])}")
    reach = math.sqrt(2 * upper)
    down, up = (-reach, reach) if name.endswith("k2") else (_root(upper, -(upper + 1)), _root(upper, reach))
    return filter_of("token", math.exp(down), math.exp(up), whole_rows=name.startswith("seq_"))


def _root(bound: float, outside: float) -> float:
    """The log ratio x on the side of ``outside`` (where it is more) at which exp(x) - 1 - x is the bound."""
    inside = 0.0
    for _ in range(100):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if math.expm1(middle) - middle <= bound else (inside, middle)
    return inside


ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer",
)
"""Sections in which releases of verl have the penalty of long answers."""
_KWARGS = ("reward_model.reward_kwargs", "reward.reward_kwargs")
_SERVED = "reward.reward_model.model_path"
_READ_KWARGS = ("overlong_buffer_cfg", "max_resp_len")
_HARDLY_EVER = 100.0
"""Ratio of a token's probabilities that no run reaches within a divergence threshold."""


def set_algorithm(draft: Draft) -> None:
    """The policy's loss, KL and the correction of the mismatch between engines."""
    low, high = (draft.theirs(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    clip = draft.theirs(f"{ACTOR}.clip_ratio")
    low, high = (clip if low is None else low), (clip if high is None else high)
    loss = draft.theirs(f"{ACTOR}.policy_loss.loss_mode")
    if (low, high) != (clip, clip):
        draft.derive(f"{ACTOR}.clip_ratio_low", "use_pg_clip_range", True)
        draft.derive(f"{ACTOR}.clip_ratio_low", "pg_clip_low", _below(low), _unbounded(low))
        draft.derive(f"{ACTOR}.clip_ratio_high", "pg_clip_high", float(high))
    draft.translate([f"{ACTOR}.policy_loss.loss_mode"], "pg_variant", "policy-loss", loss)
    if draft.theirs(f"{ACTOR}.use_gpg_loss"):
        draft.derive(f"{ACTOR}.use_gpg_loss", "pg_variant", "vanilla")
        loss = "gpg"
    if (tokens := draft.theirs(f"{ACTOR}.use_token_level_loss")) is not None:
        mode = "token-mean" if tokens else "seq-mean-token-sum"
        draft.derive(f"{ACTOR}.use_token_level_loss", "loss_agg_mode", mode)
    if loss in ("gspo", "sapo", "geo_mean"):
        note = "always there, whatever loss_agg_mode says"
        if draft.theirs(f"{ACTOR}.use_kl_loss"):
            note += ", by which the KL and the entropy are averaged there"
        draft.derive(f"{ACTOR}.policy_loss.loss_mode", "loss_agg_mode", "seq-mean-token-mean", note)
    if loss == "gspo":
        draft.derive(f"{ACTOR}.policy_loss.loss_mode", "importance_sampling", "seq", "one ratio per answer")
    elif loss in ("dppo_tv", "dppo_kl"):
        _tell_truncation(draft)
    elif loss in ("vanilla", "clip_cov"):
        bound = float(draft.theirs(f"{ACTOR}.clip_ratio_c"))
        draft.derive(f"{ACTOR}.clip_ratio_c", "dual_clip_loss", True, "it is always on there")
        draft.derive(f"{ACTOR}.clip_ratio_c", "dual_clip_c", bound)
    if loss == "cispo":
        draft.derive(f"{ACTOR}.clip_ratio_low", "cispo_epsilon_low", _below(low), _unbounded(low))
        draft.derive(f"{ACTOR}.clip_ratio_high", "cispo_epsilon_high", float(high))
    in_loss, in_reward = draft.theirs(f"{ACTOR}.use_kl_loss"), draft.theirs("algorithm.use_kl_in_reward")
    kinds = [draft.theirs(f"{ACTOR}.kl_loss_type")] if in_loss else []
    kinds += [draft.theirs("algorithm.kl_penalty")] if in_reward else []
    if kinds:
        where = "algorithm.kl_penalty" if in_reward else f"{ACTOR}.kl_loss_type"
        draft.derive(where, "kl_penalty", _kl(kinds[-1]))
        if len({_kl(each) for each in kinds}) > 1:
            draft.derive(f"{ACTOR}.kl_loss_type", "kl_loss_penalty", _kl(kinds[0]))
    if in_reward and draft.theirs("algorithm.kl_ctrl.type") == "adaptive":
        draft.carry("algorithm.kl_ctrl.target_kl", "target_kl", float)
        draft.carry("algorithm.kl_ctrl.horizon", "kl_horizon", int)
    if draft.get("adv_estimator") == "gae":
        draft.derive("algorithm.adv_estimator", "whiten_advantages", True, "gae always whitens there")
    if draft.get("norm_adv_by_std_in_grpo") is True or draft.get("adv_estimator") not in ("grpo", "grpo_passk"):
        draft.remove("norm_adv_by_std_in_grpo")
    if (cap := draft.theirs(f"{ACTOR}.tis_imp_ratio_cap")) and float(cap) > 0:
        draft.derive(f"{ACTOR}.tis_imp_ratio_cap", "train_infer_correction.is_weight.enabled", True)
        draft.derive(f"{ACTOR}.tis_imp_ratio_cap", "train_infer_correction.is_weight.upper_bound", float(cap))
    if (level := draft.theirs(f"{CORRECTION}.rollout_is")) in ("token", "sequence"):
        weight = "train_infer_correction.is_weight"
        draft.derive(f"{CORRECTION}.rollout_is", f"{weight}.enabled", True)
        draft.derive(f"{CORRECTION}.rollout_is", f"{weight}.weight_type", level)
        bound = draft.theirs(f"{CORRECTION}.rollout_is_threshold", 2.0)
        if "_" in str(bound):
            note = "weights outside of two bounds are 0 there, and still count in the loss's mean: write a filter"
            draft.tell(Kind.IMPOSSIBLE, f"{CORRECTION}.rollout_is_threshold", bound, f"{weight}.upper_bound", note=note)
        else:
            draft.derive(f"{CORRECTION}.rollout_is_threshold", f"{weight}.upper_bound", float(bound))
        draft.carry_set(f"{CORRECTION}.rollout_is_batch_normalize", f"{weight}.batch_normalize", bool)
    _set_rejections(draft)
    _set_bounds(draft)
    if draft.theirs(key := f"{CORRECTION}.bypass_mode"):
        set_bypass(draft, [key], rejects=True)
    elif draft.theirs(key := f"{CORRECTION}.bypass_old_logprob_for_rollout"):
        set_bypass(draft, [key], rejects=False)
    if draft.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        if scale := draft.theirs(f"{ACTOR}.loss_scale_factor"):
            draft.derive(f"{ACTOR}.loss_scale_factor", "loss_agg_norm", float(scale))
        else:
            note = "it divides by the width that answers are padded to"
            draft.derive("data.max_response_length", "loss_agg_norm", float(draft.get("response_length")), note)


def set_bypass(draft: Draft, keys: list[str], note: str = "", *, rejects: bool) -> None:
    """The loss's own ratio is to the policy that sampled, so that nothing is scored before an update.

    Args:
        draft: the configuration, its weights and filters there.
        keys: of theirs that ask for it.
        note: of the key here.
        rejects: whether rejections are documented to compare the policy in training with the one that sampled; before,
            they compared the latter with itself. (Up to 0.9 its workers do neither: verl#4912.)
    """
    draft.derive(keys, "train_infer_correction.bypass", True, note)
    draft.drop_ours("train_infer_correction.is_weight", "with bypass the loss's ratio is to the sampler")
    if (lost := draft.remove(ours := "train_infer_correction.filters")) is not NOTHING:
        asked = "with bypass_mode it is the policy in training that rejects, which no filter here compares"
        kind, why = (Kind.IMPOSSIBLE, asked) if rejects else (Kind.DROPPED, "it compares the sampler with itself there")
        draft.retell(ours, kind, why, lost)
    if rejects and (loss := draft.theirs(f"{CORRECTION}.loss_type")) == "reinforce":
        why = "a loss without a clip, under weights of the policy in training: that of the actor is taken"
        draft.tell(Kind.IMPOSSIBLE, f"{CORRECTION}.loss_type", loss, "pg_variant", note=why)


def _tell_truncation(draft: Draft) -> None:
    """DPPO's weights are cut at ``clip_ratio_c`` there, and whole here."""
    bound = float(draft.theirs(f"{ACTOR}.clip_ratio_c"))
    kind = Kind.IMPOSSIBLE if bound < _HARDLY_EVER else Kind.DROPPED
    note = "a token's ratio is cut at it there, and is whole here: only tokens that were very rare can reach it"
    draft.tell(kind, f"{ACTOR}.clip_ratio_c", bound, note=note)


def _below(bound: Any) -> float:
    """Distance by which a ratio may fall: 1 is all the way to 0."""
    return min(float(bound), 1.0)


def _unbounded(bound: Any) -> str:
    return "a ratio cannot fall below 0: there is no lower bound" if float(bound) > 1 else ""


def _set_rejections(draft: Draft) -> None:
    """Rejections and the token veto, as filters."""
    theirs, ours = f"{CORRECTION}.rollout_rs", "train_infer_correction.filters"
    keys = [theirs, f"{theirs}_threshold", f"{theirs}_threshold_lower", f"{CORRECTION}.rollout_token_veto_threshold"]
    options, bounds, least, veto = (draft.theirs(key) for key in keys)
    try:
        found = rejections(options, bounds, least)
    except Untranslatable as error:
        draft.tell(Kind.IMPOSSIBLE, theirs, options, ours, note=str(error))
        found = []
    if veto:
        found.append(filter_of("token", float(veto), NO_BOUND, whole_rows=True))
    if found:
        draft.derive([key for key in keys if draft.theirs(key) is not None], ours, found)


def _set_bounds(draft: Draft) -> None:
    """Weights, mask and veto as a release between spelled them: ``algorithm.rollout_is_*``."""
    theirs, ours = "algorithm.rollout_is", "train_infer_correction"
    upper, veto = draft.theirs(f"{theirs}_threshold"), draft.theirs(f"{theirs}_veto_threshold")
    if upper is None:
        return
    level, high = str(draft.theirs(f"{theirs}_level")), float(upper)
    if draft.theirs(theirs):
        draft.derive(theirs, f"{ours}.is_weight.enabled", True)
        draft.derive(f"{theirs}_level", f"{ours}.is_weight.weight_type", level)
        draft.derive(f"{theirs}_threshold", f"{ours}.is_weight.upper_bound", high)
    found = []
    if draft.theirs(f"{theirs}_mode") == "mask":
        least = draft.theirs(f"{theirs}_threshold_lower")
        found.append(filter_of(level, 1 / high if least is None else float(least), high))
    if veto:
        found.append(filter_of("token", float(veto), NO_BOUND, whole_rows=True))
    if found:
        names = ("mode", "threshold", "threshold_lower", "veto_threshold")
        keys = [f"{theirs}_{name}" for name in names if draft.has(f"{theirs}_{name}")]
        draft.derive(keys, f"{ours}.filters", found)


def _kl(kind: object) -> str:
    """Our name of an estimator; that of k2 has its own gradient already."""
    return {"mse+": "mse", "k2+": "k2"}.get(str(kind), str(kind))


def set_optimizer(draft: Draft, theirs: str, role: str, updates: int = 1) -> None:
    """Warm-up, schedule and betas, and the critic's optimizer.

    Args:
        theirs: their section of the optimizer.
        role: that it trains.
        updates: optimizer steps to one of their schedule's.
    """
    base = f"{role}.training_args"
    counted = f"{updates} optimizer steps to each that their schedule counts" if updates > 1 else ""
    begins = (
        f"{counted}; " * bool(counted) + "it begins with 0 there, which trains nothing, and with its first part here"
    )
    steps = draft.theirs(f"{theirs}.lr_warmup_steps", -1)
    ratios = [f"{theirs}.lr_warmup_steps_ratio", f"{theirs}.warmup_steps_ratio"]
    ratio = next((value for key in ratios if (value := draft.theirs(key))), 0.0)
    if steps and int(steps) > 0:
        draft.derive(f"{theirs}.lr_warmup_steps", f"{base}.warmup_steps", int(steps) * updates, begins)
    elif ratio:
        draft.derive(ratios, f"{base}.warmup_ratio", float(ratio), begins)
    styles = [f"{theirs}.{key}" for key in ("lr_scheduler_type", "lr_scheduler", "warmup_style", "lr_decay_style")]
    style = next((name for key in styles if (name := draft.theirs(key))), "constant")
    draft.translate(styles, f"{base}.lr_scheduler_type", "schedule", style)
    schedule, rate = draft.get(f"{base}.lr_scheduler_type"), draft.get(f"{base}.learning_rate")
    draft.carry_set(f"{theirs}.min_lr_ratio", f"{base}.min_lr_ratio", float)
    for key, ours in (("min_lr", "min_lr_ratio"), ("lr_warmup_init", "warmup_init_ratio")):
        if (value := draft.theirs(f"{theirs}.{key}")) and rate:
            draft.derive([f"{theirs}.{key}", f"{theirs}.lr"], f"{base}.{ours}", min(1.0, float(value) / float(rate)))
    for key, readers in (
        ("num_cycles", ("cosine",)),
        ("lr_decay_steps", ("linear", "cosine", "wsd")),
        ("lr_wsd_decay_steps", ("wsd",)),
        ("lr_wsd_decay_style", ("wsd",)),
    ):
        if schedule in readers and (value := draft.theirs(f"{theirs}.{key}")) is not None:
            steps = key.endswith("_steps")
            value = int(value) * updates if steps else value
            draft.derive(f"{theirs}.{key}", f"{base}.{key}", value, counted if steps else "")
    if role == "critic" and (name := draft.theirs(f"{theirs}.optimizer")) is not None:
        draft.translate([f"{theirs}.optimizer"], f"{base}.optimizer", "optimizer", name)
    betas = draft.theirs(f"{theirs}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for number, beta in enumerate(betas, 1):
            draft.derive(f"{theirs}.betas", f"{base}.adam_beta{number}", float(beta))


def _reward_model(draft: Draft) -> str | None:
    """The key that names the classifier which scores, in either spelling, if one does."""
    keys = {"reward_model.enable": "reward_model.model.path", "reward.reward_model.enable": _SERVED}
    return next((path for enabled, path in keys.items() if draft.theirs(enabled)), None)


def set_rewards(draft: Draft) -> None:
    """Reward domains: a function, a reward model, or those of public data; dynamic sampling; long answers."""
    where = next((key for key in _FUNCTIONS if draft.theirs(f"{key}.path")), None)
    manager = next((name for key in _MANAGERS if (name := draft.theirs(key))), "naive")
    kwargs = next((key for key in _KWARGS if draft.has(key)), _KWARGS[0])
    own = {key: value for key, value in (draft.theirs(kwargs) or {}).items() if key not in _READ_KWARGS}
    if where is not None:
        if draft.theirs("reward.reward_model.enable"):
            note = "their function calls this model through a router; ours can call a served one (the verifier judge)"
            draft.tell(Kind.IMPOSSIBLE, _SERVED, draft.theirs(_SERVED), note=note)
        name = draft.theirs(f"{where}.name") or "compute_score"
        arguments: dict[str, Any] = {"path": f"{draft.theirs(f'{where}.path')}:{name}"}
        if extra := draft.theirs(f"{where}.reward_kwargs"):
            arguments["kwargs"] = extra
        if manager == "batch":
            arguments["batch"] = True
            arguments |= {"kwargs": {**arguments.get("kwargs", {}), **own}} if own else {}
            for key, value in own.items():
                draft.tell(Kind.DERIVED, f"{kwargs}.{key}", value, "rewards.custom.verifiers")
            own = {}
        _one_domain(draft, f"{where}.path", "custom", arguments)
        note = "data_source, with which the function is called, is the row's tag: custom"
        to_do(draft, f"{where}.path", note)
    elif model := _reward_model(draft):
        if (kind := draft.theirs("reward_model.strategy")) not in (None, "fsdp", "fsdp2", "megatron"):
            note = "not in verl's releases: the model is read as a classifier; one that writes is the verifier judge"
            draft.tell(Kind.IMPOSSIBLE, "reward_model.strategy", kind, "rewards.reward_model.verifiers", note=note)
        trusted = {"trust_remote_code": True} if draft.theirs("reward_model.model.trust_remote_code") else {}
        size = int(draft.theirs(_ranks_key(model)) or 1)
        divided = {"tensor_parallel_size": size} if size > 1 else {}
        _one_domain(draft, model, "reward_model", {"model_path": draft.theirs(model), **trusted, **divided})
        if divided:
            _set_devices_of(draft, model, size)
        if trusted:
            note = "Python files that come with the reward model run: read them"
            draft.tell(
                Kind.DERIVED, "reward_model.model.trust_remote_code", True, "rewards.reward_model.verifiers", note=note
            )
    else:
        public_domains(draft, "data.reward_fn_key")
        _tell_scores(draft)
        _set_sandbox(draft)
    for key, value in own.items():
        draft.tell(Kind.IMPOSSIBLE, f"{kwargs}.{key}", value, note=f"the reward manager {manager} is not imported")
    if manager == "prime":
        for domain in draft.get("rewards", {}):
            note = "prime scores 0 what took too long"
            draft.derive("reward_model.reward_manager", f"rewards.{domain}.timeout_score", 0.0, note)
    if draft.get("adv_estimator") == "gdpo" and (keys := draft.theirs("algorithm.gdpo_reward_keys")):
        draft.derive("algorithm.gdpo_reward_keys", "gdpo_reward_keys", [f"custom/{key}" for key in keys])
        if weights := draft.theirs("algorithm.gdpo_reward_weights"):
            draft.derive("algorithm.gdpo_reward_weights", "gdpo_reward_weights", [float(each) for each in weights])
    if manager not in ("naive", "prime", "dapo", "batch", "gdpo"):
        note = "a class that scores a batch has no counterpart: write a verifier"
        draft.tell(Kind.IMPOSSIBLE, "reward_model.reward_manager", manager, note=note)
    for base in _BUFFERS:
        if draft.theirs(f"{base}.enable"):
            for key, kind in (("enable", bool), ("len", int), ("penalty_factor", float)):
                draft.derive(f"{base}.{key}", f"overlong_buffer.{key}", kind(draft.theirs(f"{base}.{key}", 1)))
    if draft.theirs("algorithm.filter_groups.enable"):
        for domain in draft.get("rewards", {}):
            chosen = {"type": "std_filter", "low": 0.0}
            draft.derive("algorithm.filter_groups.enable", f"rewards.{domain}.query_filter_config", chosen)
        if (most := int(draft.theirs("algorithm.filter_groups.max_num_gen_batches", 0) or 0)) > 0:
            draft.derive("algorithm.filter_groups.max_num_gen_batches", "max_filtered_batches", most)


def _tell_scores(draft: Draft) -> None:
    """Notes that ``math_dapo.py`` scores a wrong answer with -1, where the files may have rows that it scores."""
    sections = ("actor_train", "validation")
    names = str([draft.get(f"{section}.data_args.file_name") for section in sections]).lower()
    known = any(name in names for name in DOMAINS)
    if "math" in draft.get("rewards", {}) and (not known or "dapo" in names or "aime" in names):
        draft.given.notes.append(
            "rows of math_dapo and aime score 1 or -1 there, 1 or 0 here: weight 2 of the verifier gives the same "
            "distance, which matters with overlong_buffer, a KL in the reward, and advantages that no standard "
            "deviation divides"
        )


def _set_sandbox(draft: Draft) -> None:
    """A sandbox service runs the programs."""
    base = next((key for key in _SANDBOXES if draft.theirs(f"{key}.url")), _SANDBOXES[0])
    where = f"{base}.url" if draft.theirs(f"{base}.url") else "reward_model.sandbox_fusion_url"
    if not draft.theirs(where) or "code" not in draft.get("rewards", {}):
        return
    arguments: dict[str, Any] = {"remote": {"url": draft.theirs(where)}}
    if (most := draft.theirs(f"{base}.max_concurrent")) is not None:
        arguments["remote"]["max_concurrency"] = int(most)
    arguments["limits"] = {"memory_mb": int(draft.theirs(f"{base}.memory_limit_mb") or _THEIR_MEMORY_MB)}
    draft.get("rewards.code.verifiers")[0]["args"] = arguments
    for key in (where, f"{base}.max_concurrent", f"{base}.memory_limit_mb"):
        if draft.has(key):
            note = "args of the verifier code"
            draft.tell(Kind.DERIVED, key, draft.theirs(key), "rewards.code.verifiers", note=note)


def _ranks_key(model: str) -> str:
    """The key that says how many devices a reward model is divided over, by the key that names it."""
    section = "reward.reward_model" if model == _SERVED else "reward_model"
    return f"{section}.rollout.tensor_model_parallel_size"


def _set_devices_of(draft: Draft, model: str, size: int) -> None:
    """Devices of a reward model that is divided: those of the trainer, where they take turns."""
    key, ours = _ranks_key(model), "rewards.reward_model.device_mapping"
    draft.tell(Kind.DERIVED, key, size, "rewards.reward_model.verifiers", note="args.tensor_parallel_size")
    mapping = draft.get("actor_train.device_mapping")
    own = draft.theirs(f"{key.removesuffix('.rollout.tensor_model_parallel_size')}.enable_resource_pool")
    if own or draft.get("async_generation_ratio") or len(parse_device_mapping(mapping) or ()) % size:
        to_do(draft, key, f"give {ours} devices of its own, {size} for each worker", size, ours)
        return
    draft.derive(key, ours, mapping, "on the devices of the trainer, by turns")


_SANDBOXES = ("reward_model.sandbox_fusion", "reward.sandbox_fusion", "sandbox_fusion")
_MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
_THEIR_MEMORY_MB = 1024
_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")


def _one_domain(draft: Draft, key: str, verifier: str, arguments: dict[str, Any]) -> None:
    """A verifier that scores every row, whatever its source."""
    own = {"tag_included": [verifier], "verifiers": [{"name": verifier, "args": arguments}]}
    draft.derive(key, f"rewards.{verifier}", own)
    draft.set("actor_train.data_args.tag", "tag")
    draft.derive("data.reward_fn_key", "actor_train.data_args.default_tag", verifier, "one domain scores every row")
