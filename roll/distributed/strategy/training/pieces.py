"""Tensors whose parts lie on several ranks, made whole where they are written or sent from, and nowhere else.

All ranks know who has which part. So a tensor needs no collective: its parts travel by messages from those who have
them to those who want it whole, over any process group, and from the trainer's own memory or from a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

_AT_ONCE = 64
"""Pieces whose messages are under way at the same time; nccl has a limit."""


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
    plain: bool = False
    """There is one of each, of the same bytes, so that it can be gathered where the named one belongs."""

    @cached_property
    def outline(self) -> dict[str, Tensor]:
        """Shapes and number formats, on the meta device."""
        return dict(self.make([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.spreads]))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outline.values())

    def renamed(self, rename: Callable[[str], str]) -> Piece:
        """The same tensors under other names."""
        return Piece(self.spreads, lambda whole: {rename(name): t for name, t in self.make(whole).items()}, self.plain)


def piece_of(name: str, spread: Spread, shape: Sequence[int] | None = None) -> Piece:
    """One tensor, in the shape in which it is spread or in another."""
    return Piece([spread], lambda whole: {name: whole[0] if shape is None else whole[0].view(tuple(shape))}, True)


def gather(
    pieces: Sequence[Piece],
    targets: Collection[int],
    *,
    into: Mapping[str, Tensor] | None = None,
    read: Read | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Makes pieces whole on some ranks (all take part: the others give their parts and get nothing).

    Args:
        pieces: what.
        targets: the ranks.
        into: places of the named tensors, to which parts of plain pieces from other ranks go directly. What a rank has
            whole stays where it is.
        read: this rank's parts in host memory; without it they are read where they are now.
        group: over which they travel, of all ranks.

    Returns:
        The named tensors of all pieces.
    """
    found: dict[str, Tensor] = {}
    for start in range(0, len(pieces), _AT_ONCE):
        some, exchange = pieces[start : start + _AT_ONCE], _Exchange(targets, read, group)
        whole = [[exchange.join(spread, _place(piece, into)) for spread in piece.spreads] for piece in some]
        exchange.finish()
        if own_rank() in targets:
            for piece, tensors in zip(some, whole, strict=True):
                found |= piece.make([tensor for tensor in tensors if tensor is not None])
    return found


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


def _place(piece: Piece, into: Mapping[str, Tensor] | None) -> Tensor | None:
    if not piece.plain or not into:
        return None
    return into[next(iter(piece.outline))].view(piece.spreads[0].shape)


class _Exchange:
    """Messages of some spreads, all under way at the same time."""

    def __init__(self, targets: Collection[int], read: Read | None, group: dist.ProcessGroup | None) -> None:
        self._rank, self._targets = own_rank(), targets
        self._read, self._group = read, group
        self._messages: list[dist.P2POp] = []
        self._arrivals: list[tuple[Tensor, Tensor]] = []
        """Places, and what has to be copied there when it is here."""
        self._tag = 0

    def join(self, spread: Spread, place: Tensor | None) -> Tensor | None:
        """Starts to make a tensor whole, in ``place`` if given; complete after ``finish``. ``None`` on other ranks."""
        self._tag += 1
        takers = [target for target in self._targets if target != self._rank and spread.sent_by(self._rank, target)]
        own = self._own(spread) if takers or self._has_part(spread) else None
        if takers:
            assert own is not None
            part = own.contiguous()
            self._messages += [self._message(dist.isend, part, target) for target in takers]
        if self._rank not in self._targets:
            return None
        if len(spread.regions) == 1 and self._rank in spread.regions[0].ranks:
            return own  # whole as it is
        device = spread.device if self._read is None else torch.device("cpu")
        whole = torch.empty(spread.shape, dtype=spread.dtype, device=device) if place is None else place
        for region in spread.regions:
            self._fill(region, region.cut(whole), own)
        return whole

    def finish(self) -> None:
        """Waits for the messages."""
        for work in dist.batch_isend_irecv(self._messages) if self._messages else ():
            work.wait()
        for place, part in self._arrivals:
            place.copy_(part)

    def _fill(self, region: Region, place: Tensor, own: Tensor | None) -> None:
        source = region.source(self._rank)
        if source == self._rank:
            assert own is not None
            place.copy_(own)
            return
        part = place
        if not place.is_contiguous():
            part = torch.empty(region.sizes, dtype=place.dtype, device=place.device)
            self._arrivals.append((place, part))
        self._messages.append(self._message(dist.irecv, part, source))

    def _has_part(self, spread: Spread) -> bool:
        """This rank needs its own part."""
        return self._rank in self._targets and any(self._rank in region.ranks for region in spread.regions)

    def _own(self, spread: Spread) -> Tensor:
        if self._read is not None:
            return self._read(spread).detach().to("cpu", spread.dtype)
        return spread.own().detach().to(spread.device, spread.dtype)

    def _message(self, send_or_receive: Callable[..., object], tensor: Tensor, other: int) -> dist.P2POp:
        return dist.P2POp(send_or_receive, tensor, other, self._group, self._tag)
