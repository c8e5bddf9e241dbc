"""ROLL's training on samples that are there before: supervised, and on preferences."""

from __future__ import annotations

from roll.configs.dpo import DPOConfig
from roll.configs.offline import OfflineConfig
from roll.configs.sft import SFTConfig
from roll.extras.importers.common import drop_unread_of_roles, to_do
from roll.extras.importers.draft import Draft

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
    set_extent(draft)
    if draft.get("validation.data_args.file_name"):
        draft.derive("val_batch_size", "val_batch_size", None, "all samples that are held out")
    drop_unread_of_roles(draft)
    for key in [key for key in draft.ours if key not in schema.model_fields]:
        draft.drop_ours(key, "a run on given samples does not read it")
    for key in ("actor_infer", "prompt_length", "response_length"):
        draft.drop_ours(key, "nothing is generated")


def set_extent(draft: Draft) -> None:
    """Length of the run and of its samples, which are read by one process."""
    if draft.theirs(_EPOCHS) is not None:
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
