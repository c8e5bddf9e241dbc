"""Keeps what the backward pass needs in host memory instead of on the device.

Worth it together with recomputation, when little more than the layers' inputs is kept. Parameters stay where they are:
their owner (FSDP2, an optimizer) moves or frees them itself.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 2**20
"""Smaller tensors are not worth a transfer."""

Packed: TypeAlias = Tensor | tuple[torch.device, Tensor]


class OffloadedActivations(saved_tensors_hooks):
    """A context for forward passes: large activations saved in it wait in host memory (pinned, beside a GPU)."""

    def __init__(self) -> None:
        super().__init__(_pack, _unpack)


def _pack(tensor: Tensor) -> Packed:
    owner = tensor._base if tensor._base is not None else tensor
    # Subclasses such as DTensor know their own places.
    if type(tensor) is not Tensor or isinstance(owner, nn.Parameter) or tensor.nbytes < MIN_BYTES:
        return tensor
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        # A view with gaps or repeated elements, whose strides a copy would not have. Backward passes count on them:
        # memory-efficient attention pads the rows of its mask, and refuses one without the padding.
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _unpack(packed: Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
