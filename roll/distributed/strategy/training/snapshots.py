"""Copies of a trainer's tensors in host memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


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
