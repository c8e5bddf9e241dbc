"""``hf_infer``: generation and log-probs with plain Hugging Face models, on any device that torch has.

Several workers of a role are independent replicas: each loads the whole model and takes its own requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.engines.card import task_of
from roll.configs.engines.hf_infer import STATES, TAKEN, HfInferConfig, foreign_layers, layer_kinds
from roll.data.batch import Batch
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.evidence import (
    FORMAT,
    Sketch,
    buffer_settings,
    config_settings,
    layer_outputs,
    pictures_seen,
)
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.strategy.generation.generator import Generator
from roll.distributed.strategy.generation.model_outline import stop_token_ids
from roll.distributed.strategy.hf_infer.continuous_batching import (
    ContinuousBatching,
    RunningSequence,
    StepCounters,
    StopStrings,
)
from roll.distributed.weights.adapters import MergedAdapter, check_adapter
from roll.distributed.weights.buckets import WeightBucket, dtype_name
from roll.distributed.weights.receiver import WeightUpdate, tensors_of
from roll.models.loading import check_rope, load_causal_lm, resolve_dtype, to_hf_weights
from roll.models.measured import check_packing, has_own_code, is_proved
from roll.models.own_forward import GENERATOR_BOUND, OwnForward, in_one_process
from roll.models.pictures import tower_of
from roll.models.routing import ExpertRouting
from roll.models.scoring import TokenScorer, score_batch
from roll.models.tokenizer import check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


T = TypeVar("T")


class EngineThread:
    """Owns the thread. All methods may be called from any thread.

    All that the process computes runs there, loading included, and any other thread that computes has one core: OpenMP
    gives each thread helpers of its own, and where there are more of them than cores, they sleep between operations. So
    a process should have one engine: a second one would have one core.

    Args:
        load: makes the engine, on the thread; what it raises is raised here.
    """

    def __init__(self, load: Callable[[], ContinuousBatching], name: str) -> None:
        loaded: Future[None] = Future()
        self._batching: ContinuousBatching
        self._wake = threading.Condition()
        self._arrivals: list[tuple[RunningSequence, asyncio.Future[Completion]]] = []
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._waited_for: dict[RunningSequence, asyncio.Future[Completion]] = {}
        """Sequences in the engine; written by its thread only."""
        self.halted = False
        """No step starts; changed between two steps."""
        self._closing: str | None = None
        """Reason why the engine is to end."""
        self._failure: BaseException | None = None
        work = (load, loaded, torch.get_num_threads())
        self._thread = threading.Thread(target=self._run, args=work, name=name, daemon=True)
        self._thread.start()
        loaded.result()
        torch.set_num_threads(1)  # here, and in threads that have not computed yet

    def submit(self, sequence: RunningSequence) -> asyncio.Future[Completion]:
        """Queues a sequence; call it on the event loop that will await the future.

        Raises:
            EngineStoppedError: the engine failed earlier, or was shut down.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._check_alive()
            self._arrivals.append((sequence, future))
            self._wake.notify()
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` on the engine thread between two steps; its exception goes to the future only.

        Raises:
            EngineStoppedError: as ``submit``.
        """
        future: Future[T] = Future()
        with self._wake:
            self._check_alive()
            self._commands.append((function, future))
            self._wake.notify()
        return future

    def end(self, sequence: RunningSequence | None) -> Future[None]:
        """Ends a sequence with what it has; does nothing when it is not in flight (it may just have finished)."""

        def apply() -> None:
            if sequence is not None and sequence in self._waited_for:
                self._batching.remove(sequence)
                self._answer([(sequence, sequence.completion(FinishReason.ABORT))])

        return self.call(apply)

    def halt(self) -> Future[None]:
        """Starts no step until ``go_on``; the future is done when the step in progress is."""
        return self.call(lambda: setattr(self, "halted", True))

    def go_on(self) -> Future[None]:
        return self.call(lambda: setattr(self, "halted", False))

    def close(self, why: str = "was shut down") -> None:
        """Stops the thread after its step; requests in flight fail with ``EngineStoppedError``."""
        with self._wake:
            self._closing = self._closing or why
            self._wake.notify()
        self._thread.join()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"the generation engine failed earlier: {_describe(self._failure)}") from (
                self._failure
            )
        if self._closing:
            raise EngineStoppedError(f"the generation engine {self._closing}")

    def _run(self, load: Callable[[], ContinuousBatching], loaded: Future[None], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.get_num_threads()  # a thread that has not asked takes what another sets later
        _execute(lambda: setattr(self, "_batching", load()), loaded)
        if loaded.exception() is not None:
            return
        try:
            while self._collect():
                if self._batching.has_work and not self.halted:
                    done = [(s, s.completion(reason)) for s, reason in self._batching.step()]
                    self._answer(done)
        except Exception as error:  # whatever it was, the callers learn it: nobody may wait forever
            logger.exception("the generation engine failed; %d requests fail with it", len(self._waited_for))
            self._fail(error)
        else:
            self._fail(None)

    def _collect(self) -> bool:
        """Waits for work, takes in what arrived and runs the commands; False when it is time to stop."""
        with self._wake:
            while not (
                self._closing or self._arrivals or self._commands or (self._batching.has_work and not self.halted)
            ):
                self._wake.wait()
            if self._closing:
                return False
            arrivals, self._arrivals = self._arrivals, []
            commands, self._commands = self._commands, []
        for sequence, waiting in arrivals:
            self._waited_for[sequence] = waiting
            self._batching.add(sequence)
        for function, future in commands:
            _execute(function, future)
        return True

    def _answer(self, finished: Sequence[tuple[RunningSequence, Completion]]) -> None:
        """Hands completions to their event loops, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]]
        by_loop = defaultdict(list)
        for sequence, completion in finished:
            future = self._waited_for.pop(sequence)
            by_loop[future.get_loop()].append((future, completion))
        for loop, answers in by_loop.items():
            _call_soon(loop, _resolve, answers)

    def _fail(self, cause: BaseException | None) -> None:
        """Fails everything in flight; ``cause`` None means an orderly shutdown."""
        with self._wake:
            self._closing, self._failure = self._closing or "was shut down", cause
            waiting = [*self._waited_for.values(), *(future for _, future in self._arrivals)]
            commands = self._commands
            self._waited_for, self._arrivals, self._commands = {}, [], []
        what = f"the generation engine {f'failed: {_describe(cause)}' if cause else self._closing}"

        def error() -> EngineStoppedError:  # one each: a shared exception would collect every caller's traceback
            failure = EngineStoppedError(what)
            failure.__cause__ = cause
            return failure

        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(error())
        for one in waiting:
            _call_soon(one.get_loop(), _reject, one, error())


def _execute(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # its caller was cancelled
    try:
        result = function()
    except BaseException as error:  # raised where the result is waited for, which would else wait for ever
        future.set_exception(error)
    else:
        future.set_result(result)


def _resolve(answers: Sequence[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, completion in answers:
        if not future.done():  # its caller may have been cancelled
            future.set_result(completion)


def _reject(future: asyncio.Future[Completion], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # The callers' event loop is gone, so nobody waits for the answer.


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


CACHE_SHARE = 0.6  # of the device memory that is free after loading; the rest is for activations and logits


class HfInfer(Generator[WeightUpdate]):
    """A ``GenerateStrategy`` and ``ScoreStrategy`` in one process.

    On a CPU an update is not copied: the model lives in the buckets until the next one.
    """

    name = "hf_infer"
    streams_from_device = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._config = HfInferConfig.model_validate(context.worker.strategy_args.strategy_config)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._running: dict[str, RunningSequence] = {}

    def start(self) -> None:
        self._engine = EngineThread(self._load, name=f"hf_infer-{self.context.role}-{self.context.rank}")

    def _load(self) -> ContinuousBatching:
        context, model_args = self.context, self.context.worker.model_args
        self._model: PreTrainedModel = load_causal_lm(
            context.model_path,
            dtype=None if model_args.dtype is None else resolve_dtype(model_args.dtype),
            device=self._device,
            attn_implementation=_attention(model_args.attn_implementation),
            config_kwargs=model_args.model_config_kwargs,
            trust_remote_code=model_args.trust_remote_code,
            pictures=context.pictures,
        )
        _check_model(self._model, context.sequence_length)
        if context.worker.use_sequence_packing and task_of(context.role) == "scores":
            check_packing(self._model, context.role)
        tokenizer = load_tokenizer(
            context.tokenizer_path or context.model_path, alone=True, trust_remote_code=model_args.trust_remote_code
        )
        self._adapter = MergedAdapter(self._model, context.lora) if context.lora is not None else None
        self.vocab_size = self._model.config.get_text_config().vocab_size
        check_vocabulary(tokenizer, self.vocab_size)
        tower = tower_of(self._model, context.model_path, apart=True) if context.pictures else None
        self._scorer = TokenScorer(self._model, temperature=context.temperature, needs=context.needs, tower=tower)
        worker = context.worker
        self.own_forward = in_one_process(
            self._scorer, round_to=worker.sequence_length_round_in_infer, packing=worker.use_sequence_packing
        )
        self._batching = ContinuousBatching(
            self._model,
            stop_ids=stop_token_ids(self._model.generation_config, tokenizer, context.template),
            stop_strings=StopStrings(tokenizer),
            max_running=context.max_running_requests,
            max_prefill_tokens=self._config.max_prefill_tokens,
            max_cache_tokens=_cache_budget(self._model),
            routing=ExpertRouting(self._model) if context.router_replay == "R3" else None,
            tower=tower,
        )
        # What a layer with a state does with several rows depends on entries that a proved family may have otherwise.
        states = STATES.intersection(layer_kinds(self._model.config.get_text_config()))
        if states or has_own_code(self._model) or not is_proved(_model_types(self._model), self.name):
            _check_generation(self._model, self._batching, context.sequence_length)
        self.counters = self._batching.counters
        return self._batching

    def stop(self, why: str) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(why)

    async def sample(self, request: GenerateRequest, limit: int) -> Completion:
        sequence = RunningSequence(request, self.seed_of(request), limit)
        self._running[request.request_id] = sequence
        try:
            return await self._engine.submit(sequence)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineStoppedError):
                self._engine.end(sequence)
            raise
        finally:
            del self._running[request.request_id]

    def sampled(self, request_id: str) -> list[int]:
        """The ids so far of a request in flight, from any thread; none of another."""
        sequence = self._running.get(request_id)
        return [] if sequence is None else sequence.tokens.copy()

    def end(self, request_id: str) -> Future[None]:
        return self._engine.end(self._running.get(request_id))

    def halt(self) -> Future[None]:
        return self._engine.halt()

    def go_on(self) -> Future[None]:
        return self._engine.go_on()

    def check_weights(self, tensors: Mapping[str, Tensor]) -> WeightUpdate:
        return WeightUpdate(self._model, tensors)

    async def load_weights(self, buckets: AsyncIterator[WeightBucket], plan: WeightUpdate) -> None:
        tensors = tensors_of([bucket async for bucket in buckets])

        def apply() -> None:
            plan.apply(tensors)
            if self._adapter is not None:
                self._adapter.forget()

        await asyncio.wrap_future(self._engine.call(apply))

    def check_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        check_adapter(self._model, self.context.lora, tensors)

    async def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        adapter = self._adapter
        assert adapter is not None
        # The base weights of the adapted layers are kept, so that nothing of an old adapter stays behind.
        await asyncio.wrap_future(self._engine.call(lambda: adapter.apply(tensors)))

    def use_version(self, version: int, recompute_kv: bool) -> Future[None]:
        def apply() -> None:
            is_new = version != self._batching.weight_version
            self._batching.weight_version = version
            if recompute_kv and is_new:  # the same weights come again after an evaluation
                self._batching.preempt()

        return self._engine.call(apply)

    def num_recorded(self, version: int) -> int:
        return self._batching.num_recorded[version]

    def move_out(self, leaving: States) -> Future[None]:
        def apply() -> None:
            # In the host's memory keys and values of requests in flight stay: computed again for the same weights they
            # would differ in the last bits, from a moment on that no schedule knows.
            if self._device.type != "cpu" or not self._batching.running:
                self._batching.preempt()
            if States.WEIGHTS in leaving:
                self._model.to("cpu")  # type: ignore[arg-type]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        return self._engine.call(apply)

    def move_in(self, coming: States) -> Future[object]:
        device = self._device if States.WEIGHTS in coming else self._model.device
        return self._engine.call(lambda: self._model.to(device))  # type: ignore[arg-type]

    def logprobs(self, batch: Batch) -> TokenScores:
        """Log-probabilities and entropies of the batch's loss tokens; runs between two generation steps."""
        return self._score(batch, self.own_forward)

    def forward_logprobs(self, batch: Batch) -> Tensor | None:
        return self._score(batch, None).logprobs_T

    def _score(self, batch: Batch, check: OwnForward | None) -> TokenScores:
        worker = self.context.worker
        dynamic = worker.use_dynamic_batching_in_infer
        return self._engine.call(
            lambda: score_batch(
                self._scorer,
                batch,
                max_sequences=None if dynamic else worker.infer_batch_size,
                max_tokens=worker.max_tokens_per_microbatch_in_infer if dynamic else None,
                max_pixels=worker.max_pixels_per_microbatch_in_infer,
                round_to=worker.sequence_length_round_in_infer,
                packing=worker.use_sequence_packing,
                check=check,
            )
        ).result()

    def settings(self) -> dict[str, str]:
        of_model = config_settings(self._model.config) | buffer_settings(self._model)
        return super().settings() | of_model | {FORMAT: dtype_name(self._model.dtype)}

    def sketches(self) -> dict[str, Sketch]:
        def sketch() -> dict[str, Sketch]:
            named = self._model.named_parameters(remove_duplicate=False)
            parts = (to_hf_weights(self._model, name, parameter.detach()) for name, parameter in named)
            return {name: Sketch.of(values) for each in parts for name, values in each.items()}

        return self._engine.call(sketch).result()

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        return self._engine.call(lambda: pictures_seen(self.own_forward, self._scorer.tower, row)).result()

    def layer_outputs(self, row: Batch) -> dict[str, Tensor]:
        return self._engine.call(lambda: layer_outputs(self.own_forward, row)).result()

    def stats(self) -> dict[str, float]:
        running, waiting = len(self._batching.running), len(self._batching.waiting)
        return {**super().stats(), "running": float(running), "waiting": float(waiting)}


def _attention(name: str) -> str | None:
    """The engine passes 4D masks, which FlashAttention 2 does not take."""
    if name == "fa2":
        logger.warning("model_args.attn_implementation: hf_infer uses sdpa instead of fa2, which takes no 4D masks")
    return None if name == "auto" else "eager" if name == "eager" else "sdpa"


def _check_model(model: PreTrainedModel, sequence_length: int) -> None:
    config = model.config.get_text_config()
    check_rope(config, sequence_length)
    if foreign := foreign_layers(config):
        raise ValueError(
            f"hf_infer: {type(model).__name__} has layers of kind {foreign}, "
            f"expected any of {', '.join(sorted(TAKEN))}; use vllm or sglang for this model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise ValueError(f"sequence_length: {sequence_length}, but the model has positions for at most {positions}")


def _model_types(model: PreTrainedModel) -> set[str]:
    return {model.config.model_type, model.config.get_text_config().model_type}


CHECKED_TOKENS = 8


@torch.inference_mode()
def _check_generation(model: PreTrainedModel, batching: ContinuousBatching, sequence_length: int) -> None:
    """Samples a few tokens of two sequences at once, the second beyond any window of the model, and compares them with
    a plain forward.

    Raises:
        ValueError: the log-probabilities are not the model's: it takes no cache, or other masks.
    """
    config = model.config.get_text_config()
    windows = [size for name, size in config.to_dict().items() if "window" in name and type(size) is int]
    longest = max(1, min(max(windows, default=0) + CHECKED_TOKENS, sequence_length - CHECKED_TOKENS))
    generator, params = np.random.default_rng(0), SamplingParams(max_new_tokens=CHECKED_TOKENS, ignore_eos=True)
    prompts = [generator.integers(config.vocab_size, size=length) for length in (min(longest, CHECKED_TOKENS), longest)]
    requests = [GenerateRequest(f"check {i}", prompt, params) for i, prompt in enumerate(prompts)]
    sequences = [RunningSequence(request, i, CHECKED_TOKENS) for i, request in enumerate(requests)]
    for sequence in sequences:
        batching.add(sequence)
    try:
        while batching.has_work:
            batching.step()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"hf_infer: {type(model).__name__} fails with this engine's cache: {error}; use vllm or sglang"
        ) from error
    batching.counters = StepCounters()
    difference = max(_difference(model, sequence) for sequence in sequences)
    if not difference <= GENERATOR_BOUND:
        raise ValueError(
            f"hf_infer: {type(model).__name__} with this engine's cache gives log-probabilities that are "
            f"{difference:.2g} away from its own; use vllm or sglang for this model"
        )


def _difference(model: PreTrainedModel, sequence: RunningSequence) -> float:
    """The median of the differences from the log-probabilities of a plain forward."""
    ids, start = torch.from_numpy(sequence.history).to(model.device), len(sequence.request.prompt_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]
    return float((expected - expected.new_tensor(sequence.logprobs)).abs().median())


def _cache_budget(model: PreTrainedModel) -> int | None:
    """Positions that the key-value cache may hold on a GPU; no bound in host memory."""
    if model.device.type != "cuda":
        return None
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position_bytes = 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize
    free_bytes, _ = torch.cuda.mem_get_info(model.device)
    return int(CACHE_SHARE * free_bytes) // position_bytes
