"""A DeepSpeed engine's parameters on their way to and from model folders and checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.checkpoint import (
    MASTER,
    OPTIMIZER_FOLDER,
    SafetensorsWriter,
    StoredTensors,
    read_state,
    restore_rng,
    save_checkpoint,
)
from roll.distributed.strategy.deepspeed.weights import EngineWeights
from roll.distributed.strategy.optim import ADAM_STATE
from roll.distributed.strategy.trainer import TrainerState
from roll.models.heads import VALUE_HEAD_FILE, load_value_head
from roll.models.loading import load_causal_lm, load_trunk, save_config, to_hf_weights
from roll.models.lora import ADAPTER_FILE, adapter_name, base_name, initial_value, is_adapter, write_adapter_config

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."


def fill_from(path: Path, weights: EngineWeights, config_kwargs: Mapping[str, Any] | None = None) -> None:
    """Sets all parameters, but for an adapter's, to those of a model folder that rank 0 reads (collective)."""
    whole: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        head = weights.scorer.value_head
        load = load_causal_lm if head is None else load_trunk
        model = load(str(path), dtype=torch.float32, config_kwargs=config_kwargs)
        whole = {MODEL_PREFIX + name: parameter.detach() for name, parameter in model.named_parameters()}
        if head is not None:
            saved = load_value_head(model.config.get_text_config().hidden_size, path)
            whole |= {HEAD_PREFIX + name: parameter.detach() for name, parameter in saved.named_parameters()}
    _fill(weights, (n for n in weights.parameters if not is_adapter(n)), lambda name: whole[base_name(name)])


def start_adapter(weights: EngineWeights, seed: int) -> None:
    """Gives an adapter its first values (collective)."""
    names = [name for name in weights.parameters if is_adapter(name)]
    _fill(weights, names, lambda name: initial_value(name, weights.shape(name), seed))


def hf_weights(weights: EngineWeights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The language model's weights without an adapter under Hugging Face names, tied ones once (collective).

    They are gathered one after the other, as the iterator is asked for them.
    """
    for name, parameter in weights.parameters.items():
        if name.startswith(MODEL_PREFIX) and not is_adapter(name):
            whole = weights.stored(name) if parameter.dtype == dtype else weights.master(name).to(dtype)
            hf_name = base_name(name).removeprefix(MODEL_PREFIX)
            yield from to_hf_weights(weights.scorer.model, hf_name, whole).items()


def adapter_weights(weights: EngineWeights) -> Iterator[tuple[str, Tensor]]:
    """The adapter in float32 under the names of a peft folder (collective)."""
    for name in weights.parameters:
        if is_adapter(name):
            yield _stored_name(name), weights.master(name)


def save_weights(
    path: Path, weights: EngineWeights, state: TrainerState, *, dtype: torch.dtype, context: StrategyContext
) -> None:
    """Writes a checkpoint into ``path``: a model folder in ``dtype``, or with an adapter a peft folder (collective).

    Raises:
        OSError: on every rank, when rank 0 cannot write.
    """
    model, lora = weights.scorer.model, context.lora
    heads = [name for name in weights.parameters if name.startswith(HEAD_PREFIX)]
    adapter = {name: tensor.cpu() for name, tensor in adapter_weights(weights) if dist.get_rank() == 0}

    def write_config(folder: Path) -> None:
        save_config(model, folder, dtype)
        if lora is not None:
            write_adapter_config(folder, lora, context.model_path)
            writer = SafetensorsWriter(folder, Path(ADAPTER_FILE).stem)
            for name, tensor in adapter.items():
                writer.add(name, tensor)
            writer.finish()

    save_checkpoint(
        path,
        model=() if lora is not None else hf_weights(weights, dtype),
        optimizer=_optimizer_tensors(weights, master=lora is None and dtype != torch.float32),
        value_head=((n.removeprefix(HEAD_PREFIX), weights.master(n)) for n in heads) if heads else None,
        state=state,
        device=weights.device,
        write_config=write_config,
        tokenizer_from=context.model_path,
    )


def restore_weights(path: Path, weights: EngineWeights) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    state = read_state(path)
    stored = StoredTensors(path / OPTIMIZER_FOLDER)
    if any(map(is_adapter, weights.trained)):
        _restore_adapter(path, weights)
    elif MASTER in stored.kinds:
        _fill(weights, weights.trained, lambda name: stored.get(f"{_stored_name(name)}.{MASTER}"))
    else:
        fill_from(path, weights)
    for kind in ADAM_STATE:
        _fill(weights, weights.trained, functools.partial(_read_moment, stored, kind), kind)
    weights.set_steps(state.optimizer_steps)
    restore_rng(path, weights.device)
    return state


def _read_moment(stored: StoredTensors, kind: str, name: str) -> Tensor:
    return stored.get(f"{_stored_name(name)}.{kind}")


def _restore_adapter(path: Path, weights: EngineWeights) -> None:
    """What is trained beside frozen weights: the adapter, and a critic's head."""
    from safetensors.torch import load_file

    if not (path / ADAPTER_FILE).is_file():
        raise ValueError(f"checkpoint {path}: no {ADAPTER_FILE}; expected one of a run with lora_target")
    found: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        found = load_file(path / ADAPTER_FILE)
        if weights.scorer.value_head is not None:
            found |= {HEAD_PREFIX + name: tensor for name, tensor in load_file(path / VALUE_HEAD_FILE).items()}
    for name in weights.trained:
        key, expected = _stored_name(name), weights.shape(name)
        if dist.get_rank() == 0 and (key not in found or found[key].shape != expected):
            seen = tuple(found[key].shape) if key in found else "no such tensor"
            raise ValueError(f"checkpoint {path}: {key}: {seen}, expected shape {tuple(expected)}")
    _fill(weights, weights.trained, lambda name: found[_stored_name(name)])


def _optimizer_tensors(weights: EngineWeights, *, master: bool) -> Iterator[tuple[str, Tensor]]:
    for name in weights.trained:
        for kind in ADAM_STATE:
            yield f"{_stored_name(name)}.{kind}", weights.whole(name, kind)
        if master:
            yield f"{_stored_name(name)}.{MASTER}", weights.whole(name)


def _fill(weights: EngineWeights, names: Iterable[str], read: Callable[[str], Tensor], kind: str | None = None) -> None:
    """Sets parameters, or their moments, from whole tensors that rank 0 reads by name (collective)."""
    for name in names:
        weights.fill(name, read(name) if dist.get_rank() == 0 else None, kind)


def _stored_name(name: str) -> str:
    """A parameter's name in a model folder, or an adapter's in a peft folder."""
    hf_name = name.removeprefix(MODEL_PREFIX)
    return adapter_name(hf_name) if is_adapter(name) else hf_name
