"""``vllm``: generation and log-probs with vLLM's asynchronous engine (V1), on GPUs or on a CPU.

The engine runs in processes of its own, so this file is about what crosses to them: requests with token ids, weights
through files in memory, and an adapter the way vLLM reads one. What runs over there is ``worker.py``.

Several workers of a role are independent replicas; one worker has ``tensor_parallel_size`` devices. Where these lie on
several nodes, the worker on the first has the engine; those on the others only hold vLLM's processes there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.configs.engines.card import EnginePackage
from roll.configs.engines.vllm import CARD, VllmConfig
from roll.configs.problems import ConfigErrors
from roll.data.batch import Batch
from roll.data.columns import IntArray, Item
from roll.data.identity import items_along, spans_along, vocabulary_ids
from roll.data.requests import Completion, GenerateRequest
from roll.distributed.strategy import MissingEngineError, require_engine
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.evidence import Sketch
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.strategy.generation.generator import scratch_folder
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.generation.scoring import PromptScores, ScoringGenerator
from roll.distributed.strategy.vllm.arguments import (
    Failures,
    check_cpu_kernels,
    engine_arguments,
    engine_environment,
)
from roll.distributed.strategy.vllm.worker import FIRST_TEMPERATURE, FIRST_TOP_K
from roll.distributed.weights.adapters import peft_config
from roll.distributed.weights.buckets import WeightBucket, as_tensor, renamed
from roll.distributed.weights.messages import Lender
from roll.distributed.weights.receiver import on_device
from roll.distributed.weights.segments import collect_on_gpu, own_copy, share_on_gpu
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from roll.utils.foreign import environment
from roll.utils.progress import advance

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll.data.pictures import Pictures

logger = logging.getLogger(__name__)


T = TypeVar("T")


class EngineLoop:
    """Runs coroutines for callers on any thread and any event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs it; cancelling the future cancels it.

        Raises:
            EngineStoppedError: the loop was closed.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise EngineStoppedError("the generation engine was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels what still runs, waits for it to end, and stops the thread."""
        if self._loop.is_closed():
            return
        self.submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def brought_from(home: asyncio.AbstractEventLoop, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Reads ``items``, which live on the loop ``home`` and are never ``None``, on another loop."""

    async def following() -> T | None:
        return await anext(items, None)

    while (item := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(following(), home))) is not None:
        yield item
        del item


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


EXPECTED: dict[str, dict[str, object]] = {"mistral3": {"rms_norm_eps": 1e-5}, "glm4v": {"attention_bias": True}}
"""Entries of configurations for text: vLLM has the one number for a norm of the projector, and no biases without the
other, which the model has whatever is said there."""
STAGED_BUCKETS = 2  # copies kept from one update to the next; fresh memory costs more than the copy into it
SHUTDOWN_S = 2.0  # the engine's own clean-up takes less; then its process is killed, which it survives for seconds more
MEMORY = {States.WEIGHTS: "weights", States.CACHE: "kv_cache"}  # vLLM's names
ADAPTER_ID = 1  # vLLM counts adapters from 1; there is only one, replaced in place


class VllmStrategy(ScoringGenerator[dict[str, str]]):
    """A ``GenerateStrategy`` and ``ScoreStrategy``.

    The engine runs in processes of its own, on an event loop of this one. A request in flight keeps its own keys and
    values over an update; an adapter changes them with the update.
    """

    name = "vllm"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        require_engine("vllm", extra="vllm", strategy="vllm")
        options = context.worker.strategy_args.strategy_config
        self._config = VllmConfig.model_validate(options)
        if problems := list(CARD.option_problems(options)):
            prefix = f"{context.role}.strategy_args.strategy_config"
            raise ConfigErrors([problem.under(prefix) for problem in problems])
        self._on_cpu = not torch.cuda.is_available()
        self.can_offload = not self._on_cpu
        self._adapter: LoRARequest | None = None
        self._cache_epoch = 0
        self._begins_anew: set[str] = set()
        """Requests without a token that an update took out of the engine, to come back with the new weights."""
        self._lender = Lender()
        self._failures = Failures()

    def start(self) -> None:
        context = self.context
        self._outline = ModelOutline(context)
        self.vocab_size = self._outline.vocab_size
        longest = self._config.max_model_len
        if longest is not None and longest < context.sequence_length:
            wanted = f"at least sequence_length ({context.sequence_length})"
            raise ValueError(f"strategy_config.max_model_len: {longest}, expected {wanted}")
        self._outline.check_role(context)
        if context.nodes is not None and (context.lora is not None or context.pictures):
            what = "an adapter" if context.lora is not None else "pictures"
            raise ValueError(
                f"{context.role}: one engine over {context.nodes.count} nodes does not take {what}; expected "
                "num_gpus_per_worker that fits into a node"
            )
        if context.nodes is not None and not self._on_cpu:
            logger.warning("%s: no engine over several nodes has run on GPUs yet, only on CPUs", context.role)
        if context.pictures and not EnginePackage("torchvision", "").installed:
            raise MissingEngineError(
                f"{context.role}: vllm needs torchvision for models that take pictures", name="torchvision"
            )
        tower = self._outline.tower(context, CARD)
        if tower is not None:
            self._check_entries()
        self._prompts = Prompts(None if tower is None else tower.pictures, self._outline.dtype)
        plain = self._outline.is_whole and self._config.quantization is None
        self.drops_weights = context.updated_after_offload and self.can_offload and plain
        self._loop = EngineLoop(f"vllm-{context.role}-{context.rank}")
        try:
            self._loop.submit(self._start()).result()
        except BaseException:
            self._loop.close()
            raise

    def _check_entries(self) -> None:
        kind, text = self._outline.config.model_type, self._outline.text_config
        for entry, value in EXPECTED.get(kind, {}).items():
            if (own := getattr(text, entry, None)) != value:
                words = f"got text_config.{entry} {own}, expected {value}, with which vllm computes as the model does"
                raise ValueError(f"{self.context.role}: {self.context.model_path}: {words}")

    def stop(self, why: str) -> None:
        if hasattr(self, "_part"):
            self._part.shutdown()
        if not hasattr(self, "_engine"):
            return
        self._loop.close()
        self._engine.shutdown(timeout=SHUTDOWN_S)
        del self._engine  # else its finaliser runs when the interpreter is half gone

    async def sample(self, request: GenerateRequest, limit: int) -> Completion:
        return await asyncio.wrap_future(self._loop.submit(self._sample(request, self._sampling(request, limit))))

    def score(self, name: str, token_ids: IntArray, items: Sequence[Item]) -> Future[PromptScores]:
        return self._loop.submit(self._score(name, token_ids, items))

    def end(self, request_id: str) -> Future[None]:
        return self._loop.submit(self._abort(request_id))

    def halt(self) -> Future[None]:
        return self._loop.submit(self._engine.pause_generation(mode="keep", clear_cache=False))

    def go_on(self) -> Future[None]:
        return self._loop.submit(self._engine.resume_generation())

    def check_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return self._outline.check_weights(tensors)

    async def load_weights(self, buckets: AsyncIterator[WeightBucket], plan: dict[str, str]) -> None:
        brought = brought_from(asyncio.get_running_loop(), buckets)
        await asyncio.wrap_future(self._loop.submit(self._replace_weights(brought, plan)))

    def check_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        self._outline.check_adapter(self.context.lora, tensors)

    async def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        self._adapter = await asyncio.wrap_future(self._loop.submit(self._load_adapter(tensors)))

    def own_sketches(self) -> dict[str, Sketch]:
        (told, *_) = self._loop.submit(self._rpc("roll_sketch")).result()
        return {name: Sketch.of_plain(each) for name, each in told.items()}

    def layer_outputs(self, row: Batch) -> dict[str, Tensor]:
        return self._loop.submit(self._layer_outputs(row.tokens_T.numpy())).result()

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        items = () if row.items_I is None else row.items_I[0]
        if not (along := items_along(row.tokens_T, items)):
            return {}
        return self._loop.submit(self._pictures_seen(row.tokens_T.numpy(), [item for _, item in along])).result()

    def use_version(self, version: int, recompute_kv: bool) -> Future[None]:
        return self._loop.submit(self._now_at(version, recompute_kv))

    def move_out(self, leaving: States) -> Future[None]:
        return self._loop.submit(self._sleep(leaving))

    def move_in(self, coming: States) -> Future[None]:
        return self._loop.submit(self._wake(coming))

    def _sampling(self, request: GenerateRequest, limit: int) -> VllmSamplingParams:
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params, most = request.params, request.params.first_token_top_k
        hot = params.first_token_temperature if params.temperature else None  # a greedy row has none
        if most is not None:  # more than there are would end the engine
            most = min(most, self.vocab_size) if most > 0 else self.vocab_size
        try:
            return SamplingParams(
                max_tokens=limit,
                extra_args={FIRST_TEMPERATURE: hot, FIRST_TOP_K: most},
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=min(max(0, params.top_k), self.vocab_size),
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                stop=list(params.stop),
                include_stop_str_in_output=True,
                seed=None if params.seed is None else self.seed_of(request),
                ignore_eos=True,  # stop_token_ids are all that end a completion, as in every generator
                stop_token_ids=[] if params.ignore_eos else self._outline.stop_ids,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=bool(params.stop),
                skip_special_tokens=False,  # stop strings may hold them
                spaces_between_special_tokens=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except VLLMError as error:  # its ranges are narrower than ours: temperature up to 2
            raise ValueError(f"request {request.request_id!r}: {error}; expected what vllm takes") from error

    # What follows runs on the engine's loop.

    async def _start(self) -> None:
        context = self.context
        own_ip = None
        if context.nodes is not None:
            from ray.util import get_node_ip_address

            own_ip = get_node_ip_address()
        variables = engine_environment(context.model_path, self._on_cpu, self._failures.config, own_ip)
        with environment(variables):  # other code in this process sees none of it afterwards
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._on_cpu:
                check_cpu_kernels(self._outline)
            arguments = engine_arguments(context, self._config, self._outline, on_cpu=self._on_cpu)
            started = time.monotonic()
            # The batch sizes that vLLM has measured for throughput on this GPU; without a context, 2,048 tokens.
            throughput = UsageContext.LLM_CLASS
            try:
                if context.nodes is not None and context.nodes.number:
                    self._hold_part(AsyncEngineArgs(**arguments).create_engine_config(throughput, headless=True))
                    return
                self._engine: AsyncLLM = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**arguments), usage_context=throughput
                )
            except RuntimeError as error:  # one of its processes ended
                reason = f"{context.model_path}: {self._failures.first()}"
                raise ValueError(f"{context.role}: vllm could not start with {reason}") from error
        ranks = await self._rpc("roll_prepare", os.getpid(), dataclasses.astuple(self.scoring))
        self._num_readers = len(ranks) if context.nodes is None else 1
        await self._engine.update_weight_version("0")
        await self._engine.get_supported_tasks()  # cached, so that a request is registered without a pause
        logger.info("%s: vllm started in %.1f s", context.role, time.monotonic() - started)

    def _hold_part(self, config: Any) -> None:
        """Starts vLLM's processes of this node, which do what those of the first node do."""
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._part = MultiprocExecutor(config)
        # The first node's worker watches this one.
        self._part.register_failure_callback(functools.partial(os.kill, os.getpid(), signal.SIGKILL))

    async def _sample(self, request: GenerateRequest, sampling: VllmSamplingParams) -> Completion:
        last = await self._last_output(request.request_id, request.prompt_ids, request.items, sampling)
        (sample,) = last.outputs
        logprobs: list[float] = sample.logprobs.logprobs if sample.token_ids else []  # type: ignore[union-attr]
        # With logprobs=0 there is one entry per token.
        spans = [(int(span.version), span.start, span.end) for span in sample.weight_versions or ()]
        return self.completion(
            request,
            list(sample.token_ids),
            logprobs,
            str(sample.finish_reason),
            cached=last.num_cached_tokens or 0,
            spans=spans,
        )

    async def _score(self, name: str, token_ids: IntArray, items: Sequence[Item]) -> PromptScores:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        if len(token_ids) == 1:
            return [], [], []
        width = self.scoring.width
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=width,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        said: Any = (await self._last_output(name, token_ids, items, sampling)).prompt_logprobs
        # Nothing is said of the first token; of each other its own number comes first.
        values, ids = (np.asarray(flat).reshape(-1, 1 + width) for flat in (said.logprobs, said.token_ids))
        return values[:, 0], ids[:, 1:].ravel(), values[:, 1:].ravel()  # type: ignore[return-value]

    async def _layer_outputs(self, token_ids: IntArray) -> dict[str, Tensor]:
        await self._rpc("roll_watch_layers")
        try:
            await self._score("the layers of a probe", token_ids, ())
        finally:
            (told, *_) = await self._rpc("roll_layers", len(token_ids))
        return _tensors(told)

    async def _pictures_seen(self, token_ids: IntArray, items: Sequence[Item]) -> dict[str, Tensor]:
        await self._rpc("roll_look")
        try:
            await self._score("the pictures of a probe", token_ids, items)
        finally:
            (told, *_) = await self._rpc("roll_pictures", [item.hash for item in items])
        return _tensors(told)

    async def _last_output(
        self, name: str, token_ids: IntArray, items: Sequence[Item], sampling: VllmSamplingParams
    ) -> RequestOutput:
        """Everything that the engine says of a request."""
        from vllm.v1.engine.exceptions import EngineDeadError

        last: RequestOutput | None = None
        try:
            while last is None or (name in self._begins_anew and last.outputs[0].finish_reason == "abort"):
                self._begins_anew.discard(name)
                prompt = self._prompts.of(token_ids, items, f"weights-{self._cache_epoch}")
                async for output in self._engine.generate(prompt, sampling, name, lora_request=self._adapter):
                    last = output
                    advance()
        except EngineDeadError as error:
            self._stopped = self._stopped or "died"
            raise EngineStoppedError(f"the generation engine died: {self._failures.first()}") from error
        except asyncio.CancelledError:
            self._check_alive()  # it is the engine that ends, and not the caller who left
            raise
        finally:
            self._begins_anew.discard(name)
        return last

    async def _abort(self, request_id: str) -> None:
        await asyncio.sleep(0)  # a request that came just before becomes known to the engine in this turn of the loop
        self._begins_anew.discard(request_id)
        await self._engine.abort(request_id)

    async def _replace_weights(self, buckets: AsyncIterator[WeightBucket], names: Mapping[str, str]) -> None:
        await self._rpc("roll_begin_weights")
        async for bucket in buckets:
            await self._load(bucket, names)
        self._take_back(await self._rpc("roll_finish_weights", self._lender.segments))
        self._lender.end(STAGED_BUCKETS)
        if not self._on_cpu:
            collect_on_gpu()
        if self._adapter is not None and self.context.lora is not None:
            # vLLM dropped it. Requests in flight still name it, so it comes back as one that changes nothing.
            await self._load_adapter(self._outline.empty_adapter(self.context.lora))
            self._adapter = None

    async def _load(self, bucket: WeightBucket, names: Mapping[str, str]) -> None:
        """Hands one bucket to the workers: through memory that they map, or as a handle to the device's."""
        staged = renamed(bucket.outline.contents, names)
        if on_device(bucket):
            block = own_copy(as_tensor(bucket.data))
            handles = [share_on_gpu(block) for _ in range(self._num_readers)]
            await self._rpc("roll_load_weights_from_device", handles, block.device.index, len(bucket.data), staged)
            return
        place = await asyncio.to_thread(self._lender.lend, bucket, list(map(str, range(self._num_readers))))
        self._take_back(await self._rpc("roll_load_weights", place.segment, place.path, len(bucket.data), staged))

    def _take_back(self, released: Sequence[Sequence[str]]) -> None:
        """Notes which buckets each worker process is done with."""
        for process, segments in enumerate(released):
            self._lender.take_back(segments, str(process))

    async def _load_adapter(self, tensors: Mapping[str, Tensor]) -> LoRARequest:
        """Gives vLLM the adapter in the form that it reads, in place of the one before."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        spec = self.context.lora
        assert spec is not None
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="roll-vllm-", dir=scratch_folder(num_bytes)) as name:
            folder = Path(name)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_FILE)
            (folder / ADAPTER_CONFIG).write_text(json.dumps(peft_config(spec, tensors)))
            request = LoRARequest("policy", ADAPTER_ID, str(folder), load_inplace=True)
            if not await self._engine.add_lora(request):
                raise RuntimeError("vllm took no adapter")
        # Requests carry it without load_inplace: they find it loaded and never read the folder.
        return LoRARequest("policy", ADAPTER_ID, "memory")

    async def _now_at(self, version: int, recompute_kv: bool) -> None:
        self._cache_epoch += 1
        await self._engine.update_weight_version(str(version))
        # Of requests without a token, the engine would look for the prompt among what the old weights have computed.
        waiting = [state for state in self._engine.output_processor.request_states.values() if state.is_prefilling]
        self._begins_anew |= {state.external_req_id for state in waiting}
        await self._engine.abort([state.request_id for state in waiting], internal=True)
        # Old entries could not be found any more; without running requests the reset also frees them at once.
        if recompute_kv or not self._open:
            await self._engine.reset_prefix_cache(reset_running_requests=recompute_kv, reset_connector=recompute_kv)
            if self.context.pictures:  # requests in flight know their features by the name of the old weights
                await self._engine.reset_encoder_cache()

    async def _sleep(self, leaving: States) -> None:
        if self._on_cpu:
            return
        drops = self.drops_weights and States.WEIGHTS in leaving
        await self._engine.sleep(level=2 if drops else 1, mode="keep")  # 1 copies the weights to host memory
        if States.WEIGHTS not in leaving:  # vLLM only frees a cache alone that no request uses
            await self._engine.wake_up([MEMORY[States.WEIGHTS]])

    async def _wake(self, coming: States) -> None:
        if not self._on_cpu:
            await self._engine.wake_up([MEMORY[what] for what in coming])  # the last part resumes, too
            self._cache_epoch += 1

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a ``WorkerExtension`` method in every worker process; their answers by rank."""
        answers: list[Any] = await self._engine.collective_rpc(method, args=args)
        return answers


def _tensors(told: Mapping[str, tuple[Sequence[int], bytes]]) -> dict[str, Tensor]:
    found = {name: np.frombuffer(values, dtype=np.float32).reshape(shape) for name, (shape, values) in told.items()}
    return {name: torch.from_numpy(output.copy()) for name, output in found.items()}


_KEPT = 16
"""Pictures whose numbers are kept: the requests of a group bring the same."""


class Prompts:
    """Makes the engine's inputs; pictures arrive as the numbers that a trainer's tower is given.

    vLLM's own processing, which would resize a picture once more and put marks of its own into the prompt, is not used.

    Args:
        pictures: the picture processor of the model's folder; ``None`` for a run without pictures.
        dtype: that vLLM computes in.
    """

    def __init__(self, pictures: Pictures | None, dtype: torch.dtype) -> None:
        self._pictures = pictures
        self._dtype = dtype
        self._of_item = functools.lru_cache(_KEPT)(self._arguments)

    def of(self, ids: IntArray, items: Sequence[Item], weights: str) -> EngineInput:
        """A prompt, in the engine's words.

        Args:
            ids: those of pictures are below zero (``roll.data.identity``).
            weights: name of the present weights, part of the keys of both caches: nothing that was computed with
                others is ever found, neither keys and values of a beginning nor features of a picture.

        Raises:
            ValueError: the ids show content of none of the items.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        along = spans_along(ids, items) if len(items) else []
        words = vocabulary_ids(ids)
        if not along:
            return tokens_input(words.tolist(), cache_salt=weights)
        assert self._pictures is not None, "requests of other runs have no pictures"
        shows = torch.from_numpy(words == self._pictures.token)  # others are between rows, and at the ends
        places = [
            PlaceholderRange(offset=place, length=size, is_embed=shows[place : place + size])
            for place, size, _ in along
        ]
        shown = [item for *_, item in along]
        arguments = MultiModalKwargsItems({"image": [self._of_item(item) for item in shown]})
        hashes = {"image": [f"{weights} {item.hash}" for item in shown]}
        return mm_input(words.tolist(), arguments, hashes, {"image": places}, cache_salt=weights)

    def _arguments(self, item: Item) -> Any:
        """What the tower takes of one picture."""
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        assert self._pictures is not None
        values = {name: torch.from_numpy(found) for name, found in self._pictures.inputs([item]).items()}
        values["pixel_values"] = values["pixel_values"].to(self._dtype)
        values.pop("image_sizes", None)  # that of the only picture, which has no margin
        fields = dict.fromkeys(values, MultiModalFieldConfig.batched("image", keep_on_cpu=True))
        fields["pixel_values"] = MultiModalFieldConfig.batched("image")
        if (grids := values.get("image_grid_thw")) is not None:
            fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1))
        return MultiModalKwargsItems.from_hf_inputs(BatchFeature(values), fields)["image"][0]
