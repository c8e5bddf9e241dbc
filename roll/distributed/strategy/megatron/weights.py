"""A model's parameters from the ranks that hold them to rank 0, under Hugging Face names, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.strategy.megatron.model import MegatronModel
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX
from roll.distributed.strategy.training.tensor_files import Piece
from roll.models.lora import is_adapter
from roll.models.megatron.convert import join, shard_group
from roll.models.megatron.layout import ParallelLayout

Part: TypeAlias = Literal["trunk", "adapter", "head"]
Reader: TypeAlias = Callable[[nn.Parameter], Tensor]
"""What is gathered of a parameter: itself, or a tensor of its shape (collective over data-parallel ranks)."""


@dataclass(frozen=True)
class _Place:
    """What one rank holds."""

    stage: int
    layouts: tuple[ParallelLayout, ...]
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    """Of the parameters of each chunk."""

    @property
    def layout(self) -> ParallelLayout:
        return self.layouts[0]


@dataclass(frozen=True)
class _Item:
    """One parameter on the ranks of one pipeline stage (and, of a routed expert, of one expert-parallel rank)."""

    chunk: int
    name: str
    layout: ParallelLayout
    sources: tuple[int, ...]
    """Ranks whose shards are joined, in order."""
    holders: frozenset[int]
    """All ranks that have it."""
    shape: tuple[int, ...]


class WeightGatherer:
    """Knows which rank holds what (made collectively)."""

    def __init__(self, model: MegatronModel) -> None:
        from megatron.core import parallel_state

        self._model = model
        self._parameters = [dict(chunk.named_parameters()) for chunk in model.chunks]
        own = _Place(
            parallel_state.get_pipeline_model_parallel_rank(),
            tuple(model.layouts),
            tuple({name: tuple(p.shape) for name, p in chunk.items()} for chunk in self._parameters),
        )
        places: list[_Place] = [own] * dist.get_world_size()
        if len(places) > 1:
            dist.all_gather_object(places, own)
        self._places = places
        self._items = list(self._plan())

    def weights(self, read: Reader, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names on rank 0, nothing on the others; all must exhaust it (collective)."""
        return self._whole("trunk", read, dtype)

    def pieces(self, part: Part, read: Reader, dtype: torch.dtype) -> list[Piece]:
        """The same tensors for a checkpoint, each made whole on the rank that writes it."""
        return [self._piece(item, read, dtype) for item in self._items_of_part(part)]

    def _piece(self, item: _Item, read: Reader, dtype: torch.dtype) -> Piece:
        outline = [torch.empty(item.shape, dtype=dtype, device="meta") for _ in item.sources]

        def gather(rank: int) -> dict[str, Tensor]:
            shards = self._gather(item, read, dtype, rank)
            return dict(self._join(item, shards)) if shards else {}

        return Piece(dict(self._join(item, outline)), gather)

    def adapter(self, read: Reader) -> Iterator[tuple[str, Tensor]]:
        """The same for a LoRA adapter, in float32 under the names of a peft folder."""
        return self._whole("adapter", read, torch.float32)

    def _whole(self, part: Part, read: Reader, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for item in self._items_of_part(part):
            if shards := self._gather(item, read, dtype, 0):
                yield from self._join(item, shards)

    def _items_of_part(self, part: Part) -> list[_Item]:
        return [item for item in self._items if _part_of(item.name) == part]

    def _join(self, item: _Item, shards: list[Tensor]) -> Iterable[tuple[str, Tensor]]:
        if _part_of(item.name) == "head":
            return [(item.name.removeprefix(HEAD_PREFIX), shards[0])]
        return join(item.name, shards, self._model.converted, item.layout)

    def _gather(self, item: _Item, read: Reader, dtype: torch.dtype, target: int) -> list[Tensor]:
        """Every source's shard on the rank ``target``; an empty list elsewhere."""
        rank = dist.get_rank()
        held = torch.empty(item.shape, dtype=dtype, device=self._device)
        if rank in item.holders:
            held = read(self._parameters[item.chunk][item.name]).detach().to(dtype)
        if rank == target:
            return [held if source == target else self._receive(item, dtype, source) for source in item.sources]
        if rank in item.sources:
            dist.send(held.contiguous(), target)
        return []

    def _receive(self, item: _Item, dtype: torch.dtype, source: int) -> Tensor:
        shard = torch.empty(item.shape, dtype=dtype, device=self._device)
        dist.recv(shard, source)
        return shard

    def _plan(self) -> Iterator[_Item]:
        """All parameters, in the order of the layers."""
        of_stage: dict[int, list[int]] = {}
        for rank, place in enumerate(self._places):
            of_stage.setdefault(place.stage, []).append(rank)
        pieces = [(chunk, stage) for chunk in range(len(self._model.chunks)) for stage in sorted(of_stage)]
        for chunk, stage in pieces:
            for name in self._places[of_stage[stage][0]].shapes[chunk]:
                yield from self._items_of(chunk, name, of_stage[stage])

    def _items_of(self, chunk: int, name: str, ranks: list[int]) -> Iterator[_Item]:
        places = self._places
        group = "replicated" if name.startswith(HEAD_PREFIX) else self._group(chunk, name, places[ranks[0]])
        by_part: dict[int, list[int]] = {}  # routed experts: by the rank in the expert-parallel group
        for rank in ranks:
            by_part.setdefault(places[rank].layout.ep_rank if group == "expert_tensor" else 0, []).append(rank)
        for _, holders in sorted(by_part.items()):
            first: dict[int, int] = {}
            for rank in reversed(holders):
                layout = places[rank].layout
                shard = layout.tensor_rank(expert=group == "expert_tensor")[0]
                first[0 if group == "replicated" else shard] = rank
            sources = tuple(rank for _, rank in sorted(first.items()))
            place = places[sources[0]]
            yield _Item(chunk, name, place.layouts[chunk], sources, frozenset(holders), place.shapes[chunk][name])

    def _group(self, chunk: int, name: str, place: _Place) -> str:
        return shard_group(name, self._model.converted, place.layouts[chunk])

    @property
    def _device(self) -> torch.device:
        return next(self._model.chunks[0].parameters()).device


def _part_of(name: str) -> Part:
    if name.startswith(HEAD_PREFIX):
        return "head"
    return "adapter" if is_adapter(name) else "trunk"
