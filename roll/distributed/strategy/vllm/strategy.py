"""``vllm``: generation with vLLM's asynchronous engine (V1), on GPUs or on a CPU.

The engine runs in processes of its own, so this file is about what crosses to them: requests with token ids, weights
through files in memory, and an adapter the way vLLM reads one. What runs over there is ``worker.py``.

Several workers of a role are independent replicas; one worker has ``tensor_parallel_size`` devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.configs.engines.vllm import CARD, VllmConfig
from roll.configs.problems import ConfigErrors
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.engines import require_engine
from roll.distributed.strategy.generation.engine_loop import EngineLoop, brought_from
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.generation.requests import (
    Counters,
    EngineStoppedError,
    ResidentStates,
    check_request,
    scratch_folder,
)
from roll.distributed.strategy.vllm.arguments import (
    check_cpu_kernels,
    engine_arguments,
    environment,
)
from roll.distributed.strategy.vllm.failures import Failures
from roll.distributed.weights import device_memory
from roll.distributed.weights.adapters import peft_config
from roll.distributed.weights.buckets import as_tensor, host_bytes
from roll.distributed.weights.contents import WeightBucket, contents
from roll.distributed.weights.segments import SegmentPool
from roll.distributed.weights.update_stream import UpdateStream, on_device, receive
from roll.models.sampling import child_seed

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

STAGED_BUCKETS = 2  # kept from one update to the next; fresh memory costs more than the copy into it
SHUTDOWN_S = 2.0  # the engine's own clean-up takes less; then its process is killed, which it survives for seconds more
MEMORY = {States.WEIGHTS: "weights", States.CACHE: "kv_cache"}  # vLLM's names
ADAPTER_ID = 1  # vLLM counts adapters from 1; there is only one, replaced in place


class VllmStrategy:
    """A ``GenerateStrategy``. Call ``setup`` first and ``shutdown`` last."""

    def __init__(self, context: StrategyContext) -> None:
        if context.head != "lm":
            raise ValueError(f"{context.role}: vllm has no {context.head!r} head; expected 'lm'")
        require_engine("vllm", extra="vllm", strategy="vllm")
        self._context = context
        options = context.worker.strategy_args.strategy_config
        self._config = VllmConfig.model_validate(options)
        if problems := CARD.option_problems(options):
            prefix = f"{context.role}.strategy_args.strategy_config"
            raise ConfigErrors([problem.under(prefix) for problem in problems])
        self._on_cpu = not torch.cuda.is_available()
        self._counters = Counters()
        self._open: set[str] = set()
        self._holds: set[str] = set()
        self._states = ResidentStates()
        self._weight_version = 0
        self._adapter: LoRARequest | None = None
        self._cache_epoch = 0
        self._staging = SegmentPool()
        self._failures = Failures()
        self._stopped: str | None = None

    def setup(self) -> RankInfo:
        """Starts the engine, which loads the model.

        Raises:
            MissingEngineError: vLLM is not installed.
            ValueError: the model cannot be loaded, or an option does not fit it.
        """
        context = self._context
        self._outline = ModelOutline(context)
        self._stream = UpdateStream(self._outline.check_weights)
        longest = self._config.max_model_len
        if longest is not None and longest < context.sequence_length:
            wanted = f"at least sequence_length ({context.sequence_length})"
            raise ValueError(f"strategy_config.max_model_len: {longest}, expected {wanted}")
        self._outline.check_role(context)
        self._loop = EngineLoop(f"vllm-{context.role}-{context.rank}")
        try:
            self._loop.run(self._start())
        except BaseException:
            self._loop.close()
            raise
        return RankInfo(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def can_offload(self) -> bool:
        """Whether ``offload`` frees device memory: on a CPU it does not."""
        return not self._on_cpu

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one completion.

        A cancelled caller aborts its request.

        Raises:
            ValueError: the prompt is empty or longer than ``sequence_length``, a token id is outside the vocabulary,
                a sampling parameter is out of range, or the request id is in flight.
            EngineStoppedError: the engine failed, now or earlier, or was shut down.
        """
        return (await self.generate_n(request, 1))[0]

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        """Samples ``n`` completions of one prompt, which the prefix cache shares. Otherwise as ``generate``.

        With a seed, sample 0 is what ``generate`` gives and the others have seeds derived from it.
        """
        limit = check_request(
            request, vocab_size=self._outline.vocab_size, sequence_length=self._context.sequence_length, n=n
        )
        self._check_alive()
        seed = request.params.seed
        sampling = [self._sampling(request, None if seed is None else child_seed(seed, i), limit) for i in range(n)]
        return await self._loop.call(self._generate_all(request, sampling))

    async def abort(self, request_id: str) -> None:
        """Finishes a request with the tokens it has, reason ABORT; an unknown id is ignored (it may be done)."""
        self._check_alive()
        await self._loop.call(self._abort(request_id))

    async def update_weights(
        self, buckets: AsyncIterator[WeightBucket], version: int, *, recompute_kv: bool = False
    ) -> None:
        """Replaces all weights between two steps; requests in flight go on, and an adapter is dropped.

        Everything is received and checked before anything is changed; updates after the first that lie on the
        worker's GPU are loaded as they come. Keys and values that were computed with the old weights serve only the
        requests in flight, for which they are stale by one update.

        Args:
            buckets: all of the model's weights under Hugging Face names.
            version: what completions that start from now on report.
            recompute_kv: prefill the running requests anew, so that nothing is stale.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not the model's; the old weights stay.
            EngineStoppedError: something failed while the engine loaded; it cannot be used any more.
        """
        received, names = await self._stream.open(buckets)
        self._check_alive()
        brought = brought_from(asyncio.get_running_loop(), received)
        await self._loop.call(self._replace_weights(brought, names, version, recompute_kv))

    async def update_adapter(self, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        """Puts a LoRA adapter on the base weights, in place of the one before; otherwise as ``update_weights``.

        Args:
            buckets: the whole adapter under the names of peft's state dict.
            version: what completions that start from now on report.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not those of ``lora``; the old adapter stays.
            EngineStoppedError: the engine failed.
        """
        _, tensors = await receive(buckets)
        self._outline.check_adapter(self._context.lora, tensors)
        self._check_alive()
        await self._loop.call(self._replace_adapter(tensors, version))

    async def pause(self) -> None:
        """Returns when the step in progress is done; requests stay, and new ones queue, until ``resume``."""
        self._check_alive()
        await self._loop.call(self._hold("pause"))

    async def resume(self) -> None:
        self._check_alive()
        await self._loop.call(self._release("pause"))

    def offload(self, what: States) -> None:
        """Frees the cache, or moves the weights to host memory too; requests wait for both, keeping their tokens.

        On a CPU nothing is freed (see ``can_offload``); requests wait all the same.
        """
        leaving = self._states.leave(what)
        if not leaving:
            return
        self._check_alive()
        if self._on_cpu:
            logger.warning("%s: vllm frees no memory on a CPU; offload only holds the requests", self._context.role)
        self._loop.run(self._sleep(leaving))

    def onload(self, what: States) -> None:
        """Takes weights or cache back to the device; requests go on when nothing is away any more."""
        coming = self._states.come_back(what)
        if coming:
            self._check_alive()
            self._loop.run(self._wake(coming))

    def stats(self) -> dict[str, float]:
        """Running totals and the present load (requests running or waiting)."""
        totals = {name: float(value) for name, value in asdict(self._counters).items()}
        return {**totals, "in_flight": float(len(self._open)), "weight_version": float(self._weight_version)}

    def shutdown(self) -> None:
        """Stops the engine's processes; requests in flight fail with ``EngineStoppedError``."""
        if not hasattr(self, "_engine"):
            return
        self._stopped = self._stopped or "was shut down"
        self._loop.close()
        self._engine.shutdown(timeout=SHUTDOWN_S)
        del self._engine  # else its finaliser runs when the interpreter is half gone

    def _sampling(self, request: GenerateRequest, seed: int | None, limit: int) -> VllmSamplingParams:
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = request.params
        try:
            return SamplingParams(
                max_tokens=limit,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(0, params.top_k),
                repetition_penalty=params.repetition_penalty,
                stop=list(params.stop),
                include_stop_str_in_output=True,
                seed=seed,
                ignore_eos=True,  # stop_token_ids are all that end a completion, as in every generator
                stop_token_ids=self._outline.eos_ids,
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
        context = self._context
        with environment(context.model_path, self._on_cpu, self._failures.config):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._on_cpu:
                check_cpu_kernels(self._outline)
            arguments = engine_arguments(context, self._config, self._outline, on_cpu=self._on_cpu)
            started = time.monotonic()
            try:
                self._engine: AsyncLLM = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            except RuntimeError as error:  # one of its processes ended
                reason = f"{context.model_path}: {self._failures.first()}"
                raise ValueError(f"{context.role}: vllm could not start with {reason}") from error
        self._update_lock = asyncio.Lock()
        self._num_processes = len(await self._rpc("roll_prepare", os.getpid()))
        await self._engine.update_weight_version("0")
        await self._engine.get_supported_tasks()  # cached, so that a request is registered without a pause
        logger.info("%s: vllm started in %.1f s", context.role, time.monotonic() - started)

    async def _generate_all(self, request: GenerateRequest, sampling: Sequence[VllmSamplingParams]) -> list[Completion]:
        if request.request_id in self._open:
            raise ValueError(f"request_id {request.request_id!r} is in flight already; expected a unique id")
        self._open.add(request.request_id)
        samples = [asyncio.create_task(self._generate_one(request, one)) for one in sampling]
        try:
            return list(await asyncio.gather(*samples))
        except BaseException:
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)
            raise
        finally:
            self._open.discard(request.request_id)

    async def _generate_one(self, request: GenerateRequest, sampling: VllmSamplingParams) -> Completion:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        # The salt is part of the prefix cache's keys: nothing computed with other weights is ever found.
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"weights-{self._cache_epoch}")
        last: RequestOutput | None = None
        try:
            async for output in self._engine.generate(prompt, sampling, request.request_id, lora_request=self._adapter):
                last = output
        except EngineDeadError as error:
            self._stopped = self._stopped or "died"
            raise EngineStoppedError(f"the generation engine died: {self._failures.first()}") from error
        except asyncio.CancelledError:
            if self._stopped is not None:
                raise EngineStoppedError(f"the generation engine {self._stopped}") from None
            raise
        assert last is not None
        return self._completion(request, last)

    def _completion(self, request: GenerateRequest, output: RequestOutput) -> Completion:
        (sample,) = output.outputs
        cached = output.num_cached_tokens or 0
        self._counters.finished += 1
        self._counters.generated_tokens += len(sample.token_ids)
        self._counters.shared_tokens += cached
        self._counters.prefill_tokens += len(request.prompt_ids) - cached
        logprobs: list[float] = sample.logprobs.logprobs if sample.token_ids else []  # type: ignore[union-attr]
        # With logprobs=0 there is one entry per token.
        if len(logprobs) != len(sample.token_ids):
            raise RuntimeError(f"vllm gave {len(logprobs)} log-probs for {len(sample.token_ids)} tokens")
        spans = sample.weight_versions
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(sample.token_ids, dtype=np.int64),
            logprobs=np.array(logprobs, dtype=np.float32),
            finish_reason=FinishReason(str(sample.finish_reason)),
            weight_version=int(spans[0].version) if spans else self._weight_version,
        )

    async def _abort(self, request_id: str) -> None:
        await asyncio.sleep(0)  # a request that came just before becomes known to the engine in this turn of the loop
        await self._engine.abort(request_id)

    async def _replace_weights(
        self, buckets: AsyncIterator[WeightBucket], names: Mapping[str, str], version: int, recompute_kv: bool
    ) -> None:
        async with self._updating():
            await self._rpc("roll_begin_weights", self._staging.ids)
            async for bucket in buckets:
                await self._load(bucket, names)
            self._take_back(await self._rpc("roll_finish_weights"))
            self._staging.trim(STAGED_BUCKETS, 0)
            if not self._on_cpu:
                device_memory.collect()
            if self._adapter is not None and self._context.lora is not None:
                # vLLM dropped it. Requests in flight still name it, so it comes back as one that changes nothing.
                await self._load_adapter(self._outline.empty_adapter(self._context.lora))
                self._adapter = None
            await self._now_at(version, recompute_kv=recompute_kv)

    async def _replace_adapter(self, tensors: Mapping[str, Tensor], version: int) -> None:
        async with self._updating():
            self._adapter = await self._load_adapter(tensors)
            await self._now_at(version)

    @contextlib.asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        """Between two steps, one update at a time. What fails in here leaves a model that nobody should sample."""
        async with self._update_lock:
            if States.WEIGHTS in self._states.away and not self._on_cpu:
                raise RuntimeError("vllm: the weights are off the device; call onload before an update")
            await self._hold("update")
            try:
                yield
            except BaseException as error:
                self._stopped = f"failed in a weight update: {type(error).__name__}: {error}"
                logger.exception("%s: the weights may be half replaced, the engine stops", self._context.role)
                raise EngineStoppedError(f"the generation engine {self._stopped}") from error
            await self._release("update")

    async def _load(self, bucket: WeightBucket, names: Mapping[str, str]) -> None:
        """Hands one bucket to the workers: through memory that they map, or as a handle to the device's."""
        staged = contents(bucket, names)
        if on_device(bucket):
            block = as_tensor(bucket.data).clone()  # memory that came from another process cannot be handed on
            handles = [device_memory.share(block) for _ in range(self._num_processes)]
            await self._rpc("roll_load_weights_from_device", handles, block.device.index, staged)
            return
        data = host_bytes(bucket)
        memory = self._staging.allocate(len(data))
        await asyncio.to_thread(np.copyto, memory, data)
        segment = self._staging.find(memory)
        assert segment is not None
        self._staging.hand_over(segment, map(str, range(self._num_processes)))
        self._take_back(await self._rpc("roll_load_weights", segment.id, segment.path, len(data), staged))

    def _take_back(self, released: Sequence[Sequence[str]]) -> None:
        """Notes which staged buckets each worker process is done with."""
        for process, segments in enumerate(released):
            self._staging.release(segments, str(process))

    async def _load_adapter(self, tensors: Mapping[str, Tensor]) -> LoRARequest:
        """Gives vLLM the adapter in the form that it reads, in place of the one before."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        spec = self._context.lora
        assert spec is not None
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="roll-vllm-", dir=scratch_folder(num_bytes)) as name:
            folder = Path(name)
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
            )
            (folder / "adapter_config.json").write_text(json.dumps(peft_config(spec, tensors)))
            request = LoRARequest("policy", ADAPTER_ID, str(folder), load_inplace=True)
            if not await self._engine.add_lora(request):
                raise RuntimeError("vllm took no adapter")
        # Requests carry it without load_inplace: they find it loaded and never read the folder.
        return LoRARequest("policy", ADAPTER_ID, "memory")

    async def _now_at(self, version: int, *, recompute_kv: bool = False) -> None:
        self._weight_version = version
        self._cache_epoch += 1
        await self._engine.update_weight_version(str(version))
        # Old entries could not be found any more; without running requests the reset also frees them at once.
        if recompute_kv or not self._open:
            await self._engine.reset_prefix_cache(reset_running_requests=recompute_kv)

    async def _hold(self, reason: str) -> None:
        """No step starts until ``_release(reason)``."""
        self._holds.add(reason)
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def _release(self, reason: str) -> None:
        self._holds.discard(reason)
        if not self._holds:
            await self._engine.resume_generation()

    async def _sleep(self, leaving: States) -> None:
        async with self._update_lock:
            await self._hold("offload")
            if self._on_cpu:
                return
            # Level 2 would drop the weights, which nobody promises to send again before the next request.
            await self._engine.sleep(level=1, mode="keep")
            if States.WEIGHTS not in leaving:  # vLLM only frees a cache alone that no request uses
                await self._engine.wake_up([MEMORY[States.WEIGHTS]])

    async def _wake(self, coming: States) -> None:
        async with self._update_lock:
            if not self._on_cpu:
                await self._engine.wake_up([MEMORY[what] for what in coming])  # the last part resumes, too
                self._cache_epoch += 1
            if not self._states.away:
                self._holds.discard("offload")
            if self._holds:
                await self._engine.pause_generation(mode="keep", clear_cache=False)
            else:
                await self._engine.resume_generation()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a ``WorkerExtension`` method in every worker process; their answers by rank."""
        answers: list[Any] = await self._engine.collective_rpc(method, args=args)
        return answers

    def _check_alive(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(f"the generation engine {self._stopped}")
