"""A Megatron trainer's state on its way to and from checkpoints that any engine and layout can continue from.

Weights travel under the names of a Hugging Face checkpoint, Adam's moments under those of the Hugging Face module,
which holds all experts of a layer in two tensors. Every rank reads the folder by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from roll.distributed.strategy.checkpoint import (
    MASTER,
    OPTIMIZER_FOLDER,
    StoredTensors,
    read_state,
    restore_rng,
    save_checkpoint,
)
from roll.distributed.strategy.megatron.model import HEAD_PREFIX, MegatronModel, load_weights
from roll.distributed.strategy.megatron.optimizer import MegatronAdam
from roll.distributed.strategy.megatron.weights import WeightGatherer
from roll.distributed.strategy.optim import ADAM_STATE
from roll.distributed.strategy.trainer import TrainerState
from roll.models.heads import load_value_head
from roll.models.loading import Head, make_skeleton, save_config
from roll.models.megatron.convert import shard
from roll.models.megatron.weight_files import WeightFiles

_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_TRUNK = "model."


def save_model(
    path: Path,
    model: MegatronModel,
    gatherer: WeightGatherer,
    optimizer: MegatronAdam,
    state: TrainerState,
    *,
    head: Head,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Writes a checkpoint into ``path`` (collective).

    Args:
        path: folder; made if need be.
        model: as it lies on the ranks.
        gatherer: of the model.
        optimizer: of the model.
        state: the counters.
        head: of the model.
        dtype: number format of the Hugging Face weights.
        source: model folder whose configuration and tokenizer are copied.

    Raises:
        OSError: on every rank, when rank 0 cannot write.
    """

    def write_config(folder: Path) -> None:
        with torch.device("meta"):
            save_config(make_skeleton(head, source, dtype=dtype), folder, dtype)

    weights = gatherer.weights(lambda parameter: parameter, dtype)
    save_checkpoint(
        path,
        model=((_saved_name(name, head), tensor) for name, tensor in weights),
        optimizer=_optimizer_tensors(model, gatherer, optimizer, head, masters=dtype != torch.float32),
        value_head=gatherer.value_head(lambda parameter: parameter) if head == "value" else None,
        state=state,
        device=next(model.chunks[0].parameters()).device,
        write_config=write_config,
        tokenizer_from=source,
    )


def restore_model(path: Path, model: MegatronModel, optimizer: MegatronAdam, head: Head) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    state = read_state(path)
    stored = StoredTensors(path / OPTIMIZER_FOLDER)
    files = WeightFiles(str(path)).read
    masters = MASTER in stored.kinds
    fill_weights(model, optimizer, _reader(stored, MASTER, head) if masters else files)
    for kind in ADAM_STATE:
        _fill(model, optimizer, kind, _reader(stored, kind, head))
    if model.value_head is not None:
        saved = load_value_head(model.config.hidden_size, path)
        for name, parameter in model.value_head.named_parameters():
            with torch.no_grad():
                parameter.copy_(stored.get(f"{HEAD_PREFIX}{name}.{MASTER}") if masters else saved.get_parameter(name))
            optimizer.set(parameter, MASTER, parameter)
            for kind in ADAM_STATE:
                optimizer.set(parameter, kind, stored.get(f"{HEAD_PREFIX}{name}.{kind}"))
    optimizer.set_step(state.optimizer_steps)
    restore_rng(path, next(model.chunks[0].parameters()).device)
    return state


def fill_weights(model: MegatronModel, optimizer: MegatronAdam, read: Callable[[str], Tensor]) -> None:
    """Sets the weights, and the optimizer's float32 ones, from whole tensors under a checkpoint's names."""
    load_weights(model, read)
    _fill(model, optimizer, MASTER, read)


def module_tensors(named: Iterator[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """From a checkpoint's names to those of the Hugging Face module: a layer's experts become two tensors."""
    parts: dict[tuple[int, str], Tensor] = {}
    for name, tensor in named:
        found = _EXPERT.fullmatch(name)
        if not found:
            yield name, tensor
            continue
        parts[int(found["number"]), found["part"]] = tensor
        if len(parts) == 3 * num_experts:
            gates_ups = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(num_experts)]
            yield f"{found['experts']}.gate_up_proj", torch.stack(gates_ups)
            yield f"{found['experts']}.down_proj", torch.stack([parts[e, "down"] for e in range(num_experts)])
            parts.clear()


def _optimizer_tensors(
    model: MegatronModel, gatherer: WeightGatherer, optimizer: MegatronAdam, head: Head, *, masters: bool
) -> Iterator[tuple[str, Tensor]]:
    for kind in (*ADAM_STATE, MASTER) if masters else ADAM_STATE:

        def read(parameter: torch.nn.Parameter, kind: str = kind) -> Tensor:
            return optimizer.get(parameter, kind)

        named = gatherer.weights(read, torch.float32)
        for name, tensor in module_tensors(named, model.converted.num_experts):
            yield f"{_saved_name(name, head)}.{kind}", tensor
        for name, tensor in gatherer.value_head(read):
            yield f"{HEAD_PREFIX}{name}.{kind}", tensor


def _reader(stored: StoredTensors, kind: str, head: Head) -> Callable[[str], Tensor]:
    """Reads what is stored of a parameter by its name in a Hugging Face checkpoint."""

    @lru_cache(maxsize=2)  # a layer's experts are asked for one after the other
    def module_tensor(name: str) -> Tensor:
        return stored.get(f"{_saved_name(name, head)}.{kind}")

    def read(name: str) -> Tensor:
        found = _EXPERT.fullmatch(name)
        if not found:
            return module_tensor(name)
        number, part = int(found["number"]), found["part"]
        if part == "down":
            return module_tensor(f"{found['experts']}.down_proj")[number]
        return module_tensor(f"{found['experts']}.gate_up_proj")[number].chunk(2)[0 if part == "gate" else 1]

    return read


def _fill(model: MegatronModel, optimizer: MegatronAdam, kind: str, read: Callable[[str], Tensor]) -> None:
    for number, name, parameter in model.named_parameters():
        optimizer.set(parameter, kind, shard(name, read, model.converted, model.layouts[number]))


def _saved_name(name: str, head: Head) -> str:
    """A critic is saved as a trunk, whose names have no prefix."""
    return name.removeprefix(_TRUNK) if head == "value" else name
