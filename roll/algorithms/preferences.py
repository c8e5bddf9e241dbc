"""Losses of preferences: chosen and rejected answers, labelled ones, and the scores of reward models.

An answer is the tokens of a row with loss mask 1, and its reward under DPO is what the policy adds to the reference's
log-probability of it. A reward model's score of an answer or a step stands on the token behind its end (loss mask 1),
as a value does. A loss is a sum over the pairs, answers or steps of a micro-batch, divided by their number in the whole
optimizer step; so micro-batching, packing and data parallelism cannot change the gradient.

Axes: B rows, P pairs, T tokens, M answer tokens or scored ends of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from roll.algorithms.kl import k3
from roll.algorithms.reductions import sums
from roll.algorithms.types import LossContext, LossFn, LossOutput, TokenScores, require_columns, require_scores
from roll.configs.preference import PreferenceConfig, RewardLossConfig
from roll.data.batch import Batch
from roll.utils.registry import Registry

LOG_HALF = math.log(0.5)


@dataclass(frozen=True)
class Answers:
    """Answers and how likely they are; one entry each, on the scores' device."""

    logprob: Tensor
    """Under the policy being trained; gradients flow through it."""
    ref_logprob: Tensor | None
    """Under the reference; ``None`` where the loss asks for none."""
    length: Tensor
    """Tokens, as a float."""

    @classmethod
    def of(cls, logprobs_T: Tensor, batch: Batch) -> Answers:
        """The answer of every row, [B]; a row without one has length 0."""
        token_M = batch.loss_mask_T.nonzero().squeeze(1)
        row_M = batch.rows_T[token_M]

        def total(column_T: Tensor) -> Tensor:
            device = logprobs_T.device
            values_M = column_T.to(device)[token_M.to(device)].to(logprobs_T.dtype)
            return sums(values_M, row_M.to(device), batch.num_sequences)

        ref_logprob = None if batch.ref_logprobs_T is None else total(batch.ref_logprobs_T)
        return cls(total(logprobs_T), ref_logprob, total(torch.ones(batch.num_tokens)))

    def at(self, rows: Tensor) -> Answers:
        """Those of the given rows."""
        rows = rows.to(self.logprob.device)
        ref_logprob = None if self.ref_logprob is None else self.ref_logprob[rows]
        return Answers(self.logprob[rows], ref_logprob, self.length[rows])

    @property
    def log_ratio(self) -> Tensor:
        """Log-probability beyond the reference's."""
        assert self.ref_logprob is not None, "the loss has asked for the reference"
        return self.logprob - self.ref_logprob

    @property
    def mean_logprob(self) -> Tensor:
        """Log-probability per token."""
        return self.logprob / self.length


PreferenceFn: TypeAlias = Callable[[Tensor, PreferenceConfig], Tensor]
"""Gives the loss of each pair, [P], from the lead of the chosen answer's reward over the rejected one's."""


def sigmoid(lead_P: Tensor, config: PreferenceConfig) -> Tensor:
    """``-(1 - e) log s(lead - g) - e log s(g - lead)`` with ``label_smoothing`` e and ``target_margin`` g."""
    beyond_P, smoothing = lead_P - config.target_margin, config.label_smoothing
    return -(1 - smoothing) * logsigmoid(beyond_P) - smoothing * logsigmoid(-beyond_P)


def ipo(lead_P: Tensor, config: PreferenceConfig) -> Tensor:
    """``(lead / beta - 1 / (2 beta))^2``: the log ratios differ by ``1 / (2 beta)``, and by no more."""
    return ((lead_P - 0.5) / config.beta).square()


def hinge(lead_P: Tensor, config: PreferenceConfig) -> Tensor:
    """``max(0, 1 - lead)``."""
    return torch.relu(1 - lead_P)


def orpo(lead_P: Tensor, config: PreferenceConfig) -> Tensor:
    """``-beta log s(lead)``, the lead being that of the log odds."""
    return -config.beta * logsigmoid(lead_P)


PREFERENCE_LOSSES: Registry[PreferenceFn] = Registry("preference loss")
for _loss in (sigmoid, ipo, hinge, orpo):
    PREFERENCE_LOSSES.register(_loss.__name__, _loss)
# SimPO is DPO's loss of other rewards, see ``rewards``.
PREFERENCE_LOSSES.register("simpo", sigmoid)


def rewards(answers: Answers, config: PreferenceConfig) -> Tensor:
    """The implicit reward of each answer.

    ``beta`` times the log ratio to the reference (sigmoid, ipo, hinge, kto; per token with ``length_normalized``) or
    the mean log-probability (simpo); for orpo the log odds of the mean log-probability.
    """
    if config.preference_loss == "orpo":
        mean = answers.mean_logprob
        return mean - log_of_rest(mean)
    if config.preference_loss == "simpo":
        return config.beta * answers.mean_logprob
    scaled = config.beta * answers.log_ratio
    return scaled / answers.length if config.length_normalized else scaled


def log_of_rest(logprob: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x below 0, exact at both ends; x at 0 counts as the number next to it."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).tiny)
    near_one = below > LOG_HALF
    # Each branch gets arguments at which the other's gradient is finite too.
    small = torch.log(-torch.expm1(torch.where(near_one, below, LOG_HALF)))
    return torch.where(near_one, small, torch.log1p(-torch.exp(torch.where(near_one, LOG_HALF, below))))


def preference_loss(scores: TokenScores, batch: Batch, ctx: LossContext, config: PreferenceConfig) -> LossOutput:
    """Mean over pairs of the loss that ``config.preference_loss`` names, plus ``nll_coef`` times the chosen's NLL.

    Args:
        scores: ``logprobs_T``.
        batch: One micro-batch with ``pair_B`` and ``preferred_B``, both sides of every pair in it; ``ref_logprobs_T``
            where the loss compares with the reference.

    Raises:
        ValueError: a column or score is missing, or the optimizer step has no pair.
    """
    answers = _answers(scores, batch, config, "pair_B", "preferred_B")
    pairs = pairs_in_order(batch)
    chosen, rejected = (answers.at(rows) for rows in pairs.unbind(1))
    weight = 1.0 / _count(ctx.num_sequences / 2, "pair")

    def share(values_P: Tensor) -> Tensor:
        return values_P.sum() * weight

    chosen_reward_P, rejected_reward_P = rewards(chosen, config), rewards(rejected, config)
    lead_P = chosen_reward_P - rejected_reward_P
    wanted_P = lead_P if batch.target_B is None else lead_P - batch.target_B[pairs[:, 0]].to(lead_P.device)
    loss = share(PREFERENCE_LOSSES.get(config.preference_loss)(wanted_P, config))
    nll = share(-chosen.mean_logprob)
    if config.nll_coef:
        loss = loss + config.nll_coef * nll
    measured = {
        "loss": loss,
        "accuracy": share((lead_P > 0).to(lead_P.dtype)),
        "margin": share(lead_P),
        "chosen_reward": share(chosen_reward_P),
        "rejected_reward": share(rejected_reward_P),
        "chosen_logprob": share(chosen.logprob),
        "rejected_logprob": share(rejected.logprob),
        "chosen_nll": nll,
    }
    return LossOutput(loss, _named(measured | _divergence(scores, batch, ctx)))


def kto_loss(scores: TokenScores, batch: Batch, ctx: LossContext, config: PreferenceConfig) -> LossOutput:
    """Mean over answers of ``w (1 - s(reward - z))``, for those to discourage ``w (1 - s(z - reward))``.

    ``z`` is ``beta`` times ``anchor_B``; ``w`` is ``desirable_weight`` or ``undesirable_weight``. Otherwise as
    ``preference_loss``, with ``anchor_B`` in place of ``pair_B``.
    """
    answers = _answers(scores, batch, config, "anchor_B", "preferred_B")
    assert batch.anchor_B is not None and batch.preferred_B is not None
    rows = _answered(batch).nonzero().squeeze(1)
    device = answers.logprob.device
    good_B, anchor_B = batch.preferred_B[rows].to(device), batch.anchor_B[rows].to(device)
    weight = 1.0 / _count(ctx.num_sequences, "answer")
    answers = answers.at(rows)
    reward_B = rewards(answers, config)
    beyond_B = reward_B - config.beta * anchor_B
    lead_B = torch.where(good_B, beyond_B, -beyond_B)
    worth_B = torch.where(good_B, config.desirable_weight, config.undesirable_weight).to(lead_B.dtype)
    loss = (worth_B * torch.sigmoid(-lead_B)).sum() * weight
    measured = {
        "loss": loss,
        "accuracy": (lead_B > 0).to(lead_B.dtype).sum() * weight,
        "margin": lead_B.sum() * weight,
        "reward": reward_B.sum() * weight,
        "logprob": answers.logprob.sum() * weight,
        "anchor": anchor_B.sum() * weight,
    }
    return LossOutput(loss, _named(measured | _divergence(scores, batch, ctx)))


def build_preference_loss(config: PreferenceConfig) -> LossFn:
    """The loss with its settings; travels between processes."""
    return partial(preference_loss if config.in_pairs else kto_loss, config=config)


def _answers(scores: TokenScores, batch: Batch, config: PreferenceConfig, *columns: str) -> Answers:
    needed = (*columns, "ref_logprobs_T") if config.compares_with_reference else columns
    require_columns(batch, f"preference_loss {config.preference_loss!r}", *needed)
    return Answers.of(require_scores(scores.logprobs_T, "a preference loss", "logprobs_T"), batch)


def _answered(batch: Batch) -> Tensor:
    """bool [B]: rows with an answer; a placeholder for a rank that has nothing to do has none."""
    return batch.loss_tokens_B > 0


def pairs_in_order(batch: Batch) -> Tensor:
    """int64 [P, 2]: the rows of every pair, the better one first; none of a placeholder for a rank without work."""
    assert batch.preferred_B is not None
    if not bool(batch.loss_mask_T.any()):
        return torch.zeros(0, 2, dtype=torch.int64)
    pairs_P2 = batch.samples
    better_first = batch.preferred_B[pairs_P2].long().argsort(dim=1, descending=True, stable=True)
    return pairs_P2.gather(1, better_first)


def _count(number: float, noun: str) -> float:
    if number <= 0:
        raise ValueError(f"LossContext: {number:g} {noun}s, expected at least one {noun} in the optimizer step")
    return number


def _divergence(scores: TokenScores, batch: Batch, ctx: LossContext) -> dict[str, Tensor]:
    """This micro-batch's share of k3 between policy and reference, a mean over the answers' tokens."""
    if batch.ref_logprobs_T is None or scores.logprobs_T is None:
        return {}
    logprobs_T = scores.logprobs_T.detach()
    mask_T = batch.loss_mask_T.to(logprobs_T.device)
    kl_T = k3(logprobs_T - batch.ref_logprobs_T.to(logprobs_T.device))
    return {"kl": (kl_T * mask_T).sum() / ctx.num_tokens}


def _named(measured: dict[str, Tensor]) -> dict[str, Tensor | float]:
    return {f"dpo/{name}": value.detach() for name, value in measured.items()}


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
