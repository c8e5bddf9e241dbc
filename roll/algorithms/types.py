"""Values between a strategy and a loss (log-probs in, one scalar share out), and checks of a batch's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll.data.batch import Batch, from_arrays, to_arrays, token_index
from roll.data.columns import UNKNOWN, Column, columns_of, is_per_token
from roll.data.stored import Arrays, Block, Stored, joined, may_be_stored, store


@dataclass(frozen=True)
class TokenScores:
    """What a model computes for a batch's tokens; flat [T] tensors aligned with the token that they describe."""

    logprobs_T: Tensor | None = None
    """float32 log p(token | prefix) at the sampling temperature; 0 where the loss mask is 0."""
    entropy_T: Tensor | None = None
    """float32 entropy (nats) of the distribution that the token was drawn from; 0 where the loss mask is 0."""
    values_T: Tensor | None = None
    """float32 value of the state in which the token was chosen (critic only); 0 where the loss mask is 0."""
    kl_T: Tensor | None = None
    """float32 KL (nats) of the model's distribution to the reference's, over the vocabulary; 0 where the loss mask
    is 0."""
    top1_T: Tensor | None = None
    """float32 1 where the model finds no token likelier than this one, else 0; 0 where the loss mask is 0."""
    prob_square_sum_T: Tensor | None = None
    """float32 sum of the squared probabilities of the distribution that the token was drawn from; 0 where the loss mask
    is 0."""
    divergence_T: Tensor | None = None
    """float32 divergence (nats) of the model from its teacher, see ``roll.algorithms.quantities``; 0 where the loss
    mask is 0."""
    top_ids_TK: Tensor | None = None
    """int32 [T, K] the likeliest tokens (a teacher's), descending."""
    top_logprobs_TK: Tensor | None = None
    """float32 [T, K] their log-probabilities."""
    tail_T: Tensor | None = None
    """float32 log of the probability of all other tokens together."""
    chunk_T: Annotated[Tensor | None, Column(unset=UNKNOWN)] = None
    """int64 the chunk of text (``roll.algorithms.distillation``) that the log-prob is an equal part of, for a
    teacher with another tokenizer."""
    hidden_TH: Tensor | None = None
    """float32 [T, H] final hidden state that predicts the token (a reference's); 0 where the loss mask is 0."""
    experts_TE: Annotated[Tensor | None, Column(unset=UNKNOWN)] = None
    """int16 [T, E] the experts that each token itself went through, layer by layer; -1 where that is not known."""
    importance_T: Tensor | None = None
    """float32 importance weights to the rollout's log-probs, see ``Batch``."""
    rejected_T: Tensor | None = None
    """bool the tokens that filters turn down, see ``Batch``."""
    mismatch_BVK: Tensor | None = None
    """float64 sums of the differences to the rollout's log-probs, see ``Batch``."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of quantities (``roll.algorithms.quantities``) that have no field here, by name."""

    @classmethod
    def of(cls, **columns: Tensor) -> TokenScores:
        """Scores from columns of any names; those without a field become ``others``."""
        known = {f.name for f in fields(cls)}
        others = {name: columns.pop(name) for name in list(columns) if name not in known}
        return cls(**columns, others=others)

    @classmethod
    def gathered(cls, num_tokens: int, places: Iterable[Tensor], parts: Iterable[TokenScores]) -> TokenScores:
        """The scores of a batch from those of its parts, each at its places; in host memory.

        Parts past the last of the places are padding.
        """
        columns: dict[str, Tensor] = {}
        for part, place in zip_longest(parts, places):
            for name, values in part.columns.items():
                if name not in columns:
                    unset = columns_of(cls).get(name, Column()).unset
                    columns[name] = torch.full((num_tokens, *values.shape[1:]), unset, dtype=values.dtype)
                if place is not None and len(place):
                    columns[name][place] = values.cpu()
        return cls.of(**columns)

    @classmethod
    def joined(cls, lengths_B: Tensor, rows: Sequence[Tensor], parts: Sequence[TokenScores]) -> TokenScores:
        """The scores of a batch from stored ones of its parts, which have these rows of it; others are unset."""
        own = columns_of(cls)
        rows, parts = zip(*((some, part) for some, part in zip(rows, parts, strict=True) if len(some)), strict=True)
        columns: dict[str, Any] = {}
        for name in parts[0].as_they_are:
            of_parts = [part.as_they_are[name] for part in parts]
            if name == "mismatch_BVK":
                most = max(part.shape[1] for part in of_parts)
                found = columns[name] = of_parts[0].new_zeros(len(lengths_B), most, of_parts[0].shape[2])
                for some, part in zip(rows, of_parts, strict=True):
                    found[some, : part.shape[1]] = part
            elif name == "rejected_T":
                columns[name] = rejected_T = of_parts[0].new_zeros(int(lengths_B.sum()))
                for some, part in zip(rows, of_parts, strict=True):
                    rejected_T[token_index(some, lengths_B)] = part
            else:
                column = joined(of_parts, lengths_B, rows, own.get(name, Column()).unset)
                columns[name] = column if name in own else column.value  # ``others`` are read without a field
        return cls.of(**columns)

    def stored(self, lengths_B: Tensor, put: Callable[[Arrays], Block]) -> TokenScores:
        """The same, its columns over tokens in a block, but for the rejected ones, mostly equal; of rows of these
        lengths."""
        here: dict[str, Any] = {"mismatch_BVK": self.mismatch_BVK, "rejected_T": self.rejected_T}
        return TokenScores.of(**store(replace(self, rejected_T=None).columns, lengths_B, put) | here)

    @property
    def columns(self) -> dict[str, Tensor]:
        """All columns over tokens that are set, by name, in place."""
        own = {name: getattr(self, name) for name in columns_of(TokenScores) if is_per_token(name)}
        return {name: column for name, column in own.items() if column is not None} | {**self.others}

    @property
    def as_they_are(self) -> dict[str, Any]:
        """All columns that are set, by name; stored ones are not fetched."""
        own = {name: column for name, column in vars(self).items() if name != "others" and column is not None}
        return {**own, **self.others}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as ``Batch`` does; scores without gradient, in host memory."""
        return from_arrays, (TokenScores.of, to_arrays(self.as_they_are))


may_be_stored(*filter(is_per_token, columns_of(TokenScores)))(TokenScores)


@dataclass(frozen=True)
class LossContext:
    """Counts over the whole optimizer step (all micro-batches, all data-parallel ranks): the loss's denominators."""

    num_tokens: float
    """Tokens with loss_mask 1."""
    num_sequences: float
    """Sequences with at least one such token. A row counts by its ``sample_weight_B``, so that the rows of one
    episode are one sequence."""
    max_length: float
    """Longest count of loss tokens in a sequence (the normaliser of seq-mean-token-sum-norm)."""
    optimizer_step: int = 0
    """Optimizer steps done before this one."""

    @classmethod
    def of(cls, batch: Batch) -> LossContext:
        """The counts of a batch that is a whole optimizer step, or that is measured as one."""
        tokens_B = batch.loss_tokens_B.double()
        weight_B = torch.ones_like(tokens_B) if batch.sample_weight_B is None else batch.sample_weight_B
        return cls(float(tokens_B.sum()), float(weight_B[tokens_B > 0].sum()), float((tokens_B / weight_B).max()))


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's share of the loss; the shares of all micro-batches and ranks add up to the step's loss."""

    loss: Tensor
    """Scalar with gradient, already divided by the global denominators of ``LossContext``."""
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    """Scalars without gradient that add up in the same way, but for those whose names end in ``_max``: of them the
    greatest counts (``add_metrics``)."""


def is_maximum(name: str) -> bool:
    """Tells whether of a metric's shares the greatest counts, not the sum."""
    return name.endswith("_max")


def add_metrics(totals: dict[str, Tensor | float], metrics: Mapping[str, Tensor | float]) -> None:
    """Adds the metrics of one more micro-batch."""
    for name, value in metrics.items():
        if name in totals and is_maximum(name):
            totals[name] = torch.maximum(torch.as_tensor(totals[name]), torch.as_tensor(value))
        else:
            totals[name] = totals.get(name, 0.0) + value


LossFn: TypeAlias = Callable[[TokenScores, Batch, LossContext], LossOutput]


def require_columns(batch: Batch, user: str, *names: str) -> tuple[Tensor, ...]:
    """The named columns of the batch.

    Args:
        user: Who needs them, with its configuration key, for the message.

    Raises:
        ValueError: a column is not set.
    """
    if missing := [name for name in names if vars(batch)[name] is None]:
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
        if isinstance(stored := vars(batch)[name], Stored) and stored.is_finite:
            continue
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
