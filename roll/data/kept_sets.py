"""Kept sets: the tokens that top-k, top-p and min-p have left for each sampled token.

The policy that samples is the softmax over this set. It cannot be found again from the trainer's logits, which differ
in rounding and after every update, so it travels: the sets of a completion are one ``Item`` of numbers with seven bits
in a byte (LEB128): the place of the first sampled token in its row, how many tokens there are, the size of each set,
and the sets as gaps between ascending ids. A set of n of V tokens takes at most n + V / 128 + V / 16384 bytes, and its
size at most three.

An empty set stands for the whole vocabulary. Axes: N tokens, V logits on this rank.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from roll.data.columns import IntArray, Item, UInt8Array
from roll.data.stored import Piece

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roll.data.batch import Batch

_LONGEST = 5
"""Bytes of a number."""


def kept_item(first: int, sets: Sequence[IntArray]) -> Item:
    """The sets of a completion.

    Args:
        first: place of its first token in the row: the length of the prompt.
        sets: the ids of each token, in any order.
    """
    sizes = np.array([*map(len, sets)], dtype=np.int64)
    token = np.repeat(np.arange(len(sets)), sizes)
    ids = np.concatenate([*sets, []], dtype=np.int64, casting="unsafe")
    ids = np.sort((token << 32) | ids) & 0xFFFFFFFF
    gaps = np.diff(ids, prepend=0)
    starts = (sizes.cumsum() - sizes)[sizes > 0]
    gaps[starts] = ids[starts]
    return Item(_in_bytes(np.concatenate([[first, len(sets)], sizes, gaps])))


def kept_sizes(item: Item) -> IntArray:
    """How many tokens each set of a completion has; 0 is all."""
    count = int(_numbers(item.data, 2)[1])
    return _numbers(item.data, 2 + count)[2:]


class KeptFigures(NamedTuple):
    """What is told of the sets of a completion without a look at them."""

    ids: int
    """Of all sets."""
    sets: int
    """Those that are not the whole vocabulary."""
    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, item: Item) -> KeptFigures:
        """Those that came with the item, if its data lie elsewhere."""
        if isinstance(data := vars(item)["data"], Piece):
            assert isinstance(data.figures, KeptFigures), "of kept sets"
            return data.figures
        sizes = kept_sizes(item)
        return cls(int(sizes.sum()), int((sizes > 0).sum()), len(sizes), data.nbytes)


@dataclass(frozen=True, eq=False)
class KeptSets:
    """A set for each of N tokens."""

    ids: Tensor
    """int32: all sets end to end."""
    sizes_N: Tensor
    """int64: ids of each."""

    @classmethod
    def of(cls, batch: Batch) -> KeptSets:
        """Those of a batch's tokens, with ``kept_I``.

        Raises:
            ValueError: a sampled token is not in its own set, so these are others' sets.
        """
        import torch

        assert batch.kept_I is not None
        sizes_T = np.zeros(batch.num_tokens, dtype=np.int64)
        parts = [np.zeros(0, dtype=np.int64)]
        for offset, items in zip(batch.offsets_B.tolist(), batch.kept_I, strict=True):
            for item in items:
                (first, count), rest = np.split(_numbers(item.data), [2])
                sizes, gaps = np.split(rest, [count])
                sizes_T[offset + first : offset + first + count] = sizes
                totals = gaps.cumsum()
                begins = (sizes.cumsum() - sizes)[sizes > 0]
                parts.append(totals - np.repeat((totals - gaps)[begins], sizes[sizes > 0]))
        ids = np.concatenate(parts)
        own = np.repeat(np.arange(batch.num_tokens), sizes_T)
        found_T = np.bincount(own, ids == batch.tokens_T.numpy()[own], batch.num_tokens)
        if lost := int(((sizes_T > 0) & (found_T == 0)).sum()):
            raise ValueError(f"Batch.kept_I: {lost} sampled tokens are not in their own kept sets; expected none")
        return cls(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(sizes_T))

    def __getitem__(self, index: Tensor | slice) -> KeptSets:
        """Those of some tokens."""
        import torch

        starts_K, sizes_K = (self.sizes_N.cumsum(0) - self.sizes_N)[index], self.sizes_N[index]
        shift_K = starts_K - (sizes_K.cumsum(0) - sizes_K)
        shifts = shift_K.repeat_interleave(sizes_K)
        return KeptSets(self.ids[torch.arange(len(shifts), device=shifts.device) + shifts], sizes_K)

    def to(self, device: torch.device, non_blocking: bool = False) -> KeptSets:
        """The same on ``device``."""
        moved = (each.to(device, non_blocking=non_blocking) for each in (self.ids, self.sizes_N))
        return KeptSets(*moved)

    def mask(self, start: int, width: int) -> Tensor:
        """bool [N, V]: whether a token may be sampled, for the ``width`` ids from ``start`` on."""
        import torch

        rows, columns = torch.arange(len(self.sizes_N), device=self.ids.device), self.ids.long() - start
        rows, here = rows.repeat_interleave(self.sizes_N), (columns >= 0) & (columns < width)
        mask_NV = (self.sizes_N == 0)[:, None].repeat(1, width)
        mask_NV[rows[here], columns[here]] = True
        return mask_NV


def _in_bytes(numbers: IntArray) -> UInt8Array:
    """Seven bits in a byte, the lowest first; the highest bit of a byte says that more follow."""
    lengths = np.ones(len(numbers), dtype=np.int64)
    for count in range(1, _LONGEST):
        lengths += numbers >= 1 << (7 * count)
    starts = lengths.cumsum() - lengths
    data = np.zeros(int(lengths.sum()), dtype=np.uint8)
    for at in range(_LONGEST):
        longer = lengths > at
        more = (lengths[longer] > at + 1).astype(np.int64) << 7
        data[starts[longer] + at] = (numbers[longer] >> (7 * at)) & 127 | more
    return data


def _numbers(data: UInt8Array, count: int | None = None) -> IntArray:
    """Its inverse; only the first ``count``."""
    ends = np.flatnonzero(data < 128)[:count] + 1
    starts = np.concatenate([[0], ends[:-1]])
    within = np.arange(ends[-1]) - np.repeat(starts, ends - starts)
    parts = (data[: ends[-1]] & 127).astype(np.int64) << (7 * within)
    found: IntArray = np.add.reduceat(parts, starts)
    return found
