"""A model's parameters and moments on the ranks that hold them, under Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.strategy.megatron.model import MegatronModel
from roll.distributed.strategy.megatron.optimizer import MegatronAdam
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX
from roll.distributed.strategy.training.pieces import Piece, Region, Spread
from roll.models.lora import is_adapter
from roll.models.megatron.convert import join, shard_group
from roll.models.megatron.layout import ParallelLayout

Part: TypeAlias = Literal["trunk", "adapter", "head"]
OwnPart: TypeAlias = Callable[[nn.Parameter], Tensor]
"""Reads this rank's part of a parameter, or of a moment."""


@dataclass(frozen=True)
class _Place:
    """Place of one rank, and the parameters that it holds."""

    stage: int
    layouts: tuple[ParallelLayout, ...]
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    """Of the parameters of each chunk."""
    updated: tuple[dict[str, tuple[int, int]], ...]
    """Start and size of what the rank's optimizer has of the flat parameters of each chunk."""

    @property
    def layout(self) -> ParallelLayout:
        return self.layouts[0]


@dataclass(frozen=True)
class _Item:
    """One parameter on the ranks of one pipeline stage (and, of a routed expert, of one expert-parallel rank)."""

    chunk: int
    name: str
    layout: ParallelLayout
    holders: tuple[tuple[int, ...], ...]
    """For each shard, in the order in which they are joined, all ranks that have it."""
    shape: tuple[int, ...]


class WeightGatherer:
    """Knows which rank holds what (made collectively)."""

    def __init__(self, model: MegatronModel, optimizer: MegatronAdam) -> None:
        from megatron.core import parallel_state

        self._model = model
        self._parameters = [dict(chunk.named_parameters()) for chunk in model.chunks]
        own = _Place(
            parallel_state.get_pipeline_model_parallel_rank(),
            tuple(model.layouts),
            tuple({name: tuple(p.shape) for name, p in chunk.items()} for chunk in self._parameters),
            tuple({name: optimizer.place(p) for name, p in chunk.items()} for chunk in self._parameters),
        )
        places: list[_Place] = [own] * dist.get_world_size()
        if len(places) > 1:
            dist.all_gather_object(places, own)
        self._places = places
        self._items = list(self._plan())

    def pieces(self, part: Part, dtype: torch.dtype, updated: OwnPart | None = None) -> list[Piece]:
        """Tensors under the names of a Hugging Face checkpoint, an adapter's under those of a peft folder.

        Args:
            updated: reads what the optimizer has of a parameter; without it, the parameters themselves are meant.
        """
        return [self._piece(item, dtype, updated) for item in self._items if _part_of(item.name) == part]

    def _piece(self, item: _Item, dtype: torch.dtype, updated: OwnPart | None) -> Piece:
        def own() -> Tensor:
            parameter = self._parameters[item.chunk][item.name]
            return (parameter if updated is None else updated(parameter)).detach().reshape(-1)

        size = math.prod(item.shape)
        spreads = []
        for ranks in item.holders:
            regions = [Region((0,), (size,), ranks)] if updated is None else self._updated(item, ranks)
            spreads.append(Spread((size,), dtype, self._device, regions, own))
        return Piece(spreads, lambda whole: dict(self._join(item, [shard.view(item.shape) for shard in whole])))

    def _updated(self, item: _Item, ranks: Sequence[int]) -> list[Region]:
        """Regions of a shard, and those of the ranks that update them."""
        by_part: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            by_part.setdefault(self._places[rank].updated[item.chunk][item.name], []).append(rank)
        return [Region((start,), (size,), tuple(of)) for (start, size), of in sorted(by_part.items()) if size]

    def _join(self, item: _Item, shards: list[Tensor]) -> Iterable[tuple[str, Tensor]]:
        if _part_of(item.name) == "head":
            return [(item.name.removeprefix(HEAD_PREFIX), shards[0])]
        return join(item.name, shards, self._model.converted, item.layout)

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
        group = "replicated"
        if not name.startswith(HEAD_PREFIX):
            group = shard_group(name, self._model.converted, places[ranks[0]].layouts[chunk])
        by_part: dict[int, list[int]] = {}  # routed experts: by the rank in the expert-parallel group
        for rank in ranks:
            by_part.setdefault(places[rank].layout.ep_rank if group == "expert_tensor" else 0, []).append(rank)
        for _, holders in sorted(by_part.items()):
            of_shard: dict[int, list[int]] = {}
            for rank in holders:
                shard = places[rank].layout.tensor_rank(expert=group == "expert_tensor")[0]
                of_shard.setdefault(0 if group == "replicated" else shard, []).append(rank)
            in_order = tuple(tuple(ranks) for _, ranks in sorted(of_shard.items()))
            place = places[in_order[0][0]]
            yield _Item(chunk, name, place.layouts[chunk], in_order, place.shapes[chunk][name])

    @property
    def _device(self) -> torch.device:
        return next(self._model.chunks[0].parameters()).device


def _part_of(name: str) -> Part:
    if name.startswith(HEAD_PREFIX):
        return "head"
    return "adapter" if is_adapter(name) else "trunk"
