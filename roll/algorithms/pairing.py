"""Pairs of a step's own samples: the best and the worst answer of each rollout group (online DPO).

Guo et al. 2024, *Direct Language Model Alignment from Online AI Feedback*; best and worst of more than two: Dong et al.
2024, *RLHF Workflow: From Reward Modeling to Online RLHF*.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.checks import require_columns, require_finite
from roll.data.batch import Batch


def best_and_worst(batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The answers with the highest and the lowest score of each group, as pairs.

    Of equal scores the first row counts as the best and the last as the worst. A group whose scores are all equal, or
    whose two answers are the same tokens, has nothing to tell: its loss mask and its rewards are 0.

    Args:
        batch: Answers, a row each, with ``group_B`` and ``scores_B``.

    Returns:
        A batch with ``pair_B`` and ``preferred_B``, the better row first, groups in ascending order; and metrics:
        ``dpo/pair_frac``, the share of pairs that have something to tell, ``dpo/score_gap``, the mean difference of
        scores in all.

    Raises:
        ValueError: a column is missing or not finite, or no group has two answers.
    """
    group_B, scores_B = require_columns(batch, "online_dpo", "group_B", "scores_B")
    require_finite(batch, "scores_B")
    pairs = []
    for group in group_B.unique():
        rows = (group_B == group).nonzero().squeeze(1)
        if len(rows) > 1:
            ranked = rows[scores_B[rows].argsort(descending=True, stable=True)]
            pairs.append(ranked[[0, -1]])
    if not pairs:
        raise ValueError(f"online_dpo: got {batch.num_sequences} rows, expected two answers in one group at least")
    found = batch.select(torch.cat(pairs))
    preferred_B = torch.arange(found.num_sequences) % 2 == 0
    found = found.replace(pair_B=torch.arange(found.num_sequences) // 2, preferred_B=preferred_B)
    assert found.scores_B is not None
    gap_P = found.scores_B[0::2] - found.scores_B[1::2]
    tells_P = (gap_P > 0) & torch.tensor([not _same(found, row) for row in range(0, found.num_sequences, 2)])
    tells_T = tells_P[found.rows_T // 2]
    rewards_T = None if found.rewards_T is None else found.rewards_T * tells_T  # none on tokens that do not count
    found = found.replace(loss_mask_T=found.loss_mask_T & tells_T, rewards_T=rewards_T)
    return found, {"dpo/pair_frac": float(tells_P.double().mean()), "dpo/score_gap": float(gap_P.double().mean())}


def telling_pairs(batch: Batch) -> Tensor:
    """int64 [pairs, 2]: the rows of each pair that has something to tell, see ``best_and_worst``."""
    pairs_P2 = batch.samples
    tokens_B = torch.bincount(batch.rows_T[batch.loss_mask_T], minlength=batch.num_sequences)
    return pairs_P2[(tokens_B[pairs_P2] > 0).all(1)]


def _same(batch: Batch, row: int) -> bool:
    """Tells whether a row and the next have the same tokens."""
    first, second = (batch.tokens_T[batch.token_index([number])] for number in (row, row + 1))
    return torch.equal(first, second)
