"""A model's parameters and moments on the ranks that hold them, under Hugging Face names, for checkpoints too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.megatron.model import MegatronModel, folder_reader, own_buffers, own_parts, saved_name
from roll.distributed.strategy.megatron.optimizer import MegatronAdam
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX, adapter_tensors
from roll.distributed.strategy.training.exchange import ShardLayout, Slice, WeightShard, raise_on_all_ranks
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.distributed.strategy.training.tensor_files import Reader
from roll.models.loading import Head, to_hf_weights
from roll.models.lora import SCORE_NAME, is_adapter
from roll.models.megatron.families import Family
from roll.models.megatron.names import ParallelLayout, find_expert, fuse, is_buffer, join, shard_group, split_reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part: TypeAlias = Literal["trunk", "adapter", "head", "buffers"]
OwnPart: TypeAlias = Callable[[nn.Parameter], Tensor]
"""Reads this rank's part of a parameter, or of a moment."""


@dataclass(frozen=True)
class _Place:
    """Place of one rank, and the parameters that it holds."""

    stage: int
    layouts: tuple[ParallelLayout, ...]
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    """Of the parameters of each chunk, and of what it has of a folder's tensors beside them."""
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
        buffers = [own_buffers(chunk, model.converted) for chunk in model.chunks]
        parameters = [dict(chunk.named_parameters()) for chunk in model.chunks]
        self._tensors = [chunk | more for chunk, more in zip(parameters, buffers, strict=True)]
        own = _Place(
            parallel_state.get_pipeline_model_parallel_rank(),
            tuple(model.layouts),
            tuple({name: tuple(each.shape) for name, each in chunk.items()} for chunk in self._tensors),
            tuple({name: optimizer.place(p) for name, p in chunk.items()} for chunk in parameters),
        )
        places: list[_Place] = [own] * dist.get_world_size()
        if len(places) > 1:
            dist.all_gather_object(places, own)
        self._places = places
        self._items = list(self._plan())

    def pieces(self, part: Part, dtype: torch.dtype, updated: OwnPart | None = None) -> list[WeightShard]:
        """Tensors under the names of a Hugging Face checkpoint, an adapter's under those of a peft folder.

        Args:
            updated: reads what the optimizer has of a parameter; without it, the parameters themselves are meant.
        """
        return [self._piece(item, dtype, updated) for item in self._items if self._part_of(item.name) == part]

    def _piece(self, item: _Item, dtype: torch.dtype, updated: OwnPart | None) -> WeightShard:
        def own() -> Tensor:
            parameter: Any = self._tensors[item.chunk][item.name]
            return (parameter if updated is None else updated(parameter)).detach().reshape(-1)

        size = math.prod(item.shape)
        spreads = []
        for ranks in item.holders:
            regions = [Slice((0,), (size,), ranks)] if updated is None else self._updated(item, ranks)
            spreads.append(ShardLayout((size,), dtype, self._device, regions, own))
        return WeightShard(spreads, lambda whole: dict(self._join(item, [shard.view(item.shape) for shard in whole])))

    def _part_of(self, name: str) -> Part:
        if name.startswith(HEAD_PREFIX):
            return "head"
        if is_adapter(name):
            return "adapter"
        return "buffers" if is_buffer(name, self._model.converted) else "trunk"

    def _updated(self, item: _Item, ranks: Sequence[int]) -> list[Slice]:
        """Regions of a shard, and those of the ranks that update them."""
        by_part: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            by_part.setdefault(self._places[rank].updated[item.chunk][item.name], []).append(rank)
        return [Slice((start,), (size,), tuple(of)) for (start, size), of in sorted(by_part.items()) if size]

    def _join(self, item: _Item, shards: list[Tensor]) -> Iterable[tuple[str, Tensor]]:
        if self._part_of(item.name) == "head":
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


@dataclass(frozen=True)
class TrainedModel:
    """``checkpoint.Trained`` for a model that lies on the ranks in Megatron's way."""

    model: MegatronModel
    gatherer: WeightGatherer
    optimizer: MegatronAdam
    context: StrategyContext

    @property
    def device(self) -> torch.device:
        return next(self.model.chunks[0].parameters()).device

    @property
    def _adapts(self) -> bool:
        """A LoRA adapter is all that is trained."""
        return self.context.lora is not None

    @property
    def kinds(self) -> Sequence[str]:
        return ADAM_STATE

    def tensors(self, kind: str) -> list[WeightShard]:
        def pieces(part: Part) -> list[WeightShard]:
            return self.gatherer.pieces(part, torch.float32, lambda parameter: self.optimizer.share(parameter, kind))

        head = [piece.renamed(lambda name: HEAD_PREFIX + name) for piece in pieces("head")]
        if self._adapts:
            return [*pieces("adapter"), *head]
        # Nothing of what is frozen, of which no rank updates a part, or of tied embeddings' copy, which has no name.
        updated = [one for one in pieces("trunk") if one.outline and all(spread.regions for spread in one.spreads)]
        trunk = module_pieces(updated, self.model.converted.family, self.model.converted.num_experts)
        return [*(piece.renamed(partial(saved_name, head=self.context.head)) for piece in trunk), *head]

    def fill(self, kind: str, read: Reader) -> None:
        with raise_on_all_ranks():
            whole = (lambda name: read(name).whole()) if self._adapts else self._module_reader(read)
            self._set(kind, whole, updated=True)

    def load(self, path: Path) -> None:
        with raise_on_all_ranks():
            reader = self._adapter_reader if self._adapts else partial(folder_reader, self.model, self.context)
            self._set(MASTER, reader(path))

    def _module_reader(self, read: Reader) -> Callable[[str], Tensor]:
        """Reads by the names of a whole model what ``read`` has by those in the module of this head."""
        head = self.context.head
        return split_reader(lambda name: read(saved_name(name, head)), self.model.converted.family)

    def _adapter_reader(self, path: Path) -> Callable[[str], Tensor]:
        """Reads a peft folder by its names, and its head by that of a parameter here."""
        names = [name for piece in adapter_pieces(self.gatherer) for name in piece.outline]
        stored = adapter_tensors(path, names)
        return lambda name: stored.get(SCORE_NAME if name.startswith(HEAD_PREFIX) else name)

    def set_steps(self, steps: int) -> None:
        self.optimizer.set_step(steps)

    @torch.no_grad()
    def _set(self, kind: str, read: Callable[[str], Tensor], *, updated: bool = False) -> None:
        adapts = self._adapts  # then an adapter is trained, and the head beside it
        for parameter, part in own_parts(
            self.model, read, adapter=None if adapts else False, trained=updated or adapts
        ):
            if kind == MASTER:
                parameter.copy_(part)
            self.optimizer.set(parameter, kind, part)


def adapter_pieces(gatherer: WeightGatherer) -> list[WeightShard]:
    """The adapter, and the head beside it, in float32 under the names of a peft folder."""
    head = [piece.renamed(lambda _: SCORE_NAME) for piece in gatherer.pieces("head", torch.float32)]
    return [*gatherer.pieces("adapter", torch.float32), *head]


def module_pieces(pieces: Iterable[WeightShard], family: Family, num_experts: int) -> list[WeightShard]:
    """The same under the names of Transformers' module, all of a layer's experts in one piece."""
    groups: dict[str, list[WeightShard]] = {}
    for piece in pieces:
        name = next(iter(piece.outline))
        found = find_expert(name, family)
        groups.setdefault(f"{found.layer} experts" if found else name, []).append(piece)
    return [_one_piece(group, family, num_experts) for group in groups.values()]


def published_piece(piece: WeightShard, hf_model: PreTrainedModel, head: Head) -> WeightShard:
    """The same under the names, and in the shapes, in which a folder of the model has it."""

    def make(whole: Sequence[Tensor]) -> dict[str, Tensor]:
        named = (to_hf_weights(hf_model, saved_name(name, head), x) for name, x in piece.make(whole).items())
        return {name: tensor for each in named for name, tensor in each.items()}

    return WeightShard(piece.spreads, make)


def _one_piece(group: list[WeightShard], family: Family, num_experts: int) -> WeightShard:
    def make(whole: Sequence[Tensor]) -> dict[str, Tensor]:
        rest = iter(whole)
        made = (piece.make(list(islice(rest, len(piece.spreads)))) for piece in group)
        return dict(fuse((pair for tensors in made for pair in tensors.items()), family, num_experts))

    return WeightShard([spread for piece in group for spread in piece.spreads], make)
