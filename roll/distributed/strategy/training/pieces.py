"""Tensors whose parts lie on several ranks, made whole where they are written.

All ranks know who has which part. So a tensor needs no collective: its parts travel by messages from those who have
them to the one who writes, over any process group, and from the trainer's own memory or from a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """A part of a tensor, and the ranks that have it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def source(self, target: int) -> int:
        """The rank that gives it to ``target``: itself if it can."""
        return target if target in self.ranks else self.ranks[target % len(self.ranks)]

    def cut(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor, a view."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))]


@dataclass(frozen=True)
class Spread:
    """A tensor on the ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """In which it is made whole; it may be kept in another."""
    device: torch.device
    """Where the trainers make it whole."""
    regions: Sequence[Region]
    """Together the whole tensor; a rank has one at most."""
    own: Callable[[], Tensor]
    """This rank's part as it is now, not a copy; called only where there is one."""

    def sent_by(self, rank: int, target: int) -> bool:
        """Tells whether ``target`` needs the part of ``rank``."""
        return any(region.source(target) == rank for region in self.regions)


Read: TypeAlias = Callable[[Spread], Tensor]
"""This rank's part: as it is now, or as it was when it was copied."""


@dataclass(frozen=True)
class Piece:
    """Named tensors that are written together, such as those that one parameter of an engine turns into."""

    spreads: Sequence[Spread]
    make: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    """Turns the whole tensors into the named ones; works on the meta device too."""

    @cached_property
    def outline(self) -> dict[str, Tensor]:
        """Shapes and number formats, on the meta device."""
        return dict(self.make([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.spreads]))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outline.values())

    def renamed(self, rename: Callable[[str], str]) -> Piece:
        """The same tensors under other names."""
        return Piece(self.spreads, lambda whole: {rename(name): t for name, t in self.make(whole).items()})


def piece_of(name: str, spread: Spread, shape: Sequence[int] | None = None) -> Piece:
    """One tensor, in the shape in which it is spread or in another."""
    return Piece([spread], lambda whole: {name: whole[0] if shape is None else whole[0].view(tuple(shape))})


def gather(
    piece: Piece, target: int, *, read: Read | None = None, group: dist.ProcessGroup | None = None
) -> Mapping[str, Tensor]:
    """Makes a piece whole on the rank ``target``; nothing elsewhere (all ranks take part).

    Args:
        piece: what.
        target: where.
        read: this rank's parts in host memory; without it they are read where they are now.
        group: over which they travel, of all ranks.
    """
    whole = [_join(spread, target, read, group) for spread in piece.spreads]
    return piece.make([tensor for tensor in whole if tensor is not None]) if own_rank() == target else {}


def find_regions(own: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> dict[str, list[Region]]:
    """Who has which part of some tensors (collective).

    Args:
        own: offsets and sizes of this rank's parts by names that mean the same on all ranks.
    """
    places = [dict(own)] * world_size()
    if len(places) > 1:
        dist.all_gather_object(places, dict(own))
    holders: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]] = {}
    for rank, parts in enumerate(places):
        for name, (offsets, sizes) in parts.items():
            found = holders.setdefault(name, {})
            if math.prod(sizes):
                found.setdefault((tuple(offsets), tuple(sizes)), []).append(rank)
    return {
        name: [Region(offsets, sizes, tuple(ranks)) for (offsets, sizes), ranks in sorted(parts.items())]
        for name, parts in holders.items()
    }


def everywhere(shape: Sequence[int]) -> list[Region]:
    """The regions of a tensor that every rank has whole."""
    return [Region((0,) * len(shape), tuple(shape), tuple(range(world_size())))]


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _join(spread: Spread, target: int, read: Read | None, group: dist.ProcessGroup | None) -> Tensor | None:
    rank = own_rank()
    device = spread.device if read is None else torch.device("cpu")

    def own() -> Tensor:
        part = spread.own() if read is None else read(spread)
        return part.detach().to(device, spread.dtype)

    if rank != target:
        if spread.sent_by(rank, target):
            dist.send(own().contiguous(), target, group=group)
        return None
    if len(spread.regions) == 1 and target in spread.regions[0].ranks:
        return own()  # whole as it is
    whole = torch.empty(spread.shape, dtype=spread.dtype, device=device)
    for region in spread.regions:
        place, source = region.cut(whole), region.source(target)
        if source == rank:
            place.copy_(own())
        elif place.is_contiguous():
            dist.recv(place, source, group=group)
        else:
            part = torch.empty(region.sizes, dtype=spread.dtype, device=device)
            dist.recv(part, source, group=group)
            place.copy_(part)
    return whole
