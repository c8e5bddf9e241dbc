"""Tensors in files, of which a rank reads the part that it keeps; in FP8 and MXFP4 as the plain ones they stand for.

Transformers' own reader of FP8 refuses a matrix whose last block is not a whole one, as DeepSeek-V3 has them, and reads
no layer that the model does not compute with; so both formats are read here, by name, for every engine alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from roll.utils.progress import advance

if TYPE_CHECKING:
    from torch import Tensor

Block: TypeAlias = tuple[int, "Callable[[], Tensor]"]
"""Number of elements that follow each other in a tensor, and what reads them, in any shape."""

_FP8_SCALE = "_scale_inv"
_MXFP4 = ("_blocks", "_scales")
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the three lower bits (E2M1); the fourth is the sign."""
_MAX_ELEMENTS = 2**22
"""Of FP8 read at once, unless a row of blocks has more."""


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


@dataclass(frozen=True)
class Packed:
    """Names of the two tensors in a file that one weight is stored in."""

    values: str
    scales: str


@dataclass(frozen=True)
class LowPrecision:
    """How a folder stores its weights: what ``quantization_config`` in its ``config.json`` says."""

    method: str
    """``fp8`` or ``mxfp4``."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of FP8 that share a scale."""
    dtype: str = "BF16"
    """Number format of what is read, by its name in a file's header."""

    def packed(self, names: Collection[str]) -> dict[str, Packed]:
        """The weights among the tensors of a folder that are stored so, by their own names."""
        if self.method == "fp8":
            found = {name: Packed(name, name + _FP8_SCALE) for name in names}
        else:
            values, scales = _MXFP4
            stems = [name.removesuffix(values) for name in names if name.endswith(values)]
            found = {stem: Packed(stem + values, stem + scales) for stem in stems}
        return {name: parts for name, parts in found.items() if parts.scales in names}

    def names(self, names: Collection[str]) -> list[str]:
        """Names of a folder's tensors as a plain model has them."""
        packed = self.packed(names)
        parts = {name for each in packed.values() for name in (each.values, each.scales)}
        return [*packed, *(name for name in names if name not in parts)]

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """A weight's, by that of its values."""
        if self.method == "fp8" or len(values) != 4:
            return values
        experts, outputs, groups, size = values
        return experts, groups * size * 2, outputs

    def stored(self, name: str, values: Tensor, scales: Tensor) -> StoredTensor:
        """The weight, whose elements are computed in float32 and rounded once to ``dtype``, some rows at a time.

        Raises:
            ValueError: shapes that do not belong together.
        """
        self._check(name, values, scales)
        in_fp8 = self.method == "fp8"
        height = self.block[0] if in_fp8 else 1
        step = max(1, _MAX_ELEMENTS // (height * values[0].numel())) if in_fp8 else 1

        def read(start: int) -> Tensor:
            rows = values[start * height : (start + step) * height]
            return self._plain(rows, scales[start : start + step])

        shape = self.shape(tuple(values.shape))
        width = math.prod(shape[1:])
        sizes = [(min(step * height, len(values) - row * height), row) for row in range(0, len(scales), step)]
        return StoredTensor(shape, [(count * width, partial(read, row)) for count, row in sizes])

    def _check(self, name: str, values: Tensor, scales: Tensor) -> None:
        if self.method == "fp8":
            expected = tuple(-(-size // block) for size, block in zip(values.shape, self.block, strict=False))
            if values.ndim != 2 or scales.shape != expected:
                found = f"shape {tuple(values.shape)} with scales of shape {tuple(scales.shape)}"
                raise ValueError(
                    f"{name}: got {found}, expected a matrix with a scale per {self.block} of its elements"
                )
        elif values.ndim != 4 or scales.shape != values.shape[:-1]:
            found = f"blocks of shape {tuple(values.shape)} with scales of shape {tuple(scales.shape)}"
            raise ValueError(f"{name}: got {found}, expected [experts, outputs, groups, bytes] and a scale per group")

    def _plain(self, values: Tensor, scales: Tensor) -> Tensor:
        import torch

        whole = self._fp8(values, scales) if self.method == "fp8" else self._mxfp4(values, scales)
        return whole.to({"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[self.dtype])

    def _fp8(self, values: Tensor, scales: Tensor) -> Tensor:
        rows, columns = values.shape
        wide = scales.float().repeat_interleave(self.block[1], 1)[:, :columns]
        return values.float() * wide.repeat_interleave(self.block[0], 0)[:rows]

    def _mxfp4(self, values: Tensor, scales: Tensor) -> Tensor:
        """Experts' [input, output] matrices from [output, group, byte], two elements a byte, the lower half first."""
        import torch

        table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
        pairs = torch.stack([values & 15, values >> 4], -1).int()
        whole = torch.ldexp(table[pairs].flatten(-2), scales.int()[..., None] - 127)
        return whole.flatten(-2).transpose(1, 2).contiguous()


def scheme_of(content: Mapping[str, Any]) -> LowPrecision | None:
    """How the weights are stored, by the content of a ``config.json``; ``None``: plain, or not as is read here."""
    stated = content.get("quantization_config")
    if not isinstance(stated, Mapping):
        return None
    names = {"float16": "F16", "float32": "F32"}
    dtype = names.get(str(content.get("dtype") or content.get("torch_dtype")), "BF16")
    method, block = stated.get("quant_method"), stated.get("weight_block_size")
    if method == "mxfp4":
        return LowPrecision("mxfp4", dtype=dtype)
    whole = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    if method == "fp8" and isinstance(block, list) and whole:
        return LowPrecision("fp8", (block[0], block[1]), dtype)
    return None


def scheme_in(folder: Path) -> LowPrecision | None:
    """The same of a folder."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # said by those who read it
        return None
    return scheme_of(content) if isinstance(content, dict) else None
