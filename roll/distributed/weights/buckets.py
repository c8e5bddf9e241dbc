"""Weights on their way from a trainer to an engine: packed into flat buckets, checked, matched to a model's parameters.

The names are Hugging Face's. A bucket is plain bytes, so any dtype crosses any transport bit for bit. How buckets
travel is the business of ``roll.distributed.weights``; strategies see only what is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from roll.distributed.weights.contents import BucketOutline, WeightBucket, aligned, outline_of
from roll.models.loading import checkpoint_shapes, to_hf_weights
from roll.utils.memory import paused_collector

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


class WeightUpdate:
    """The way of a model's weights from tensors of certain names and shapes: found once, then used for every update.

    Checkpoint names and shapes are not always the model's own (transformers fuses the experts of a layer into one
    parameter, for example); its own conversion table says which elements go where.

    Args:
        model: the receiver, unchanged until ``apply``.
        tensors: all parameters by Hugging Face name; tied weights under one of their names, or under several that
            agree. Buffers are optional.

    Raises:
        WeightMismatchError: unknown or missing names, wrong shapes, tied names that differ; all are listed.
    """

    @paused_collector()
    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        self._problems: list[str] = []
        own = dict(model.named_parameters(remove_duplicate=False))
        self.parts = checkpoint_shapes(model, own)
        """For each parameter, the tensors of a checkpoint that make it up."""
        twins: dict[int, list[str]] = {}
        for name, parameter in own.items():
            twins.setdefault(id(parameter), []).append(name)
        self._sources = {names[0]: self._source(names, tensors) for names in twins.values()}
        buffers = {name: buffer.shape for name, buffer in model.named_buffers()}
        self._buffers = [name for name in buffers if name in tensors]
        self._check_shapes(tensors, buffers)
        if self._problems:
            shown, rest = self._problems[:8], len(self._problems) - 8
            more = f"; and {rest} more" if rest > 0 else ""
            raise WeightMismatchError(f"weight update refused, the old weights stay: {'; '.join(shown)}{more}")

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives the parameters their new values, across dtypes and devices.

        Where neither changes, the tensors themselves become the model's, without a copy: they must stay as they are
        for as long as the model has them, and nothing may write to the model's parameters in place.

        Args:
            tensors: of the same names and shapes.
        """
        targets = dict(self._model.named_parameters())
        for name, source in self._sources.items():
            target = targets[name]
            if list(source) == [name] and self.parts[name][name] == target.shape:
                target.data = tensors[source[name]].to(target.device, target.dtype)
                continue
            # Converting the element numbers shows where every element of every part belongs.
            numbers = torch.arange(target.numel(), device=target.device).view(target.shape)
            whole = torch.empty_like(target)
            for part, index in to_hf_weights(self._model, name, numbers).items():
                values = tensors[source[part]].to(target.device, target.dtype)
                whole.view(-1).index_copy_(0, index.reshape(-1), values.reshape(-1))
            target.data = whole
        buffers = dict(self._model.named_buffers()) if self._buffers else {}
        for name in self._buffers:
            buffers[name].copy_(tensors[name])

    def _source(self, names: list[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Names of the tensors that make up one parameter, given the names it goes by (several when tied)."""
        complete = [name for name in names if all(part in tensors for part in self.parts[name])]
        if not complete:
            self._problems += [f"missing name {part}" for part in self.parts[names[0]] if part not in tensors]
            return {}
        sources = [list(self.parts[name]) for name in complete]
        for name, source in zip(complete[1:], sources[1:], strict=True):
            if not all(tensors[a].equal(tensors[b]) for a, b in zip(sources[0], source, strict=True)):
                self._problems.append(f"{name} is tied to {complete[0]} in this model, but came with other values")
        # Under the model's own name of the parameter, whichever of its twins' names the values come by.
        return dict(zip(self.parts[names[0]], sources[0], strict=True))

    def _check_shapes(self, tensors: Mapping[str, Tensor], buffers: Mapping[str, torch.Size]) -> None:
        expected = {part: shape for group in self.parts.values() for part, shape in group.items()} | dict(buffers)
        for name, tensor in tensors.items():
            if (shape := expected.get(name)) is None:
                self._problems.append(f"unknown name {name}")
            elif tensor.shape != shape:
                self._problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


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
