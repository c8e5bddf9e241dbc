"""What losses need of each token's distribution: one function per quantity, for whole and sharded vocabularies.

A quantity maps a ``Distribution`` to columns of ``TokenScores``. Where it sums over the vocabulary, it does so with
``Distribution.total`` and ``highest``: then it is right whether all logits are here or each rank has a stretch of them.

Axes: T tokens of a batch, K of them to score, H hidden units, V logits on this rank, C top tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from roll.configs.teacher import DivergenceConfig
from roll.data.batch import Batch
from roll.data.kept_sets import KeptSets


def divergence_addends(teacher: Tensor, student: Tensor, config: DivergenceConfig) -> Tensor:
    """Addends, in nats, that sum over all outcomes (a vocabulary, or top tokens and the rest) to the divergence.

    So outcomes may lie on several devices. With t and s the teacher's and the student's probabilities:

    - ``forward_kl``: KL(t || s); Hinton, Vinyals and Dean (2015).
    - ``reverse_kl``: KL(s || t); Gu et al. (2024), MiniLLM.
    - ``js_divergence``: b KL(t || m) + (1 - b) KL(s || m), m = b t + (1 - b) s; Agarwal et al. (2024), GKD.
    - ``skewed_forward_kl``: KL(t || a t + (1 - a) s), ``skewed_reverse_kl``: KL(s || a s + (1 - a) t); Ko et al.
      (2024).

    Args:
        teacher: Log-probabilities, finite.
        student: The same of the student, of the same shape; gradients flow through it.
        config: Reads ``kd_objective``, ``jsd_beta``, ``skew_lambda``.
    """
    match config.kd_objective:
        case "forward_kl":
            return _kl_addends(teacher, student)
        case "reverse_kl":
            return _kl_addends(student, teacher)
        case "js_divergence":
            beta = config.jsd_beta
            middle = _mixture(teacher, student, beta)
            return beta * _kl_addends(teacher, middle) + (1 - beta) * _kl_addends(student, middle)
        case "skewed_forward_kl":
            return _kl_addends(teacher, _mixture(teacher, student, config.skew_lambda))
        case "skewed_reverse_kl":
            return _kl_addends(student, _mixture(student, teacher, config.skew_lambda))


def _kl_addends(p: Tensor, q: Tensor) -> Tensor:
    return p.exp() * (p - q)


def _mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """Log-probabilities of ``share`` p and the rest q."""
    return q if share == 0 else torch.logaddexp(p + math.log(share), q + math.log1p(-share))


MASKED = -1e30
"""Logit of an id that does not count. Finite, so that 0 times it is 0."""
TOP_COLUMNS = ("top_ids_TK", "top_logprobs_TK", "tail_T")
"""Names of what ``top_tokens`` finds in ``TokenScores``."""
_LEAST_MASS = 1e-30


class Vocabulary(Protocol):
    """This rank's part of the vocabulary, and the reductions over ranks."""

    @property
    def start(self) -> int:
        """Id of the first logit."""
        ...

    def beyond(self, num_ids: int, width: int) -> bool:
        """Tells whether there are ids from ``num_ids`` on, here or on another rank; ``width``: logits on this one."""
        ...

    def log_softmax(self, logits_KV: Tensor) -> Tensor: ...
    def at(self, logprobs_KV: Tensor, ids_K: Tensor) -> Tensor:
        """The log-probability of one id in each place; [K], the same on all ranks."""
        ...

    def total(self, parts: Tensor) -> Tensor:
        """The sum over ranks; what follows is the same on each of them."""
        ...

    def highest(self, parts: Tensor) -> Tensor:
        """The maximum over ranks, without gradient."""
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

    def at(self, logprobs_KV: Tensor, ids_K: Tensor) -> Tensor:
        return -nn.functional.nll_loss(logprobs_KV, ids_K, reduction="none")

    def total(self, parts: Tensor) -> Tensor:
        return parts

    def highest(self, parts: Tensor) -> Tensor:
        return parts.detach()

    def top(self, logprobs_KV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return logprobs_KV.topk(min(count, logprobs_KV.shape[1]), dim=-1)


@dataclass(frozen=True)
class OutputLayer:
    """A frozen output layer, or a part of one, outside any module, so that it is not trained, sharded or saved."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    head: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] | None = None
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
class OutputLayers:
    """Where a ``Comparison`` finds the output layer of the other model, for this rank's ids."""

    own: Callable[[], OutputLayer]
    """Copies the model's own, as it is now (collective)."""
    of: Callable[[str, bool], OutputLayer]
    """Reads that of a folder or hub name, whose Python files may run or not (collective)."""


class Given:
    """Columns of a batch that ``Comparison.reads`` names, and the kept sets, at some tokens.

    Not a dataclass or another container that an engine would look into: FSDP2 and DeepSpeed round floating-point
    arguments of a model to the format that it computes in.
    """

    def __init__(self, columns: Mapping[str, Tensor] | None = None, kept: KeptSets | None = None) -> None:
        self.columns, self.kept = columns or {}, kept

    @classmethod
    def of(cls, batch: Batch, needs: Iterable[Quantity]) -> Given:
        """The columns that the batch has of those that the quantities read, and its kept sets."""
        columns = {name: column for name in columns_read(needs) if (column := getattr(batch, name)) is not None}
        return cls(columns, None if batch.kept_I is None else KeptSets.of(batch))

    def take(self, index: Tensor, device: torch.device) -> Given:
        """The entries of some tokens, on ``device``."""
        return self._map(lambda column: column[index].to(device, non_blocking=True))

    def split(self, size: int, number: int) -> list[Given]:
        """``number`` parts of ``size`` tokens each, the last of what is left."""
        return [self._map(lambda c, at=at * size: c[at : at + size]) for at in range(number)]  # type: ignore[misc]

    def _map(self, change: Callable[[Any], Any]) -> Given:
        columns = {name: change(column) for name, column in self.columns.items()}
        return Given(columns, None if self.kept is None else change(self.kept))


class Distribution:
    """The model's distribution over the vocabulary in each of K places, as far as it lies on this rank.

    With kept sets (``keep``) it is that among each token's set. Ids outside of it, and of padding, have probability 0
    and a log-probability of about ``MASKED``.

    Args:
        all_logprobs_KV: float32 log-probabilities of this rank's ids, at ``temperature``.
        target_K: the token that stands in each place.
        hidden_KH: the hidden states that it is predicted from.
        vocabulary: where the ids lie.
        temperature: that divided the logits.
        read: log-probabilities [K, V] from hidden states, by the model's own head and temperature with another output
            layer.
        given: what the batch says of the tokens.
    """

    def __init__(
        self,
        all_logprobs_KV: Tensor,
        target_K: Tensor,
        hidden_KH: Tensor,
        vocabulary: Vocabulary,
        *,
        temperature: float,
        read: Callable[[Tensor, OutputLayer], Tensor],
        given: Given,
    ) -> None:
        self.all_logprobs_KV, self.probabilities_KV = all_logprobs_KV, all_logprobs_KV.exp()
        self.target_K, self.hidden_KH, self.vocabulary = target_K, hidden_KH, vocabulary
        self.temperature, self.read, self._given = temperature, read, given

    @cached_property
    def logprobs_K(self) -> Tensor:
        """Log-probabilities of the targets."""
        return self.vocabulary.at(self.all_logprobs_KV, self.target_K)

    def total(self, values_KV: Tensor) -> Tensor:
        """Sums [K] over the whole vocabulary."""
        return self.vocabulary.total(values_KV.sum(-1))

    def highest(self, values_KV: Tensor) -> Tensor:
        """Maxima [K] over the whole vocabulary, without gradient."""
        return self.vocabulary.highest(values_KV.detach().amax(-1))

    def given(self, name: str) -> Tensor:
        """A column of the batch at these tokens. It may have waited in host memory, as parameters do."""
        return self._given.columns[name].to(self.all_logprobs_KV.device)


Quantity: TypeAlias = Callable[[Distribution], dict[str, Tensor]]
"""Columns of ``TokenScores``, one entry for each of the K places. It travels between processes: a function of a module,
or an object of plain data."""


def logprobs(p: Distribution) -> dict[str, Tensor]:
    return {"logprobs_T": p.logprobs_K}


def entropy(p: Distribution) -> dict[str, Tensor]:
    return {"entropy_T": -p.total(p.probabilities_KV * p.all_logprobs_KV)}


BASIC: tuple[Quantity, ...] = (logprobs, entropy)
"""What a language model computes where nobody asks for anything else."""


def top1(p: Distribution) -> dict[str, Tensor]:
    """Marks the tokens that are the model's first choice."""
    return {"top1_T": (p.logprobs_K.detach() >= p.highest(p.all_logprobs_KV)).float()}


def prob_square_sum(p: Distribution) -> dict[str, Tensor]:
    """Sums of squared probabilities, without gradient."""
    return {"prob_square_sum_T": p.total(p.probabilities_KV.detach().square())}


def hidden_states(p: Distribution) -> dict[str, Tensor]:
    """Final hidden states, from which another process can make the distribution with the output layer alone."""
    return {"hidden_TH": p.hidden_KH.float()}


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens, and the probability of all others together (a teacher's)."""

    count: int
    num_ids: int | None = None
    """Ids from this on do not count. ``None``: all count."""

    def __call__(self, p: Distribution) -> dict[str, Tensor]:
        found = top_tokens(p.all_logprobs_KV, self.count, self.num_ids, p.vocabulary)
        return dict(zip(TOP_COLUMNS, found, strict=True))


@dataclass(frozen=True)
class Comparison(ABC):
    """A quantity of the model's distribution and that of another role's model.

    The other role computes ``asks``, which travels in the batch. Without those columns the comparison is left out.
    """

    _: KW_ONLY
    layer: OutputLayer | None = None
    """The other model's, once ``prepare`` has found it."""
    width: ClassVar[int]
    """Further tensors of the logits' size that it holds."""
    role: ClassVar[str]
    """Kind of the other role."""

    @property
    @abstractmethod
    def asks(self) -> Quantity:
        """What the other role computes for it."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The columns of ``Batch`` that this becomes."""

    @abstractmethod
    def __call__(self, p: Distribution) -> dict[str, Tensor]: ...

    @abstractmethod
    def prepare(self, layers: OutputLayers) -> Comparison:
        """The same, with the output layer of the other model where it takes one (collective)."""

    def to(self, device: torch.device) -> Comparison:
        return replace(self, layer=None if self.layer is None else self.layer.to(device))


@dataclass(frozen=True)
class KlToReference(Comparison):
    """KL to the reference over the whole vocabulary, from the reference's hidden states.

    The reference's output layer is the one that the model starts with.
    """

    width = 1
    role = "reference"
    reads = ("ref_hidden_TH",)

    @property
    def asks(self) -> Quantity:
        return hidden_states

    def prepare(self, layers: OutputLayers) -> KlToReference:
        return replace(self, layer=layers.own())

    def __call__(self, p: Distribution) -> dict[str, Tensor]:
        if self.layer is None:
            raise ValueError("kl_penalty 'full': this model has no copy of the reference's output layer")
        hidden_KH = p.given("ref_hidden_TH").to(p.hidden_KH.dtype)
        return {"kl_T": p.total(p.probabilities_KV * (p.all_logprobs_KV - p.read(hidden_KH, self.layer)))}


@dataclass(frozen=True)
class Divergence(Comparison):
    """Divergence from a teacher, see ``roll.algorithms.quantities``."""

    width = 2
    role = "teacher"
    config: DivergenceConfig
    """With ``logits_topk`` the teacher's top tokens come, else its hidden states."""
    temperature: float
    """Divides the logits of both."""
    teacher_path: str | None = None
    """Folder or hub name of the teacher; ``None``: what it says is on disk."""
    num_ids: int | None = None
    """Ids that both have, from 0 on: the teacher's probabilities are those of them, and with hidden states the model's
    too. ``None``: all."""
    trusts_teacher: bool = False
    """True if Python files that come with the teacher may run."""

    @property
    def asks(self) -> Quantity:
        top = self.config.logits_topk
        return hidden_states if top is None else TopTokens(top, self.num_ids)

    @property
    def reads(self) -> tuple[str, ...]:
        by_hidden = self.config.logits_topk is None
        return ("teacher_hidden_TH",) if by_hidden else ("teacher_ids_TK", "teacher_top_TK", "teacher_tail_T")

    def prepare(self, layers: OutputLayers) -> Divergence:
        if self.teacher_path is None or self.config.logits_topk is not None:
            return self
        return replace(self, layer=layers.of(self.teacher_path, self.trusts_teacher))

    def __call__(self, p: Distribution) -> dict[str, Tensor]:
        own_KV, vocabulary = self._at_temperature(p), p.vocabulary
        if self.config.logits_topk is not None:
            ids_KC, top_KC, tail_K = (p.given(name) for name in self.reads)
            outcomes_KC = torch.cat([top_KC, tail_K[:, None]], dim=1)
            own_KC = torch.cat(tokens_and_tail(own_KV, ids_KC, vocabulary), dim=1)
            return {"divergence_T": divergence_addends(outcomes_KC, own_KC, self.config).sum(-1)}
        if self.layer is None:
            raise ValueError(
                "distillation: got a teacher's hidden states, but this model has no copy of its output layer"
            )
        logits_KV = self.layer(p.given("teacher_hidden_TH")) / self.temperature
        theirs_KV = vocabulary.log_softmax(restrict(logits_KV, self.num_ids, vocabulary))
        return {"divergence_T": p.total(divergence_addends(theirs_KV, own_KV, self.config))}

    def _at_temperature(self, p: Distribution) -> Tensor:
        num_ids = self.num_ids if self.config.logits_topk is None else None
        factor = p.temperature / self.temperature
        if factor == 1:
            return _of_ids(p.all_logprobs_KV, num_ids, p.vocabulary)
        return p.vocabulary.log_softmax(restrict(p.all_logprobs_KV * factor, num_ids, p.vocabulary))


def columns_read(needs: Iterable[Quantity]) -> list[str]:
    """Columns of ``Batch`` that quantities read."""
    return [name for each in needs if isinstance(each, Comparison) for name in each.reads]


def asked_of(role: str, needs: Iterable[Quantity]) -> tuple[Quantity, ...]:
    """What a role of some kind computes where the trained model computes ``needs``."""
    return (logprobs, *(each.asks for each in needs if isinstance(each, Comparison) and each.role == role))


def prepared(needs: Iterable[Quantity], layers: OutputLayers) -> tuple[Quantity, ...]:
    """The quantities, each comparison with its output layer (collective)."""
    return tuple(each.prepare(layers) if isinstance(each, Comparison) else each for each in needs)


def moved(needs: Iterable[Quantity], device: torch.device) -> tuple[Quantity, ...]:
    """The quantities, their output layers on ``device``."""
    return tuple(each.to(device) if isinstance(each, Comparison) else each for each in needs)


def restrict(logits_KV: Tensor, num_ids: int | None, vocabulary: Vocabulary) -> Tensor:
    """The logits with those of ids from ``num_ids`` on masked; the same tensor where there are none."""
    held = logits_KV.shape[1] if num_ids is None else num_ids - vocabulary.start
    if held >= logits_KV.shape[1]:
        return logits_KV
    return logits_KV.masked_fill(torch.arange(logits_KV.shape[1], device=logits_KV.device) >= held, MASKED)


def keep(logits_KV: Tensor, kept: KeptSets | None, start: int) -> Tensor:
    """The logits with those outside of each token's kept set masked; ``start``: id of the first."""
    if kept is None:
        return logits_KV
    return logits_KV.masked_fill(~kept.to(logits_KV.device).mask(start, logits_KV.shape[1]), MASKED)


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
