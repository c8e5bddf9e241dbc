"""Losses of reward models, on the scores that a head gives at the ends of answers or of their steps.

A loss is a sum over the pairs, answers or steps of a micro-batch, divided by their number in the whole optimizer step.
The score of an end stands on the token behind it (loss mask 1), as a value does.

Axes: B rows, P pairs, T tokens, M scored ends of the micro-batch.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from roll.algorithms.preferences import pairs_in_order
from roll.algorithms.statistics import sums
from roll.algorithms.types import LossContext, LossFn, LossOutput, TokenScores, require_columns, require_scores
from roll.configs.reward_training import RewardLossConfig
from roll.data.batch import Batch


def bradley_terry_loss(scores: TokenScores, batch: Batch, ctx: LossContext, config: RewardLossConfig) -> LossOutput:
    """Mean over pairs of ``-log s(r_w - r_l - margin) + center_coef (r_w + r_l)^2``.

    Args:
        scores: ``values_T``.
        batch: One micro-batch with ``pair_B`` and ``preferred_B``, both sides of every pair in it; the margins are
            ``target_B``, if there are any. One token of each row has loss mask 1.

    Raises:
        ValueError: a column or score is missing.
    """
    require_columns(batch, "reward_loss 'bradley_terry'", "pair_B", "preferred_B")
    values_T = _values(scores)
    pairs_P2 = pairs_in_order(batch)
    reward_B = row_scores(values_T, batch)
    chosen_P, rejected_P = (reward_B[rows.to(reward_B.device)] for rows in pairs_P2.unbind(1))
    weight = 2.0 / ctx.num_sequences
    lead_P = chosen_P - rejected_P
    wanted_P = lead_P if batch.target_B is None else lead_P - batch.target_B[pairs_P2[:, 0]].to(lead_P.device)
    loss_P = -logsigmoid(wanted_P) + config.center_coef * (chosen_P + rejected_P).square()
    measured = {
        "loss": loss_P,
        "accuracy": (lead_P > 0).to(lead_P.dtype),
        "margin": lead_P,
        "chosen_score": chosen_P,
        "rejected_score": rejected_P,
    }
    return _output({name: each.sum() * weight for name, each in measured.items()})


def regression_loss(scores: TokenScores, batch: Batch, ctx: LossContext, config: RewardLossConfig) -> LossOutput:
    """Mean over scored ends of the squared error; the targets are ``returns_T``."""
    value_M, target_M = _at_ends(scores, batch, "regression")
    error_M = value_M - target_M
    measured = {"loss": error_M.square(), "absolute_error": error_M.abs(), "score": value_M}
    return _output({name: each.sum() / ctx.num_tokens for name, each in measured.items()})


def process_loss(scores: TokenScores, batch: Batch, ctx: LossContext, config: RewardLossConfig) -> LossOutput:
    """Mean over steps of the cross-entropy of ``s(score)`` with the step's label, ``returns_T`` from 0 to 1."""
    value_M, label_M = _at_ends(scores, batch, "process")
    loss_M = binary_cross_entropy_with_logits(value_M, label_M, reduction="none")
    right_M = ((value_M > 0) == (label_M > 0.5)).to(value_M.dtype)
    measured = {"loss": loss_M, "accuracy": right_M, "score": value_M}
    return _output({name: each.sum() / ctx.num_tokens for name, each in measured.items()})


REWARD_LOSSES = {"bradley_terry": bradley_terry_loss, "regression": regression_loss, "process": process_loss}


def build_reward_loss(config: RewardLossConfig) -> LossFn:
    """The loss with its settings; travels between processes."""
    return partial(REWARD_LOSSES[config.reward_loss], config=config)


def row_scores(values_T: Tensor, batch: Batch) -> Tensor:
    """[B]: the score of each row, at its one token with loss mask 1; 0 where there is none."""
    token_M = batch.loss_mask_T.nonzero().squeeze(1)
    row_M = batch.rows_T[token_M].to(values_T.device)
    return sums(values_T[token_M.to(values_T.device)], row_M, batch.num_sequences)


def calibration_error(probability_N: Tensor, right_N: Tensor) -> float:
    """Expected calibration error: how far stated probabilities are from the shares that came true.

    The differences of the means over ten bins of equal width, averaged by their counts.

    Args:
        right_N: whether it was, 0 or 1.
    """
    bin_N = (probability_N.double() * 10).long().clamp(max=9)
    gap = sums(probability_N.double() - right_N.double(), bin_N, 10)
    return float(gap.abs().sum() / max(1, len(probability_N)))


def _at_ends(scores: TokenScores, batch: Batch, loss: str) -> tuple[Tensor, Tensor]:
    """[M]: scores and targets."""
    (targets_T,) = require_columns(batch, f"reward_loss {loss!r}", "returns_T")
    values_T = _values(scores)
    token_M = batch.loss_mask_T.nonzero().squeeze(1).to(values_T.device)
    return values_T[token_M], targets_T.to(values_T.device, values_T.dtype)[token_M]


def _values(scores: TokenScores) -> Tensor:
    return require_scores(scores.values_T, "a reward model's loss", "values_T")


def _output(measured: dict[str, Tensor]) -> LossOutput:
    return LossOutput(measured["loss"], {f"rm/{name}": value.detach() for name, value in measured.items()})
