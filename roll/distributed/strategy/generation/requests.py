"""Base of every generator, whatever engine is behind it: requests, counters, what is on the device."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from roll.data.requests import GenerateRequest
from roll.distributed.strategy.base import States

_OF_GENERATORS = States.WEIGHTS | States.CACHE
_COLDEST = 1e-30
"""Temperature below which logits that are divided by it leave the range of float32."""


class EngineStoppedError(RuntimeError):
    """The engine failed or was shut down; ``__cause__`` holds the failure."""


@dataclass
class Counters:
    """Running totals since the start."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    shared_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finished: int = 0


class ResidentStates:
    """States of a generator that are on its device. It runs requests when all are."""

    def __init__(self) -> None:
        self.away = States(0)

    def leave(self, what: States) -> States:
        """Notes that ``what`` leaves; returns what of it was there."""
        if States.WEIGHTS in what:
            what |= States.CACHE
        leaving = what & _OF_GENERATORS & ~self.away
        self.away |= leaving
        return leaving

    def come_back(self, what: States) -> States:
        """Notes that ``what`` comes back; returns what of it was away."""
        coming = what & self.away
        self.away &= ~coming
        return coming


def scratch_folder(num_bytes: int) -> Path | None:
    """Folder for handing files of that size to an engine: shared memory, or ``None`` (on disk) if that has no room."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * num_bytes
    return memory if fits else None


def check_request(request: GenerateRequest, *, vocab_size: int, sequence_length: int) -> int:
    """Checks a request before an engine sees it, where an error could take other requests along.

    Args:
        vocab_size: token ids must be below it.

    Returns:
        The most tokens to sample: ``max_new_tokens``, or what is left of the context.

    Raises:
        ValueError: the prompt is empty or too long, a token id is outside the vocabulary, or a sampling parameter is
            out of range.
    """
    prompt, params = request.prompt_ids, request.params
    first = params.first_token_temperature
    where = f"request {request.request_id!r}"
    if prompt.ndim != 1 or len(prompt) == 0:
        raise ValueError(f"{where}: prompt_ids has shape {prompt.shape}, expected [prompt_len] with at least 1")
    if len(prompt) >= sequence_length:
        raise ValueError(
            f"{where}: the prompt has {len(prompt)} tokens, sequence_length is {sequence_length}; "
            "expected a shorter prompt, with room for at least one new token"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(f"{where}: token ids from {prompt.min()} to {prompt.max()}, expected 0 to {vocab_size - 1}")
    for name, value, holds, expected in (
        ("max_new_tokens", params.max_new_tokens, params.max_new_tokens >= 1, "at least 1"),
        (
            "temperature",
            params.temperature,
            params.temperature == 0 or _is_warm(params.temperature),
            f"0 (greedy), or at least {_COLDEST}",
        ),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "at least 0 and at most 1"),
        ("first_token_temperature", first, first is None or _is_warm(first), f"None, or at least {_COLDEST}"),
        ("repetition_penalty", params.repetition_penalty, params.repetition_penalty > 0, "above 0"),
        ("presence_penalty", params.presence_penalty, -2 <= params.presence_penalty <= 2, "-2 to 2"),
        ("frequency_penalty", params.frequency_penalty, -2 <= params.frequency_penalty <= 2, "-2 to 2"),
        ("stop", params.stop, all(params.stop), "strings that are not empty"),
    ):
        if not holds:
            raise ValueError(f"{where}: params.{name} is {value!r}, expected {expected}")
    return min(params.max_new_tokens, sequence_length - len(prompt))


def _is_warm(temperature: float) -> bool:
    return _COLDEST <= temperature < float("inf")
