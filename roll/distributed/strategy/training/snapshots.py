"""A trainer's tensors in host memory: copies of them, and their way there and back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory or on a GPU; complete when the current stream is.

    In host memory its room is pinned, which makes both ways several times as fast. PyTorch keeps such room for the next
    tensor of its size.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return DTensor(to_device(tensor._local_tensor, device), tensor._spec, requires_grad=tensor.requires_grad)
    if device.type == "cpu" and tensor.is_cuda:
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


class Snapshots:
    """Copies tensors into memory that is kept from one time to the next.

    Fresh memory costs several times what the copy does: the system clears it page by page, and a GPU's driver pins it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies all; those that show the same memory share a copy. What ``take`` returned before is written over."""
        pinned = torch.cuda.is_available()
        different = {_memory_of(tensor): tensor.detach() for tensor in tensors}
        self._kept = [self._room(number, tensor, pinned) for number, tensor in enumerate(different.values())]
        for copy, tensor in zip(self._kept, different.values(), strict=True):
            copy.copy_(tensor, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        copies = dict(zip(different, self._kept, strict=True))
        return [copies[_memory_of(tensor)] for tensor in tensors]

    def _room(self, number: int, tensor: Tensor, pinned: bool) -> Tensor:
        kept = self._kept[number] if number < len(self._kept) else None
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


def _memory_of(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
