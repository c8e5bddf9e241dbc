"""verl's roles: engines, devices, the generator, the critic."""

from __future__ import annotations

from typing import Any

from roll.extras.importers.common import devices
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.table import DERIVE, TRANSFORMS, usual
from roll.extras.importers.verl_algorithm import set_optimizer

ACTOR, ROLLOUT, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
MODEL = "actor_rollout_ref.model"
PER_GPU = "_per_gpu"
OPTIONS = "strategy_args.strategy_config"
MEGATRON_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
"""Options of Megatron with the same names in verl."""
UNREAD_BY_ENGINES = ("disable_mm_preprocessor_cache", "max_logprobs")
"""Options of vLLM that say nothing here: pictures are prepared before, and who asks for top tokens gets them."""
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linear layers, as Hugging Face's models name them."""
_ALL_LAYERS = {part for parts in FUSED.values() for part in parts}
ENGINES = {"dp": "fsdp2_train", "veomni": "fsdp2_train", "megatron": "megatron_train"}
"""Engines of training by the names that ``model_engine`` has for them."""
_SHARED = (
    ("ppo_epochs", f"{ACTOR}.ppo_epochs"),
    ("ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    ("grad_clip", f"{ACTOR}.grad_clip"),
    ("loss_agg_mode", f"{ACTOR}.loss_agg_mode"),
    ("loss_scale_factor", f"{ACTOR}.loss_scale_factor"),
)
"""The critic's keys, and those of the actor that hold for it too."""
FIRE = {"first_token_temperature": 30.0, "first_token_top_k": 16}
"""Settings that their switch stands for."""


def _devices(draft: Draft) -> int:
    """Devices that train."""
    return int(draft.theirs("trainer.nnodes")) * int(draft.theirs("trainer.n_gpus_per_node"))


def per_device(draft: Draft, key: str) -> int | None:
    """A micro-batch on one device: ``key`` with ``_per_gpu``, else what ``key`` says of all of them."""
    if size := draft.theirs(f"{key}{PER_GPU}"):
        return int(size)
    whole = draft.theirs(key)
    return max(1, int(whole) // _devices(draft)) if whole else None


def set_roles(draft: Draft) -> None:
    """Sets the roles that there are, their devices and their engines."""
    _trainer(draft)
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
    override = _override(draft)
    if (attention := override.pop("attn_implementation", None)) is not None:
        draft.derive(f"{MODEL}.override_config", "actor_train.model_args.attn_implementation", attention)
    if (template := override.pop("chat_template", None)) is not None:
        draft.derive(f"{MODEL}.override_config.chat_template", "actor_train.data_args.template", template)
    if extra := {key: value for key, value in override.items() if value is not None and "dropout" not in key}:
        for role in roles:
            draft.derive(f"{MODEL}.override_config", f"{role}.model_args.model_config_kwargs", extra)
    _adapter(draft)
    _generator(draft)


def _trainer(draft: Draft) -> None:
    """The engine of training: ``model_engine``, ``actor.strategy``, or what the files build on."""
    ours = "actor_train.strategy_args.strategy_name"
    if (engine := draft.theirs("model_engine")) is not None and engine not in ENGINES:
        note = f"the engines of training are {', '.join(ENGINES)} there: fsdp2_train is taken"
        draft.tell(Kind.IMPOSSIBLE, "model_engine", engine, note=note)
    elif engine is not None:
        draft.derive("model_engine", ours, ENGINES[engine])
    elif draft.has(f"{ACTOR}.strategy"):
        return
    elif any("megatron" in name for name in draft.given.missing):
        draft.derive(f"{ACTOR}.strategy", ours, "megatron_train", "that of the configuration which it builds on")
    elif draft.has(f"{ACTOR}.megatron") and not draft.has(f"{ACTOR}.fsdp_config"):
        draft.derive(f"{ACTOR}.megatron", ours, "megatron_train", "only megatron has its section")


def _adapter(draft: Draft) -> None:
    """LoRA: keys of the model, or those of its section ``lora``, which Megatron's runs read."""
    base, alone = "actor_train.model_args", not draft.has(f"{MODEL}.lora.rank")
    keys = {
        name: f"{MODEL}.{old}" if alone else f"{MODEL}.lora.{new}"
        for name, old, new in (
            ("rank", "lora_rank", "rank"),
            ("alpha", "lora_alpha", "alpha"),
            ("target", "target_modules", "target_modules"),
            ("exclude", "exclude_modules", "exclude_modules"),
            ("path", "lora_adapter_path", "adapter_path"),
        )
    }
    path = draft.theirs(keys["path"])
    if (rank := draft.theirs(keys["rank"]) or 0) <= 0:
        if path:
            note = "write lora_target, lora_rank and lora_alpha of the adapter next to adapter_name_or_path"
            draft.tell(Kind.IMPOSSIBLE, keys["path"], path, note=note)
        return
    draft.derive(keys["rank"], f"{base}.lora_rank", int(rank))
    draft.derive(keys["alpha"], f"{base}.lora_alpha", int(draft.theirs(keys["alpha"], 16 if alone else 32)))
    draft.derive(keys["target"], f"{base}.lora_target", _layers(draft.theirs(keys["target"]) or "all-linear"))
    draft.carry_set(keys["exclude"], f"{base}.lora_exclude", _layers)
    draft.carry_set(keys["path"], f"{base}.adapter_name_or_path")


def _layers(names: Any) -> str:
    """Names of linear layers, with commas; those that Megatron fuses as their parts."""
    parts = [part for name in str(TRANSFORMS["commas"](names)).split(",") for part in FUSED.get(name, (name,))]
    return "all-linear" if set(parts) >= _ALL_LAYERS else ",".join(parts)


def _override(draft: Draft) -> dict[str, Any]:
    """Entries over the model's own configuration, without those of Megatron's experts."""
    given = draft.theirs(f"{MODEL}.override_config") or {}
    given = given.get("model_config", given) if isinstance(given, dict) else {}
    return {key: value for key, value in (given or {}).items() if key != "moe_config"}


def _fsdp(draft: Draft, role: str, theirs: str) -> None:
    config, options = f"{ACTOR}.fsdp_config", f"{role}.{OPTIONS}"
    dtype = TRANSFORMS["dtype"](draft.theirs(f"{config}.model_dtype"))
    draft.derive(f"{config}.model_dtype", f"{role}.model_args.dtype", dtype)
    if dtype == "fp32":
        draft.derive(f"{config}.mixed_precision.param_dtype", f"{options}.param_dtype", "bf16", "weights in fp32")
    if role == "actor_train":
        size = draft.theirs(f"{config}.fsdp_size", -1)
        if size and 0 < int(size) < _devices(draft):
            draft.derive(f"{config}.fsdp_size", f"{options}.fsdp_size", int(size))
        draft.carry_set(f"{config}.offload_policy", f"{options}.cpu_offload", bool)
        if draft.theirs(f"{config}.reshard_after_forward", True) is False:
            draft.derive(f"{config}.reshard_after_forward", f"{options}.reshard_after_forward", False)
        return
    key, shared = f"{theirs}.ulysses_sequence_parallel_size", draft.get("actor_train.model_args.ulysses_size", 1)
    if (size := draft.theirs(key, shared)) != 1:
        draft.derive(key, f"{role}.model_args.ulysses_size", int(size))


def _megatron(draft: Draft, role: str, theirs: str) -> None:
    options = f"{role}.{OPTIONS}"
    draft.derive(f"{ACTOR}.megatron.dtype", f"{role}.model_args.dtype", "bf16", "Megatron computes in bf16")
    if role == "actor_train" and (dtype := draft.theirs(f"{ACTOR}.megatron.dtype")) not in (None, "bfloat16", "bf16"):
        note = "nothing is trained in 16 bits but bf16, which is taken"
        draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.megatron.dtype", dtype, f"{role}.model_args.dtype", note=note)
    for key in MEGATRON_KEYS:
        value = draft.theirs(f"{theirs}.megatron.{key}", draft.theirs(f"{ACTOR}.megatron.{key}"))
        if value is not None and not (role == "reference" and key == "use_distributed_optimizer"):
            draft.derive(f"{theirs}.megatron.{key}", f"{options}.{key.replace('-', '_')}", value)
    if draft.get(f"{options}.sequence_parallel") is None and draft.get(f"{options}.tensor_model_parallel_size", 1) > 1:
        draft.derive(
            f"{theirs}.megatron.sequence_parallel", f"{options}.sequence_parallel", True, "on there by default"
        )
    if role == "actor_train":
        _transformer(draft, role, f"{ACTOR}.megatron.override_transformer_config")


def _transformer(draft: Draft, role: str, extra: str) -> None:
    """Fields of Megatron's own configuration."""
    chosen = draft.theirs(f"{extra}.recompute_granularity") == "selective"
    for key in draft.theirs(extra) or {}:
        if draft.rule(f"{extra}.{key}") != DERIVE or (key == "recompute_modules" and not chosen):
            continue
        if draft.theirs(f"{extra}.{key}") == "flex":
            draft.derive(f"{extra}.{key}", f"{role}.{OPTIONS}.{key}", "alltoall", "the same tokens, by other kernels")
        else:
            draft.carry(f"{extra}.{key}", f"{role}.{OPTIONS}.{key}")


def set_engine(draft: Draft, role: str, theirs: str) -> None:
    """Options of the engine of a role that generates, or scores as one that does, from a section such as rollout."""
    name = draft.get(f"{role}.strategy_args.strategy_name", "vllm")
    options = f"{role}.{OPTIONS}"
    share = draft.theirs(f"{theirs}.gpu_memory_utilization", draft.theirs(f"{ROLLOUT}.gpu_memory_utilization"))
    if name == "vllm":
        draft.derive(f"{theirs}.gpu_memory_utilization", f"{options}.gpu_memory_utilization", share)
        for key in ("enforce_eager", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"):
            if draft.has(f"{theirs}.{key}"):
                draft.carry(f"{theirs}.{key}", f"{options}.{key}")
    elif name == "sglang":
        draft.derive(f"{theirs}.gpu_memory_utilization", f"{options}.mem_fraction_static", share)
        draft.carry_set(f"{theirs}.enforce_eager", f"{options}.disable_cuda_graph", bool)
    else:
        draft.remove(f"{role}.num_gpus_per_worker")
    own = draft.theirs(f"{theirs}.engine_kwargs.{name}")
    for key, value in (own or {}).items() if isinstance(own, dict) else ():
        if value is not None and key not in UNREAD_BY_ENGINES:
            draft.derive(f"{theirs}.engine_kwargs.{name}.{key}", f"{options}.{key.replace('-', '_')}", value)


def _generator(draft: Draft) -> None:
    set_engine(draft, "actor_infer", ROLLOUT)
    name, options = draft.get("actor_infer.strategy_args.strategy_name", "vllm"), f"actor_infer.{OPTIONS}"
    if draft.theirs(f"{ROLLOUT}.use_fire_sampling"):
        for key, value in FIRE.items():
            draft.derive(f"{ROLLOUT}.use_fire_sampling", f"actor_infer.generating_args.{key}", value)
    if method := draft.theirs(key := f"{ROLLOUT}.quantization"):
        if name == "vllm" and method == "fp8":
            note = "blocks of 128 x 128, as there; quantised at the start and after every update"
            draft.derive(key, f"{options}.quantization", "fp8_per_block", note)
        else:
            draft.tell(Kind.IMPOSSIBLE, key, method, note="fp8 of vllm alone is quantised again after every update")
    limit, whole = draft.theirs(f"{ROLLOUT}.max_model_len"), int(draft.get("sequence_length"))
    if limit and name == "vllm" and int(limit) >= whole:
        draft.derive(f"{ROLLOUT}.max_model_len", f"{options}.max_model_len", int(limit))
    for key in ("prompt_length", "response_length"):
        if draft.has(f"{ROLLOUT}.{key}") and draft.theirs(f"{ROLLOUT}.{key}") != draft.get(key):
            note = f"data.max_{key} is read: {draft.get(key)}"
            draft.tell(Kind.DROPPED, f"{ROLLOUT}.{key}", draft.theirs(f"{ROLLOUT}.{key}"), note=note)


def set_critic(draft: Draft, updates: int) -> None:
    """The critic: the actor's engine and devices, its own optimizer with ``updates`` steps to one of its schedule's."""
    trainer = draft.get("actor_train.strategy_args.strategy_name", "fsdp2_train")
    draft.derive("critic.strategy", "critic.strategy_args.strategy_name", trainer)
    draft.derive("trainer.n_gpus_per_node", "critic.device_mapping", draft.get("actor_train.device_mapping"))
    for key in ("model_args", "strategy_args"):
        draft.set(f"critic.{key}", _copy(draft.get(f"actor_train.{key}", {})))
    if trainer == "megatron_train":
        _transformer(draft, "critic", f"{CRITIC}.megatron.override_transformer_config")
    _tell_of_the_actor(draft)
    if (path := draft.theirs("critic.model.path")) and path != draft.get("pretrain"):
        draft.derive("critic.model.path", "reward_pretrain", path)
    elif not path:
        note = f"not given: there it is {usual('verl', 'critic.model.path').values[0]}, here it starts from the policy"
        draft.tell(Kind.TO_DO, "critic.model.path", path, "reward_pretrain", note=note)
    if draft.has(key := "critic.model.enable_gradient_checkpointing"):
        draft.derive(key, "critic.model_args.disable_gradient_checkpointing", not draft.theirs(key))
    for name in ("use_rmpad", "use_remove_padding"):
        draft.carry_set(f"critic.model.{name}", "critic.use_sequence_packing", bool)
    draft.carry_set("critic.ulysses_sequence_parallel_size", "critic.model_args.ulysses_size", int)
    draft.carry("critic.optim.lr", "critic.training_args.learning_rate", float)
    draft.carry("critic.optim.weight_decay", "critic.training_args.weight_decay", float)
    set_optimizer(draft, "critic.optim", "critic", updates)
    draft.carry("critic.cliprange_value", "value_clip", float)
    if size := per_device(draft, "critic.forward_micro_batch_size"):
        draft.derive(f"critic.forward_micro_batch_size{PER_GPU}", "critic.infer_batch_size", size)


def _tell_of_the_actor(draft: Draft) -> None:
    """Tells of the critic's keys that differ from the actor's where one value holds for both here."""
    for name, theirs in _SHARED:
        key = f"{CRITIC}.{name}"
        got, held = draft.theirs(key), draft.theirs(theirs)
        if draft.has(key) and got is not None and got != held:
            draft.outcomes = [each for each in draft.outcomes if each.key != key]
            draft.tell(Kind.IMPOSSIBLE, key, got, note=f"{theirs}, {held}, holds for the critic too")


def _copy(values: Any) -> Any:
    return (
        {key: _copy(value) for key, value in values.items() if not key.startswith("lora")}
        if isinstance(values, dict)
        else values
    )
