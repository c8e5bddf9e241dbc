"""Weights on their way from a trainer to an engine: packed into flat buckets, checked, matched to a model's parameters.

The names are Hugging Face's. A bucket is plain bytes, so any dtype crosses any transport bit for bit.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.distributed.strategy.base import WeightBucket
from roll.models.loading import to_hf_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALIGNMENT = 16  # bytes; a multiple of every element size, so that views by dtype need no copy


class WeightChecksumError(ValueError):
    """A bucket's bytes are not those that were packed."""


class WeightMismatchError(ValueError):
    """The names or shapes that arrived are not those of the receiving model."""


def pack_buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Packs tensors, in order, into buckets of at most ``bucket_bytes``; a larger tensor gets a bucket of its own.

    The tensors are consumed lazily and may live on any device; at most one bucket's worth is held at a time.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: {bucket_bytes}, expected a positive number of bytes")
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        num_bytes = _aligned(tensor.numel() * tensor.element_size())
        if pending and size + num_bytes > bucket_bytes:
            yield _pack(pending, size)
            pending, size = [], 0
        pending.append((name, tensor.detach()))
        size += num_bytes
    if pending:
        yield _pack(pending, size)


def unpack_bucket(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor); the tensors are read-only views of ``bucket.data``, without a copy.

    Raises:
        WeightChecksumError: the bytes changed on the way.
        ValueError: the described tensors do not fill the data exactly.
    """
    found = zlib.crc32(bucket.data.data)
    if found != bucket.checksum:
        raise WeightChecksumError(
            f"weight bucket of {len(bucket.names)} tensors ({bucket.names[0] if bucket.names else 'empty'} …): "
            f"crc32 {found:#010x}, expected {bucket.checksum:#010x}; the data was damaged in transfer"
        )
    with warnings.catch_warnings():
        # Arrays out of Ray's object store are read-only; the receiver only copies from the views.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(bucket.data)
    offset = 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"weight bucket: {name} has dtype {dtype_name!r}, expected the name of a torch dtype")
        num_bytes = math.prod(shape) * dtype.itemsize
        if offset + num_bytes > len(flat):
            raise ValueError(f"weight bucket: {name} ends at byte {offset + num_bytes}, the data has {len(flat)}")
        yield name, flat[offset : offset + num_bytes].view(dtype).view(shape)
        offset += _aligned(num_bytes)


class WeightUpdate:
    """New values for all of a model's weights: checked when it is made, copied in by ``apply``.

    Checkpoint names and shapes are not always the model's own (transformers fuses the experts of a layer into one
    parameter, for example); its own conversion table says which elements go where.

    Args:
        model: the receiver, unchanged until ``apply``.
        tensors: all parameters by Hugging Face name; tied weights under one of their names, or under several that
            agree. Buffers are optional.

    Raises:
        WeightMismatchError: unknown or missing names, wrong shapes, tied names that differ; all are listed.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        self._tensors = tensors
        self._problems: list[str] = []
        own = dict(model.named_parameters(remove_duplicate=False))
        parts = {
            name: to_hf_weights(model, name, torch.empty_like(parameter, device="meta"))
            for name, parameter in own.items()
        }
        twins: dict[int, list[str]] = {}
        for name, parameter in own.items():
            twins.setdefault(id(parameter), []).append(name)
        self._sources = {names[0]: self._source(names, parts) for names in twins.values()}
        self._check_shapes(parts)
        if self._problems:
            shown, rest = self._problems[:8], len(self._problems) - 8
            more = f"; and {rest} more" if rest > 0 else ""
            raise WeightMismatchError(f"weight update refused, the old weights stay: {'; '.join(shown)}{more}")

    @torch.no_grad()
    def apply(self) -> None:
        """Copies the values in, in place, across dtypes and devices."""
        for name, source in self._sources.items():
            target = self._model.get_parameter(name)
            if list(source) == [name]:
                target.copy_(source[name])
                continue
            # Converting the element numbers shows where every element of every part belongs.
            numbers = torch.arange(target.numel(), device=target.device).view(target.shape)
            for part, index in to_hf_weights(self._model, name, numbers).items():
                values = source[part].to(target.device, target.dtype)
                target.view(-1).index_copy_(0, index.reshape(-1), values.reshape(-1))
        buffers = dict(self._model.named_buffers())
        for name in self._tensors.keys() & buffers.keys():
            buffers[name].copy_(self._tensors[name])

    def _source(self, names: list[str], parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors that make up one parameter, given the names it goes by (several when tied)."""
        complete = [name for name in names if all(part in self._tensors for part in parts[name])]
        if not complete:
            self._problems += [f"missing name {part}" for part in parts[names[0]] if part not in self._tensors]
            return {}
        sources = [[self._tensors[part] for part in parts[name]] for name in complete]
        for name, source in zip(complete[1:], sources[1:], strict=True):
            if not all(map(torch.equal, sources[0], source)):
                self._problems.append(f"{name} is tied to {complete[0]} in this model, but came with other values")
        # Under the model's own name of the parameter, whichever of its twins' names the values came by.
        return dict(zip(parts[names[0]], sources[0], strict=True))

    def _check_shapes(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        expected = {part: tensor.shape for group in parts.values() for part, tensor in group.items()}
        expected |= {name: buffer.shape for name, buffer in self._model.named_buffers()}
        for name, tensor in self._tensors.items():
            if name not in expected:
                self._problems.append(f"unknown name {name}")
            elif tensor.shape != expected[name]:
                self._problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected[name])}")


def _pack(named_tensors: list[tuple[str, Tensor]], size: int) -> WeightBucket:
    data = torch.zeros(size, dtype=torch.uint8)
    offset = 0
    for _, tensor in named_tensors:
        as_bytes = tensor.contiguous().reshape(-1).view(torch.uint8)
        data[offset : offset + len(as_bytes)].copy_(as_bytes)
        offset += _aligned(len(as_bytes))
    array = data.numpy()
    return WeightBucket(
        names=tuple(name for name, _ in named_tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named_tensors),
        data=array,
        checksum=zlib.crc32(array.data),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
