"""Sends what only one rank knows to the others: a row of numbers, or a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from roll.utils.foreign import Fault


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
