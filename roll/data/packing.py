"""Splits a ragged batch into micro-batches, and arranges a micro-batch as a model's input.

Three layouts. A *rectangle* is rows padded on the right: causal attention never looks to the right, so no attention
mask is needed and padding costs only its own tokens; sequences are sorted by length first, so that there is hardly any.
A *packed row* is all sequences end to end with ``position_ids`` that restart at 0: no padding at all, and attention
within each sequence.

A *shared row* is packed too, and holds a prompt that several sequences begin with once, followed by what each of them
adds. The hidden states of a prompt do not depend on what follows, and everything but attention works on single tokens;
an ``AttentionPlan`` says which tokens see which. A prompt here ends before its last token: that one predicts the first
loss token and stays with the sample. A pair shares its beginning as far as its two rows agree, because a reward model
has its only loss tokens at the ends.

Axes: B sequences, T tokens end to end, R x C the model's input, N its cells, K loss tokens, E experts of a token; of a
shared row, G distinct prompts, and of one block of attention Q queries and J keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from roll.data.batch import Batch, placeholder
from roll.data.columns import UNKNOWN, Item
from roll.data.identity import common_beginning, identity, vocabulary_ids

WORTH_SHARING = 0.9
"""Prompts are shared where the row then has at most this share of the sequences' tokens."""
MAX_BLOCK_CELLS = 2**23
"""Most query-key pairs of a block: its mask has a byte for each."""
MAX_ROW_CELLS = 2**22
"""Most query-key pairs of one sequence; the masks of longer ones (2,048 tokens) would cost more than is saved."""
SIMILAR = 0.75
"""Sequences of one block have at least this share of its longest."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Rows of queries that attend at a time; padded cells repeat token 0, and their results are dropped."""

    query_RQ: Tensor
    """int64: index into N."""
    key_RJ: Tensor
    """int64: index into N."""
    visible_RQJ: Tensor | None
    """bool: what a query sees; ``None`` is causal (J = Q)."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Plan of attention in a row: which tokens attend to which."""

    blocks: tuple[AttentionBlock, ...]
    result_N: Tensor
    """int64: where in the blocks' queries, end to end, each token's own lies."""

    def to(self, device: torch.device) -> AttentionPlan:
        """The same on ``device``."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        blocks = tuple(
            AttentionBlock(moved(b.query_RQ), moved(b.key_RJ), None if b.visible_RQJ is None else moved(b.visible_RQJ))
            for b in self.blocks
        )
        return AttentionPlan(blocks, moved(self.result_N))


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of a batch and the rows that share them."""

    prompt_B: Tensor
    """int64: index into G."""
    first_row_G: Tensor
    """int64: a sequence that begins with the prompt."""
    lengths_G: Tensor
    """int64: tokens; 0 is a prompt too, of sequences that have nothing to share."""

    @classmethod
    def find(cls, batch: Batch) -> SharedPrompts:
        """Compares what stands before the first loss token, of a pair what its rows begin with."""
        cuts = _cuts(batch).tolist()
        tokens, offsets = batch.tokens_T.numpy(), batch.offsets_B.tolist()
        known: dict[bytes, int] = {}
        first_rows: list[int] = []
        owners = []
        for row, (offset, cut) in enumerate(zip(offsets, cuts, strict=True)):
            index = known.setdefault(identity(tokens[offset : offset + cut]), len(known))
            if index == len(first_rows):
                first_rows.append(row)
            owners.append(index)
        first_row_G = torch.tensor(first_rows, dtype=torch.int64)
        return cls(torch.tensor(owners, dtype=torch.int64), first_row_G, torch.tensor(cuts)[first_row_G])

    @classmethod
    def expected(cls, batch: Batch) -> SharedPrompts:
        """The same by what is known without the tokens, where that is enough.

        Rows of a group that begin in the same state, and with a prompt of the same length, begin with the same prompt.
        """
        if batch.group_B is None or batch.state_B is None or batch.pair_B is not None:
            return cls.find(batch)
        keys_BK = np.stack([batch.group_B.numpy(), batch.state_B.numpy(), _cuts(batch).numpy()], 1)
        keys_GK, first_row_G, prompt_B = np.unique(keys_BK, axis=0, return_index=True, return_inverse=True)
        return cls(*map(torch.from_numpy, (prompt_B.reshape(-1), first_row_G, keys_GK[:, 2].copy())))

    def own_lengths(self, batch: Batch) -> Tensor:
        """[B]: tokens that the sequences do not share."""
        return batch.lengths_B - self.lengths_G[self.prompt_B]

    def num_tokens(self, batch: Batch) -> int:
        """N of the batch as one row."""
        return int(self.lengths_G.sum() + self.own_lengths(batch).sum())


def computed_tokens(micro_batches: Iterable[Batch], *, sharing: bool) -> int:
    """Tokens that a model computes of micro-batches, without padding; ``sharing``: prompts where it is worth it."""
    return sum(
        SharedPrompts.find(each).num_tokens(each) if sharing and worth_sharing(each) else each.num_tokens
        for each in micro_batches
    )


def worth_sharing(batch: Batch) -> bool:
    """Tells whether sharing saves enough, and the sequences are short enough for masks."""
    if batch.num_sequences < 2:
        return False
    shared = SharedPrompts.find(batch)
    own_B = shared.own_lengths(batch)
    if int((own_B * batch.lengths_B).max()) > MAX_ROW_CELLS or int(shared.lengths_G.max()) ** 2 > MAX_ROW_CELLS:
        return False
    return shared.num_tokens(batch) <= WORTH_SHARING * batch.num_tokens


def make_shared_batches(
    batch: Batch, *, max_sequences: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Micro-batches in which sequences with a common prompt stay together as far as the bounds allow.

    Args:
        max_sequences: most samples per micro-batch: sequences, or pairs of them, which are never cut.
        max_tokens: most tokens of its row. A longer sample gets a micro-batch of its own.

    Returns:
        Row indices per micro-batch.
    """
    shared = SharedPrompts.find(batch)
    own = shared.own_lengths(batch).tolist()
    prompt, prompt_length = shared.prompt_B.tolist(), shared.lengths_G.tolist()
    groups: list[list[int]] = []
    present: set[int] = set()
    load = taken = 0
    for rows in sorted(batch.samples.tolist(), key=lambda rows: (prompt[rows[0]], -own[rows[0]])):
        prompts = {prompt[row] for row in rows}
        new = sum(own[row] for row in rows)
        cost = new + sum(prompt_length[each] for each in prompts - present)
        if not groups or taken == max_sequences or (max_tokens is not None and load + cost > max_tokens):
            groups.append([])
            present, load, taken, cost = set(), 0, 0, new + sum(prompt_length[each] for each in prompts)
        groups[-1] += rows
        present |= prompts
        load += cost
        taken += 1
    return [torch.tensor(group, dtype=torch.int64) for group in groups]


def shared_row(batch: Batch) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
    """Lays a micro-batch out.

    Returns:
        The row's token ids and positions [N], for every token of the batch [T] where it stands in the row, and the
        plan. A shared token stands where its prompt does.
    """
    shared = SharedPrompts.find(batch)
    prompt_lengths_G, own_lengths_B = shared.lengths_G, shared.own_lengths(batch)
    prompt_starts_G = prompt_lengths_G.cumsum(0) - prompt_lengths_G
    own_starts_B = prompt_lengths_G.sum() + own_lengths_B.cumsum(0) - own_lengths_B
    rows_T, positions_T = batch.rows_T, batch.positions_T
    cuts_B = prompt_lengths_G[shared.prompt_B]
    in_prompt_T = positions_T < cuts_B[rows_T]
    cell_T = torch.where(
        in_prompt_T,
        prompt_starts_G[shared.prompt_B][rows_T] + positions_T,
        own_starts_B[rows_T] + positions_T - cuts_B[rows_T],
    )
    num_tokens = shared.num_tokens(batch)
    ids_N, positions_N = (torch.zeros(num_tokens, dtype=torch.int64) for _ in range(2))
    ids_N[cell_T], positions_N[cell_T] = batch.tokens_T, positions_T
    plan = _plan(num_tokens, shared, prompt_starts_G, own_starts_B, own_lengths_B)
    return ids_N, positions_N, cell_T, plan


def _cuts(batch: Batch) -> Tensor:
    """[B]: tokens before the one that predicts the first loss token, common to a pair; 0 without loss tokens."""
    loss_T = batch.loss_mask_T.nonzero()[:, 0]
    first_B = torch.zeros(batch.num_sequences, dtype=torch.int64)
    first_B.scatter_reduce_(0, batch.rows_T[loss_T], batch.positions_T[loss_T], "amin", include_self=False)
    cuts_B = (first_B - 1).clamp(min=0)
    if batch.pair_B is not None:
        for pair in batch.samples:
            cuts_B[pair] = min(int(cuts_B[pair].min()), _common_prefix(batch, pair))
    return cuts_B


def _common_prefix(batch: Batch, pair: Tensor) -> int:
    """Number of tokens that two rows begin with alike."""
    first, second = (
        batch.tokens_T[offset : offset + length]
        for offset, length in zip(batch.offsets_B[pair].tolist(), batch.lengths_B[pair].tolist(), strict=True)
    )
    return common_beginning(first, second)


def _plan(
    num_tokens: int, shared: SharedPrompts, prompt_starts_G: Tensor, own_starts_B: Tensor, own_lengths_B: Tensor
) -> AttentionPlan:
    """Prompts see themselves; what is a sequence's own sees the sequence's prompt and itself."""
    blocks, num_queries = [], 0
    result_N = torch.zeros(num_tokens, dtype=torch.int64)

    def add(query_RQ: Tensor, valid_RQ: Tensor, key_RJ: Tensor, visible_RQJ: Tensor | None) -> None:
        nonlocal num_queries
        result_N[query_RQ[valid_RQ]] = num_queries + valid_RQ.flatten().nonzero()[:, 0]
        blocks.append(AttentionBlock(query_RQ, key_RJ, visible_RQJ))
        num_queries += query_RQ.numel()

    lengths_G = shared.lengths_G
    for some_G in _similar(lengths_G, lengths_G):
        query_RQ, valid_RQ = _cells(prompt_starts_G[some_G], lengths_G[some_G])
        add(query_RQ, valid_RQ, query_RQ, None)
    cuts_B = lengths_G[shared.prompt_B]
    for some_B in _similar(own_lengths_B, own_lengths_B + int(lengths_G.max())):
        query_RQ, valid_RQ = _cells(own_starts_B[some_B], own_lengths_B[some_B])
        prompt_RP, in_prompt_RP = _cells(prompt_starts_G[shared.prompt_B[some_B]], cuts_B[some_B])
        causal_QQ = torch.ones(query_RQ.shape[1], query_RQ.shape[1], dtype=torch.bool).tril()
        visible_RQJ = torch.cat(
            [
                in_prompt_RP[:, None].expand(-1, query_RQ.shape[1], -1),
                causal_QQ.expand(len(some_B), -1, -1),
            ],
            dim=2,
        )
        add(query_RQ, valid_RQ, torch.cat([prompt_RP, query_RQ], dim=1), visible_RQJ)
    return AttentionPlan(tuple(blocks), result_N)


def _similar(lengths: Tensor, widths: Tensor) -> list[Tensor]:
    """Indices by length, cut where lengths fall off or a block would get too large; empty ones are left out."""
    parts: list[list[int]] = []
    longest = cells = 0
    for index in torch.argsort(lengths, descending=True, stable=True).tolist():
        length = int(lengths[index])
        if length == 0:
            break
        if not parts or length < SIMILAR * longest or (len(parts[-1]) + 1) * cells > MAX_BLOCK_CELLS:
            parts.append([])
            longest, cells = length, length * int(widths[index])
        parts[-1].append(index)
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def _cells(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens as rows of a rectangle, and which of its cells are tokens; the others hold 0."""
    columns = torch.arange(int(lengths.max()))
    valid = columns < lengths[:, None]
    return torch.where(valid, starts[:, None] + columns, 0), valid


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """The sequences of a packed row; each attends only to itself, and causally but within ``both_ways_N``."""

    lengths: tuple[int, ...]
    """Tokens of each, in the row's order."""
    both_ways_N: Tensor | None = None
    """bool: consecutive tokens that see each other, as those of a picture in some models; ``None``: there are none."""
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    """By length, or by sequence where some see both ways, and width of the window; made once per micro-batch."""

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

    def mask(self, index: int, width: int | None, device: torch.device) -> Tensor | None:
        """bool [1, 1, length, length] of what a sequence's tokens see; ``None`` where that is everything before them.

        Args:
            width: of a sliding window.
        """
        length = self.lengths[index]
        if self.both_ways_N is None and (width is None or length <= width):
            return None
        key = (length if self.both_ways_N is None else index, width)
        if key not in self.masks:
            place_L = torch.arange(length, device=device)
            distance = place_L[:, None] - place_L
            seen = distance >= 0
            if self.both_ways_N is not None:
                within_L = self.both_ways_N.split(self.lengths)[index].to(device)
                block_L = (within_L & ~torch.cat([within_L.new_zeros(1), within_L[:-1]])).cumsum(0)
                seen |= (block_L[:, None] == block_L) & within_L[:, None] & within_L
            self.masks[key] = (seen if width is None else seen & (distance < width))[None, None]
        return self.masks[key]


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
    pictured: Batch | None = None
    """The micro-batch, where its rows may have pictures."""

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
            self.pictured,
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


def rows_by_pictures(batch: Batch, max_pixels: int) -> list[Tensor]:
    """Parts of a batch whose pictures, each once, have at most ``max_pixels`` pixels; samples are never cut.

    Rows with the same pictures stay together. A sample that has more pixels by itself begins a part of its own.

    Returns:
        Row indices per part.
    """
    assert batch.items_I is not None
    samples: dict[frozenset[Item], list[int]] = {}
    for rows in batch.samples.tolist():
        samples.setdefault(frozenset(item for row in rows for item in batch.items_I[row]), []).extend(rows)
    sizes = {item: math.prod(item.data.shape[-3:-1]) for items in samples for item in items}

    def pixels(items: Iterable[Item]) -> int:
        return sum(map(sizes.__getitem__, items))

    parts: list[tuple[set[Item], list[int]]] = []
    for items in sorted(samples, key=pixels, reverse=True):
        fitting = (part for part in parts if items <= part[0] or pixels(part[0] | items) <= max_pixels)
        if (part := next(fitting, None)) is None:
            parts.append(part := (set(), []))
        part[0].update(items)
        part[1].extend(samples[items])
    if parts and (most := pixels(parts[0][0])) > max_pixels:
        logger.warning(
            "a sample has pictures of %d pixels, above the %d of a micro-batch, and gets a separate one",
            *(most, max_pixels),
        )
    return [torch.tensor(members, dtype=torch.int64) for _, members in parts]


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
    """Lays distinct prompts and what follows them end to end in one row, see ``roll.data.packing``."""
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
        None if batch.items_I is None else batch,
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
