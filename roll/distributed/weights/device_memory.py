"""Buckets on a GPU that sender and receiver share: CUDA hands out the memory itself, nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DEVICE = 6  # position of the device's index among the arguments of rebuild_cuda_tensor


def share(data: Tensor) -> tuple[Any, ...]:
    """What one receiver needs to open the tensor. To be called once per receiver: each gives its share back."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(data)
    return tuple(arguments)


def open_shared(handle: tuple[Any, ...], device: int) -> Tensor:
    """The sender's tensor; its memory is kept for as long as anything here refers to it.

    Args:
        handle: what ``share`` returned.
        device: index of the GPU among those that this process sees.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = [*handle]
    arguments[_DEVICE] = device
    tensor: Tensor = rebuild_cuda_tensor(*arguments)
    return tensor


def collect() -> None:
    """Frees the blocks that all receivers have given back."""
    torch.cuda.ipc_collect()
