"""A model beside its teacher: what the teacher says of each token, and how far the model's own distribution is from it.

Axes: T tokens of a batch, K of them to score, H hidden units of the teacher, V logits on this rank, C top tokens. The
logits of a token may lie on several ranks, each with a stretch of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from roll.algorithms.divergences import divergence_addends
from roll.configs.divergence import DivergenceConfig
from roll.data.batch import Batch
from roll.models.heads import OutputHead

MASKED = -1e30
"""Logit of an id that does not count. Finite, so that 0 times it is 0."""
_LEAST_MASS = 1e-30


class Vocabulary(Protocol):
    """Place of this rank's logits in the vocabulary, and the ways in which ranks put theirs together."""

    @property
    def start(self) -> int:
        """Id of the first logit."""
        ...

    def beyond(self, num_ids: int, width: int) -> bool:
        """Tells whether there are ids from ``num_ids`` on, here or on another rank; ``width``: logits on this one."""
        ...

    def log_softmax(self, logits_KV: Tensor) -> Tensor: ...
    def total(self, parts: Tensor) -> Tensor:
        """The sum over ranks; what follows is the same on each of them."""
        ...

    def top(self, logprobs_KV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The highest log-probabilities of all ranks, descending, and their ids; [K, at most ``count``] each."""
        ...


class WholeVocabulary:
    """All logits are here (a ``Vocabulary``)."""

    start = 0

    def beyond(self, num_ids: int, width: int) -> bool:
        return num_ids < width

    def log_softmax(self, logits_KV: Tensor) -> Tensor:
        return torch.log_softmax(logits_KV, dim=-1)

    def total(self, parts: Tensor) -> Tensor:
        return parts

    def top(self, logprobs_KV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return logprobs_KV.topk(min(count, logprobs_KV.shape[1]), dim=-1)


@dataclass(frozen=True, eq=False)
class TeacherView:
    """A teacher's view of tokens, one entry of each column per token: hidden states, or top tokens.

    No container of tensors that an engine would look into: FSDP2 and DeepSpeed round floating-point arguments of a
    model to the format that it computes in.
    """

    hidden: Tensor | None
    """float32 [·, H] final hidden states that the teacher predicts the tokens from."""
    ids: Tensor | None
    """int32 [·, C] the teacher's likeliest tokens."""
    logprobs: Tensor | None
    """float32 [·, C] their log-probabilities."""
    tail: Tensor | None
    """float32 [·] log of the probability of all others together."""

    @classmethod
    def of(cls, batch: Batch) -> TeacherView | None:
        """The columns of a batch; ``None`` where no teacher has looked at it."""
        view = cls(batch.teacher_hidden_TH, batch.teacher_ids_TK, batch.teacher_top_TK, batch.teacher_tail_T)
        return None if view.hidden is None and view.ids is None else view

    def take(self, index: Tensor, device: torch.device) -> TeacherView:
        """The entries of some tokens, on ``device``."""
        return self._map(lambda column: column[index]).to(device)

    def to(self, device: torch.device) -> TeacherView:
        """The same on ``device``."""
        return self._map(lambda column: column.to(device, non_blocking=True))

    def split(self, size: int) -> Iterator[TeacherView]:
        """Views of ``size`` tokens each, the last of what is left."""
        (first, *_) = [column for f in fields(self) if (column := getattr(self, f.name)) is not None]
        for start in range(0, len(first), size):
            yield self._map(lambda column, start=start: column[start : start + size])  # type: ignore[misc]

    def _map(self, change: Callable[[Tensor], Tensor]) -> TeacherView:
        return TeacherView(
            *(None if (column := getattr(self, f.name)) is None else change(column) for f in fields(self))
        )


@dataclass(frozen=True)
class OutputLayer:
    """A frozen output layer, or a part of one, outside any module, so that nobody trains, shards or saves it."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    head: OutputHead | None = None
    """The head of its model; ``None``: the layer is all there is, or it stands in a head that applies it."""

    def rows(self, start: int, count: int) -> OutputLayer:
        """The layer for ``count`` ids from ``start`` on; zeros where it has none."""

        def cut(tensor: Tensor) -> Tensor:
            part = tensor[start : start + count]
            return nn.functional.pad(part, (0, 0) * (part.ndim - 1) + (0, count - len(part))).clone()

        return replace(self, weight_VH=cut(self.weight_VH), bias_V=None if self.bias_V is None else cut(self.bias_V))

    def to(self, device: torch.device) -> OutputLayer:
        bias = None if self.bias_V is None else self.bias_V.to(device)
        return replace(self, weight_VH=self.weight_VH.to(device), bias_V=bias)

    def __call__(self, hidden_KH: Tensor) -> Tensor:
        """float32 logits."""
        return self._apply(hidden_KH) if self.head is None else self.head(hidden_KH, self._apply)

    def _apply(self, hidden_KH: Tensor) -> Tensor:
        return nn.functional.linear(hidden_KH.to(self.weight_VH.dtype), self.weight_VH, self.bias_V).float()


@dataclass(frozen=True)
class ComparisonSpec:
    """Divergence that a policy is told of."""

    divergence: DivergenceConfig
    temperature: float
    """Divides the logits of both."""
    teacher_path: str | None = None
    """Folder or hub name of the teacher whose hidden states come; ``None``: its top tokens come."""
    num_ids: int | None = None
    """Ids that both have, from 0 on: with hidden states, probabilities are those of them. ``None``: all."""
    trusts_teacher: bool = False
    """True if Python files that come with the teacher may run."""


@dataclass(frozen=True)
class Comparison:
    """Measures a model beside its teacher."""

    spec: ComparisonSpec
    vocabulary: Vocabulary
    temperature: float
    """That of the log-probabilities which come in."""
    layer: OutputLayer | None = None
    """The teacher's, for this rank's ids; where its hidden states come."""

    def to(self, device: torch.device) -> Comparison:
        return replace(self, layer=None if self.layer is None else self.layer.to(device))

    def __call__(self, logprobs_KV: Tensor, view: TeacherView) -> Tensor:
        """Divergences of the tokens, float32 [K], the same on all ranks.

        Raises:
            ValueError: the view has hidden states, but there is no layer to read them with.
        """
        view = view.to(logprobs_KV.device)  # parameters that wait in host memory do not say where the model runs
        own_KV = self._at_temperature(logprobs_KV)
        if view.hidden is None:
            assert view.ids is not None and view.logprobs is not None and view.tail is not None
            outcomes_KC = torch.cat([view.logprobs, view.tail[:, None]], dim=1)
            own_KC = torch.cat(tokens_and_tail(own_KV, view.ids, self.vocabulary), dim=1)
            return divergence_addends(outcomes_KC, own_KC, self.spec.divergence).sum(-1)
        if self.layer is None:
            raise ValueError(
                "distillation: hidden states of a teacher came, but this model holds no output layer of it"
            )
        theirs_KV = restrict(self.layer(view.hidden) / self.spec.temperature, self.spec.num_ids, self.vocabulary)
        addends_KV = divergence_addends(self.vocabulary.log_softmax(theirs_KV), own_KV, self.spec.divergence)
        return self.vocabulary.total(addends_KV.sum(-1))

    def _at_temperature(self, logprobs_KV: Tensor) -> Tensor:
        num_ids = None if self.layer is None else self.spec.num_ids
        factor = self.temperature / self.spec.temperature
        if factor == 1:
            return _of_ids(logprobs_KV, num_ids, self.vocabulary)
        return self.vocabulary.log_softmax(restrict(logprobs_KV * factor, num_ids, self.vocabulary))


def restrict(logits_KV: Tensor, num_ids: int | None, vocabulary: Vocabulary) -> Tensor:
    """The logits with those of ids from ``num_ids`` on masked; the same tensor where there are none."""
    held = logits_KV.shape[1] if num_ids is None else num_ids - vocabulary.start
    if held >= logits_KV.shape[1]:
        return logits_KV
    return logits_KV.masked_fill(torch.arange(logits_KV.shape[1], device=logits_KV.device) >= held, MASKED)


def _of_ids(logprobs_KV: Tensor, num_ids: int | None, vocabulary: Vocabulary) -> Tensor:
    """Log-probabilities among the ids below ``num_ids``; all ranks or none exchange sums for it."""
    if num_ids is None or not vocabulary.beyond(num_ids, logprobs_KV.shape[1]):
        return logprobs_KV
    return vocabulary.log_softmax(restrict(logprobs_KV, num_ids, vocabulary))


def top_tokens(
    logprobs_KV: Tensor, count: int, num_ids: int | None, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Top of a teacher's distribution: ids (int32 [K, C]), their log-probabilities, and the tail's [K]."""
    known_KV = _of_ids(logprobs_KV, num_ids, vocabulary)
    top_KC, ids_KC = vocabulary.top(known_KV, count if num_ids is None else min(count, num_ids))
    tail_K1 = tokens_and_tail(known_KV, ids_KC, vocabulary)[1]
    return ids_KC.int(), top_KC, tail_K1.squeeze(1)


def tokens_and_tail(logprobs_KV: Tensor, ids_KC: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Log-probabilities [K, C] of some tokens, and [K, 1] of all others together."""
    width = logprobs_KV.shape[1]
    index_KC = ids_KC.long() - vocabulary.start
    here_KC = (index_KC >= 0) & (index_KC < width)
    tokens_KC = logprobs_KV.gather(1, torch.where(here_KC, index_KC, 0)) * here_KC
    others_KV = nn.functional.pad(logprobs_KV.exp(), (0, 1)).scatter(1, torch.where(here_KC, index_KC, width), 0.0)
    mass_K1 = vocabulary.total(others_KV.sum(1, keepdim=True))
    return vocabulary.total(tokens_KC), mass_K1.clamp_min(_LEAST_MASS).log()
