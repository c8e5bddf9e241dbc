"""Drawing one token per row, each row with its own parameters and its own random stream.

Axes: B rows, V vocabulary. Randomness is counter-based: the uniform number behind a token is a hash of the request's
seed and the token's index, so a request samples the same tokens whoever else is in the batch and whenever it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roll.data.columns import IntArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALL = 1 << 40  # more tokens than any vocabulary has
_WIDEST = 512
"""Tokens of a row up to which a sum over them, padded to a multiple of ``_LANES``, is that over a vocabulary to the
last bit: its zeros only add zeros to the same partial sums."""
_LANES = 128


def uniforms(seeds_B: npt.NDArray[np.uint64], index_B: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """One number in (0, 1) per (seed, index), from SplitMix64 (Steele, Lea and Flood 2014), the seed mixed first.

    The numbers are odd multiples of 2^-24: exact in float32, never 0 and never 1.
    """
    bits = _mix(_mix(seeds_B + _GOLDEN) + (index_B + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class SamplerRows:
    """The sampling parameters of B rows. A field is ``None`` when no row needs it, and costs nothing then."""

    temperature_B: Tensor | None
    """float32; 1 for greedy rows. ``None``: all 1."""
    greedy_B: Tensor | None
    """bool: take the most likely token."""
    first_temperature_B: Tensor | None
    """float32: temperature of the first token. ``None``: that of the others."""
    truncated_R: Tensor | None
    """int64: the rows with a top-k, a top-p or a min-p."""
    top_k_R: Tensor | None
    first_top_k_R: Tensor | None
    """int64: of the first token. ``None``: that of the others."""
    top_p_R: Tensor | None
    min_p_R: Tensor | None
    """``None``: all 0."""
    most: int
    """No truncated row keeps more tokens."""
    max_kept_R: Tensor | None
    """int64: the kept sets of a row are told up to so many tokens. ``None``: of no row."""
    penalty_B: Tensor | None
    """float32: repetition penalty."""
    presence_B: Tensor | None
    frequency_B: Tensor | None
    """float32: taken off the logit of a token that was sampled, once and each time. Both or neither."""

    @staticmethod
    def of(params: Sequence[Mapping[str, Any]], device: torch.device) -> SamplerRows:
        """Of requests, one per row, whose parameters go by the names of ``SamplingParams``."""

        def column(name: str) -> list[Any]:
            return [each[name] for each in params]

        return SamplerRows.build(
            column("temperature"),
            column("top_k"),
            column("top_p"),
            column("repetition_penalty"),
            device,
            min_p=column("min_p"),
            first_temperature=column("first_token_temperature"),
            first_top_k=column("first_token_top_k"),
            presence=column("presence_penalty"),
            frequency=column("frequency_penalty"),
            max_kept=[each.get("max_kept", 0) for each in params],
        )

    @staticmethod
    def build(
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        penalty: Sequence[float],
        device: torch.device,
        *,
        min_p: Sequence[float] | None = None,
        first_temperature: Sequence[float | None] | None = None,
        first_top_k: Sequence[int | None] | None = None,
        presence: Sequence[float] = (),
        frequency: Sequence[float] = (),
        max_kept: Sequence[int] = (),
    ) -> SamplerRows:
        """From one value per row; temperature 0 is greedy in any case; top_k <= 0, top_p >= 1, min_p 0 keep everything.

        ``presence`` and ``frequency`` come together; without them there are no such penalties.
        """
        least = [0.0] * len(temperature) if min_p is None else min_p
        first, first_k = list(temperature), list(top_k)
        if first_temperature is not None:
            first = [t if hot is None or t == 0 else hot for t, hot in zip(temperature, first_temperature, strict=True)]
        if first_top_k is not None:
            first_k = [k if own is None else own for k, own in zip(top_k, first_top_k, strict=True)]

        def tensor(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def bounds(most: Sequence[int]) -> list[int]:
            return [min(most[i], _ALL) if most[i] > 0 else _ALL for i in rows]

        truncated = [max(top_k[i], first_k[i]) > 0 or top_p[i] < 1 or least[i] > 0 for i in range(len(temperature))]
        # A greedy row takes the maximum, which no truncation removes.
        rows = [i for i, t in enumerate(temperature) if t > 0 and truncated[i]]
        return SamplerRows(
            temperature_B=tensor([t or 1.0 for t in temperature])
            if any(t not in (0, 1) for t in temperature)
            else None,
            greedy_B=tensor([t == 0 for t in temperature], torch.bool) if 0 in temperature else None,
            first_temperature_B=tensor([t or 1.0 for t in first]) if first != list(temperature) else None,
            truncated_R=tensor(rows, torch.int64) if rows else None,
            top_k_R=tensor(bounds(top_k), torch.int64) if rows else None,
            first_top_k_R=tensor(bounds(first_k), torch.int64) if any(first_k[i] != top_k[i] for i in rows) else None,
            top_p_R=tensor([top_p[i] for i in rows]) if rows else None,
            min_p_R=tensor([least[i] for i in rows]) if any(least[i] > 0 for i in rows) else None,
            most=max([*bounds(top_k), *bounds(first_k)], default=_ALL),
            max_kept_R=tensor([max_kept[i] for i in rows], torch.int64) if rows and any(max_kept) else None,
            penalty_B=tensor(penalty) if any(p != 1 for p in penalty) else None,
            presence_B=tensor(presence) if any(presence) or any(frequency) else None,
            frequency_B=tensor(frequency) if any(presence) or any(frequency) else None,
        )

    @property
    def counts_tokens(self) -> bool:
        """The first token is drawn otherwise than those behind it."""
        return self.first_temperature_B is not None or self.first_top_k_R is not None

    def temperature(self, index_B: Tensor | None) -> Tensor | None:
        """float32 [B]: temperature of each row's token of this index; ``None``: all 1."""
        if self.first_temperature_B is None:
            return self.temperature_B
        assert index_B is not None
        later_B = torch.ones_like(self.first_temperature_B) if self.temperature_B is None else self.temperature_B
        return torch.where(index_B == 0, self.first_temperature_B, later_B)


def sample(
    logits_BV: Tensor,
    rows: SamplerRows,
    uniform_B: Tensor,
    seen_BV: Tensor | None = None,
    index_B: Tensor | None = None,
    count_BV: Tensor | None = None,
    kept: dict[int, IntArray] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    Args:
        logits_BV: the model's logits, any float dtype.
        uniform_B: float32 in (0, 1), one per row.
        seen_BV: bool, tokens of the prompt and the completion so far; needed when ``rows.penalty_B`` is set.
        index_B: how many tokens of the completion each row has; needed when ``rows.counts_tokens``.
        count_BV: int32, how often the completion so far has each token; needed when ``rows.presence_B`` is set.
        kept: gets, by row, the tokens that truncation has left, of rows with ``max_kept`` that have no more of them.

    Returns:
        tokens_B (int64) and logprobs_B (float32): log-softmax of logits / temperature at the token, before penalties,
        top-k, top-p and min-p, which is what a trainer computes again; of a row in ``kept``, that among its kept set.
    """
    logits_BV, temperature_B = logits_BV.float(), rows.temperature(index_B)
    logprobs_BV = _log_softmax(logits_BV, temperature_B)
    choice_BV = logprobs_BV
    if rows.penalty_B is not None or rows.presence_B is not None:
        choice_BV = _log_softmax(_penalised(logits_BV, rows, seen_BV, count_BV), temperature_B)
    all_truncated = rows.truncated_R is not None and len(rows.truncated_R) == len(choice_BV)
    tokens_B = (
        torch.zeros_like(uniform_B, dtype=torch.int64) if all_truncated else _invert_cdf(choice_BV.exp(), uniform_B)
    )
    if rows.truncated_R is not None:
        index_R = None if index_B is None else index_B[rows.truncated_R]
        left = _Left.of(choice_BV[rows.truncated_R], rows, index_R)
        tokens_B = tokens_B.index_copy(0, rows.truncated_R, left.draw(uniform_B[rows.truncated_R]))
    if rows.greedy_B is not None:
        tokens_B = torch.where(rows.greedy_B, choice_BV.argmax(-1), tokens_B)
    drawn_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    if rows.max_kept_R is not None and kept is not None:
        assert rows.truncated_R is not None
        mass_R, own = left.tell(rows.max_kept_R)
        drawn_B = drawn_B.index_add(0, rows.truncated_R, -mass_R)
        places = rows.truncated_R.tolist()
        kept |= {places[row]: ids for row, ids in own.items()}
    return tokens_B, drawn_B


def _penalised(logits_BV: Tensor, rows: SamplerRows, seen_BV: Tensor | None, count_BV: Tensor | None) -> Tensor:
    """The repetition penalty divides, then presence and frequency are taken off (the order of vLLM)."""
    if rows.penalty_B is not None:
        assert seen_BV is not None
        penalty_B1 = rows.penalty_B[:, None]
        penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if rows.presence_B is not None and rows.frequency_B is not None:
        assert count_BV is not None
        logits_BV = logits_BV - rows.frequency_B[:, None] * count_BV - rows.presence_B[:, None] * (count_BV > 0)
    return logits_BV


def _log_softmax(logits_BV: Tensor, temperature_B: Tensor | None) -> Tensor:
    return torch.log_softmax(logits_BV if temperature_B is None else logits_BV / temperature_B[:, None], dim=-1)


def _invert_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds u times the total: never one of weight 0, as u < 1."""
    cdf_BV = weights_BV.cumsum(-1)
    threshold_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    # The clamp matters only for NaN, which must not become an index outside; its log-probability stays NaN.
    return torch.searchsorted(cdf_BV, threshold_B1, right=True)[:, 0].clamp(max=weights_BV.shape[1] - 1)


@dataclass(frozen=True)
class _Left:
    """What truncation leaves of R rows."""

    probs_RV: Tensor
    """By descending probability, which sum to 1 before top-p; 0: not left."""
    logprobs_RV: Tensor
    token_RV: Tensor

    @classmethod
    def of(cls, logprobs_RV: Tensor, rows: SamplerRows, index_R: Tensor | None) -> _Left:
        """Min-p and top-k first, then top-p of what is left (the order of vLLM)."""
        assert rows.top_k_R is not None and rows.top_p_R is not None
        top_k_R = rows.top_k_R
        if rows.first_top_k_R is not None:
            assert index_R is not None
            top_k_R = torch.where(index_R == 0, rows.first_top_k_R, top_k_R)
        sorted_RV, token_RV = _likeliest(logprobs_RV, rows.most)
        rank_V = torch.arange(sorted_RV.shape[1], device=sorted_RV.device)
        probs_RV = sorted_RV.exp() * (rank_V < top_k_R[:, None])
        if rows.min_p_R is not None:
            probs_RV = probs_RV * (probs_RV >= rows.min_p_R[:, None] * probs_RV[:, :1])
        probs_RV = probs_RV / probs_RV.sum(-1, keepdim=True)
        more_likely_RV = probs_RV.cumsum(-1) - probs_RV
        keep_RV = (more_likely_RV < rows.top_p_R[:, None]) | (rank_V == 0)
        return cls(probs_RV * keep_RV, sorted_RV, token_RV)

    def draw(self, uniform_R: Tensor) -> Tensor:
        """One token per row."""
        picked_R = _invert_cdf(self.probs_RV, uniform_R)
        return self.token_RV.gather(1, picked_R[:, None])[:, 0]

    def tell(self, most_R: Tensor) -> tuple[Tensor, dict[int, IntArray]]:
        """The log of what each row's set has of the probability, and the set; 0 and none of a set of more tokens."""
        left_RV = self.probs_RV > 0
        size_R = left_RV.sum(-1)
        told_R = size_R <= most_R
        mass_R = self.logprobs_RV.masked_fill(~left_RV, -torch.inf).logsumexp(-1)
        ids = self.token_RV[left_RV & told_R[:, None]].cpu().numpy()
        rows, sizes = told_R.nonzero()[:, 0].tolist(), size_R[told_R].tolist()
        return torch.where(told_R, mass_R, 0.0), dict(
            zip(rows, np.split(ids, np.cumsum(sizes, dtype=np.int64)), strict=False)
        )


def _likeliest(logprobs_RV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Values and ids in descending order, of equal ones the lowest id first; where few are kept, only as many.

    So few are found without sorting the vocabulary: a number that holds value and id has no ties.
    """
    width = -(-most // _LANES) * _LANES
    if most > _WIDEST or width >= logprobs_RV.shape[1]:
        return logprobs_RV.sort(dim=-1, descending=True, stable=True)
    bits_RV = (logprobs_RV + 0.0).view(torch.int32)  # no -0.0
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).long()
    id_V = torch.arange(logprobs_RV.shape[1], device=logprobs_RV.device)
    keys_RW = ((ordered_RV << 32) - id_V).topk(width, dim=-1).values
    token_RW = -keys_RW & 0xFFFFFFFF
    return logprobs_RV.gather(1, token_RW), token_RW
