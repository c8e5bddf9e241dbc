"""Batches of rows that a test writes down."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from roll.data.batch import Batch


def batch_of(rows: Iterable[Any], prompts: int | Sequence[int] = 0, **columns: Any) -> Batch:
    """Rows of ids, of which those behind the prompts count: behind as many of every row, or so many of each."""
    ids = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    tokens_T = torch.cat(ids)
    batch = Batch(torch.tensor([len(row) for row in ids]), tokens_T, torch.zeros(len(tokens_T)).bool(), **columns)
    starts_B = torch.as_tensor(prompts).expand(len(ids))
    return batch.replace(loss_mask_T=batch.positions_T >= starts_B[batch.rows_T])
