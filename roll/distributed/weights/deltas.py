"""What an update changes of a bucket, in a form that is shorter than the bucket if few elements change.

Elements are compared bit for bit, as integers: a NaN's payload counts, and so does the sign of a zero. A bucket is cut
into pieces, on which threads work side by side. Of each piece the delta has the steps from one changed element to the
next, a byte each, and their new values; where the next is further away, elements in between are sent along unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from roll.distributed.weights.buckets import BucketOutline

_PIECE = 1 << 24  # bytes, a multiple of every element's size
_FAR = 255  # the longest step


def delta_between(
    outline: BucketOutline, old: np.ndarray, new: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray] | None:
    """The elements sent of each piece, and the delta; ``None`` where the whole bucket is not longer.

    Args:
        old: uint8 [num_bytes] of the update before.
        new: of this one.
    """
    pieces = zip(_pieces(outline, old), _pieces(outline, new), strict=True)
    found = []
    for piece in _threads().map(lambda pair: _changes(*pair), pieces):
        if piece is None:
            return None
        found.append(piece)
    counts = tuple(len(steps) for steps, _ in found)
    if delta_bytes(outline, counts) >= len(new):
        return None
    parts = [values.view(np.uint8) for _, values in found] + [steps for steps, _ in found]
    return counts, np.concatenate(parts)


def delta_bytes(outline: BucketOutline, counts: Sequence[int]) -> int:
    """Length of a delta."""
    return sum(counts) * (_element(outline).itemsize + 1)


def apply_delta(
    outline: BucketOutline, old: np.ndarray, counts: Sequence[int], delta: np.ndarray, into: np.ndarray
) -> None:
    """Writes the new bucket.

    Args:
        old: uint8 [num_bytes] that the delta starts from.
        counts: elements of each piece, as ``delta_between`` returns them.
        into: uint8 [num_bytes].
    """
    element, ends = _element(outline), np.cumsum(counts)[:-1]
    num_values = sum(counts) * element.itemsize
    values = np.split(delta[:num_values].view(element), ends)
    steps = np.split(delta[num_values:], ends)
    pieces = zip(_pieces(outline, old), steps, values, _pieces(outline, into), strict=True)
    list(_threads().map(lambda piece: _change(*piece), pieces))


def _changes(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """uint8 steps, the first one from before the start, and the values that they lead to; ``None`` if many change."""
    differ = old != new
    if np.count_nonzero(differ) * (new.itemsize + 1) >= new.nbytes:
        return None
    gaps = np.diff(np.flatnonzero(differ), prepend=-1)
    unchanged = (gaps - 1) // _FAR
    ends = np.cumsum(unchanged + 1)
    steps = np.full(ends[-1] if len(ends) else 0, _FAR, dtype=np.uint8)
    steps[ends - 1] = gaps - _FAR * unchanged
    return steps, new[_places(steps)]


def _change(old: np.ndarray, steps: np.ndarray, values: np.ndarray, into: np.ndarray) -> None:
    np.copyto(into, old)
    into[_places(steps)] = values


def _places(steps: np.ndarray) -> np.ndarray:
    return np.cumsum(steps, dtype=np.int64) - 1


def _element(outline: BucketOutline) -> np.dtype[np.unsignedinteger]:
    """Integers of the size of the bucket's elements, of the smallest where they differ."""
    return np.dtype(f"u{min([8, *(getattr(torch, name).itemsize for name in outline.dtypes)])}")


def _pieces(outline: BucketOutline, data: np.ndarray) -> list[np.ndarray]:
    return [data[start : start + _PIECE].view(_element(outline)) for start in range(0, len(data), _PIECE)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Comparing and copying release the interpreter's lock."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="deltas")
