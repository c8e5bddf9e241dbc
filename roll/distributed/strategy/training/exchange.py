"""What ranks exchange: facts that one of them has, failures, and tensors whose parts lie on several.

A tensor is made whole only where it is written or sent from. All ranks know who has which part, so this needs no
collective: the parts travel by messages from those who have them to those who want the whole, over any process group,
and from the trainer's own memory or from a copy of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from roll.utils.foreign import Fault

_AT_ONCE = 64
"""Pieces whose messages are under way at the same time; nccl has a limit."""


Part: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rank's part of a tensor."""


@dataclass(frozen=True)
class Slice:
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
class ShardLayout:
    """A tensor on the ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """In which it is made whole; it may be kept in another."""
    device: torch.device
    """Device on which the trainers make it whole."""
    regions: Sequence[Slice]
    """Together the whole tensor; a rank has one at most."""
    own: Callable[[], Tensor]
    """This rank's part as it is now, not a copy; called only where there is one."""

    def sent_by(self, rank: int, target: int) -> bool:
        """Tells whether ``target`` needs the part of ``rank``."""
        return any(region.source(target) == rank for region in self.regions)


Read: TypeAlias = Callable[[ShardLayout], Tensor]
"""This rank's part: as it is now, or as it was when it was copied."""


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightShard:
    """Named tensors that are written together, such as those that one parameter of an engine turns into."""

    spreads: Sequence[ShardLayout]
    make: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    """Turns the whole tensors into the named ones; works on the meta device too."""
    plain: Mapping[str, TensorForm] | None = None
    """The named tensor, if it is the bytes of the only spread, so that it can be gathered where it belongs."""

    @property
    def outline(self) -> Mapping[str, TensorForm]:
        """The named tensors."""
        return self._made if self.plain is None else self.plain

    @cached_property
    def _made(self) -> dict[str, TensorForm]:
        made = self.make([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.spreads])
        return {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}

    @property
    def num_bytes(self) -> int:
        return sum(form.nbytes for form in self.outline.values())

    @property
    def holders(self) -> Sequence[int]:
        """Ranks that have all of it; none where it has to be gathered."""
        regions = [region for spread in self.spreads for region in spread.regions]
        return regions[0].ranks if len(regions) == len(self.spreads) == 1 else ()

    def renamed(self, rename: Callable[[str], str]) -> WeightShard:
        """The same tensors under other names."""
        plain = None if self.plain is None else {rename(name): form for name, form in self.plain.items()}
        return WeightShard(self.spreads, lambda whole: {rename(name): t for name, t in self.make(whole).items()}, plain)


def weight_shard(name: str, spread: ShardLayout, shape: Sequence[int] | None = None) -> WeightShard:
    """One tensor, in the shape in which it is spread or in another."""
    form = TensorForm(spread.shape if shape is None else tuple(shape), spread.dtype)
    return WeightShard((spread,), lambda whole: {name: whole[0].view(form.shape)}, {name: form})


def gather(
    pieces: Sequence[WeightShard],
    targets: Collection[int],
    *,
    into: Mapping[str, Tensor] | None = None,
    read: Read | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Makes pieces whole on some ranks (all take part: the others give their parts and get nothing).

    Args:
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


def find_regions(own: Mapping[str, Part]) -> dict[str, Sequence[Slice]]:
    """Finds the regions of some tensors, and the ranks that have them (collective).

    Args:
        own: this rank's parts by names that mean the same on all ranks.
    """
    places = [dict(own)] * world_size()
    if len(places) > 1:
        dist.all_gather_object(places, dict(own))
    names = dict.fromkeys(itertools.chain.from_iterable(places))
    regions = functools.cache(_regions)  # a model has many tensors, but few shapes
    return {name: regions(tuple([parts.get(name) for parts in places])) for name in names}


def _regions(parts: Sequence[Part | None]) -> tuple[Slice, ...]:
    """The regions of one tensor, given the part of every rank that has any."""
    holders: dict[Part, list[int]] = {}
    for rank, part in enumerate(parts):
        if part is not None and math.prod(part[1]) > 0:
            holders.setdefault(part, []).append(rank)
    return tuple(Slice(offsets, sizes, tuple(ranks)) for (offsets, sizes), ranks in sorted(holders.items()))


def everywhere(shape: Sequence[int]) -> Sequence[Slice]:
    """The regions of a tensor that every rank has whole."""
    return _whole(tuple(shape), world_size())


@functools.cache
def _whole(shape: tuple[int, ...], ranks: int) -> Sequence[Slice]:
    return (Slice((0,) * len(shape), shape, tuple(range(ranks))),)


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _place(piece: WeightShard, into: Mapping[str, Tensor] | None) -> Tensor | None:
    if piece.plain is None or not into:
        return None
    return into[next(iter(piece.plain))].view(piece.spreads[0].shape)


class _Exchange:
    """Messages of some spreads, all under way at the same time."""

    def __init__(self, targets: Collection[int], read: Read | None, group: dist.ProcessGroup | None) -> None:
        self._rank, self._targets = own_rank(), targets
        self._read, self._group = read, group
        self._messages: list[dist.P2POp] = []
        self._arrivals: list[tuple[Tensor, Tensor]] = []
        """Places, and what has to be copied there when it is here."""
        self._tag = 0

    def join(self, spread: ShardLayout, place: Tensor | None) -> Tensor | None:
        """Starts to make a tensor whole, in ``place`` if given; complete after ``finish``. ``None`` on other ranks."""
        self._tag += 1
        takers = [target for target in self._targets if target != self._rank and spread.sent_by(self._rank, target)]
        needs_own = self._rank in self._targets and any(self._rank in region.ranks for region in spread.regions)
        own = self._own(spread) if takers or needs_own else None
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

    def _fill(self, region: Slice, place: Tensor, own: Tensor | None) -> None:
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

    def _own(self, spread: ShardLayout) -> Tensor:
        if self._read is not None:
            return self._read(spread).detach().to("cpu", spread.dtype)
        return spread.own().detach().to(spread.device, spread.dtype)

    def _message(self, send_or_receive: Callable[..., object], tensor: Tensor, other: int) -> dist.P2POp:
        return dist.P2POp(send_or_receive, tensor, other, self._group, self._tag)


def all_gather(row: Tensor) -> Tensor:
    """Every rank's ``row``, stacked in order of rank (collective)."""
    rows = row.new_zeros((dist.get_world_size(), len(row)))
    rows[dist.get_rank()] = row
    dist.all_reduce(rows)
    return rows


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Makes a failure inside one on every rank, at once (collective).

    For what a rank does by itself, such as reading files, before a step that takes all of them: without it, the others
    would wait in that step until the collective's timeout. What is inside must not be collective, unless its own
    failures are agreed on.

    Args:
        group: of all ranks; ``None``: that of the role.

    Raises:
        Exception: what was raised inside, where it was.
        OSError: on the other ranks, if that was one, with the message of the first rank that failed.
        ValueError: the same, for all other kinds.
    """
    with Fault() as fault:  # of any kind: it is raised again below
        yield
    told = _first(fault.error, group) if dist.is_initialized() and dist.get_world_size() > 1 else None
    if failure := fault.error or told:
        raise failure


def _first(own: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """The failure of the first rank that has one, as the others report it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = torch.tensor(ranks if own is None else rank)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    source = int(first)
    if source == ranks:
        return None
    told = [(isinstance(own, OSError), f"rank {rank}: {str(own) or type(own).__name__}")]
    dist.broadcast_object_list(told, source, group=group)
    is_os_error, message = told[0]
    return OSError(message) if is_os_error else ValueError(message)
