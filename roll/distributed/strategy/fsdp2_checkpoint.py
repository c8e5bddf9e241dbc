"""Parameters of ``Weights`` on their way to and from model folders and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.strategy.checkpoint import (
    MASTER,
    OPTIMIZER_FOLDER,
    StoredTensors,
    read_state,
    restore_rng,
    save_checkpoint,
)
from roll.distributed.strategy.fsdp2_weights import Weights, whole_parameters
from roll.distributed.strategy.optim import ADAM_STATE
from roll.distributed.strategy.trainer import TrainerState
from roll.models.heads import load_value_head
from roll.models.loading import Head, load_causal_lm, load_trunk, save_config, to_hf_weights

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."


def save_weights(
    path: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    *,
    dtype: torch.dtype,
    tokenizer_from: str,
) -> None:
    """Writes a checkpoint into ``path`` (collective).

    Args:
        path: folder; made if need be.
        weights: the parameters.
        optimizer: over ``weights.local``.
        state: the counters.
        dtype: number format of the Hugging Face weights.
        tokenizer_from: model folder whose tokenizer files are copied.

    Raises:
        OSError: on every rank, when rank 0 cannot write.
    """
    scorer = weights.scorer
    save_checkpoint(
        path,
        model=hf_weights(weights, dtype),
        optimizer=_optimizer_tensors(weights, optimizer, dtype),
        value_head=None if scorer.value_head is None else _head_weights(weights),
        state=state,
        device=weights.device,
        write_config=lambda folder: save_config(scorer.model, folder, dtype),
        tokenizer_from=tokenizer_from,
    )


def restore_weights(path: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    state = read_state(path)
    stored = StoredTensors(path / OPTIMIZER_FOLDER)
    head: Head = "lm" if weights.scorer.value_head is None else "value"
    if MASTER in stored.kinds:
        fill_weights(weights, lambda name: stored.get(f"{_hf_name(name)}.{MASTER}"))
    else:
        load_weights(path, weights, head)
    for name, share in weights.local.items():
        for kind in ADAM_STATE:
            moment = weights.broadcast(name, stored.get(f"{_hf_name(name)}.{kind}") if _rank() == 0 else None)
            optimizer.state[share][kind].copy_(moment)
        optimizer.state[share]["step"].fill_(state.optimizer_steps)
    restore_rng(path, weights.device)
    return state


def load_weights(path: Path, weights: Weights, head: Head, config_kwargs: Mapping[str, Any] | None = None) -> None:
    """Fills the parameters from a model folder that rank 0 reads (collective)."""
    whole: dict[str, Tensor] = {}
    if _rank() == 0:
        model = (load_causal_lm if head == "lm" else load_trunk)(
            str(path), dtype=torch.float32, config_kwargs=config_kwargs
        )
        whole = {MODEL_PREFIX + name: parameter.detach() for name, parameter in model.named_parameters()}
        if head == "value":
            value_head = load_value_head(model.config.get_text_config().hidden_size, path)
            whole |= {HEAD_PREFIX + name: parameter.detach() for name, parameter in value_head.named_parameters()}
    fill_weights(weights, whole.__getitem__)


def fill_weights(weights: Weights, read: Callable[[str], Tensor]) -> None:
    """Sets all parameters from whole tensors that rank 0 reads by name (collective)."""
    for name in weights.local:
        weights.fill(name, read(name) if _rank() == 0 else None)


def hf_weights(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The language model's weights under Hugging Face names, tied ones once (collective)."""
    for name, whole in whole_parameters(weights):
        if name.startswith(MODEL_PREFIX):
            yield from to_hf_weights(weights.scorer.model, name.removeprefix(MODEL_PREFIX), whole.to(dtype)).items()


def _head_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name, whole in whole_parameters(weights):
        if name.startswith(HEAD_PREFIX):
            yield name.removeprefix(HEAD_PREFIX), whole


def _optimizer_tensors(
    weights: Weights, optimizer: torch.optim.Optimizer, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, share in weights.local.items():
        for kind in ADAM_STATE:
            yield f"{_hf_name(name)}.{kind}", weights.whole(name, optimizer.state[share][kind])
        if dtype != torch.float32:
            yield f"{_hf_name(name)}.{MASTER}", weights.whole(name, share)


def _hf_name(name: str) -> str:
    return name.removeprefix(MODEL_PREFIX)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
