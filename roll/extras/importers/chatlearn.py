"""ChatLearn's configurations: keys that are converted together."""

from __future__ import annotations

import math
import re

from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.common import (
    ENGINE_OF_A_NODE,
    GPUS_OF_A_NODE,
    devices,
    drop_unread,
    profiler_of_chatlearn,
    public_domains,
    set_batch,
    set_budget,
    tidy_engines,
    to_do,
    trust_code,
    use_wandb,
    verl_columns,
)
from roll.extras.importers.draft import Draft, Kind

TRAINER, REF, POLICY, RUN = "models.policy_trainer", "models.ref_policy", "models.policy", "runtime_args"
_OPTIONS = "strategy_args.strategy_config"
_MEGATRON = {
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "sequence_parallel": "sequence_parallel",
}
_WANDB = {"wandb_project": "project", "wandb_name": "name", "wandb_id": "id", "wandb_dir": "log_dir"}


def derive(draft: Draft) -> type[RLVRConfig]:
    """Everything that no row of the table says by itself; returns whose configuration it is."""
    draft.derive([], "adv_estimator", "grpo", "the algorithm of ChatLearn")
    _unread_devices(draft)
    if draft.has("models.agent"):
        note = "agents are LangGraph graphs of theirs, named in the data: see the agentic pipeline"
        draft.tell(Kind.IMPOSSIBLE, "models.agent", "a section", note=note)
    _trackers(draft)
    _lengths(draft)
    _algorithm(draft)
    _schedule(draft)
    _roles(draft)
    verl_columns(draft)
    draft.set("actor_train.data_args.prompt_overflow", "drop")
    public_domains(draft, f"{RUN}.data_path")
    for domain in draft.get("rewards", {}):
        each = max(1, int(draft.theirs("models.reward.cpu_per_process")))
        workers = max(1, int(draft.theirs("models.reward.num_cpu")) // each)
        draft.derive("models.reward.num_cpu", f"rewards.{domain}.world_size", workers)
    _validation(draft)
    _batches(draft)
    drop_unread(draft)
    trust_code(draft, [f"{section}.trust_remote_code" for section in (TRAINER, POLICY, REF)])
    tidy_engines(draft)
    profiler_of_chatlearn(draft)
    return RLVRConfig


def _trackers(draft: Draft) -> None:
    log = f"{RUN}.log_args_dict"
    if draft.theirs(f"{log}.enable_wandb"):
        use_wandb(draft, log, "enable_wandb", _WANDB)
    else:
        folder = next((name for name in ("tensorboard_dir", "log_dir") if draft.theirs(f"{log}.{name}")), None)
        if folder is not None:
            draft.derive(f"{log}.{folder}", "tracker_kwargs.log_dir", draft.theirs(f"{log}.{folder}"))


def _unread_devices(draft: Draft) -> None:
    """Where only a shell can tell the number of devices: whole nodes that hold the layout, reported once."""
    key, names = f"{TRAINER}.num_gpu", (".num_gpu", ".fsdp_size")
    told = [each for each in draft.outcomes if each.kind == Kind.IMPOSSIBLE and each.key.endswith(names)]
    if key not in {each.key for each in told}:
        return

    def size(*names: str, of: str = TRAINER) -> int:
        return math.prod(int(draft.theirs(f"{of}.{name}") or 1) for name in names)

    count = math.lcm(GPUS_OF_A_NODE, size("tensor_model_parallel_size", of=POLICY))
    if draft.theirs(f"{RUN}.train_backend") == "megatron":
        dense = size("tensor_model_parallel_size", "context_parallel_size")
        experts = size("expert_tensor_parallel_size", "expert_model_parallel_size")
        count = math.lcm(count, math.lcm(dense, experts) * size("pipeline_model_parallel_size"))
    models = draft.given.values["models"]
    for section in models.values():  # links to it
        for name in [name for name in ("num_gpu", "fsdp_size") if isinstance(section.get(name), str)]:
            del section[name]
    models["policy_trainer"]["num_gpu"] = count
    draft.outcomes = [each for each in draft.outcomes if each not in told]
    got = next(each.got for each in told if each.key == key)
    unread = draft.given.unread.get(key)
    variable = re.fullmatch(r"\$\{oc\.env:(\w+)\}", str(got))
    by = unread.by if unread else (variable[1],) if variable else ()
    why = f"it depends on {' and '.join(by)}, which nothing sets" if by else "no line of the files says it"
    give = "".join(f"--set {name}=… " for name in by) + ("or " if by else "") + f"{key}=…"
    note = f"{why}; {count} is taken, the fewest nodes of {GPUS_OF_A_NODE} that hold the layout; give {give}"
    draft.tell(Kind.IMPOSSIBLE, key, got, "actor_train.device_mapping", note=note)


def _lengths(draft: Draft) -> None:
    """Prompt and answer each have a bound; older releases have one for both together."""
    keys = [f"{POLICY}.max_prompt_tokens_length", f"{POLICY}.max_response_tokens_length"]
    both = f"{POLICY}.seq_length"
    if draft.has(both) and not any(draft.has(key) for key in keys):
        whole = int(draft.theirs(both))
        prompt = max(1, whole // 4)
        draft.derive(both, "sequence_length", whole, "prompt and answer together")
        draft.set("prompt_length", prompt)
        draft.set("response_length", whole - prompt)
        note = f"an answer has all that its prompt leaves there; here the prompt has {prompt} of these tokens"
        draft.tell(Kind.IMPOSSIBLE, both, whole, "response_length", whole - prompt, note)
        return
    draft.derive(keys[0], "prompt_length", int(draft.theirs(keys[0])), "a longer prompt is left out")
    draft.derive(keys[1], "response_length", int(draft.theirs(keys[1])))
    draft.derive(keys, "sequence_length", draft.get("prompt_length") + draft.get("response_length"))


def _algorithm(draft: Draft) -> None:
    low, high = draft.get("pg_clip_low"), draft.get("pg_clip_high")
    if low == high:
        draft.derive([f"{TRAINER}.pos_clip_ratio", f"{TRAINER}.neg_clip_ratio"], "pg_clip", low)
        for key in ("pg_clip_low", "pg_clip_high", "use_pg_clip_range"):
            draft.remove(key)
    draft.derive([], "loss_agg_mode", "token-mean", "the loss of ChatLearn")
    megatron = draft.theirs(f"{RUN}.train_backend") == "megatron"
    for key in (f"{TRAINER}.entropy_coef", f"{TRAINER}.kl_coef"):
        coefficient = float(draft.theirs(key) or 0)
        if megatron and coefficient:
            draft.tell(Kind.DROPPED, key, coefficient, note="with megatron the loss there has no such term")
        elif key.endswith("entropy_coef"):
            draft.derive(key, "entropy_loss_coef", coefficient)
        elif coefficient > 0:
            draft.derive(key, "kl_loss_coef", coefficient)
            draft.derive(key, "use_kl_loss", True)
            draft.derive(key, "kl_penalty", "k3")
    if draft.theirs(key := f"{TRAINER}.use_group_sequence_policy"):
        if megatron:
            draft.derive(key, "importance_sampling", "seq")
        else:
            draft.tell(Kind.DROPPED, key, True, note="with fsdp nothing reads it there")


def _schedule(draft: Draft) -> None:
    """The learning rate: level with FSDP; Megatron's falls in a line in ``train_iters`` steps, else in one."""
    arguments, optimizer = "actor_train.training_args", f"{TRAINER}.optimizer"
    rate, least = float(draft.get(f"{arguments}.learning_rate")), float(draft.theirs(f"{optimizer}.min_lr") or 0)
    ratio = round(min(1.0, least / rate), 6)
    style = draft.theirs(f"{optimizer}.lr_decay_style")
    megatron = draft.theirs(f"{RUN}.train_backend") == "megatron"
    keys = [f"{optimizer}.min_lr", f"{TRAINER}.train_iters"]
    if style is not None:
        draft.translate([f"{optimizer}.lr_decay_style"], f"{arguments}.lr_scheduler_type", "schedule", style)
        draft.carry_set(f"{optimizer}.lr_decay_iters", f"{arguments}.lr_decay_steps", int)
        if ratio and style != "constant":
            draft.derive(f"{optimizer}.min_lr", f"{arguments}.min_lr_ratio", ratio)
    elif not megatron or ratio == 1:
        note = "min_lr is the rate itself" if megatron else "no schedule changes the rate with fsdp"
        draft.derive(keys[:1] if megatron else [], f"{arguments}.lr_scheduler_type", "constant_with_warmup", note)
    else:
        steps = int(draft.theirs(f"{TRAINER}.train_iters") or 1)
        draft.derive(keys, f"{arguments}.lr_scheduler_type", "linear", f"from lr to min_lr in {steps} steps there")
        draft.derive(keys, f"{arguments}.lr_decay_steps", steps)
        draft.derive(keys, f"{arguments}.min_lr_ratio", ratio)
        if not ratio and steps == 1:
            note = "not given, it is 0 with megatron: nothing is learned after the first optimizer step"
            to_do(draft, f"{optimizer}.min_lr", note, least, f"{arguments}.min_lr_ratio")


def _roles(draft: Draft) -> None:
    trainer = draft.get("actor_train.strategy_args.strategy_name")
    groups = draft.theirs(f"{RUN}.colocation") or ("policy", "policy_trainer", "ref_policy")
    shared = {name for group in groups for name in (group if isinstance(group, list) else [group])}
    sizes = {
        "actor_train": ("policy_trainer", int(draft.theirs(f"{TRAINER}.num_gpu"))),
        "actor_infer": ("policy", int(draft.theirs(f"{POLICY}.num_gpu") or draft.theirs(f"{TRAINER}.num_gpu"))),
    }
    if draft.get("use_kl_loss"):
        count = int(draft.theirs(f"{REF}.num_gpu", draft.theirs(f"{TRAINER}.num_gpu")))
        sizes["reference"] = ("ref_policy", count)
        scorer = trainer.replace("_train", "_infer")
        draft.derive(f"{RUN}.train_backend", "reference.strategy_args.strategy_name", scorer)
    first = 0
    for role, (name, count) in sizes.items():
        start = 0 if name in shared else first
        draft.derive(f"models.{name}.num_gpu", f"{role}.device_mapping", devices(start, count))
        first = max(first, start + count)
    if (nodes := -(-first // GPUS_OF_A_NODE)) > 1:
        note = f"of {GPUS_OF_A_NODE} devices; on machines with more give num_nodes and num_gpus_per_node"
        draft.derive(f"{TRAINER}.num_gpu", "num_nodes", nodes, note)
    for role, theirs in (("actor_train", TRAINER), ("reference", REF)):
        if role in sizes:
            _trained(draft, role, theirs, trainer)
    if (size := int(draft.get("actor_infer.num_gpus_per_worker") or 1)) > GPUS_OF_A_NODE:
        key, ours = f"{POLICY}.tensor_model_parallel_size", "actor_infer.num_gpus_per_worker"
        draft.derive(key, ours, GPUS_OF_A_NODE)
        to_do(draft, key, ENGINE_OF_A_NODE, size, ours)
    name = draft.get("actor_infer.strategy_args.strategy_name")
    key = "mem_fraction_static" if name == "sglang" else "gpu_memory_utilization"
    share = draft.theirs(f"{POLICY}.gpu_memory_utilization")
    draft.derive(f"{POLICY}.gpu_memory_utilization", f"actor_infer.{_OPTIONS}.{key}", float(share))
    if name == "vllm":
        draft.carry_set(f"{POLICY}.enforce_eager", f"actor_infer.{_OPTIONS}.enforce_eager", bool)
        draft.carry_set(f"{POLICY}.max_num_batched_tokens", f"actor_infer.{_OPTIONS}.max_num_batched_tokens", int)
    draft.set("actor_infer.model_args.dtype", "bf16")
    pretrain = draft.get("pretrain") or draft.theirs(f"{TRAINER}.load") or draft.theirs(f"{TRAINER}.tokenizer_model")
    if pretrain:
        draft.derive([f"{POLICY}.load", f"{TRAINER}.load"], "pretrain", pretrain)
    tokenizer = draft.theirs(f"{TRAINER}.tokenizer_model")
    if tokenizer and tokenizer != pretrain:
        draft.derive(f"{TRAINER}.tokenizer_model", "tokenizer_path", tokenizer)
    for other in (TRAINER, REF):
        path = draft.theirs(f"{other}.load")
        if path and path != pretrain and other == REF and trainer.startswith("fsdp2"):
            draft.derive(f"{other}.load", "reference_pretrain", path)
        elif path and path != pretrain:
            to_do(draft, f"{other}.load", f"all copies of the policy start from pretrain, {pretrain}", path)


def _trained(draft: Draft, role: str, theirs: str, trainer: str) -> None:
    options = f"{role}.{_OPTIONS}"
    if trainer == "megatron_train":
        for key, ours in _MEGATRON.items():
            value = draft.theirs(f"{theirs}.{key}", draft.theirs(f"{TRAINER}.{key}"))
            if value is not None:
                draft.derive(f"{theirs}.{key}", f"{options}.{ours}", value)
        if role == "actor_train":
            draft.carry(f"{theirs}.use_distributed_optimizer", f"{options}.use_distributed_optimizer")
            for section in (f"{theirs}.megatron_model_cfg", theirs):
                draft.carry(f"{section}.moe_aux_loss_coeff", f"{options}.moe_aux_loss_coeff", float)
            if kind := draft.theirs(key := f"{theirs}.recompute_granularity"):
                draft.derive(key, f"{options}.recompute_granularity", "selective" if kind == "sel" else kind)
                names = ("recompute_modules",) if kind != "full" else ("recompute_method", "recompute_num_layers")
                for name in names:
                    draft.carry(f"{theirs}.{name}", f"{options}.{name}")
            else:
                off = f"{role}.model_args.disable_gradient_checkpointing"
                draft.derive(key, off, True, "null computes nothing again there")
    elif role == "actor_train":
        size, count = draft.theirs(f"{theirs}.fsdp_size"), int(draft.theirs(f"{TRAINER}.num_gpu"))
        if size and 0 < int(size) < count:
            draft.derive(f"{theirs}.fsdp_size", f"{options}.fsdp_size", int(size))
    if role == "reference":
        draft.derive(f"{theirs}.bf16", f"{role}.model_args.dtype", draft.get("actor_train.model_args.dtype"))
        draft.carry_set(f"{theirs}.generation_batch_size", f"{role}.infer_batch_size", int)


def _validation(draft: Draft) -> None:
    if not draft.get("validation.data_args.file_name"):
        if draft.remove("validation") and draft.has(f"{RUN}.eval_data_path"):
            draft.tell(Kind.DROPPED, f"{RUN}.eval_data_path", None, note="it names no file")
        return
    period, episodes = int(draft.theirs(key := f"{RUN}.eval_episode_interval") or 0), int(draft.get("max_steps"))
    if not period or episodes % period:
        draft.derive(key, "val_after_train", False)
    if not period and draft.get("val_before_train"):
        draft.derive(key, "val_before_train", False, "without a period nothing is evaluated there")
    draft.derive(f"{RUN}.eval_data_path", "val_batch_size", None, "all of the held-out prompts")


def _batches(draft: Draft) -> None:
    answers = int(draft.get("num_return_sequences_in_group"))
    samples = int(draft.theirs(f"{RUN}.sample_per_episode"))
    prompts = max(1, samples // answers)
    keys = [f"{RUN}.sample_per_episode", f"{POLICY}.num_inference_per_prompt"]
    draft.derive(keys, "rollout_batch_size", prompts, f"{prompts} prompts × {answers} answers")
    packing = bool(draft.theirs(f"{TRAINER}.packing"))
    micro = draft.theirs(f"{TRAINER}.train_micro_batch_size", draft.theirs(f"{RUN}.train_micro_batch_size"))
    wanted = int(draft.theirs(f"{RUN}.train_global_batch_size"))
    keys = [f"{RUN}.train_global_batch_size", f"{RUN}.train_micro_batch_size"]
    set_batch(draft, "actor_train", wanted, None if packing else int(micro), keys, prompts * answers)
    for role, theirs in (("actor_train", TRAINER), ("reference", REF)):
        if role not in draft.ours or not draft.theirs(f"{theirs}.packing", packing):
            continue
        budget = int(draft.theirs(f"{theirs}.max_token_in_packing", draft.theirs(f"{TRAINER}.max_token_in_packing")))
        keys = [f"{theirs}.packing", f"{theirs}.max_token_in_packing"]
        for phase in ("train", "infer") if role == "actor_train" else ("infer",):
            set_budget(draft, role, phase, budget, keys)
        draft.derive(f"{theirs}.packing", f"{role}.use_sequence_packing", True)
