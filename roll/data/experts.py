"""The experts of tokens on their way from a generator to a trainer: arrays [tokens, E], -1 where they are not known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.arrays import ExpertArray

UNKNOWN = -1
"""In the place of an expert; where experts are replayed, the router chooses there."""


def unknown_experts(num_tokens: int, width: int) -> ExpertArray:
    """Tokens of which nothing is known."""
    return np.full((num_tokens, width), UNKNOWN, dtype=np.int16)


def continued(earlier: ExpertArray | None, later: ExpertArray) -> ExpertArray:
    """The experts of a row that a later turn continues: for each token those that were known first.

    They are those under which the tokens after it were sampled; what a later prompt goes through may differ.
    """
    if earlier is None:
        return later
    merged = later.copy()
    merged[: len(earlier)] = np.where(earlier == UNKNOWN, later[: len(earlier)], earlier)
    return merged


def join_experts(parts: Sequence[ExpertArray | None]) -> tuple[ExpertArray | None, list[int] | None]:
    """One array and the rows of each part, 0 of a part that is ``None``; neither where all are."""
    known = [part for part in parts if part is not None]
    if not known:
        return None, None
    return np.concatenate(known), [0 if part is None else len(part) for part in parts]
