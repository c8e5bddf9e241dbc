"""Checkpoints of which every rank writes its own shards (PyTorch's distributed checkpoint, in safetensors).

Nothing is gathered, and any number of ranks, sharded in any way, can continue. PyTorch's own format keeps its index in
a pickle, which could run code when it is read; the safetensors storage keeps it in the files' headers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.models.lora import is_adapter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from roll.distributed.strategy.fsdp2.weights import Weights

Shards: TypeAlias = dict[str, Tensor]


def shards_of(weights: Weights, *, moments: bool = True) -> Shards:
    """Weights and moments as they lie on the ranks, but for what an adapter is added to; writing changes them.

    With ``cpu_offload`` beside a GPU they are copies, as a DTensor lies on the devices of its mesh.
    """
    return {name: _placed(share, like) for name, share, like in _shares(weights, moments)}


class ShardCopies:
    """Copies of ``shards_of`` in host memory, which is kept from one time to the next."""

    def __init__(self) -> None:
        self._kept: Shards | None = None

    @torch.no_grad()
    def take(self, shards: Shards) -> Shards:
        """Copies all; what was returned before is written over."""
        gpu = torch.cuda.is_available()
        if self._kept is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            options = StagingOptions(gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu)
            # Only PyTorch makes a DTensor that lies beside its mesh; at a millisecond for each, it is asked once.
            self._kept = cast(Shards, DefaultStager(options).stage(shards))
            return self._kept
        for name, tensor in shards.items():
            _local(self._kept[name]).copy_(_local(tensor), non_blocking=gpu)
        if gpu:
            torch.cuda.synchronize()
        return self._kept


def save_shards(path: Path, state: Shards, group: dist.ProcessGroup | None) -> None:
    """Writes the shards of weights and moments into a folder (collective over the group, or all ranks).

    Raises:
        OSError: on every rank, when one cannot write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    try:
        with _quiet():
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise OSError(f"checkpoint {path}: {error}") from error


def load_shards(path: Path, weights: Weights, *, moments: bool) -> None:
    """Sets weights, and ``moments`` too if wanted, to what ``save_shards`` wrote (collective).

    Earlier versions left out what is frozen, which then stays as it is.

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(path))
    state = shards_of(weights, moments=moments)
    if frozen := state.keys() & weights.local.keys() - weights.trained.keys():
        with raise_on_all_ranks():
            for name in frozen - reader.read_metadata().state_dict_metadata.keys():
                del state[name]
    try:
        with _quiet():
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError) as error:
        raise ValueError(f"checkpoint {path}: {error}; expected the shards of this model") from error
    for name, share, _ in _shares(weights, moments):
        if name in state and (loaded := _local(state[name])).device != share.device:
            share.copy_(loaded)


def _quiet() -> warnings.catch_warnings:
    """Without the warning that a lone worker is alone."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _shares(weights: Weights, moments: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, this rank's share, and the parameter that it is shaped like."""
    trained = weights.trained
    for name, share in (trained if any(map(is_adapter, trained)) else weights.local).items():
        parameter = weights.parameters[name]
        yield name, share.detach(), parameter
        for kind in weights.kinds(name) if moments and name in trained else ():
            yield f"{name}.{kind}", weights.optimizer.state[share][kind], parameter


def _placed(share: Tensor, like: Tensor) -> Tensor:
    """A share as the part of a whole tensor that it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return share
    whole = cast("DTensor", like)
    return DTensor.from_local(
        share, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
