"""How far the generation engine's log-probabilities are from the training engine's."""

from __future__ import annotations

import torch

from roll.algorithms.checks import require_finite
from roll.algorithms.kl import k3
from roll.data.batch import Batch


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Differences between ``rollout_logprobs_T`` and ``old_logprobs_T`` over sampled tokens.

    Returns:
        ``mismatch/logprob_diff_mean`` and ``mismatch/logprob_diff_max`` of the absolute difference, and
        ``mismatch/k3``, the estimated KL of the rollout engine's distribution to the training engine's. All are 0 when
        the engines agree; empty when either column is absent or nothing was sampled.
    """
    if batch.rollout_logprobs_T is None or batch.old_logprobs_T is None:
        return {}
    require_finite(batch, "rollout_logprobs_T", "old_logprobs_T")
    d_M = (batch.rollout_logprobs_T.double() - batch.old_logprobs_T.double())[batch.loss_mask_T]
    if len(d_M) == 0:
        return {}
    return {
        "mismatch/logprob_diff_mean": float(d_M.abs().mean()),
        "mismatch/logprob_diff_max": float(d_M.abs().max()),
        "mismatch/k3": float(torch.mean(k3(d_M))),
    }
