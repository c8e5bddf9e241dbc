"""Distillation from a teacher: its log-probs of sampled tokens as advantages or rewards; the loss on given responses.

On the policy's own samples the teacher's term of a token is ``log q - log p``, q the teacher and p the policy that
sampled it: the negative of the unbiased estimate (k1) of the reverse KL(p || q). On a fixed dataset the loss is a
divergence over the vocabulary, which the model computes (``TokenScores.divergence_T``).

With another tokenizer, the two are compared by chunks: the shortest spans of text that begin and end in both. The
likelihood of a chunk is the product of those of its tokens, in either tokenization (Minixhofer, Vulić and Ponti 2025,
*Universal Cross-Tokenizer Distillation via Approximate Likelihood Matching*; spans of equal text also in GOLD of
Hugging Face 2025, which extends Boizard et al. 2024, *Towards Cross-Tokenizer Distillation: the Universal Logit
Distillation Loss*). Where both are the same, every token is a chunk. A chunk has a number that is unique within its
row; -1 is none.

Axes: T tokens of the policy, S of the teacher.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from roll.algorithms.losses import SampledTokens
from roll.algorithms.reductions import sums
from roll.algorithms.types import (
    LossContext,
    LossFn,
    LossOutput,
    TokenScores,
    require_columns,
    require_finite,
    require_scores,
)
from roll.configs.distill import DistillLossConfig
from roll.configs.teacher import TeacherTerm
from roll.data.batch import Batch

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


def teacher_rewards(batch: Batch, term: TeacherTerm) -> Batch:
    """Adds the teacher's term to the rewards, or with ``is_pure_opd`` puts it in their place (``opd_form: reward``).

    Args:
        batch: With ``rewards_T``, ``teacher_logprobs_T``, and ``old_logprobs_T`` (else ``rollout_logprobs_T``).
    """
    (rewards_T,) = require_columns(batch, "opd_form reward", "rewards_T")
    term_T = teacher_term(batch, term)
    own_T = torch.zeros_like(term_T) if term.alone else rewards_T.double()
    return batch.replace(rewards_T=(own_T + term_T).float())


def teacher_advantages(batch: Batch, term: TeacherTerm) -> Batch:
    """Adds the teacher's term to the advantages (``opd_form: advantage``).

    Args:
        batch: With ``advantages_T``; otherwise as ``teacher_rewards``.
    """
    (advantages_T,) = require_columns(batch, "opd_form advantage", "advantages_T")
    return batch.replace(advantages_T=(advantages_T.double() + teacher_term(batch, term)).float())


def teacher_term(batch: Batch, term: TeacherTerm) -> Tensor:
    """float64 [T]: ``c (log q - log p)``, at most ``opd_token_kld_clip`` from 0; 0 off the mask.

    Of several teachers of a row it is ``sum_i c_i (log q_i - log p)``: the batch has the mean of their
    log-probabilities, weighted with c_i, and c is the sum of these.
    """
    coefficient: float | Tensor = term.coefficient
    if term.by_tag:
        (tag_B,) = require_columns(batch, "several teachers", "tag_B")
        coefficient = torch.tensor(term.by_tag, dtype=torch.float64)[tag_B][batch.rows_T]
    term_T = coefficient * _gap(batch, term.least)
    return term_T if term.clip is None else term_T.clamp(-term.clip, term.clip)


def no_advantages(batch: Batch) -> Batch:
    """The batch with advantages and returns of 0: rewards count for nothing (``is_pure_opd``)."""
    zeros_T = torch.zeros(batch.num_tokens)
    return batch.replace(advantages_T=zeros_T, returns_T=zeros_T)


def clip_metrics(batch: Batch, term: TeacherTerm) -> dict[str, float]:
    """``teacher/clipped``: share of the sampled tokens whose term ``opd_token_kld_clip`` bounds."""
    mask_T = batch.loss_mask_T
    if term.clip is None or not mask_T.any():
        return {}
    return {"teacher/clipped": float((teacher_term(batch, term).abs()[mask_T] >= term.clip).double().mean())}


def teacher_metrics(batch: Batch) -> dict[str, float]:
    """Means over sampled tokens: ``teacher/reverse_kl`` (the estimate, in nats) and ``teacher/logprob``.

    With a teacher that has another tokenizer, ``teacher/aligned`` is the share of those that are in a chunk of text.
    """
    mask_T = batch.loss_mask_T
    if not mask_T.any():
        return {}
    gap_T = _gap(batch)
    assert batch.teacher_logprobs_T is not None
    metrics = {
        "teacher/reverse_kl": -float(gap_T[mask_T].mean()),
        "teacher/logprob": float(batch.teacher_logprobs_T[mask_T].double().mean()),
    }
    if batch.teacher_chunk_T is not None:
        metrics["teacher/aligned"] = float((batch.teacher_chunk_T[mask_T] != NO_CHUNK).double().mean())
    return metrics


def distill_loss(scores: TokenScores, batch: Batch, ctx: LossContext, config: DistillLossConfig) -> LossOutput:
    """``w D + (1 - w) NLL`` of the tokens with loss mask 1, w ``distill_loss_weight``, aggregated by ``loss_agg_mode``.

    Args:
        scores: ``logprobs_T`` and ``divergence_T``.
        batch: One micro-batch, with the teacher's columns.

    Returns:
        The loss, and ``distill/loss``, ``distill/divergence``, ``distill/nll``: D and NLL aggregated likewise.

    Raises:
        ValueError: the model has not compared itself with a teacher, or the optimizer step has no loss token.
    """
    divergence_T = require_scores(scores.divergence_T, "distill_loss", "divergence_T")
    logprobs_T = require_scores(scores.logprobs_T, "distill_loss", "logprobs_T")
    tokens = SampledTokens.of(batch, batch.loss_mask_T, config.loss_agg_mode, ctx, logprobs_T)
    divergence = tokens.loss(tokens.take(divergence_T))
    nll = -tokens.loss(tokens.take(logprobs_T))
    weight = config.distill_loss_weight
    loss = weight * divergence + (1 - weight) * nll
    metrics = {"loss": loss, "divergence": divergence, "nll": nll}
    return LossOutput(loss, {f"distill/{name}": value.detach() for name, value in metrics.items()})


def build_distill_loss(config: DistillLossConfig) -> LossFn:
    """``distill_loss`` with its settings; travels between processes."""
    return partial(distill_loss, config=config)


def _gap(batch: Batch, least: float | None = None) -> Tensor:
    """float64 [T]: the teacher's log-probability minus that of the policy before the update; 0 off the mask.

    Below ``least`` both are ``least``.

    Of a teacher with another tokenizer, it is that of a chunk of text, spread evenly over the policy's tokens in it.
    """
    (teacher_T,) = require_columns(batch, "distillation from a teacher", "teacher_logprobs_T")
    fresh_T = None if batch.on_policy_B is None else batch.on_policy_B[batch.rows_T]
    require_finite(batch, "teacher_logprobs_T", "old_logprobs_T", "rollout_logprobs_T")
    policy_T = batch.old_logprobs_T
    if policy_T is None or fresh_T is not None:  # all rows, or some, were not scored again
        (sampled_T,) = require_columns(batch, "distillation from a teacher", "rollout_logprobs_T")
        policy_T = sampled_T if policy_T is None or fresh_T is None else torch.where(fresh_T, sampled_T, policy_T)
    teacher_T, policy_T = teacher_T.double(), policy_T.double()
    gap_T = teacher_T - policy_T if least is None else teacher_T.clamp(min=least) - policy_T.clamp(min=least)
    if batch.teacher_chunk_T is not None:
        gap_T = chunk_means(gap_T, batch.rows_T, batch.teacher_chunk_T)
    return torch.where(batch.loss_mask_T, gap_T, torch.zeros_like(gap_T))
