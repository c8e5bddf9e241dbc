"""Parameters of ``Weights`` on their way to and from model folders and checkpoints."""

from __future__ import annotations

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
from roll.distributed.strategy.fsdp2.shards import SHARDS_FOLDER, load_shards, save_shards
from roll.distributed.strategy.fsdp2.weights import Weights, whole_parameters
from roll.distributed.strategy.optim import ADAM_STATE
from roll.distributed.strategy.trainer import TrainerState
from roll.models.heads import VALUE_HEAD_FILE, load_value_head
from roll.models.loading import Head, load_causal_lm, load_trunk, save_config, to_hf_weights
from roll.models.lora import ADAPTER_FILE, adapter_name, base_name, initial_value, is_adapter, write_adapter_config

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."
FULL = torch.float32
"""The number format of trained weights."""


def save_weights(
    path: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    *,
    dtype: torch.dtype,
    context: StrategyContext,
    sharded: bool = False,
) -> None:
    """Writes a checkpoint into ``path`` (collective).

    With an adapter, that is a peft folder: the frozen weights are those of the run's own model.

    Args:
        path: folder; made if need be.
        weights: the parameters.
        optimizer: over ``weights.trained``.
        state: the counters.
        dtype: number format of the Hugging Face weights.
        context: the role's.
        sharded: every rank writes its own shards, in place of the model folder and the optimizer.

    Raises:
        OSError: on every rank, when one cannot write.
    """
    scorer, lora = weights.scorer, context.lora
    adapter: dict[str, Tensor] = {} if lora is None or sharded else _on_rank_0(adapter_weights(weights))
    if sharded:
        save_shards(path / SHARDS_FOLDER, weights, optimizer)

    def write_config(folder: Path) -> None:
        save_config(scorer.model, folder, dtype)
        if lora is not None:
            write_adapter_config(folder, lora, context.model_path)
        if adapter:
            writer = SafetensorsWriter(folder, Path(ADAPTER_FILE).stem)
            for name, tensor in adapter.items():
                writer.add(name, tensor)
            writer.finish()

    save_checkpoint(
        path,
        model=() if sharded or lora is not None else hf_weights(weights, dtype),
        optimizer=() if sharded else _optimizer_tensors(weights, optimizer, master=lora is None and dtype != FULL),
        value_head=None if sharded or scorer.value_head is None else _head_weights(weights),
        state=state,
        device=weights.device,
        write_config=write_config,
        tokenizer_from=context.model_path,
    )


def restore_weights(path: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    state = read_state(path)
    if (path / SHARDS_FOLDER).is_dir():
        load_shards(path / SHARDS_FOLDER, weights, optimizer)
    else:
        _restore_whole(path, weights, optimizer)
    for share in weights.trained.values():
        optimizer.state[share]["step"].fill_(state.optimizer_steps)
    restore_rng(path, weights.device)
    return state


def load_weights(path: Path, weights: Weights, head: Head, config_kwargs: Mapping[str, Any] | None = None) -> None:
    """Fills the parameters, but for an adapter's, from a model folder that rank 0 reads (collective)."""
    whole: dict[str, Tensor] = {}
    if _rank() == 0:
        model = (load_causal_lm if head == "lm" else load_trunk)(str(path), dtype=FULL, config_kwargs=config_kwargs)
        whole = {MODEL_PREFIX + name: parameter.detach() for name, parameter in model.named_parameters()}
        if head == "value":
            value_head = load_value_head(model.config.get_text_config().hidden_size, path)
            whole |= {HEAD_PREFIX + name: parameter.detach() for name, parameter in value_head.named_parameters()}
    names = [name for name in weights.local if not is_adapter(name)]
    fill_weights(weights, names, lambda name: whole[base_name(name)])


def start_adapter(weights: Weights, seed: int) -> None:
    """Gives an adapter its first values (collective)."""
    names = [name for name in weights.local if is_adapter(name)]
    fill_weights(weights, names, lambda name: initial_value(name, weights.shapes[name], seed))


def fill_weights(weights: Weights, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Sets parameters from whole tensors that rank 0 reads by name (collective)."""
    for name in names:
        weights.fill(name, read(name) if _rank() == 0 else None)


def hf_weights(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The language model's weights without an adapter under Hugging Face names, tied ones once (collective)."""
    for name, whole in whole_parameters(weights):
        if name.startswith(MODEL_PREFIX) and not is_adapter(name):
            hf_name = base_name(name).removeprefix(MODEL_PREFIX)
            yield from to_hf_weights(weights.scorer.model, hf_name, whole.to(dtype)).items()


def adapter_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The adapter in float32 under the names of a peft folder (collective)."""
    for name, share in weights.local.items():
        if is_adapter(name):
            yield _stored_name(name), weights.whole(name, share)


def _restore_whole(path: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
    stored = StoredTensors(path / OPTIMIZER_FOLDER)
    trained = list(weights.trained)
    if any(is_adapter(name) for name in trained):
        _restore_adapter(path, weights, trained)
    elif MASTER in stored.kinds:
        fill_weights(weights, trained, lambda name: stored.get(f"{_stored_name(name)}.{MASTER}"))
    else:
        load_weights(path, weights, "lm" if weights.scorer.value_head is None else "value")
    for name, share in weights.trained.items():
        for kind in ADAM_STATE:
            moment = stored.get(f"{_stored_name(name)}.{kind}") if _rank() == 0 else None
            optimizer.state[share][kind].copy_(weights.broadcast(name, moment))


def _restore_adapter(path: Path, weights: Weights, trained: list[str]) -> None:
    """What is trained beside frozen weights: the adapter, and a critic's head."""
    from safetensors import safe_open

    def read(name: str) -> Tensor:
        file = path / (ADAPTER_FILE if is_adapter(name) else VALUE_HEAD_FILE)
        stored_name = _stored_name(name) if is_adapter(name) else name.removeprefix(HEAD_PREFIX)
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(stored_name)
        if tensor.shape != weights.shapes[name]:
            expected = tuple(weights.shapes[name])
            raise ValueError(f"{file}: {stored_name} has shape {tuple(tensor.shape)}, expected {expected}")
        return tensor

    missing = [file for file in (ADAPTER_FILE,) if not (path / file).is_file()]
    if missing:
        raise ValueError(f"checkpoint {path}: no {missing[0]}; expected one of a run with lora_target")
    fill_weights(weights, trained, read)


def _on_rank_0(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Collects tensors, which every rank must go through, in rank 0's host memory."""
    return {name: tensor.cpu() for name, tensor in named if _rank() == 0}


def _head_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name, whole in whole_parameters(weights):
        if name.startswith(HEAD_PREFIX):
            yield name.removeprefix(HEAD_PREFIX), whole


def _optimizer_tensors(
    weights: Weights, optimizer: torch.optim.Optimizer, *, master: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, share in weights.trained.items():
        for kind in ADAM_STATE:
            yield f"{_stored_name(name)}.{kind}", weights.whole(name, optimizer.state[share][kind])
        if master:
            yield f"{_stored_name(name)}.{MASTER}", weights.whole(name, share)


def _stored_name(name: str) -> str:
    """A parameter's name in a model folder, or an adapter's in a peft folder."""
    hf_name = name.removeprefix(MODEL_PREFIX)
    return adapter_name(hf_name) if is_adapter(name) else hf_name


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
