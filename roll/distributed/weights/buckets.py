"""Weights in flat buckets: where each tensor lies, packing and checks.

The names are Hugging Face's. A bucket is plain bytes, so any dtype crosses any transport bit for bit. How buckets
travel is the business of the other modules here.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
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
    """``checksum`` of ``data``, which the receiver compares; ``None`` in an update that is not checked."""
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


_WORD = 8  # bytes that the checksum takes for one number
_ROW = 512  # words that it adds up before it weighs them by their place


class WeightChecksumError(ValueError):
    """A bucket's bytes are not those that were packed."""


class WeightMismatchError(ValueError):
    """The names or shapes that arrived are not those of the receiving model."""


def _private_memory(num_bytes: int) -> np.ndarray:
    return np.empty(num_bytes, dtype=np.uint8)


_host_memory: ContextVar[Callable[[int], np.ndarray]] = ContextVar("host_memory", default=_private_memory)


@contextmanager
def packing_into(allocate: Callable[[int], np.ndarray]) -> Iterator[None]:
    """Inside the block, ``pack_buckets`` takes host memory from ``allocate(num_bytes)``, which returns uint8 arrays.

    So a sender gets buckets that lie where its receivers can read them, without another copy.
    """
    token = _host_memory.set(allocate)
    try:
        yield
    finally:
        _host_memory.reset(token)


def pack_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, *, check: bool = True
) -> Iterator[WeightBucket]:
    """Packs tensors, in order, into buckets of at most ``bucket_bytes``; a larger tensor gets a bucket of its own.

    The tensors are consumed lazily and may live on any device. A bucket lies on the device of its first tensor.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: {bucket_bytes}, expected a positive number of bytes")
    for group in _groups(named_tensors, bucket_bytes):
        outline = outline_of(group)
        data = allocate(outline.num_bytes, group[0][1].device)
        places = [place for _, place in outline.views(as_tensor(data))]
        yield pack(outline, [tensor for _, tensor in group], data, places, check=check)


def allocate(num_bytes: int, device: torch.device) -> np.ndarray | Tensor:
    """Memory for a bucket, not set: of ``packing_into`` in the host's."""
    if device.type == "cpu":
        return _host_memory.get()(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@torch.no_grad()
def pack(
    outline: BucketOutline,
    tensors: Sequence[Tensor],
    data: np.ndarray | Tensor,
    places: Sequence[Tensor],
    *,
    check: bool,
) -> WeightBucket:
    """Copies tensors to their places in a bucket.

    Args:
        tensors: in its order; one that is its place already stays there.
    """
    moves = [(p, t) for p, t in zip(places, tensors, strict=True) if p.data_ptr() != t.data_ptr() and t.numel()]
    if moves:
        torch._foreach_copy_([place for place, _ in moves], [tensor for _, tensor in moves])
    if not check:
        if isinstance(data, Tensor) and data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()  # others may read it from now on
        return WeightBucket(outline, data)
    flat, end = as_tensor(data), 0
    for place, (*_, offset) in zip(places, outline.contents, strict=True):
        if end < offset:
            flat[end:offset] = 0  # the gap is part of the checksum
        end = offset + place.nbytes
    flat[end:] = 0
    return WeightBucket(outline, data, checksum(data))


def unpack_bucket(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor); the tensors are read-only views of ``bucket.data``, without a copy.

    They stay valid for as long as they are referenced; memory that other buckets wait for is held as long.

    Raises:
        WeightChecksumError: the bytes changed on the way.
        ValueError: the described tensors do not fill the data exactly.
    """
    if not bucket.checked:
        verify(bucket)
    yield from bucket.outline.views(as_tensor(bucket.data))


def verify(bucket: WeightBucket) -> None:
    """Compares the checksum, if there is one, with the data.

    Raises:
        WeightChecksumError: they do not belong together.
    """
    if bucket.checksum is None:
        return
    found, names = checksum(bucket.data), bucket.outline.names
    if found != bucket.checksum:
        raise WeightChecksumError(
            f"weight bucket of {len(names)} tensors ({names[0] if names else 'empty'} …): "
            f"checksum {found:#018x}, expected {bucket.checksum:#018x}; the data was damaged in transfer"
        )


def with_checksum(bucket: WeightBucket) -> WeightBucket:
    """The same for an update that is checked, if it was packed for one that was not."""
    return bucket if bucket.checksum is not None else replace(bucket, checksum=checksum(bucket.data))


def checksum(data: np.ndarray | Tensor) -> int:
    """A 64-bit checksum, computed where the data lies and the same on every device.

    The sum of all 8-byte words mod 2**64, weighted by an odd number per 4 KiB. Any change within one word is found for
    certain, and so are blocks that were lost, moved or left over from another bucket, but for a chance of 2**-64. What
    it costs is one read of the data, at several times the speed of a cryptographic or CRC checksum.

    Args:
        data: uint8, its length a multiple of 8.
    """
    if len(data) % _WORD:
        raise ValueError(f"weight bucket: {len(data)} bytes, expected a multiple of {_WORD}")
    if not len(data):
        return 0
    words = as_tensor(data).view(torch.int64)
    whole = len(words) // _ROW * _ROW
    sums = torch.cat([words[:whole].view(-1, _ROW).sum(1), words[whole:].sum()[None]])
    places = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return (int((sums * places).sum()) + len(data)) % 2**64


def host_bytes(bucket: WeightBucket) -> np.ndarray:
    """The bucket's bytes in host memory, copied only if they lie on a GPU."""
    return bucket.data if isinstance(bucket.data, np.ndarray) else bucket.data.cpu().numpy()


def _groups(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        num_bytes = aligned(tensor.numel() * tensor.element_size())
        if group and size + num_bytes > bucket_bytes:
            yield group
            group, size = [], 0
        group.append((name, tensor.detach()))
        size += num_bytes
    if group:
        yield group


def as_tensor(data: np.ndarray | Tensor) -> Tensor:
    """The bytes as a tensor, without a copy."""
    if isinstance(data, Tensor):
        return data
    if not len(data):  # from_numpy gives it a stride that no other dtype can view
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Arrays in shared memory are read-only; the receiver only copies from the views.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


class UpdateDigest:
    """Names, shapes, dtypes and checksums of all buckets in their order: equal on both ends, or something is lost."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, bucket: WeightBucket) -> None:
        self._hash.update(repr((bucket.outline.key, bucket.checksum)).encode())

    def hex(self) -> str:
        return self._hash.hexdigest()
