"""Places of tensors in a bucket: for who packs it, and for engines that load it in a process of their own."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll.distributed.weights.segments import SharedMemory

ALIGNMENT = 64  # bytes; as torch aligns its own tensors, so that a model computes the same with views of a bucket

Contents: TypeAlias = Sequence[tuple[str, str, Sequence[int], int]]
"""(name, dtype name, shape, offset in bytes) of tensors in a block of bytes: plain, for any message format."""

Layout: TypeAlias = Sequence[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int, int]]
"""The same with what a view needs: name, dtype, shape, strides, first element, and the byte at which it ends."""


@dataclass(frozen=True)
class BucketOutline:
    """Tensors of a bucket without their values: the same in every update of a run."""

    names: tuple[str, ...]
    """Hugging Face's."""
    dtypes: tuple[str, ...]
    """torch dtype names without the prefix, e.g. ``float32``."""
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def contents(self) -> Contents:
        """Places of the tensors, in their order, each aligned to ``ALIGNMENT``.

        Raises:
            ValueError: a dtype that torch does not have.
        """
        found, offset = [], 0
        for name, dtype_name, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            found.append((name, dtype_name, shape, offset))
            offset += aligned(_form(dtype_name, shape).num_bytes)
        return found

    @cached_property
    def num_bytes(self) -> int:
        """Length of the bucket."""
        if not self.contents:
            return 0
        _, dtype_name, shape, offset = self.contents[-1]
        return offset + aligned(_form(dtype_name, tuple(shape)).num_bytes)

    def views(self, block: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a bucket, as ``views``."""
        return _cut(block, self._layout)

    @cached_property
    def _layout(self) -> Layout:
        return _layout(self.contents)

    @cached_property
    def key(self) -> str:
        """A digest that stands for the outline in messages."""
        told = repr((self.names, self.dtypes, self.shapes)).encode()
        return hashlib.blake2b(told, digest_size=16).hexdigest()


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's weights in one flat buffer, under Hugging Face names."""

    outline: BucketOutline
    data: np.ndarray | Tensor
    """uint8 [num_bytes], the tensors end to end: an array in host memory, or a tensor on a GPU."""
    checksum: int | None = None
    """``buckets.checksum`` of ``data``, which the receiver compares; ``None`` in an update that is not checked."""
    checked: bool = False
    """This process has compared the checksum."""
    place: SharedMemory | None = None
    """Shared memory in which other processes of this machine find ``data``, as long as something here refers to it."""


class Described(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def outline_of(tensors: Iterable[tuple[str, Described]]) -> BucketOutline:
    """The outline of a bucket with these tensors."""
    described = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    names, dtypes, shapes = zip(*described, strict=True) if described else ((), (), ())
    return BucketOutline(names, dtypes, shapes)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def renamed(contents: Contents, names: Mapping[str, str]) -> Contents:
    """Entries of a bucket that are wanted, under their new names.

    Args:
        names: the tensors that are wanted, and their new names.
    """
    return [(names[name], dtype, shape, offset) for name, dtype, shape, offset in contents if name in names]


def views(block: Tensor, wanted: Contents) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, without a copy.

    Args:
        block: uint8 [num_bytes].

    Raises:
        ValueError: a dtype that torch does not have, or a tensor that ends behind the block.
    """
    return _cut(block, _layout(wanted))


def _layout(contents: Contents) -> Layout:
    found = []
    for name, dtype_name, shape, offset in contents:
        form = _form(dtype_name, tuple(shape))
        start, end = offset // form.dtype.itemsize, offset + form.num_bytes
        found.append((name, form.dtype, form.shape, form.strides, start, end))
    return found


def _cut(block: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    typed: dict[torch.dtype, tuple[Tensor, int]] = {}
    num_bytes = len(block)
    for name, dtype, shape, strides, start, end in layout:
        if end > num_bytes:
            raise ValueError(f"weight bucket: {name} ends at byte {end}, the data has {num_bytes}")
        if dtype not in typed:
            numbers = block[: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
            typed[dtype] = numbers, int(numbers.storage_offset())
        numbers, base = typed[dtype]
        yield name, numbers.as_strided(shape, strides, base + start)


class _Form(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_bytes: int


@functools.cache
def _form(dtype_name: str, shape: tuple[int, ...]) -> _Form:
    """Form of a view of a whole tensor; a model has many tensors, but few forms."""
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight bucket: dtype {dtype_name!r}, expected the name of a torch dtype")
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return _Form(dtype, shape, strides, math.prod(shape) * dtype.itemsize)
