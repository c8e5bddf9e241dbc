"""Splits a ragged batch into micro-batches, and arranges a micro-batch as a model's input.

Three layouts. A *rectangle* is rows padded on the right: causal attention never looks to the right, so no attention
mask is needed and padding costs only its own tokens; sequences are sorted by length first, so that there is hardly any.
A *packed row* is all sequences end to end with ``position_ids`` that restart at 0: no padding at all, and attention
within each sequence. A *shared row* is packed too, holds a prompt that several sequences begin with once, and brings
its own plan of attention.

Axes: B sequences, T tokens end to end, R x C the model's input, N its cells, K loss tokens, E experts of a token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.data.batch import Batch, placeholder
from roll.data.columns import UNKNOWN
from roll.data.identity import vocabulary_ids
from roll.data.shared_prompts import AttentionPlan, shared_row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """The sequences of a packed row; each attends causally and only to itself."""

    lengths: tuple[int, ...]
    """Tokens of each, in the row's order."""
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Sliding windows by length and width, made once per micro-batch."""

    borders: dict[torch.device, Tensor] = field(default_factory=dict)
    """``starts`` by device, made once per micro-batch."""

    def to(self, device: torch.device) -> PackedSequences:
        """The same; masks and starts are made where they are asked for."""
        return self

    def starts(self, device: torch.device) -> Tensor:
        """int32 [B + 1]: where each sequence begins in the row, and the row's end."""
        if device not in self.borders:
            ends = torch.tensor([0, *self.lengths]).cumsum(0)
            self.borders[device] = ends.to(device, torch.int32)
        return self.borders[device]

    def window_mask(self, length: int, width: int | None, device: torch.device) -> Tensor | None:
        """bool [1, 1, length, length]: a sliding window; ``None`` where everything before passes."""
        if width is None or length <= width:
            return None
        if (length, width) not in self.masks:
            distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
            self.masks[length, width] = ((distance >= 0) & (distance < width))[None, None]
        return self.masks[length, width]


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One micro-batch as a causal language model takes it, and where its loss tokens are predicted."""

    input_ids_RC: Tensor
    """int64."""
    position_ids_RC: Tensor | None
    """int64; ``None`` for a rectangle, in which every row counts from 0."""
    source_K: Tensor
    """int64: index into the flattened R x C grid of the token *before* each loss token, which predicts it."""
    target_K: Tensor
    """int64: the loss tokens' ids."""
    token_K: Tensor
    """int64: index of each loss token in the batch's T axis (ascending)."""
    cell_T: Tensor
    """int64: index into the flattened R x C grid of each token; several tokens share a cell in a shared row."""
    experts_NE: Tensor | None = None
    """int16: the experts that each cell goes through, see ``Batch.experts_TE``."""
    attention: AttentionPlan | PackedSequences | None = None
    """Plan of who sees whom in a shared or packed row; ``None``: every row of a rectangle is causal."""

    def to(self, device: torch.device) -> ModelInput:
        """The same on ``device``."""
        positions = self.position_ids_RC
        return ModelInput(
            self.input_ids_RC.to(device, non_blocking=True),
            None if positions is None else positions.to(device, non_blocking=True),
            self.source_K.to(device, non_blocking=True),
            self.target_K.to(device, non_blocking=True),
            self.token_K.to(device, non_blocking=True),
            self.cell_T.to(device, non_blocking=True),
            None if self.experts_NE is None else self.experts_NE.to(device, non_blocking=True),
            None if self.attention is None else self.attention.to(device),
        )


def make_micro_batches(
    lengths_B: Tensor, *, max_sequences: int | None = None, max_tokens: int | None = None, round_to: int = 1
) -> list[Tensor]:
    """Groups sequences of similar length into rectangles.

    Args:
        max_sequences: most sequences per micro-batch.
        max_tokens: most tokens per micro-batch, padding included. A longer sequence gets a micro-batch of its own.
        round_to: a rectangle's width is rounded up to a multiple of this.

    Returns:
        Row indices per micro-batch, longest first, so that memory runs out at once or never.
    """
    _check_limits(max_sequences, max_tokens, round_to)
    order = torch.argsort(lengths_B, descending=True, stable=True)
    widths = _round_up(lengths_B[order], round_to).tolist()
    _warn_if_too_long(widths, max_tokens)
    groups, start = [], 0
    while start < len(widths):
        rows = len(widths) - start if max_sequences is None else max_sequences
        if max_tokens is not None:
            rows = min(rows, max(1, max_tokens // widths[start]))
        groups.append(order[start : start + rows])
        start += rows
    return groups


def make_packs(lengths_B: Tensor, *, max_sequences: int | None = None, max_tokens: int | None = None) -> list[Tensor]:
    """Fills packed rows of at most ``max_tokens`` tokens, first fit, longest sequence first.

    A sequence longer than ``max_tokens`` gets a row of its own. Returns row indices per packed row.
    """
    _check_limits(max_sequences, max_tokens, 1)
    order = torch.argsort(lengths_B, descending=True, stable=True).tolist()
    lengths = lengths_B.tolist()
    _warn_if_too_long([lengths[row] for row in order[:1]], max_tokens)
    packs: list[list[int]] = []
    loads: list[int] = []
    for row in order:
        for pack, members in enumerate(packs):
            fits = max_tokens is None or loads[pack] + lengths[row] <= max_tokens
            if fits and (max_sequences is None or len(members) < max_sequences):
                members.append(row)
                loads[pack] += lengths[row]
                break
        else:
            packs.append([row])
            loads.append(lengths[row])
    return [torch.tensor(members, dtype=torch.int64) for members in packs]


def padding_waste(lengths_B: Tensor, groups: Sequence[Tensor], round_to: int = 1) -> float:
    """The share of the rectangles' tokens that is padding, from 0 to 1."""
    computed = sum(len(rows) * int(_round_up(lengths_B[rows].max(), round_to)) for rows in groups)
    return 1.0 - float(lengths_B.sum()) / computed if computed else 0.0


def take_micro_batch(batch: Batch, groups: Sequence[Tensor], index: int) -> Batch:
    """The sequences of group ``index``.

    Past the last group, a placeholder of one sequence without loss tokens: ranks that share a model's weights must run
    equally many micro-batches.
    """
    if index < len(groups):
        return batch.select(groups[index])
    return placeholder(batch)


def rectangle(batch: Batch, round_to: int = 1) -> ModelInput:
    """Lays the sequences out as rows, padded on the right with token 0."""
    width = int(_round_up(batch.lengths_B.max(), round_to))
    cell_T = batch.rows_T * width + batch.positions_T
    grid = torch.zeros(batch.num_sequences * width, dtype=torch.int64)
    grid[cell_T] = batch.tokens_T
    return _model_input(batch, grid.view(-1, width), None, cell_T)


def packed_row(batch: Batch) -> ModelInput:
    """Lays the sequences end to end in one row.

    A model that takes no plan of attention gets no mask either: transformers finds the borders where ``position_ids``
    restart, and would ignore them if it were given a mask, even one of ones.
    """
    cells = torch.arange(batch.num_tokens)
    sequences = PackedSequences(tuple(batch.lengths_B.tolist()))
    return _model_input(batch, batch.tokens_T.view(1, -1), batch.positions_T.view(1, -1), cells, sequences)


def row_with_shared_prompts(batch: Batch) -> ModelInput:
    """Lays distinct prompts and what follows them end to end in one row, see ``roll.data.shared_prompts``."""
    ids_N, positions_N, cell_T, plan = shared_row(batch)
    return _model_input(batch, ids_N.view(1, -1), positions_N.view(1, -1), cell_T, plan)


def _model_input(
    batch: Batch,
    input_ids_RC: Tensor,
    position_ids_RC: Tensor | None,
    cell_T: Tensor,
    attention: AttentionPlan | PackedSequences | None = None,
) -> ModelInput:
    token_K = batch.loss_mask_T.nonzero().squeeze(1)
    if bool((batch.positions_T[token_K] == 0).any()):
        raise ValueError("loss_mask_T: True on the first token of a sequence, which no token predicts; expected False")
    return ModelInput(
        vocabulary_ids(input_ids_RC),
        position_ids_RC,
        cell_T[token_K] - 1,
        batch.tokens_T[token_K],
        token_K,
        cell_T,
        None if batch.experts_TE is None else experts_of_cells(batch.experts_TE, cell_T, input_ids_RC.numel()),
        attention,
    )


def experts_of_cells(experts_TE: Tensor, cell_T: Tensor, num_cells: int) -> Tensor:
    """[N, E]: the experts of each cell: those of its first token that has any. Tokens in cell -1 are elsewhere."""
    num_tokens, width = experts_TE.shape
    known_T = ((experts_TE >= 0).all(1) & (cell_T >= 0)).nonzero()[:, 0]
    first_N = cell_T.new_full((num_cells,), num_tokens).scatter_reduce_(0, cell_T[known_T], known_T, "amin")
    has_N = first_N < num_tokens
    experts_NE = experts_TE.new_full((num_cells, width), UNKNOWN)
    experts_NE[has_N] = experts_TE[first_N[has_N]]
    return experts_NE


def _round_up(lengths: Tensor, round_to: int) -> Tensor:
    return torch.div(lengths + round_to - 1, round_to, rounding_mode="floor") * round_to


def _check_limits(max_sequences: int | None, max_tokens: int | None, round_to: int) -> None:
    for name, value in (("max_sequences", max_sequences), ("max_tokens", max_tokens), ("round_to", round_to)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value}, expected at least 1")


def _warn_if_too_long(widths: list[int], max_tokens: int | None) -> None:
    if widths and max_tokens is not None and widths[0] > max_tokens:
        logger.warning(
            "a sequence of %d tokens exceeds the budget of %d tokens per micro-batch and gets a separate one",
            widths[0],
            max_tokens,
        )
