"""A tensor in files, of which a rank reads the part that it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from roll.utils.progress import advance

if TYPE_CHECKING:
    from torch import Tensor

Block: TypeAlias = tuple[int, "Callable[[], Tensor]"]
"""Number of elements that follow each other in a tensor, and what reads them, in any shape."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as blocks in row-major order, each read when it is needed.

    A block that lies in a file as it is comes as a view of the mapped file: it takes no memory before it is copied.
    """

    shape: tuple[int, ...]
    blocks: Sequence[Block]

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """One that is in memory."""
        return cls(tuple(tensor.shape), [(tensor.numel(), lambda: tensor)])

    def whole(self) -> Tensor:
        import torch

        parts = [read() for _, read in self.blocks]
        joined = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        return joined.reshape(self.shape)

    def rows(self, first: int, last: int, shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yields the rows from ``first`` to before ``last`` of the tensor viewed in a shape, as many as a block has.

        Yields:
            Number of the first of them, and the rows.
        """
        width = math.prod(shape[1:])
        if any(size % width for size, _ in self.blocks):  # blocks end within rows
            yield first, self.whole().view(tuple(shape))[first:last]
            return
        start = 0
        for size, read in self.blocks:
            end = start + size // width
            if (low := max(start, first)) < (high := min(end, last)):
                yield low, read().reshape(-1, *shape[1:])[low - start : high - start]
            start = end

    def copy_into(self, place: Tensor, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Copies a region of the tensor viewed in a shape, in the number format and to the device of ``place``."""
        if place.numel() == 0:
            return
        if not shape:
            shape, offsets, sizes, place = (1,), (0,), (1,), place.view(1)
        inner = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
        for number, rows in self.rows(offsets[0], offsets[0] + sizes[0], shape):
            target = place[number - offsets[0] : number - offsets[0] + len(rows)]
            target.copy_(rows[:, *inner].to(place.device))
            advance()
