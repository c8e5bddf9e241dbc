"""Requirements of an algorithm on a batch, checked before it computes anything."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from roll.data.batch import Batch


def require_columns(batch: Batch, user: str, *names: str) -> tuple[Tensor, ...]:
    """The named columns of the batch.

    Args:
        user: Who needs them, with its configuration key, for the message.

    Raises:
        ValueError: a column is not set.
    """
    if missing := [name for name in names if getattr(batch, name) is None]:
        raise ValueError(f"{user} needs Batch.{', Batch.'.join(missing)}, which is not set")
    return tuple(getattr(batch, name) for name in names)


def require_scores(column_T: Tensor | None, user: str, name: str) -> Tensor:
    """A column of ``TokenScores``; raises ``ValueError`` if it was not computed."""
    if column_T is None:
        raise ValueError(f"{user} needs TokenScores.{name}, which the strategy did not compute")
    return column_T


def require_finite(batch: Batch, *names: str) -> None:
    """Raises ``ValueError`` if a column holds NaN or infinity, and says where. Columns that are unset pass."""
    for name in names:
        column = getattr(batch, name)
        if column is None:
            continue
        if np.isfinite(column.numpy()).all():  # ten times faster than torch.isfinite(...).all()
            continue
        bad = (~torch.isfinite(column)).nonzero().squeeze(1)
        if name.endswith("_B"):
            place = f"in sequence {int(bad[0])}"
        else:
            row = int(batch.rows_T[bad[0]])
            place = f"at token {int(bad[0] - batch.offsets_B[row])} of sequence {row}"
        raise ValueError(
            f"Batch.{name}: {len(bad)} of {len(column)} values are not finite, the first is "
            f"{float(column[bad[0]])} {place}; expected finite numbers"
        )


def require_rewards(batch: Batch, user: str) -> Tensor:
    """The rewards; raises ``ValueError`` unless they are present, finite and only on sampled tokens."""
    (rewards_T,) = require_columns(batch, user, "rewards_T")
    require_finite(batch, "rewards_T")
    stray = ((rewards_T != 0) & ~batch.loss_mask_T).nonzero().squeeze(1)
    if len(stray):
        row = int(batch.rows_T[stray[0]])
        raise ValueError(
            f"Batch.rewards_T: {len(stray)} rewards on tokens with loss_mask 0 (the first in sequence {row}); "
            "expected rewards on sampled tokens only, where the estimators can see them"
        )
    return rewards_T
