"""Arranges micro-batches for Megatron's model: padded to sizes that the layout divides, split over context.

Axes: R rows, C columns of a whole row, S columns that this context-parallel rank holds, K loss tokens predicted there,
T the micro-batch's tokens end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from roll.data.batch import Batch
from roll.data.identity import vocabulary_ids
from roll.data.packing import (
    AttentionPlan,
    SharedPrompts,
    packed_row,
    rectangle,
    row_with_shared_prompts,
    worth_sharing,
)
from roll.distributed.strategy.megatron.substitutes import PlannedRow, held_columns
from roll.models.pictures import PictureInput


@dataclass(frozen=True)
class Rounding:
    """Multiples that the widths of rows and the lengths of packed sequences are rounded up to, and how rows are cut."""

    round_to: int
    """``sequence_length_round_in_*``; packed sequences are not rounded to it."""
    packing: bool
    tensor_size: int
    """Sequence-parallel ranks; 1 without sequence parallelism."""
    context_rank: int
    context_size: int
    sharing: bool = False
    """Micro-batches in which that saves enough hold common prompts once; not with context parallelism."""

    gemm_rows: int = 1
    """Divisor of the tokens on each rank, for products in fp8."""

    @property
    def unit(self) -> int:
        """Divisor of every sequence's length, so that every rank holds equally many positions."""
        size = self.context_size
        return self.tensor_size if size == 1 else math.lcm(2 * size, size * self.tensor_size)

    @property
    def row_unit(self) -> int:
        """Divisor of a row's columns; a packed row ends with a sequence of padding where its own do not fill it."""
        return math.lcm(self.unit, self.gemm_rows * self.context_size * self.tensor_size)


@dataclass(frozen=True, eq=False)
class MegatronInput:
    """One micro-batch on one rank."""

    micro_batch: Batch
    input_ids_RS: Tensor
    source_K: Tensor
    """Index into the flattened [whole S, R] hidden states of the token before each loss token that it predicts."""
    target_K: Tensor
    token_K: Tensor
    """Index of each loss token in the T axis."""
    cumulative_lengths: Tensor | None
    """int32 bounds of a packed row's sequences in the whole row, padding included; ``None`` for a rectangle."""
    max_length: int
    place_T: Tensor
    """Index into the flattened [S, R] grid of each token that this rank holds; -1 of others."""
    planned: PlannedRow | None = None
    """The plan of a row that holds common prompts once."""
    trains: bool = False
    """A backward pass follows."""
    pictures: PictureInput | None = None
    """Those of a model that takes some, in host memory."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Experts that this rank's routers chose, by layer, see ``routing``."""

    def to(self, device: torch.device) -> MegatronInput:
        bounds = self.cumulative_lengths
        return replace(
            self,
            input_ids_RS=self.input_ids_RS.to(device, non_blocking=True),
            source_K=self.source_K.to(device, non_blocking=True),
            target_K=self.target_K.to(device, non_blocking=True),
            token_K=self.token_K.to(device, non_blocking=True),
            cumulative_lengths=None if bounds is None else bounds.to(device, non_blocking=True),
            place_T=self.place_T.to(device, non_blocking=True),
            planned=None if self.planned is None else self.planned.to(device),
        )

    def packed_seq_params(self) -> Any:
        """Description of a packed or shared row for attention and rotary embeddings."""
        if self.planned is not None:
            return self.planned
        if self.cumulative_lengths is None:
            return None
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds, longest = self.cumulative_lengths, self.max_length
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )


def grid_shape(micro_batch: Batch, rounding: Rounding) -> tuple[int, int]:
    """Rows and columns of the micro-batch's grid."""
    if rounding.sharing and worth_sharing(micro_batch):
        return 1, _round_up(SharedPrompts.find(micro_batch).num_tokens(micro_batch), rounding.row_unit)
    if rounding.packing:
        return 1, _round_up(sum(_padded_lengths(micro_batch, rounding)), rounding.row_unit)
    width = int(micro_batch.lengths_B.max())
    return micro_batch.num_sequences, _round_up(width, math.lcm(rounding.round_to, rounding.row_unit))


def lay_out(micro_batch: Batch, rounding: Rounding, shape: tuple[int, int] | None = None) -> MegatronInput:
    """Lays a micro-batch out.

    Args:
        shape: of the grid, where all micro-batches need the same; at least ``grid_shape``, columns a multiple of
            ``rounding.row_unit``. ``None``: its own.
    """
    rows, columns = shape or grid_shape(micro_batch, rounding)
    if rounding.sharing and worth_sharing(micro_batch):
        return _share(micro_batch, columns)
    if rounding.packing:
        grid, cell_T, lengths = _pack(micro_batch, rounding, columns)
        flat = packed_row(micro_batch)
    else:
        flat = rectangle(micro_batch)
        own_rows, own_columns = flat.input_ids_RC.shape
        grid = functional.pad(flat.input_ids_RC, (0, columns - own_columns, 0, rows - own_rows))
        cell_T = flat.cell_T // own_columns * columns + flat.cell_T % own_columns
        lengths = [columns]
    held_S = held_columns(lengths, rounding.context_rank, rounding.context_size)
    place_C = torch.full((columns,), -1)
    place_C[held_S] = torch.arange(len(held_S))
    column_T = place_C[cell_T % columns]
    place_T = torch.where(column_T >= 0, column_T * rows + cell_T // columns, -1)
    place_K = place_T[flat.token_K - 1]
    here_K = place_K >= 0
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) if rounding.packing else None
    return MegatronInput(
        micro_batch,
        grid[:, held_S],
        place_K[here_K],
        flat.target_K[here_K],
        flat.token_K[here_K],
        bounds,
        max(lengths),
        place_T,
    )


def _share(micro_batch: Batch, columns: int) -> MegatronInput:
    """A row that holds common prompts once; what is left over of it attends as its first token, to nobody's use."""
    flat = row_with_shared_prompts(micro_batch)
    assert isinstance(flat.attention, AttentionPlan) and flat.position_ids_RC is not None
    rest = columns - flat.input_ids_RC.shape[1]
    plan = AttentionPlan(flat.attention.blocks, functional.pad(flat.attention.result_N, (0, rest)))
    return MegatronInput(
        micro_batch,
        functional.pad(flat.input_ids_RC, (0, rest)),
        flat.source_K,
        flat.target_K,
        flat.token_K,
        None,
        columns,
        flat.cell_T,
        PlannedRow(plan, functional.pad(flat.position_ids_RC[0], (0, rest)), int(micro_batch.lengths_B.max())),
    )


def _pack(micro_batch: Batch, rounding: Rounding, columns: int) -> tuple[Tensor, Tensor, list[int]]:
    """The packed row's ids, where each token lies, and its lengths; what is left over is one more."""
    lengths = _padded_lengths(micro_batch, rounding)
    start_B = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    cell_T = start_B[micro_batch.rows_T] + micro_batch.positions_T
    row = torch.zeros(columns, dtype=torch.int64)
    row[cell_T] = vocabulary_ids(micro_batch.tokens_T)
    if rest := columns - sum(lengths):
        lengths.append(rest)
    return row[None], cell_T, lengths


def _padded_lengths(micro_batch: Batch, rounding: Rounding) -> list[int]:
    return [_round_up(length, rounding.unit) for length in micro_batch.lengths_B.tolist()]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
