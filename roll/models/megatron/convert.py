"""Whole Hugging Face tensors to the shards of one rank, and back: one parameter at a time, to the last bit.

Nothing communicates here. To load, every rank reads the whole tensors of one parameter and keeps its part
(``load_shards``). To export, a strategy gathers a parameter's shards over the group that ``shard_group`` names and one
rank joins them (``join``); every pipeline stage and every expert-parallel rank has its own parameters to export.
Tensors shaped like parameters, such as Adam's moments, convert in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from roll.models.megatron.config import MegatronModelConfig, padded_vocab_size
from roll.models.megatron.names import Form, ParallelLayout, source

ShardGroup = Literal["replicated", "tensor", "expert_tensor"]


def load_shards(
    read: Callable[[str], Tensor], names: Iterable[str], config: MegatronModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter's part for one rank; holds one parameter's whole tensors at a time.

    Args:
        read: the whole tensor for a Hugging Face name (``WeightFiles.read`` for a model folder).
        names: the model's own parameter names, e.g. of ``model.named_parameters()``, of either module set.
        layout: of the rank, or of the model chunk that the names are from.

    Yields:
        Name and shard, in the number format that was read; a shard may share the storage of what was read.

    Raises:
        ValueError: a name that no converted model has, or a tensor of the wrong shape.
    """
    for name in names:
        yield name, shard(name, read, config, layout)


def shard(name: str, read: Callable[[str], Tensor], config: MegatronModelConfig, layout: ParallelLayout) -> Tensor:
    """One parameter's part for one rank. Arguments and errors as ``load_shards``."""
    found = source(name, config, layout)
    rank, size = layout.tensor_rank(expert=found.expert)
    parts = [_cut(found.form, _read(read, hf, found.form, config), config, rank, size) for hf in found.hf]
    if found.form == "all_gate_up":  # [experts, hidden, rows] in the shape that Megatron gives this memory
        return torch.stack(parts).reshape(parts[0].shape[0], -1)
    return torch.cat(parts) if found.form == "all_down" else parts[0]


def shard_group(name: str, config: MegatronModelConfig, layout: ParallelLayout) -> ShardGroup:
    """Over which ranks a parameter is cut: those whose shards ``join`` needs (any one if ``replicated``)."""
    found = source(name, config, layout)
    if found.form == "replicated":
        return "replicated"
    return "expert_tensor" if found.expert else "tensor"


def join(
    name: str, shards: Sequence[Tensor], config: MegatronModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that a parameter holds.

    Args:
        name: of the parameter, on the rank of ``layout``.
        shards: that parameter on every rank of its ``shard_group``, in rank order; just one if it is replicated.
        layout: of any of these ranks (their layers and experts are the same).

    Yields:
        Hugging Face name and whole tensor; may share the storage of the shards. Nothing for an output layer that is a
        copy of the embedding.

    Raises:
        ValueError: not as many shards as ranks.
    """
    found = source(name, config, layout)
    if name == "output_layer.weight" and config.tied:
        return
    size = 1 if found.form == "replicated" else layout.tensor_rank(expert=found.expert)[1]
    if len(shards) != size:
        raise ValueError(f"Megatron parameter {name!r}: {len(shards)} shards, expected {size}")
    for index, hf in enumerate(found.hf):
        own = [_of_expert(s, found.form, index, len(found.hf), config) for s in shards]
        yield from zip(hf, _uncut(found.form, own, config), strict=True)


def _cut(form: Form, whole: list[Tensor], config: MegatronModelConfig, rank: int, size: int) -> Tensor:
    if form == "replicated":
        return whole[0]
    if form == "vocab":
        added = padded_vocab_size(config.vocab_size, size) - config.vocab_size
        rows = functional.pad(whole[0], (0, 0, 0, added)) if added else whole[0]
        return rows.chunk(size)[rank]
    if form == "qkv":
        return _interleave(whole, config).chunk(size)[rank]
    if form == "rows":
        return whole[0].chunk(size)[rank]
    if form in ("columns", "all_down"):
        part = whole[0].chunk(size, dim=1)[rank].contiguous()
    else:
        part = torch.cat([half.chunk(size)[rank] for half in whole])
    return part.T if form.startswith("all_") else part


def _uncut(form: Form, shards: list[Tensor], config: MegatronModelConfig) -> Sequence[Tensor]:
    if form == "replicated":
        return shards
    if form == "vocab":
        return [torch.cat(shards)[: config.vocab_size]]
    if form == "qkv":
        return _separate(torch.cat(shards), config)
    if form == "rows":
        return [torch.cat(shards)]
    if form in ("columns", "all_down"):
        return [torch.cat(shards, dim=1)]
    return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in shards), strict=True)]


def _of_expert(part: Tensor, form: Form, index: int, count: int, config: MegatronModelConfig) -> Tensor:
    """One expert's weight from a parameter that holds those of ``count``; other parameters as they are."""
    if form == "all_gate_up":
        return part.reshape(count, config.transformer["hidden_size"], -1)[index].T
    return part.chunk(count)[index].T if form == "all_down" else part


def _interleave(qkv: Sequence[Tensor], config: MegatronModelConfig) -> Tensor:
    """Query, key and value rows, so that each query group's queries, key and value follow each other."""
    groups = config.transformer["num_query_groups"]
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in qkv], dim=1).flatten(0, 1)


def _separate(fused: Tensor, config: MegatronModelConfig) -> list[Tensor]:
    size = config.transformer
    groups, width = size["num_query_groups"], size["kv_channels"]
    queries = size["num_attention_heads"] // groups * width
    by_group = fused.reshape(groups, -1, *fused.shape[1:]).split([queries, width, width], dim=1)
    return [part.flatten(0, 1) for part in by_group]


def _read(read: Callable[[str], Tensor], names: Sequence[str], form: Form, config: MegatronModelConfig) -> list[Tensor]:
    """Whole tensors, with their rows checked where cutting would hide that they are wrong."""
    tensors = [read(name) for name in names]
    size = config.transformer
    rows: list[int] = []
    if form == "vocab":
        rows = [config.vocab_size]
    elif form == "qkv":
        rows = [size[heads] * size["kv_channels"] for heads in ("num_attention_heads", *["num_query_groups"] * 2)]
    for name, tensor, expected in zip(names, tensors, rows, strict=False):
        if tensor.shape[0] != expected:
            raise ValueError(f"{name}: {tensor.shape[0]} rows, expected {expected} by the model's configuration")
    return tensors
