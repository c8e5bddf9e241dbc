"""The third layout of a micro-batch: one row without padding, in which rows with the same prompt share it.

The samples of a group begin with the same prompt, whose hidden states do not depend on what follows. So each distinct
prompt stands in the row once, followed by what the samples add to it. Everything but attention works on single tokens
and sees a row that is shorter than the sequences together; attention is told by an ``AttentionPlan`` who sees whom.
A prompt here ends before its last token: that one predicts the first loss token and stays with the sample. Of a pair
it ends where its two rows part, too: a reward model's only loss tokens are at their ends.

Axes: B sequences, N tokens of the row, G distinct prompts; of one block of attention, R rows of Q queries and J keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.data.identity import common_beginning, identity

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
