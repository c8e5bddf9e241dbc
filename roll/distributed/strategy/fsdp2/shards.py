"""Checkpoints of which every rank writes its own shards (PyTorch's distributed checkpoint, in safetensors).

Nothing is gathered, and any number of ranks, sharded in any way, can continue. PyTorch's own format keeps its index in
a pickle, which could run code when it is read; the safetensors storage keeps it in the files' headers.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import Tensor

from roll.distributed.strategy.optim import ADAM_STATE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from roll.distributed.strategy.fsdp2.weights import Weights

SHARDS_FOLDER = "shards"


def save_shards(path: Path, weights: Weights) -> None:
    """Writes weights and moments into the folder ``path`` (collective).

    Raises:
        OSError: on every rank, when one cannot write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    try:
        with _quiet():
            dcp.save(_state(weights), storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise OSError(f"checkpoint {path}: {error}") from error


def load_shards(path: Path, weights: Weights) -> None:
    """Sets weights and moments to what ``save_shards`` wrote (collective).

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(path))
    try:
        with _quiet():
            dcp.load(_state(weights), storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError) as error:
        raise ValueError(f"checkpoint {path}: {error}; expected the shards of this model") from error


def _quiet() -> warnings.catch_warnings:
    """Without the warning that a lone worker is alone."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _state(weights: Weights) -> dict[str, Tensor]:
    """What is trained and its moments as they lie on the ranks; writing into the tensors changes it."""
    state = {}
    for name, share in weights.trained.items():
        state[name] = _placed(share.detach(), weights.parameters[name])
        for kind in ADAM_STATE:
            state[f"{name}.{kind}"] = _placed(weights.optimizer.state[share][kind], weights.parameters[name])
    return state


def _placed(share: Tensor, like: Tensor) -> Tensor:
    """A share as the part of a whole tensor that it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return share
    whole = cast("DTensor", like)
    return DTensor.from_local(
        share, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
