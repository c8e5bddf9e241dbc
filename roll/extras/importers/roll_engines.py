"""ROLL's engines: the options of a role's strategy that several keys say together."""

from __future__ import annotations

from roll.configs.problems import NOTHING
from roll.configs.rules import TRAINED
from roll.configs.shipped import SHIPPED
from roll.extras.importers.draft import Draft, Kind

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}
"""Data types by the names of PyTorch and of the engines."""


def set_model_kwargs(draft: Draft, role: str) -> None:
    """The generator and the reference hold the actor's model: entries of its config.json hold for them too."""
    key = "model_args.model_config_kwargs"
    kwargs = draft.get(f"actor_train.{key}")
    if kwargs and role in ("actor_infer", "reference") and draft.get(f"{role}.{key}") != kwargs:
        draft.derive(f"actor_train.{key}", f"{role}.{key}", dict(kwargs), "one model")


def drop_adapter(draft: Draft) -> None:
    """The generator's adapter is the one that is trained; theirs is told the names of its layers once more."""
    if draft.get("actor_train.model_args.lora_target"):
        for key in ("target", "rank", "alpha"):
            draft.drop_ours(f"actor_infer.model_args.lora_{key}", "it generates with the adapter of actor_train")


def set_engine(draft: Draft, role: str) -> None:
    """A role's engine and its options: presets of DeepSpeed, sizes of an engine, data types."""
    base = f"{role}.strategy_args.strategy_config"
    link = draft.link(base)
    preset = str(link)[2:-1] if isinstance(link, str) and link.startswith("${") else ""
    if preset == "deepspeed_zero1":
        preset = "deepspeed_zero"
    if preset.startswith("deepspeed_zero") and (SHIPPED / f"{preset}.yaml").is_file():
        draft.forget(base)
        draft.set(base, f"${{{preset}}}")
        draft.tell(Kind.KEPT, base, link, base, link)
    name = draft.get(f"{role}.strategy_args.strategy_name", "")
    if draft.theirs(f"{base}.save_only_model"):
        draft.derive(f"{base}.save_only_model", "checkpoint_config.save_contents", ["model"])
    if role in TRAINED and not draft.has("max_grad_norm"):
        draft.carry(f"{base}.max_grad_norm", "max_grad_norm")
    _precision(draft, role)
    if (reduced := draft.theirs(f"{base}.reduce_dtype")) is not None:
        reduced = _SHORT.get(str(reduced), reduced)
        if reduced == "fp32" or draft.get(f"{base}.fsdp_size") != 1:
            draft.derive(f"{base}.reduce_dtype", f"{base}.reduce_dtype", reduced)
    if name in ("vllm", "sglang"):
        _engine_precision(draft, role)
        split = draft.get(f"{base}.tensor_parallel_size") or draft.get(f"{base}.tp_size")
        size = int(split or draft.theirs(f"{role}.num_gpus_per_worker") or 1)
        key, ours = f"{base}.cuda_graph_sizes", f"{base}.cudagraph_capture_sizes"
        draft.carry(key, ours, note="its name in vLLM now")
        limit = draft.theirs(f"{base}.max_num_seqs")
        if limit and name == "vllm" and draft.get("max_running_requests") is None:
            draft.derive(f"{base}.max_num_seqs", "max_running_requests", int(limit))
        if size > 1:
            draft.derive(f"{role}.num_gpus_per_worker", f"{role}.num_gpus_per_worker", size)
    elif draft.theirs(f"{role}.num_gpus_per_worker", 1) != 1:
        words = f"{name or 'a trainer'} runs one process per device"
        draft.tell(Kind.DROPPED, f"{role}.num_gpus_per_worker", draft.theirs(f"{role}.num_gpus_per_worker"), note=words)


def _engine_precision(draft: Draft, role: str) -> None:
    """The data type that an option of the engine asks for, beside ``model_args.dtype``."""
    key, ours = f"{role}.strategy_args.strategy_config.dtype", f"{role}.model_args.dtype"
    asked = draft.remove(key)
    if asked is NOTHING:
        return
    short, given = _SHORT.get(str(asked), asked), draft.get(ours)
    if short == "auto" or short == given:
        draft.retell(key, Kind.DROPPED, f"{ours} says it", asked)
    elif given is None:
        draft.forget(key)
        draft.derive(key, ours, short)
    else:
        draft.retell(key, Kind.IMPOSSIBLE, f"{ours} is {given}", asked)


def _precision(draft: Draft, role: str) -> None:
    """The data type that the trainers' own switches ask for, beside ``model_args.dtype``."""
    base, ours = f"{role}.strategy_args.strategy_config", f"{role}.model_args.dtype"
    for dtype in ("bf16", "fp16"):
        key = f"{base}.{dtype}"
        asked = draft.theirs(key)
        if isinstance(asked, dict):  # DeepSpeed's
            asked = asked.get("enabled")
        if asked is None:
            continue
        if asked == "auto":
            draft.tell(Kind.DROPPED, key, asked, note=f"{ours} says it")
            continue
        given = draft.get(ours)
        if asked and given is None:
            draft.derive(key, ours, dtype)
        elif bool(asked) != (given == dtype):
            draft.tell(Kind.IMPOSSIBLE, key, asked, note=f"{ours} is {given or 'that of the model'}")
        else:
            draft.tell(Kind.DROPPED, key, asked, note=f"{ours} says it")
