"""verl's configurations: what several of its keys say together."""

from __future__ import annotations

import re
from typing import Any

from roll.configs.importers.common import (
    devices,
    drop_unread,
    parallel_sizes,
    public_domains,
    set_batch,
    set_budget,
    set_everywhere,
    tidy_engines,
    to_do,
)
from roll.configs.importers.draft import Draft, Kind
from roll.configs.importers.transforms import TRANSFORMS, Omitted, Partial, Untranslatable

ACTOR, ROLLOUT, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
MODEL = "actor_rollout_ref.model"
_OPTIONS = "strategy_args.strategy_config"

_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer",
)
"""Where releases of verl have the penalty of long answers."""
_SCHEDULES = TRANSFORMS["schedule"]
_NAMED = re.compile(r"[^\w.+-]+")


def derive(draft: Draft) -> None:
    """Everything that no row of the table says by itself."""
    _run(draft)
    _data(draft)
    _roles(draft)
    _algorithm(draft)
    _optimizer(draft, f"{ACTOR}.optim", "actor_train")
    _rewards(draft)
    _validation(draft)
    if draft.get("adv_estimator") == "gae":
        _critic(draft)
    _batches(draft)
    drop_unread(draft)
    tidy_engines(draft)


def _run(draft: Draft) -> None:
    if name := draft.theirs("trainer.experiment_name"):
        draft.derive("trainer.experiment_name", "exp_name", _NAMED.sub("_", str(name)).strip("_") or "verl")
    steps, epochs = draft.theirs("trainer.total_training_steps"), draft.theirs("trainer.total_epochs")
    if steps:
        draft.derive(["trainer.total_training_steps", "trainer.total_epochs"], "max_steps", int(steps))
    else:
        draft.derive("trainer.total_epochs", "total_epochs", int(epochs))
    try:
        draft.derive("trainer.logger", "track_with", TRANSFORMS["trackers"](draft.theirs("trainer.logger")))
    except Partial as some:
        draft.derive("trainer.logger", "track_with", some.value, str(some))
    except Omitted as why:
        draft.derive("trainer.logger", "track_with", "stdout", str(why))
    trackers = draft.get("track_with")
    if "wandb" in (trackers if isinstance(trackers, list) else [trackers]):
        key = "tracker_kwargs.wandb.project" if isinstance(trackers, list) else "tracker_kwargs.project"
        draft.derive("trainer.project_name", key, str(draft.theirs("trainer.project_name")))
    if draft.theirs("trainer.default_local_dir"):
        draft.derive(
            "trainer.default_local_dir", "checkpoint_config.output_dir", draft.theirs("trainer.default_local_dir")
        )
    if draft.theirs("trainer.max_actor_ckpt_to_keep"):
        draft.derive(
            "trainer.max_actor_ckpt_to_keep", "max_ckpt_to_keep", int(draft.theirs("trainer.max_actor_ckpt_to_keep"))
        )
    elif draft.theirs("trainer.remove_previous_ckpt_in_save"):
        draft.derive("trainer.remove_previous_ckpt_in_save", "max_ckpt_to_keep", 1)
    if draft.get("resume_from_checkpoint") == "resume_path":
        path = draft.theirs("trainer.resume_from_path")
        draft.derive("trainer.resume_from_path", "resume_from_checkpoint", path)
        to_do(draft, "trainer.resume_from_path", "checkpoints of verl are not read: give one of this library", path)


def _data(draft: Draft) -> None:
    data = "actor_train.data_args"
    for key in (f"{data}.file_name", "validation.data_args.file_name"):
        names = draft.get(key)
        if isinstance(names, list) and len(names) == 1:
            draft.set(key, names[0])
    draft.derive("data.reward_fn_key", f"{data}.response", "reward_model.ground_truth", "where verl's rows have it")
    drop = draft.theirs("data.filter_overlong_prompts")
    truncation = draft.theirs("data.truncation")
    try:
        overflow = "drop" if drop else TRANSFORMS["truncation"](truncation)
        draft.derive(["data.filter_overlong_prompts", "data.truncation"], f"{data}.prompt_overflow", overflow)
    except Untranslatable as error:
        draft.tell(Kind.IMPOSSIBLE, "data.truncation", truncation, note=str(error))
    if draft.has("data.seed") and draft.theirs("data.seed") is not None:
        draft.derive("data.seed", "seed", int(draft.theirs("data.seed")))
    draft.derive(
        ["data.max_prompt_length", "data.max_response_length"],
        "sequence_length",
        int(draft.get("prompt_length", 512)) + int(draft.get("response_length", 512)),
    )
    if not draft.get("actor_train.data_args.dataset_filter.num_samples", 1):
        draft.remove("actor_train.data_args.dataset_filter.num_samples")


def _devices(draft: Draft) -> int:
    return int(draft.get("num_nodes", 1)) * int(draft.get("num_gpus_per_node", 8))


def _roles(draft: Draft) -> None:
    count = _devices(draft)
    mapping = devices(0, count)
    where = ["trainer.n_gpus_per_node", "trainer.nnodes"]
    trainer = draft.get("actor_train.strategy_args.strategy_name", "fsdp2_train")
    uses_kl = draft.theirs(f"{ACTOR}.use_kl_loss") or draft.theirs("algorithm.use_kl_in_reward")
    roles = ["actor_train", "actor_infer", *(["reference"] if uses_kl else [])]
    for role in roles:
        draft.derive(where, f"{role}.device_mapping", mapping, "all roles share all devices")
    if uses_kl:
        scorer = trainer.replace("_train", "_infer")
        draft.derive(f"{REF}.strategy", "reference.strategy_args.strategy_name", scorer)
    for role, theirs in (("actor_train", ACTOR), ("reference", REF)):
        if role in roles and trainer == "megatron_train":
            _megatron(draft, role, theirs)
        elif role in roles:
            _fsdp(draft, role, theirs)
    if (attention := _override(draft).pop("attn_implementation", None)) is not None:
        draft.derive(f"{MODEL}.override_config", "actor_train.model_args.attn_implementation", attention)
    if extra := {key: value for key, value in _override(draft).items() if value is not None and "dropout" not in key}:
        for role in roles:
            draft.derive(f"{MODEL}.override_config", f"{role}.model_args.model_config_kwargs", extra)
    if (rank := draft.theirs(f"{MODEL}.lora_rank") or 0) > 0:
        draft.derive(f"{MODEL}.lora_rank", "actor_train.model_args.lora_rank", int(rank))
        alpha, layers = draft.theirs(f"{MODEL}.lora_alpha", 16), draft.theirs(f"{MODEL}.target_modules", "all-linear")
        draft.derive(f"{MODEL}.lora_alpha", "actor_train.model_args.lora_alpha", int(alpha))
        draft.derive(f"{MODEL}.target_modules", "actor_train.model_args.lora_target", TRANSFORMS["commas"](layers))
    _generator(draft)


def _override(draft: Draft) -> dict[str, Any]:
    """Entries over the model's own configuration, without those of Megatron's experts."""
    given = draft.theirs(f"{MODEL}.override_config") or {}
    given = given.get("model_config", given) if isinstance(given, dict) else {}
    return {key: value for key, value in (given or {}).items() if key != "moe_config"}


def _fsdp(draft: Draft, role: str, theirs: str) -> None:
    config, options = f"{ACTOR}.fsdp_config", f"{role}.{_OPTIONS}"
    dtype = TRANSFORMS["dtype"](draft.theirs(f"{config}.model_dtype"))
    draft.derive(f"{config}.model_dtype", f"{role}.model_args.dtype", dtype)
    if dtype == "fp32":
        draft.derive(f"{config}.mixed_precision.param_dtype", f"{options}.param_dtype", "bf16", "weights in fp32")
    if role == "actor_train":
        size = draft.theirs(f"{config}.fsdp_size", -1)
        if size and 0 < int(size) < _devices(draft):
            draft.derive(f"{config}.fsdp_size", f"{options}.fsdp_size", int(size))
        if draft.theirs(f"{config}.offload_policy"):
            draft.derive(f"{config}.offload_policy", f"{options}.cpu_offload", True)
        if draft.theirs(f"{config}.reshard_after_forward", True) is False:
            draft.derive(f"{config}.reshard_after_forward", f"{options}.reshard_after_forward", False)
    elif (
        size := draft.theirs(
            f"{theirs}.ulysses_sequence_parallel_size", draft.get("actor_train.model_args.ulysses_size", 1)
        )
    ) != 1:
        draft.derive(f"{theirs}.ulysses_sequence_parallel_size", f"{role}.model_args.ulysses_size", int(size))


def _megatron(draft: Draft, role: str, theirs: str) -> None:
    options = f"{role}.{_OPTIONS}"
    draft.derive(f"{ACTOR}.strategy", f"{role}.model_args.dtype", "bf16", "Megatron computes in bf16")
    for key in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
    ):
        value = draft.theirs(f"{theirs}.megatron.{key}", draft.theirs(f"{ACTOR}.megatron.{key}"))
        if value is not None and not (role == "reference" and key == "use_distributed_optimizer"):
            draft.derive(f"{theirs}.megatron.{key}", f"{options}.{key}", value)
    if draft.get(f"{options}.sequence_parallel") is None and draft.get(f"{options}.tensor_model_parallel_size", 1) > 1:
        draft.derive(
            f"{theirs}.megatron.sequence_parallel", f"{options}.sequence_parallel", True, "on there by default"
        )
    if role == "actor_train":
        extra = f"{ACTOR}.megatron.override_transformer_config"
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            if draft.theirs(f"{extra}.{key}") is not None:
                draft.derive(f"{extra}.{key}", f"{options}.{key}", draft.theirs(f"{extra}.{key}"))


def _generator(draft: Draft) -> None:
    name = draft.get("actor_infer.strategy_args.strategy_name", "vllm")
    options = f"actor_infer.{_OPTIONS}"
    share = draft.theirs(f"{ROLLOUT}.gpu_memory_utilization")
    if name == "vllm":
        draft.derive(f"{ROLLOUT}.gpu_memory_utilization", f"{options}.gpu_memory_utilization", share)
        for key in ("enforce_eager", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"):
            if draft.has(f"{ROLLOUT}.{key}") and draft.theirs(f"{ROLLOUT}.{key}") is not None:
                draft.derive(f"{ROLLOUT}.{key}", f"{options}.{key}", draft.theirs(f"{ROLLOUT}.{key}"))
    elif name == "sglang":
        draft.derive(f"{ROLLOUT}.gpu_memory_utilization", f"{options}.mem_fraction_static", share)
        if draft.theirs(f"{ROLLOUT}.enforce_eager"):
            draft.derive(f"{ROLLOUT}.enforce_eager", f"{options}.disable_cuda_graph", True)
    else:
        draft.remove("actor_infer.num_gpus_per_worker")
    own = draft.theirs(f"{ROLLOUT}.engine_kwargs.{name}")
    for key, value in (own or {}).items() if isinstance(own, dict) else ():
        if value is not None and key != "disable_mm_preprocessor_cache":
            draft.derive(f"{ROLLOUT}.engine_kwargs.{name}.{key}", f"{options}.{key}", value)
    limit, whole = draft.theirs(f"{ROLLOUT}.max_model_len"), int(draft.get("sequence_length"))
    if limit and name == "vllm" and int(limit) >= whole:
        draft.derive(f"{ROLLOUT}.max_model_len", f"{options}.max_model_len", int(limit))
    for key in ("prompt_length", "response_length"):
        if draft.has(f"{ROLLOUT}.{key}") and draft.theirs(f"{ROLLOUT}.{key}") != draft.get(key):
            note = f"data.max_{key} is read: {draft.get(key)}"
            draft.tell(Kind.DROPPED, f"{ROLLOUT}.{key}", draft.theirs(f"{ROLLOUT}.{key}"), note=note)


def _algorithm(draft: Draft) -> None:
    low, high = (draft.theirs(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    clip = draft.theirs(f"{ACTOR}.clip_ratio")
    low, high = (clip if low is None else low), (clip if high is None else high)
    loss = draft.theirs(f"{ACTOR}.policy_loss.loss_mode")
    if (low, high) != (clip, clip):
        draft.derive(f"{ACTOR}.clip_ratio_low", "use_pg_clip_range", True)
        draft.derive(f"{ACTOR}.clip_ratio_low", "pg_clip_low", float(low))
        draft.derive(f"{ACTOR}.clip_ratio_high", "pg_clip_high", float(high))
    try:
        draft.derive(f"{ACTOR}.policy_loss.loss_mode", "pg_variant", TRANSFORMS["policy-loss"](loss))
    except Untranslatable as error:
        draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.policy_loss.loss_mode", loss, "pg_variant", note=str(error))
    if draft.theirs(f"{ACTOR}.use_gpg_loss"):
        draft.derive(f"{ACTOR}.use_gpg_loss", "pg_variant", "vanilla")
        loss = "gpg"
    if (tokens := draft.theirs(f"{ACTOR}.use_token_level_loss")) is not None:
        mode = "token-mean" if tokens else "seq-mean-token-sum"
        draft.derive(f"{ACTOR}.use_token_level_loss", "loss_agg_mode", mode)
    if loss == "gspo":
        draft.derive(f"{ACTOR}.policy_loss.loss_mode", "importance_sampling", "seq", "one ratio per answer")
    elif loss in ("vanilla", "clip_cov"):
        bound = float(draft.theirs(f"{ACTOR}.clip_ratio_c"))
        draft.derive(f"{ACTOR}.clip_ratio_c", "dual_clip_loss", True, "it is always on there")
        draft.derive(f"{ACTOR}.clip_ratio_c", "dual_clip_c", bound)
    if loss == "cispo":
        draft.derive(f"{ACTOR}.clip_ratio_low", "cispo_epsilon_low", float(low))
        draft.derive(f"{ACTOR}.clip_ratio_high", "cispo_epsilon_high", float(high))
    in_loss, in_reward = draft.theirs(f"{ACTOR}.use_kl_loss"), draft.theirs("algorithm.use_kl_in_reward")
    kinds = [draft.theirs(f"{ACTOR}.kl_loss_type")] if in_loss else []
    kinds += [draft.theirs("algorithm.kl_penalty")] if in_reward else []
    if kinds:
        kind = str(kinds[0]).removesuffix("+")
        draft.derive([f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty"], "kl_penalty", kind)
        if len({str(each) for each in kinds}) > 1:
            note = "one kl_penalty for the loss and the reward: that of the loss is taken"
            draft.tell(Kind.IMPOSSIBLE, "algorithm.kl_penalty", kinds[-1], "kl_penalty", note=note)
        if str(kinds[0]).endswith("+"):
            note = "its gradient is that of k2 there: the plain estimator is taken"
            draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.kl_loss_type", kinds[0], "kl_penalty", note=note)
    if in_reward and draft.theirs("algorithm.kl_ctrl.type") == "adaptive":
        draft.derive("algorithm.kl_ctrl.target_kl", "target_kl", float(draft.theirs("algorithm.kl_ctrl.target_kl")))
        draft.derive("algorithm.kl_ctrl.horizon", "kl_horizon", int(draft.theirs("algorithm.kl_ctrl.horizon")))
    if draft.get("adv_estimator") == "gae":
        draft.derive("algorithm.adv_estimator", "whiten_advantages", True, "gae always whitens there")
    if draft.get("norm_adv_by_std_in_grpo") is True or draft.get("adv_estimator") not in ("grpo", "grpo_passk"):
        draft.remove("norm_adv_by_std_in_grpo")
    if (cap := draft.theirs(f"{ACTOR}.tis_imp_ratio_cap")) and float(cap) > 0:
        draft.derive(f"{ACTOR}.tis_imp_ratio_cap", "train_infer_correction.is_weight.enabled", True)
        draft.derive(f"{ACTOR}.tis_imp_ratio_cap", "train_infer_correction.is_weight.upper_bound", float(cap))
    correction = "algorithm.rollout_correction"
    if (level := draft.theirs(f"{correction}.rollout_is")) in ("token", "sequence"):
        weight = "train_infer_correction.is_weight"
        draft.derive(f"{correction}.rollout_is", f"{weight}.enabled", True)
        draft.derive(f"{correction}.rollout_is", f"{weight}.weight_type", level)
        bound = float(draft.theirs(f"{correction}.rollout_is_threshold", 2.0))
        draft.derive(f"{correction}.rollout_is_threshold", f"{weight}.upper_bound", bound)


def _optimizer(draft: Draft, theirs: str, role: str) -> None:
    base = f"{role}.training_args"
    steps = draft.theirs(f"{theirs}.lr_warmup_steps", -1)
    ratio = draft.theirs(f"{theirs}.lr_warmup_steps_ratio", 0.0)
    if steps and int(steps) > 0:
        draft.derive(f"{theirs}.lr_warmup_steps", f"{base}.warmup_steps", int(steps))
    elif ratio:
        draft.derive(f"{theirs}.lr_warmup_steps_ratio", f"{base}.warmup_ratio", float(ratio))
    style = next(
        (
            name
            for key in ("lr_scheduler_type", "warmup_style", "lr_decay_style")
            if (name := draft.theirs(f"{theirs}.{key}"))
        ),
        "constant",
    )
    try:
        draft.derive(
            [f"{theirs}.lr_scheduler_type", f"{theirs}.warmup_style"], f"{base}.lr_scheduler_type", _SCHEDULES(style)
        )
    except Untranslatable as error:
        draft.tell(Kind.IMPOSSIBLE, f"{theirs}.lr_scheduler_type", style, f"{base}.lr_scheduler_type", note=str(error))
    if least := draft.theirs(f"{theirs}.min_lr_ratio"):
        draft.derive(f"{theirs}.min_lr_ratio", f"{base}.min_lr_ratio", float(least))
    betas = draft.theirs(f"{theirs}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for number, beta in enumerate(betas, 1):
            draft.derive(f"{theirs}.betas", f"{base}.adam_beta{number}", float(beta))


def _rewards(draft: Draft) -> None:
    where = next((key for key in _FUNCTIONS if draft.theirs(f"{key}.path")), None)
    if where is not None:
        name = draft.theirs(f"{where}.name") or "compute_score"
        arguments: dict[str, Any] = {"path": f"{draft.theirs(f'{where}.path')}:{name}"}
        if extra := draft.theirs(f"{where}.reward_kwargs"):
            arguments["kwargs"] = extra
        _one_domain(draft, f"{where}.path", "custom", arguments)
        note = "data_source, with which the function is called, is the row's tag: custom"
        to_do(draft, f"{where}.path", note)
    elif draft.theirs("reward_model.enable"):
        path = draft.theirs("reward_model.model.path")
        _one_domain(draft, "reward_model.model.path", "reward_model", {"model_path": path})
    else:
        public_domains(draft, "data.reward_fn_key")
    manager = draft.theirs("reward_model.reward_manager") or draft.theirs("reward.reward_manager.name") or "naive"
    if manager not in ("naive", "prime", "dapo", "batch"):
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


_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")


def _one_domain(draft: Draft, key: str, verifier: str, arguments: dict[str, Any]) -> None:
    """A verifier that scores every row, whatever its source."""
    own = {"tag_included": [verifier], "verifiers": [{"name": verifier, "args": arguments}]}
    draft.derive(key, f"rewards.{verifier}", own)
    draft.set("actor_train.data_args.tag", "tag")
    draft.derive("data.reward_fn_key", "actor_train.data_args.default_tag", verifier, "one domain scores every row")


def _validation(draft: Draft) -> None:
    if not draft.get("validation.data_args.file_name"):
        draft.remove("validation")
        return
    base, theirs = "validation.generating_args", f"{ROLLOUT}.val_kwargs"
    samples = bool(draft.theirs(f"{theirs}.do_sample"))
    draft.derive(f"{theirs}.do_sample", f"{base}.do_sample", samples)
    draft.derive(f"{theirs}.n", f"{base}.num_return_sequences", int(draft.theirs(f"{theirs}.n")))
    for key, kind in (("temperature", float), ("top_p", float), ("top_k", int)) if samples else ():
        draft.derive(f"{theirs}.{key}", f"{base}.{key}", kind(draft.theirs(f"{theirs}.{key}")))
    most = draft.theirs("data.val_max_samples", -1)
    words = "all of the held-out prompts"
    bound = int(most) if most and int(most) > 0 else 1_000_000
    draft.derive("data.val_max_samples", "val_batch_size", bound, words if bound == 1_000_000 else "")


def _critic(draft: Draft) -> None:
    trainer = draft.get("actor_train.strategy_args.strategy_name", "fsdp2_train")
    draft.derive("critic.strategy", "critic.strategy_args.strategy_name", trainer)
    draft.derive("trainer.n_gpus_per_node", "critic.device_mapping", draft.get("actor_train.device_mapping"))
    for key in ("model_args", "strategy_args"):
        draft.set(f"critic.{key}", _copy(draft.get(f"actor_train.{key}", {})))
    if (path := draft.theirs("critic.model.path")) and path != draft.get("pretrain"):
        draft.derive("critic.model.path", "reward_pretrain", path)
    if draft.has("critic.model.enable_gradient_checkpointing"):
        off = not draft.theirs("critic.model.enable_gradient_checkpointing")
        draft.derive(
            "critic.model.enable_gradient_checkpointing", "critic.model_args.disable_gradient_checkpointing", off
        )
    if draft.has("critic.model.use_remove_padding"):
        draft.derive(
            "critic.model.use_remove_padding",
            "critic.use_sequence_packing",
            draft.theirs("critic.model.use_remove_padding"),
        )
    if draft.theirs("critic.ulysses_sequence_parallel_size"):
        draft.derive(
            "critic.ulysses_sequence_parallel_size",
            "critic.model_args.ulysses_size",
            int(draft.theirs("critic.ulysses_sequence_parallel_size")),
        )
    draft.derive("critic.optim.lr", "critic.training_args.learning_rate", float(draft.theirs("critic.optim.lr")))
    draft.derive(
        "critic.optim.weight_decay",
        "critic.training_args.weight_decay",
        float(draft.theirs("critic.optim.weight_decay")),
    )
    _optimizer(draft, "critic.optim", "critic")
    draft.derive("critic.cliprange_value", "value_clip", float(draft.theirs("critic.cliprange_value")))
    if size := draft.theirs("critic.forward_micro_batch_size_per_gpu"):
        draft.derive("critic.forward_micro_batch_size_per_gpu", "critic.infer_batch_size", int(size))


def _copy(values: Any) -> Any:
    return (
        {key: _copy(value) for key, value in values.items() if not key.startswith("lora")}
        if isinstance(values, dict)
        else values
    )


def _batches(draft: Draft) -> None:
    answers = int(draft.get("num_return_sequences_in_group", 1))
    per_step = int(draft.get("rollout_batch_size", 1024)) * answers
    samples = int(draft.theirs(f"{ACTOR}.ppo_mini_batch_size")) * answers
    for role, theirs in (("actor_train", ACTOR), ("critic", CRITIC)):
        if role not in draft.ours:
            continue
        dynamic = draft.theirs(f"{theirs}.use_dynamic_bsz", draft.theirs(f"{ACTOR}.use_dynamic_bsz"))
        micro = None if dynamic else draft.theirs(f"{theirs}.ppo_micro_batch_size_per_gpu")
        keys = [f"{theirs}.ppo_mini_batch_size", f"{theirs}.ppo_micro_batch_size_per_gpu"]
        set_batch(draft, role, samples, int(micro) if micro else None, keys, per_step)
        if dynamic:
            key = f"{theirs}.ppo_max_token_len_per_gpu"
            spread = parallel_sizes(draft, role) if role else 1
            set_budget(draft, role, "train", int(draft.theirs(key, 16384)) * spread, [f"{theirs}.use_dynamic_bsz", key])
    scoring = {"actor_train": (ROLLOUT, "log_prob"), "reference": (REF, "log_prob"), "critic": (CRITIC, "forward")}
    for role, (theirs, word) in scoring.items():
        if role not in draft.ours:
            continue
        switch, key = f"{theirs}.{word}_use_dynamic_bsz", f"{theirs}.{word}_max_token_len_per_gpu"
        dynamic = draft.theirs(switch, draft.theirs(f"{ACTOR}.use_dynamic_bsz"))
        if dynamic:
            budget = draft.theirs(key) or draft.theirs(f"{ACTOR}.ppo_max_token_len_per_gpu")
            set_budget(draft, role, "infer", int(budget) * parallel_sizes(draft, role), [switch, key])
        elif role == "reference" and (size := draft.theirs(f"{REF}.log_prob_micro_batch_size_per_gpu")):
            draft.derive(f"{REF}.log_prob_micro_batch_size_per_gpu", "reference.infer_batch_size", int(size))
    set_everywhere(draft, "use_sequence_packing", ("reference",))
