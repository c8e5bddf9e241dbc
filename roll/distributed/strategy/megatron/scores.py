"""Log-probabilities, entropies and values from final hidden states, with the vocabulary cut over tensor-parallel ranks.

No rank ever holds a row of logits over the whole vocabulary: ranks exchange one number per token where a sum or maximum
over the vocabulary is needed. Axes: K loss tokens, H hidden units, V one rank's share of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from roll.models.comparison import MASKED, Comparison, TeacherView, top_tokens
from roll.models.scoring import TOP_COLUMNS, in_chunks


@dataclass(frozen=True)
class VocabularyShare:
    """The rows of the output layer that this rank holds."""

    vocab_size: int
    """Tokens of the model; rows past them are padding."""
    start: int
    """Token of the first row held."""
    group: Any
    """The tensor-parallel process group."""

    def beyond(self, num_ids: int, width: int) -> bool:
        return num_ids < self.vocab_size

    def log_softmax(self, logits_KV: Tensor) -> Tensor:
        found: Tensor = _LogSoftmax.apply(logits_KV, self.group)
        return found

    def total(self, parts: Tensor) -> Tensor:
        return sum_over(parts, self.group)

    def top(self, logprobs_KV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values_KC, index_KC = logprobs_KV.topk(min(count, logprobs_KV.shape[1]), dim=-1)
        if (size := self.group.size()) == 1:
            return values_KC, index_KC
        gathered = [[torch.empty_like(mine) for _ in range(size)] for mine in (values_KC, index_KC)]
        for parts, mine in zip(gathered, (values_KC, index_KC + self.start), strict=True):
            dist.all_gather(parts, mine.contiguous(), group=self.group)
        values_KR, ids_KR = (torch.cat(parts, dim=1) for parts in gathered)
        found_KC, order_KC = values_KR.topk(min(count, self.vocab_size), dim=-1)
        return found_KC, ids_KR.gather(1, order_KC)


class TokenScorer:
    """Scores tokens from hidden states that all tensor-parallel ranks hold alike.

    What else it tells of them is as in ``roll.models.scoring.TokenScorer``.
    """

    def __init__(
        self,
        share: VocabularyShare,
        temperature: float,
        marks_hits: bool = False,
        top_k: int = 0,
        num_ids: int | None = None,
        sums_squares: bool = False,
    ) -> None:
        self.share = share
        self.marks_hits = marks_hits
        self.sums_squares = sums_squares
        self.top_k = top_k
        self.num_ids = num_ids
        self.comparison: Comparison | None = None
        """Comparison of the model with its teacher, where it has one."""
        self.reference_weight_VH: Tensor | None = None
        """The reference's output layer, where the KL to it is wanted."""
        self._inverse_temperature = 1.0 / temperature if temperature > 0 else 1.0

    def __call__(
        self,
        weight_VH: Tensor,
        hidden_KH: Tensor,
        target_K: Tensor,
        ref_hidden_KH: Tensor | None = None,
        teacher: TeacherView | None = None,
    ) -> dict[str, Tensor]:
        """Scores of the tokens, in chunks whose logits are computed again in the backward pass.

        Returns:
            float32 [K] under their names in ``TokenScores``: log-probabilities, entropies, where wanted the hits or the
            top tokens, with the reference's hidden states the KL to it, with a teacher the divergence from it.

        Raises:
            ValueError: ``ref_hidden_KH`` without the reference's output layer, ``teacher`` without a ``comparison``.
        """
        score = in_chunks(self._score_chunk, weight_VH.shape[0], weight_VH)
        return score(hidden_KH, target_K, ref_hidden_KH, teacher)

    def _score_chunk(
        self,
        hidden_KH: Tensor,
        target_K: Tensor,
        ref_hidden_KH: Tensor | None,
        teacher: TeacherView | None,
        weight_VH: Tensor | None,
    ) -> dict[str, Tensor]:
        assert weight_VH is not None
        group = self.share.group
        logprobs_KV = self._log_softmax(weight_VH, _SameOnAll.apply(hidden_KH, group))
        probabilities_KV = logprobs_KV.exp()
        index_K = target_K - self.share.start
        here_K = (index_K >= 0) & (index_K < weight_VH.shape[0])
        target_logprobs_K = logprobs_KV.gather(1, (index_K * here_K)[:, None]).squeeze(1) * here_K
        scores = {
            "logprobs_T": _Sum.apply(target_logprobs_K, group),
            "entropy_T": -_Sum.apply((probabilities_KV * logprobs_KV).sum(-1), group),
        }
        if self.marks_hits:
            with torch.no_grad():
                highest_K = _reduced(logprobs_KV.amax(-1), group, dist.ReduceOp.MAX)
                scores["hit_T"] = (scores["logprobs_T"] >= highest_K).float()
        if self.sums_squares:
            scores["squares_T"] = _reduced(probabilities_KV.detach().square().sum(-1), group)
        if ref_hidden_KH is not None:
            if self.reference_weight_VH is None:
                raise ValueError("kl_penalty 'full': this model holds no output layer of the reference to compare with")
            ref_logprobs_KV = self._log_softmax(self.reference_weight_VH, ref_hidden_KH)
            scores["kl_T"] = _Sum.apply((probabilities_KV * (logprobs_KV - ref_logprobs_KV)).sum(-1), group)
        if teacher is not None:
            if self.comparison is None:
                raise ValueError("distillation: this model was not told how to compare itself with a teacher")
            scores["divergence_T"] = self.comparison(logprobs_KV, teacher)
        if self.top_k:
            found = top_tokens(logprobs_KV, self.top_k, self.num_ids, self.share)
            scores |= dict(zip(TOP_COLUMNS, found, strict=True))
        return scores

    def _log_softmax(self, weight_VH: Tensor, hidden_KH: Tensor) -> Tensor:
        """Log-probabilities of this rank's tokens, float32; those of padding are about ``MASKED``."""
        logits_KV = functional.linear(hidden_KH.to(weight_VH.dtype), weight_VH).float() * self._inverse_temperature
        held = self.share.vocab_size - self.share.start
        if held < weight_VH.shape[0]:
            padding_V = torch.arange(weight_VH.shape[0], device=weight_VH.device) >= held
            logits_KV = logits_KV.masked_fill(padding_V, MASKED)
        return self.share.log_softmax(logits_KV)


def sum_over(values: Tensor, group: Any) -> Tensor:
    """The sum over a group whose ranks then do the same with it; each rank's part gets the sum's gradient."""
    found: Tensor = _Sum.apply(values, group)
    return found


class _LogSoftmax(torch.autograd.Function):
    """Log-softmax over columns that lie on the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, logits_KV: Tensor, group: Any) -> Tensor:
        highest_K = _reduced(logits_KV.amax(-1), group, dist.ReduceOp.MAX)
        shifted_KV = logits_KV - highest_K[:, None]
        total_K = _reduced(shifted_KV.exp().sum(-1), group)
        logprobs_KV = shifted_KV - total_K.log()[:, None]
        ctx.save_for_backward(logprobs_KV)
        ctx.group = group
        return logprobs_KV

    @staticmethod
    def backward(ctx: Any, gradient_KV: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (logprobs_KV,) = ctx.saved_tensors
        total_K = _reduced(gradient_KV.sum(-1), ctx.group)
        return gradient_KV - logprobs_KV.exp() * total_K[:, None], None


class _Sum(torch.autograd.Function):
    """Sum over a group. What follows is the same on every rank, so each rank's part gets the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        return _reduced(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _SameOnAll(torch.autograd.Function):
    """A value that every rank of a group holds and uses in a way of its own: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduced(gradient, ctx.group), None


def _reduced(values: Tensor, group: Any, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    if group.size() == 1:
        return values
    values = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, operation, group=group)
    return values
