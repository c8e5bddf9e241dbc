"""Log-probabilities, entropies and values from final hidden states, with the vocabulary cut over tensor-parallel ranks.

No rank ever holds a row of logits over the whole vocabulary: ranks exchange one number per token where a sum or maximum
over the vocabulary is needed. Axes: K loss tokens, H hidden units, V one rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.quantities import MASKED, Distribution, Given, OutputLayer, Quantity, keep
from roll.data.kept_sets import KeptSets
from roll.models.scoring import score_hidden


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

    def at(self, logprobs_KV: Tensor, ids_K: Tensor) -> Tensor:
        index_K = ids_K - self.start
        here_K = (index_K >= 0) & (index_K < logprobs_KV.shape[1])
        return self.total(logprobs_KV.gather(1, (index_K * here_K)[:, None]).squeeze(1) * here_K)

    def total(self, parts: Tensor) -> Tensor:
        return sum_over(parts, self.group)

    def highest(self, parts: Tensor) -> Tensor:
        return _reduced(parts.detach(), self.group, dist.ReduceOp.MAX)

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


class VocabularyScorer:
    """Computes log-probs from hidden states that are the same on all tensor-parallel ranks.

    Args:
        needs: what it computes of each token's distribution, see ``roll.algorithms.quantities``.
    """

    def __init__(self, share: VocabularyShare, temperature: float, needs: Sequence[Quantity]) -> None:
        self.share = share
        self.needs = tuple(needs)
        self._temperature = temperature if temperature > 0 else 1.0

    def __call__(
        self, weight_VH: Tensor, hidden_KH: Tensor, target_K: Tensor, given: Given | None = None
    ) -> dict[str, Tensor]:
        """Columns of ``TokenScores``, in chunks whose logits are computed again in the backward pass.

        Args:
            weight_VH: this rank's rows of the output layer.
            given: what the batch says of the tokens.
        """
        return score_hidden(
            self._distribution, self.needs, hidden_KH, target_K, given or Given(), len(weight_VH), weight_VH
        )

    def _distribution(
        self, hidden_KH: Tensor, target_K: Tensor, given: Given, weight_VH: Tensor | None
    ) -> Distribution:
        assert weight_VH is not None
        read = partial(self._read, kept=given.kept)
        return Distribution(
            read(_SameOnAll.apply(hidden_KH, self.share.group), OutputLayer(weight_VH)),
            target_K,
            hidden_KH,
            self.share,
            temperature=self._temperature,
            read=read,
            given=given,
        )

    def _read(self, hidden_KH: Tensor, layer: OutputLayer, kept: KeptSets | None = None) -> Tensor:
        """Log-probabilities of this rank's tokens, float32; those of padding are about ``MASKED``."""
        logits_KV = layer(hidden_KH) * (1.0 / self._temperature)
        width, held = logits_KV.shape[1], self.share.vocab_size - self.share.start
        if held < width:
            logits_KV = logits_KV.masked_fill(torch.arange(width, device=logits_KV.device) >= held, MASKED)
        return self.share.log_softmax(keep(logits_KV, kept, self.share.start))


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
