"""Sampling inside SGLang: the sampler of ``hf_infer`` as SGLang's own.

SGLang's sampler has no seeds outside its deterministic mode, applies repetition penalties to sampled tokens only, and
reports log-probabilities after them; a rollout's must be those that a trainer computes again. Registering a sampler and
giving requests parameters of one's own are SGLang's extension points.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.models.sampling import SamplerRows, sample

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler

BACKEND = "pytorch"
"""The sampler goes by the name of SGLang's plain one, which it replaces: on a CPU, SGLang insists on that name."""

SEEN, COUNT = "__seen__", "__count__"
"""Keys under which a request's parameters keep the tokens that its penalties fall on."""


def register() -> None:
    """Replaces SGLang's sampler in this process."""
    from sglang.srt.layers.sampler import register_sampler_backend

    register_sampler_backend(BACKEND, _make_sampler)


def request_marker() -> str:
    """Mark that a request must carry so that SGLang keeps its parameters next to its row of the batch.

    They come with a logit processor, SGLang's way to change logits; this one is never called.
    """
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return DisallowedTokensLogitsProcessor.to_str()


def _make_sampler() -> Sampler:
    from sglang.srt.layers.sampler import Sampler

    class RolloutSampler(Sampler):
        """Samples requests that bring parameters of ours; leaves SGLang's own, such as health checks, to SGLang."""

        batch: SampledBatch | None = None

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: Tensor,
            *,
            logprob_logits: Tensor | None = None,
        ) -> Tensor:
            params = sampling_info.custom_params
            if params is None:
                return super().forward(
                    logits_output,
                    sampling_info,
                    return_logprob,
                    top_logprobs_nums,
                    token_ids_logprobs,
                    positions,
                    logprob_logits=logprob_logits,
                )
            logits_BV = logits_output.next_token_logits
            if self.batch is None or not self.batch.holds(params):
                self.batch = SampledBatch(params, logits_BV.device, logits_BV.shape[1])
            tokens_B, logits_output.next_token_logprobs = self.batch.draw(logits_BV, positions)
            self._sync_token_ids_across_tp(tokens_B, sampling_info)
            return tokens_B

    return RolloutSampler()


class SampledBatch:
    """The sampling state of a fixed list of requests, made anew when one joins or leaves.

    Everything stays on the device, in the order of its kernels: SGLang starts a step before it has read the tokens of
    the one before.

    Args:
        params: of each request ``seed`` (unsigned 64 bits), ``prompt_len``, ``temperature``, ``top_k``, ``top_p``,
            ``min_p``, ``first_token_temperature``, ``first_token_top_k``, ``repetition_penalty``, ``presence_penalty``
            and ``frequency_penalty``, and SGLang's own ``__req__``.
    """

    def __init__(self, params: list[dict[str, Any]], device: torch.device, vocab_size: int) -> None:
        self._params = list(params)
        self._rows = SamplerRows.of(params, device)
        self._seed_B = torch.tensor([_signed(p["seed"]) for p in params], device=device)
        self._last_prompt_position_B = torch.tensor([p["prompt_len"] - 1 for p in params], device=device)
        shape = (vocab_size, device)
        self._seen_BV = None if self._rows.penalty_B is None else self._kept(SEEN, _seen, *shape)
        self._count_BV = None if self._rows.presence_B is None else self._kept(COUNT, _counted, *shape)

    def holds(self, params: list[dict[str, Any]]) -> bool:
        return len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True))

    def draw(self, logits_BV: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """One token and its log-probability per row.

        Args:
            position_B: of the last token that the model has seen.
        """
        index_B = position_B.to(torch.int64) - self._last_prompt_position_B
        uniform_B = uniforms(self._seed_B, index_B)
        tokens_B, logprobs_B = sample(logits_BV, self._rows, uniform_B, self._seen_BV, index_B, self._count_BV)
        # A prompt that is prefilled in parts has a negative index until its last; what is drawn then is no token.
        is_token_B1 = (index_B >= 0)[:, None]
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, tokens_B[:, None], self._seen_BV.gather(1, tokens_B[:, None]) | is_token_B1)
        if self._count_BV is not None:
            self._count_BV.scatter_add_(1, tokens_B[:, None], is_token_B1.int())
        return tokens_B, logprobs_B

    def _kept(self, key: str, make: Callable[[Any, int], Tensor], vocab_size: int, device: torch.device) -> Tensor:
        """[B, V], made of requests that are new. Each keeps its row, as a view, for the next batch that it is in."""
        rows = [p[key] if key in p else make(p["__req__"], vocab_size).to(device) for p in self._params]
        kept_BV = torch.stack(rows)
        for p, kept_V in zip(self._params, kept_BV, strict=True):
            p[key] = kept_V
        return kept_BV


def _seen(request: Any, vocab_size: int) -> Tensor:
    """bool: tokens of the prompt, a picture's by the vocabulary's numbers, and the completion."""
    return torch.tensor([*request.origin_input_ids_unpadded, *request.output_ids]).bincount(minlength=vocab_size) > 0


def _counted(request: Any, vocab_size: int) -> Tensor:
    """int32: how often the completion has each token."""
    return torch.tensor(request.output_ids, dtype=torch.int64).bincount(minlength=vocab_size).int()


def uniforms(seed_B: Tensor, index_B: Tensor) -> Tensor:
    """``roll.models.sampling.uniforms`` on a device: int64 holds the bits of unsigned 64-bit numbers."""
    bits_B = _mix(_mix(seed_B + _GOLDEN) + (index_B + 1) * _GOLDEN)
    return (_shift(bits_B, 41).to(torch.float32) + 0.5) * 2.0**-23


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """To the right, filling up with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The signed 64-bit number with the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
