"""Many requests or completions as one value: arrays that hold all their tokens, and lists of what is one per request.

An array costs tens of microseconds to pickle, however short it is; so a batch of them travels as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from roll.data.arrays import ExpertArray, FloatArray, IntArray
from roll.data.experts import join_experts
from roll.data.requests import Completion, FinishReason, GenerateRequest, Runs, SamplingParams

_BUT_SEED = attrgetter(*(field.name for field in fields(SamplingParams) if field.name != "seed"))


@dataclass(frozen=True)
class FlatRequests:
    """Requests on their way to an engine."""

    ids: list[str]
    prompt_ids: IntArray
    """All prompts, one after the other."""
    lengths: list[int]
    """Tokens of each prompt."""
    params: list[SamplingParams]
    """Different ones, without their seeds."""
    uses: list[int]
    """Index into ``params`` of each request."""
    seeds: list[int | None]
    recorded: list[Runs]

    @classmethod
    def of(cls, requests: Mapping[str, GenerateRequest]) -> FlatRequests:
        """By the ids under which they travel."""
        numbers: dict[tuple[Any, ...], int] = {}
        params: list[SamplingParams] = []
        uses = []
        for request in requests.values():
            wanted = request.params
            number = numbers.setdefault(_BUT_SEED(wanted), len(params))
            if number == len(params):
                params.append(replace(wanted, seed=None))
            uses.append(number)
        return cls(
            ids=list(requests),
            prompt_ids=join([request.prompt_ids for request in requests.values()], np.int64),
            lengths=[len(request.prompt_ids) for request in requests.values()],
            params=params,
            uses=uses,
            seeds=[request.params.seed for request in requests.values()],
            recorded=[request.recorded for request in requests.values()],
        )

    def __iter__(self) -> Iterator[GenerateRequest]:
        prompts = _cut(self.prompt_ids, self.lengths)
        for name, prompt, use, seed, recorded in zip(
            self.ids, prompts, self.uses, self.seeds, self.recorded, strict=True
        ):
            yield GenerateRequest(name, prompt, replace(self.params[use], seed=seed), recorded)


@dataclass(frozen=True)
class FlatCompletions:
    """Completions on their way back."""

    ids: list[str]
    token_ids: IntArray
    """All tokens, one completion after the other."""
    logprobs: FloatArray
    versions: IntArray
    lengths: list[int]
    """Tokens of each completion."""
    finish_reasons: list[FinishReason]
    experts: ExpertArray | None = None
    """Of prompts and answers, one completion after the other."""
    num_routed: list[int] | None = None
    """Rows of ``experts`` of each completion."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> FlatCompletions:
        experts, num_routed = join_experts([completion.experts for completion in completions])
        return cls(
            ids=[completion.request_id for completion in completions],
            token_ids=join([completion.token_ids for completion in completions], np.int64),
            logprobs=join([completion.logprobs for completion in completions], np.float32),
            versions=join([completion.versions for completion in completions], np.int64),
            lengths=[len(completion.token_ids) for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
            experts=experts,
            num_routed=num_routed,
        )

    def __iter__(self) -> Iterator[Completion]:
        columns = (_cut(values, self.lengths) for values in (self.token_ids, self.logprobs, self.versions))
        experts: Iterable[ExpertArray | None] = [None] * len(self.ids)
        if self.experts is not None and self.num_routed is not None:
            experts = (part if len(part) else None for part in _cut(self.experts, self.num_routed))
        for name, token_ids, logprobs, versions, reason, routed in zip(
            self.ids, *columns, self.finish_reasons, experts, strict=True
        ):
            yield Completion(name, token_ids, logprobs, reason, versions, routed)


def join(arrays: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    """One array of that kind, and none of an empty one that is of another."""
    return np.concatenate(arrays, dtype=kind, casting="unsafe") if arrays else np.zeros(0, dtype=kind)


def _cut(values: np.ndarray, lengths: Iterable[int]) -> Iterator[np.ndarray]:
    """Parts of these lengths, copied: one that is kept for long must not keep the others."""
    start = 0
    for length in lengths:
        yield values[start : start + length].copy()
        start += length
