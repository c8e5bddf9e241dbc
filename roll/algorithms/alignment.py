"""Two tokenizations of one text, compared by chunks: the shortest spans of text that begin and end in both.

The likelihood of a chunk is the product of those of its tokens, in either tokenization (Minixhofer, Vulić and Ponti
2025, *Universal Cross-Tokenizer Distillation via Approximate Likelihood Matching*; spans of equal text also in GOLD of
Hugging Face 2025, which extends Boizard et al. 2024, *Towards Cross-Tokenizer Distillation: the Universal Logit
Distillation Loss*). Where both are the same, every token is a chunk.

A chunk has a number that is unique within its row; -1 is none. Axes: T tokens of one side, S of the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from roll.algorithms.statistics import sums

WITHIN = -1
"""In place of where a token ends: within a character."""
NO_CHUNK = -1


def common_chunks(own: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int]]:
    """Numbers of the chunks that the tokens on both sides belong to, ascending from 0.

    Args:
        own: where in the text each token ends, in characters, ascending; ``WITHIN`` where it ends in none's place.
        other: the same of the other tokenization.

    Returns:
        For each token of either side its chunk; ``NO_CHUNK`` for those after the last end that both have.
    """
    common = sorted(set(own) & set(other) - {WITHIN})
    return _numbered(own, common), _numbered(other, common)


def _numbered(ends: Sequence[int], common: Sequence[int]) -> list[int]:
    last = {end: index for index, end in enumerate(ends)}  # a token without text belongs to the chunk before it
    cuts = [last[end] for end in common]
    numbers = (bisect_left(cuts, index) for index in range(len(ends)))
    return [number if number < len(cuts) else NO_CHUNK for number in numbers]


def shared_logprobs(logprobs_S: Tensor, theirs: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> Tensor:
    """The log-probability that one side gives to each chunk, in equal parts for the tokens of the other side.

    Args:
        logprobs_S: of the tokens of one side.
        theirs: [S] int64 rows and chunks of these tokens.
        own: [T] the same of the other side's; every chunk is on both sides.

    Returns:
        float64 [T]; 0 for tokens without a chunk.
    """
    keys_S, keys_T = (_keys(*side) for side in (theirs, own))
    chunks, index = torch.unique(torch.cat([keys_S, keys_T]), return_inverse=True)
    totals = sums(logprobs_S.double(), index[: len(keys_S)], len(chunks))
    counts = sums(torch.ones(len(keys_T), dtype=torch.float64), index[len(keys_S) :], len(chunks))
    shares_T = (totals / counts)[index[len(keys_S) :]]
    return shares_T.where(own[1] != NO_CHUNK, 0.0)


def chunk_means(values_T: Tensor, rows_T: Tensor, chunk_T: Tensor) -> Tensor:
    """Each value replaced by the mean over its token's chunk, which leaves the sum of a chunk what it is.

    Returns:
        float64 [T]; 0 for tokens without a chunk.
    """
    chunks, index = torch.unique(_keys(rows_T, chunk_T), return_inverse=True)
    counts = torch.bincount(index, minlength=len(chunks))
    return (sums(values_T.double(), index, len(chunks)) / counts)[index].where(chunk_T != NO_CHUNK, 0.0)


def _keys(rows: Tensor, chunks: Tensor) -> Tensor:
    """One number for a chunk of a row."""
    return rows * 2**32 + chunks
