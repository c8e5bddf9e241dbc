"""Buckets on a GPU that sender and receiver share: CUDA hands out the memory itself, nothing is copied."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

_VARYING = (3, 7, 8, 9, 11, 12, 13, 14)
"""Positions of the arguments of ``rebuild_cuda_tensor`` that differ between blocks of bytes, but for the device."""

Handle: TypeAlias = tuple[Any, ...]
"""Length, then what CUDA and PyTorch need to open the memory: numbers, bytes and truth values."""


def share(data: Tensor) -> Handle:
    """Handle for one receiver to open ``data``, uint8 [num_bytes]. Once per receiver: each gives its share back."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(data)
    return (len(data), *(arguments[position] for position in _VARYING))


def open_shared(handle: Handle, device: int) -> Tensor:
    """The sender's bytes; their memory is kept for as long as anything here refers to it.

    Args:
        device: index of the GPU among those that this process sees.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from torch.storage import TypedStorage

    num_bytes, offset, memory, size, start, *counter_and_event = handle
    place = (TypedStorage, torch.uint8, device, memory, size, start)
    needs_grad = False
    tensor: Tensor = rebuild_cuda_tensor(
        Tensor, torch.Size([num_bytes]), (1,), offset, *place, needs_grad, *counter_and_event
    )
    return tensor


def collect() -> None:
    """Frees the blocks that all receivers have given back."""
    torch.cuda.ipc_collect()
