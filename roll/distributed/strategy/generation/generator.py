"""Generation for any engine: requests, weight updates and offloading.

An engine brings a few operations, which answer by futures because it lives on a thread, a loop or a process of its
own: start and stop, sample and abort, hold and go on, load weights or an adapter and use them, move memory. What is
here is the same for all of them: requests are checked before an engine sees them, an update is received and checked
before an engine changes anything, weights change between two steps, nothing runs while a hold is on or a part of the
memory is away, and who fails is reported and stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from roll.data.batch import Batch
from roll.data.identity import items_along, vocabulary_ids
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.evidence import PROMPT, TEMPERATURE, Sketch, probe_prompt
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.weights.buckets import WeightBucket
from roll.distributed.weights.receiver import UpdateStream, receive, tensors_of
from roll.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_OF_GENERATORS = States.WEIGHTS | States.CACHE
_COLDEST = 1e-30
"""Temperature below which logits that are divided by it leave the range of float32."""


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


def check_request(request: GenerateRequest, *, vocab_size: int, sequence_length: int, pictures: bool = False) -> int:
    """Checks a request before an engine sees it, where an error could take other requests along.

    Args:
        vocab_size: token ids must be below it.
        pictures: the prompt may have some.

    Returns:
        The most tokens to sample: ``max_new_tokens``, or what is left of the context.

    Raises:
        ValueError: the prompt is empty or too long, a token id is outside the vocabulary or of no picture of the
            request, or a sampling parameter is out of range.
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
    if pictures and prompt.min() < 0:
        if prompt[-1] < 0:
            raise ValueError(f"{where}: the prompt ends within a picture, expected a token of the vocabulary behind it")
        try:
            items_along(prompt, request.items)
        except ValueError as error:
            raise ValueError(f"{where}: prompt_ids: {error}") from error
        prompt = vocabulary_ids(prompt)
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
        (
            "max_kept",
            params.max_kept,
            not params.max_kept or _is_plain(params),
            "0 with penalties, or a first temperature",
        ),
        ("stop", params.stop, all(params.stop), "strings that are not empty"),
    ):
        if not holds:
            raise ValueError(f"{where}: params.{name} is {value!r}, expected {expected}")
    return min(params.max_new_tokens, sequence_length - len(prompt))


def _is_plain(params: SamplingParams) -> bool:
    """Tokens are drawn from the softmax of the logits at the temperature, or a part of it: a trainer has the same."""
    penalties = params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty
    return not any(penalties) and params.first_token_temperature is None


def _is_warm(temperature: float) -> bool:
    return _COLDEST <= temperature < float("inf")


PlanT = TypeVar("PlanT")
"""Findings of an engine's check of an update, for loading it."""

_LOCK_POLL_S = 0.005
_UNKNOWN = -1
_MASK64 = (1 << 64) - 1


class Generator(ABC, Generic[PlanT]):
    """A ``GenerateStrategy``. Call ``setup`` first and ``shutdown`` last. The methods without a body are the engine's.

    Its coroutines may be awaited on any event loop; ``offload``, ``onload`` and ``shutdown`` block.
    """

    name: ClassVar[str]
    drops_weights: bool = False
    """Weights that leave the device are lost, as they are sent again before the next use."""
    can_offload: bool = True
    """``offload`` frees device memory; otherwise it only holds the requests."""
    vocab_size: int
    """Set by ``start``."""
    streams_from_device = True
    """Updates after the first that lie on the device are loaded bucket by bucket, see ``UpdateStream``."""

    def __init__(self, context: StrategyContext) -> None:
        if context.head != "lm":
            raise ValueError(f"{context.role}: {self.name} has no {context.head!r} head; expected 'lm'")
        self.context = context
        self.counters = Counters()
        self.weight_version = 0
        """Version that completions report which start from now on."""
        self._stream = UpdateStream(self.check_weights, from_device=self.streams_from_device)
        self._states = ResidentStates()
        self._open: set[str] = set()
        self._begun: set[str] = set()
        """Those of them that the engine has."""
        self._given_up: set[str] = set()
        """Those of them that were aborted before the engine had them."""
        self._lost_weights = False
        """They were dropped, and not sent again yet."""
        self._draining = False
        """Nothing more is begun before the next update."""
        self._holds: set[str] = set()
        self._gate = threading.Lock()
        """Guards the sets above; the engine hears of holds in the order in which they change."""
        self._exclusive = threading.Lock()
        """Held by an update or a move of memory: one at a time."""
        self._stopped: str | None = None
        # The stream of seeds for requests that bring none: it differs by worker and repeats with the run's seed.
        self._seeds = random.Random(f"{context.seed}/{context.role}/{context.rank}")

    @abstractmethod
    def start(self) -> None:
        """Loads the model and starts the engine.

        Raises:
            ValueError: the model cannot be loaded, or an option does not fit it.
            EngineStoppedError: the engine did not come up.
        """

    @abstractmethod
    def stop(self, why: str) -> None:
        """Ends the engine; what is in flight fails with ``EngineStoppedError``. Called again, it does nothing."""

    @abstractmethod
    async def sample(self, request: GenerateRequest, limit: int) -> Completion:
        """Samples at most ``limit`` tokens. A cancelled caller ends the request in the engine."""

    @abstractmethod
    def end(self, request_id: str) -> Future[Any]:
        """Makes ``sample`` return what it has, reason ABORT; an unknown id is ignored."""

    @abstractmethod
    def halt(self) -> Future[Any]:
        """Starts no further step until ``go_on``; done when the step in progress is. May be called again."""

    @abstractmethod
    def go_on(self) -> Future[Any]:
        """Takes steps again. May be called again."""

    @abstractmethod
    def check_weights(self, tensors: Mapping[str, Tensor]) -> PlanT:
        """Checks that these are all of the model's weights, before anything is changed.

        Returns:
            What ``load_weights`` wants to know of their names and shapes; used again for updates that have the same.

        Raises:
            WeightMismatchError: names or shapes are not the model's.
        """

    @abstractmethod
    async def load_weights(self, buckets: AsyncIterator[WeightBucket], plan: PlanT) -> None:
        """Replaces all weights while no step runs, and drops an adapter. What it raises stops the engine."""

    @abstractmethod
    def check_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks that these are one whole adapter for the model, as ``check_weights``."""

    @abstractmethod
    async def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts an adapter in place of the one before, as ``load_weights``."""

    @abstractmethod
    def use_version(self, version: int, recompute_kv: bool) -> Future[Any]:
        """Ends an update, while no step runs: nothing is found any more that was computed with the old weights.

        Args:
            version: what the first token of a completion is reported to come from, from now on.
            recompute_kv: prefill the running requests anew. Otherwise their own keys and values stay.
        """

    @abstractmethod
    def move_out(self, leaving: States) -> Future[Any]:
        """Frees the cache, or moves the weights to host memory too, while no step runs."""

    @abstractmethod
    def move_in(self, coming: States) -> Future[Any]:
        """Takes weights or cache back to the device, while no step runs."""

    def setup(self) -> RankInfo:
        """Starts the engine; see ``start`` for what it raises. Each worker is a replica of its own."""
        self.start()
        rank, size = self.context.rank, self.context.world_size
        return RankInfo(rank=rank, world_size=size, dp_rank=rank, dp_size=size)

    def shutdown(self) -> None:
        """Stops the engine; requests in flight, and whatever comes, fail with ``EngineStoppedError``."""
        self._stop("was shut down")

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one completion.

        A cancelled caller aborts its request.

        Raises:
            ValueError: the prompt is empty or longer than ``sequence_length``, a token id is outside the vocabulary,
                a sampling parameter is out of range, or the request id is in flight.
            EngineStoppedError: the engine failed, now or earlier, or was shut down.
        """
        context = self.context
        sizes = {"vocab_size": self.vocab_size, "sequence_length": context.sequence_length}
        limit = check_request(request, **sizes, pictures=context.pictures)
        self._check_alive()
        with self._in_flight(request.request_id):
            while not self._begin(request.request_id):
                if request.request_id in self._given_up:
                    return _nothing_sampled(request)
                await asyncio.sleep(_LOCK_POLL_S)
                self._check_alive()
            return await self.sample(request, limit)

    async def abort(self, request_id: str) -> None:
        """Finishes a request with the tokens it has, reason ABORT; an unknown id is ignored (it may be done)."""
        self._check_alive()
        with self._gate:
            if request_id in self._open - self._begun:
                self._given_up.add(request_id)
                return
        await asyncio.wrap_future(self.end(request_id))

    async def drain(self) -> None:
        """Returns when no request is in flight; new ones wait for the next update of weights."""
        with self._gate:
            self._draining = True
        while self._begun:
            self._check_alive()
            await asyncio.sleep(_LOCK_POLL_S)

    async def update_weights(
        self, buckets: AsyncIterator[WeightBucket], version: int, *, recompute_kv: bool | None = None
    ) -> None:
        """Replaces all weights between two steps; requests in flight go on, and an adapter is dropped.

        Everything is received and checked before anything is changed, see ``UpdateStream``. Keys and values that were
        computed with the old weights serve only the requests in flight, for which they are stale by one update.

        Args:
            version: what completions that start from now on report.
            recompute_kv: prefill the running requests anew, so that nothing is stale; ``None``: as the context says.
                SGLang always does.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not the model's; the old weights stay.
            EngineStoppedError: something failed while the engine loaded; it cannot be used any more.
        """
        received, plan = await self._stream.open(buckets)
        async with self._updating(version, recompute_kv):
            await self.load_weights(received, plan)

    async def update_adapter(self, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        """Puts a LoRA adapter on the base weights, in place of the one before; otherwise as ``update_weights``.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not those of ``lora``; the old adapter stays.
            EngineStoppedError: the engine failed.
        """
        tensors = tensors_of(await receive(buckets))
        self.check_adapter(tensors)
        async with self._updating(version):
            await self.load_adapter(tensors)

    def offload(self, what: States) -> None:
        """Frees the cache, or moves the weights to host memory too; requests wait for both, keeping their tokens."""
        with self._exclusive:
            leaving = self._states.leave(what)
            if not leaving:
                return
            self._check_alive()
            if not self.can_offload:
                logger.warning(
                    "%s: %s frees no memory on a CPU; offload only holds the requests", self.context.role, self.name
                )
            self._hold("offload").result()
            self.move_out(leaving).result()
            self._lost_weights |= self.drops_weights and States.WEIGHTS in leaving

    def onload(self, what: States) -> None:
        """Takes weights or cache back to the device; requests go on when nothing is away any more.

        Raises:
            RuntimeError: they would go on with weights that were dropped.
        """
        with self._exclusive:
            coming = self._states.come_back(what)
            if not coming:
                return
            self._check_alive()
            if self._lost_weights and not self._states.away:
                raise RuntimeError(
                    f"{self.context.role}: its weights were dropped; expected an update before it goes on"
                )
            self.move_in(coming).result()
            # An engine may go on by itself once all is back: it is told what holds now in any case.
            (self._hold("offload") if self._states.away else self._release("offload")).result()

    def stats(self) -> dict[str, float]:
        """Running totals and the present load (requests running or waiting)."""
        totals = {name: float(value) for name, value in asdict(self.counters).items()}
        return {**totals, "in_flight": float(len(self._open)), "weight_version": float(self.weight_version)}

    def settings(self) -> dict[str, str]:
        """What it computes by, see ``evidence``, and the prompt of a probe as its tokenizer and template render it."""
        context = self.context
        trusts = context.worker.model_args.trust_remote_code
        tokenizer = load_tokenizer(context.tokenizer_path or context.model_path, alone=True, trust_remote_code=trusts)
        prompt = probe_prompt(tokenizer, context.template)
        return {TEMPERATURE: f"{context.temperature or 1.0:g}", PROMPT: " ".join(map(str, prompt))}

    def forward_logprobs(self, batch: Batch) -> Tensor | None:
        """[T]: of the loss tokens, by a forward pass without sampling; ``None`` of an engine that has none."""
        return None

    def sketches(self) -> dict[str, Sketch]:
        """Of the weights under their names in a checkpoint; none of an engine that keeps them in other forms."""
        return {}

    def own_sketches(self) -> dict[str, Sketch]:
        """Of the weights under the engine's names; none of an engine that cannot say."""
        return self.sketches()

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        """See ``evidence.pictures_seen``; none of an engine that cannot say."""
        return {}

    def layer_outputs(self, row: Batch) -> dict[str, Tensor]:
        """See ``evidence.layer_outputs``; none of an engine that cannot say."""
        return {}

    def seed_of(self, request: GenerateRequest) -> int:
        """The request's own seed, or the next of this worker's stream; unsigned 64 bits."""
        seed = request.params.seed
        return self._seeds.getrandbits(64) if seed is None else seed & _MASK64

    def completion(
        self,
        request: GenerateRequest,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        reason: str,
        *,
        cached: int,
        spans: Sequence[tuple[int, int, int]],
    ) -> Completion:
        """Checks and counts what an engine sampled for a request.

        Args:
            cached: prompt tokens that came from the prefix cache.
            spans: the weight version of the tokens from a start up to an end, in order, all of them.

        Raises:
            FloatingPointError: a log-probability is NaN.
            RuntimeError: tokens without a log-probability or a version.
        """
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"{self.name} gave {len(logprobs)} log-probs for {len(tokens)} tokens")
        versions = np.full(len(tokens), _UNKNOWN, dtype=np.int64)
        for version, start, end in spans:
            versions[start:end] = version
        if (versions == _UNKNOWN).any():
            raise RuntimeError(f"{self.name} gave no weight version for some of {len(tokens)} tokens: {spans}")
        sampled = np.array(logprobs, dtype=np.float32)
        if np.isnan(sampled).any():
            raise FloatingPointError(f"request {request.request_id!r}: the model's logits are NaN")
        self.counters.finished += 1
        self.counters.generated_tokens += len(tokens)
        self.counters.shared_tokens += cached
        self.counters.prefill_tokens += len(request.prompt_ids) - cached
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(tokens, dtype=np.int64),
            logprobs=sampled,
            finish_reason=FinishReason(reason),
            versions=versions,
        )

    @contextlib.contextmanager
    def _in_flight(self, request_id: str) -> Iterator[None]:
        with self._gate:
            if request_id in self._open:
                raise ValueError(f"request_id {request_id!r} is in flight already; expected a unique id")
            self._open.add(request_id)
        try:
            yield
        finally:
            self._open.discard(request_id)
            self._begun.discard(request_id)
            self._given_up.discard(request_id)

    def _begin(self, request_id: str) -> bool:
        """Lets a request into the engine, unless those in it are to end first or nobody waits for it any more."""
        with self._gate:
            begins = not self._draining and request_id not in self._given_up
            if begins:
                self._begun.add(request_id)
            return begins

    def _hold(self, reason: str) -> Future[Any]:
        """Starts no step until this and every other reason is released."""
        with self._gate:
            self._holds.add(reason)
            return self.halt()

    def _release(self, reason: str) -> Future[Any]:
        with self._gate:
            self._holds.discard(reason)
            return self.halt() if self._holds else self.go_on()

    @contextlib.asynccontextmanager
    async def _updating(self, version: int, recompute_kv: bool | None = None) -> AsyncIterator[None]:
        """Between two steps, one update at a time. What fails in here leaves a model that nobody should sample."""
        self._check_alive()
        while not self._exclusive.acquire(blocking=False):  # callers come from any loop; updates are rare
            await asyncio.sleep(_LOCK_POLL_S)
        try:
            if States.WEIGHTS in self._states.away and self.can_offload:
                raise RuntimeError(f"{self.name}: the weights are offloaded; call onload before an update")
            await asyncio.wrap_future(self._hold("update"))
            try:
                yield
                recompute = self.context.recompute_kv if recompute_kv is None else recompute_kv
                await asyncio.wrap_future(self.use_version(version, recompute))
            except BaseException as error:
                logger.exception("%s: the weights may be half replaced, so the engine stops", self.context.role)
                await asyncio.to_thread(self._stop, f"failed in a weight update: {type(error).__name__}: {error}")
                raise EngineStoppedError(f"the generation engine {self._stopped}") from error
            self.weight_version = version
            self._lost_weights = self._draining = False
            await asyncio.wrap_future(self._release("update"))
        finally:
            self._exclusive.release()

    def _stop(self, why: str) -> None:
        self._stopped = self._stopped or why
        self.stop(why)

    def _check_alive(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(f"the generation engine {self._stopped}")


def _nothing_sampled(request: GenerateRequest) -> Completion:
    """Completion of a request that was aborted before it began."""
    nothing = np.empty(0, dtype=np.int64)
    return Completion(request.request_id, nothing, nothing.astype(np.float32), FinishReason.ABORT, nothing)
