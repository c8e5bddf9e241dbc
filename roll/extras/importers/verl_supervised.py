"""verl's supervised training: ``fsdp_sft_trainer``, and ``sft_trainer``, which names an engine."""

from __future__ import annotations

from typing import Any

from roll.configs.offline import SFTConfig
from roll.extras.importers.common import (
    devices,
    drop_unread_of_roles,
    parallel_sizes,
    profiler_of_verl_supervised,
    sequence_ranks,
    set_batch,
    set_budget,
    tidy_engines,
    to_do,
    trust_code,
)
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.table import TRANSFORMS
from roll.extras.importers.verl import set_run
from roll.extras.importers.verl_algorithm import set_optimizer
from roll.extras.importers.verl_roles import MEGATRON_KEYS

_DATA, _MODEL = "actor_train.data_args", "actor_train.model_args"
_OPTIONS = "actor_train.strategy_args.strategy_config"
_BUDGET, _ENGINE_RATE = 8192, 1e-3


def derive(draft: Draft) -> type[SFTConfig]:
    """Everything that no row of the table says by itself; returns whose configuration it is."""
    engine = any(draft.has(key) for key in ("engine", "model.path", "data.messages_key"))
    set_run(draft, "checkpoint", ("model.external_lib",))
    _length(draft)
    _columns(draft, engine)
    _samples(draft)
    _strategy(draft)
    _model(draft)
    _optimizer(draft, engine)
    _batches(draft, engine)
    drop_unread_of_roles(draft)
    trust_code(draft, ["model.trust_remote_code"])
    tidy_engines(draft)
    profiler_of_verl_supervised(draft)
    return SFTConfig


def _length(draft: Draft) -> None:
    draft.derive("trainer", "train_on", "all", "the answers of each row")
    steps, epochs = draft.theirs("trainer.total_training_steps"), draft.theirs("trainer.total_epochs")
    if steps:
        draft.derive(["trainer.total_training_steps", "trainer.total_epochs"], "max_steps", int(steps))
    else:
        draft.derive("trainer.total_epochs", "num_train_epochs", int(epochs))
    resumed = draft.theirs("trainer.resume_path") or draft.theirs("trainer.resume_from_path")
    if resumed and draft.get("resume_from_checkpoint") in (None, "resume_path"):
        keys = ["trainer.resume_path", "trainer.resume_from_path"]
        draft.derive(keys, "resume_from_checkpoint", resumed)
        note = "checkpoints of verl are not read: give one of this library"
        to_do(draft, keys[not draft.has(keys[0])], note, resumed)


def _columns(draft: Draft, engine: bool) -> None:
    """The conversation, or the question and the answer; a key inside a column is a dotted path."""
    if engine or draft.theirs("data.multiturn.enable"):
        keys = ["data.multiturn.messages_key", "data.messages_key", "data.multiturn.enable"]
        column = next((str(name) for key in keys[:2] if (name := draft.theirs(key))), "messages")
        draft.derive(keys, f"{_DATA}.messages", column)
        draft.derive(keys, f"{_DATA}.response", None, "the answers are in the conversation")
    else:
        for ours, name in (("prompt", "prompt"), ("response", "response")):
            column, inside = draft.theirs(f"data.{name}_key"), draft.theirs(f"data.{name}_dict_keys")
            inside = [inside] if isinstance(inside, str) else list(inside or [])
            keys = [f"data.{name}_key", f"data.{name}_dict_keys"]
            draft.derive(keys, f"{_DATA}.{ours}", ".".join([str(column), *map(str, inside[:1])]))
            if len(inside) > 1:
                draft.tell(Kind.IMPOSSIBLE, keys[1], inside, f"{_DATA}.{ours}", note="one column is one text")
    for key in ("data.multiturn.tools_key", "data.tools_key"):
        if draft.theirs(key) not in (None, "tools"):
            note = "a row's tools are not passed to the template: put them into its system message"
            draft.tell(Kind.IMPOSSIBLE, key, draft.theirs(key), note=note)
    draft.carry_set("data.chat_template", f"{_DATA}.template")


def _samples(draft: Draft) -> None:
    if int(most := draft.theirs("data.train_max_samples") or -1) > 0:
        draft.derive("data.train_max_samples", f"{_DATA}.dataset_filter.num_samples", int(most))
    if not draft.get("validation.data_args.file_name"):
        draft.remove("validation")
        return
    most = int(draft.theirs("data.val_max_samples") or -1)
    bound = most if most > 0 else None
    draft.derive("data.val_max_samples", "val_batch_size", bound, "" if bound else "all that is held out")


def _strategy(draft: Draft) -> None:
    name = draft.theirs("engine.strategy")
    trainer = TRANSFORMS["trainer"](name if name in ("megatron", "veomni") else "fsdp")
    keys = ["engine.strategy", "model.strategy"]
    draft.derive(keys, "actor_train.strategy_args.strategy_name", trainer)
    count = int(draft.get("num_nodes", 1)) * int(draft.get("num_gpus_per_node", 8))
    draft.derive(["trainer.n_gpus_per_node", "trainer.nnodes"], "actor_train.device_mapping", devices(0, count))
    if trainer == "megatron_train":
        draft.derive(keys, f"{_MODEL}.dtype", "bf16", "Megatron computes in bf16")
        for key in MEGATRON_KEYS:
            draft.carry(f"engine.{key}", f"{_OPTIONS}.{key}")
        return
    given = next((key for key in ("engine.model_dtype", "model.fsdp_config.model_dtype") if draft.has(key)), None)
    dtype = TRANSFORMS["dtype"](draft.theirs(given or "model.fsdp_config.model_dtype"))
    draft.derive(given or "model.fsdp_config.model_dtype", f"{_MODEL}.dtype", dtype)
    if dtype == "fp32":
        draft.derive("model.fsdp_config.model_dtype", f"{_OPTIONS}.param_dtype", "bf16", "weights in fp32")
    for key in ("model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params", "engine.offload_policy"):
        draft.carry_set(key, f"{_OPTIONS}.cpu_offload", bool)
    if 0 < int(size := draft.theirs("engine.fsdp_size") or -1) < count:
        draft.derive("engine.fsdp_size", f"{_OPTIONS}.fsdp_size", int(size))
    if draft.theirs("engine.reshard_after_forward", True) is False:
        draft.derive("engine.reshard_after_forward", f"{_OPTIONS}.reshard_after_forward", False)


def _model(draft: Draft) -> None:
    if int(rank := draft.theirs("model.lora_rank") or 0) > 0:
        draft.derive("model.lora_rank", f"{_MODEL}.lora_rank", int(rank))
        draft.derive("model.lora_alpha", f"{_MODEL}.lora_alpha", int(draft.theirs("model.lora_alpha") or 16))
        layers = TRANSFORMS["commas"](draft.theirs("model.target_modules") or "all-linear")
        draft.derive("model.target_modules", f"{_MODEL}.lora_target", layers)
    other: dict[str, Any] = dict(draft.theirs("model.override_config") or {})
    if (attention := other.pop("attn_implementation", None)) is not None:
        draft.derive("model.override_config", f"{_MODEL}.attn_implementation", TRANSFORMS["attention"](attention))
    if (template := other.pop("chat_template", None)) is not None:
        draft.derive("model.override_config", f"{_DATA}.template", template)
    if other:
        draft.derive("model.override_config", f"{_MODEL}.model_config_kwargs", other)


def _optimizer(draft: Draft, engine: bool) -> None:
    """Schedule and betas; what is not given is another in the two trainers."""
    given = draft.given.values.setdefault("optim", {})
    usual: dict[str, tuple[str, Any]] = {
        "betas": ("", [0.9, 0.95]),
        "warmup_steps_ratio": ("lr_warmup_steps_ratio", 0.1),
        "lr_scheduler": ("lr_scheduler_type", "cosine"),
    }
    for key, (newer, value) in () if engine else usual.items():
        if newer not in given:
            given.setdefault(key, value)
    if engine and "lr" not in given:
        draft.derive("optim.lr", "actor_train.training_args.learning_rate", _ENGINE_RATE, "the default with an engine")
    if not engine:
        draft.given.notes.append(
            "fsdp_sft_trainer averages the loss over the tokens of each micro-batch, and these means evenly; here it "
            "is the mean over all tokens of an optimizer step"
        )
    set_optimizer(draft, "optim", "actor_train")


def _batches(draft: Draft, engine: bool) -> None:
    samples = int(draft.theirs("data.train_batch_size"))
    keys = ["data.train_batch_size", "data.micro_batch_size_per_gpu", "data.micro_batch_size"]
    dynamic = draft.theirs("data.use_dynamic_bsz", engine)
    per_device = draft.theirs("data.micro_batch_size_per_gpu")
    if not draft.has("data.micro_batch_size_per_gpu") and (whole := draft.theirs("data.micro_batch_size")):
        count = int(draft.get("num_nodes", 1)) * int(draft.get("num_gpus_per_node", 8))
        per_device = max(1, int(whole) * parallel_sizes(draft, "actor_train") // count)
    set_batch(draft, "actor_train", samples, None if dynamic else int(per_device or 0) or None, keys)
    if dynamic:
        budget = int(draft.theirs("data.max_token_len_per_gpu") or _BUDGET) * sequence_ranks(draft, "actor_train")
        set_budget(draft, "actor_train", "train", budget, ["data.use_dynamic_bsz", "data.max_token_len_per_gpu"])
