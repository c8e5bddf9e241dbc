"""What lies where in a bucket: for who packs it, and for engines that load it in a process of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; as torch aligns its own tensors, so that a model computes the same with views of a bucket

Contents: TypeAlias = Sequence[tuple[str, str, Sequence[int], int]]
"""(name, dtype name, shape, offset in bytes) of tensors in a block of bytes: plain, for any message format."""


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's weights in one flat buffer, under Hugging Face names."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch dtype names without the prefix, e.g. ``float32``."""
    shapes: tuple[tuple[int, ...], ...]
    data: np.ndarray | Tensor
    """uint8, the tensors end to end, each aligned to ``ALIGNMENT``: an array in host memory, or a tensor on a GPU."""
    checksum: int
    """``buckets.checksum`` of ``data``; the receiver compares."""
    checked: bool = False
    """This process has compared the checksum."""


def aligned(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def contents(bucket: WeightBucket, names: Mapping[str, str] | None = None) -> Contents:
    """What is in a bucket, in its order.

    Args:
        bucket: its data is not looked at.
        names: the tensors that are wanted, and their new names; all under their own by default.

    Raises:
        ValueError: a dtype that torch does not have.
    """
    found, offset = [], 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        if names is None or name in names:
            found.append((name if names is None else names[name], dtype_name, shape, offset))
        offset += aligned(math.prod(shape) * _dtype(name, dtype_name).itemsize)
    return found


def views(block: Tensor, wanted: Contents) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, without a copy.

    Args:
        block: uint8 [num_bytes].
        wanted: what is in it.

    Raises:
        ValueError: a dtype that torch does not have, or a tensor that ends behind the block.
    """
    for name, dtype_name, shape, offset in wanted:
        dtype = _dtype(name, dtype_name)
        end = offset + math.prod(shape) * dtype.itemsize
        if end > len(block):
            raise ValueError(f"weight bucket: {name} ends at byte {end}, the data has {len(block)}")
        yield name, block[offset:end].view(dtype).view(tuple(shape))


def _dtype(name: str, dtype_name: str) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight bucket: {name} has dtype {dtype_name!r}, expected the name of a torch dtype")
    return dtype
