"""``sglang``: generation with SGLang's asynchronous engine, on GPUs or on a CPU.

SGLang has a process to itself (``server.py``), which may run under another interpreter: its pinned packages
agree with no other engine's. This file is the near side: what crosses to that process, and when. Sampling and loading
weights happen in a third process, next to the model (``sampler.py``, ``scheduler.py``).

Several workers of a role are independent replicas; one worker has ``tp_size`` devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # teaches ForkingPickler tensors

from roll.configs.engines.sglang import CARD, SglangConfig
from roll.configs.problems import ConfigErrors
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.generation.engine_process import EngineCallError, EngineProcess
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.generation.requests import (
    Counters,
    EngineStoppedError,
    ResidentStates,
    check_request,
    scratch_folder,
)
from roll.distributed.strategy.sglang import cpu
from roll.distributed.strategy.sglang.options import require_sglang
from roll.distributed.weights.adapters import adapted_names, peft_config
from roll.distributed.weights.buckets import host_bytes, pack_buckets
from roll.distributed.weights.contents import WeightBucket, contents
from roll.distributed.weights.update_stream import UpdateStream, receive
from roll.models.loading import locate_model
from roll.models.sampling import child_seed

logger = logging.getLogger(__name__)

SERVER = "roll.distributed.strategy.sglang.server"
CPU_CACHE_SHARE = 0.25  # of the host memory that is free, at most, unless max_total_tokens says otherwise
CONTEXT_MARGIN = 8  # SGLang leaves the last positions of its context empty
MEMORY = {States.WEIGHTS: ("weights",), States.CACHE: ("kv_cache", "cuda_graph")}  # SGLang's names
ADAPTERS = 3  # in one batch: none, the old one of requests in flight, and the new one


class SglangStrategy:
    """A ``GenerateStrategy``. Call ``setup`` first and ``shutdown`` last."""

    def __init__(self, context: StrategyContext) -> None:
        if context.head != "lm":
            raise ValueError(f"{context.role}: sglang has no {context.head!r} head; expected 'lm'")
        options = context.worker.strategy_args.strategy_config
        self._context = context
        self._config = SglangConfig.model_validate(options)
        require_sglang(self._config.python_executable)
        if problems := CARD.option_problems(options):
            prefix = f"{context.role}.strategy_args.strategy_config"
            raise ConfigErrors([problem.under(prefix) for problem in problems])
        self._on_cpu = not torch.accelerator.is_available()
        self._tp_size = self._config.tp_size or context.worker.num_gpus_per_worker
        self._counters = Counters()
        self._ids = itertools.count()
        self._open: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self._weight_version = 0
        # The stream of seeds for requests that bring none: it differs by worker and repeats with the run's seed.
        self._seeds = random.Random(f"{context.seed}/{context.role}/{context.rank}")
        self._states = ResidentStates()

    def setup(self) -> RankInfo:
        """Starts the engine, which loads the model.

        Raises:
            ValueError: the model cannot be loaded, or an option does not fit it.
            EngineStoppedError: the engine did not come up; its own log says why.
        """
        context = self._context
        self._outline = ModelOutline(context)
        self._stream = UpdateStream(self._outline.check_weights)
        self._outline.check_role(context)
        if self._on_cpu:
            cpu.check_tensor_parallel(self._outline.text_config, self._tp_size, lora=context.lora is not None)
        started = time.monotonic()
        self._engine = EngineProcess(
            [self._config.python_executable or sys.executable, "-m", SERVER],
            self._environment(),
            name=f"sglang of {context.role}[{context.rank}]",
        )
        try:
            self._engine.submit("start", engine_arguments(context, self._config, self._outline, self._on_cpu)).result()
        except EngineCallError as error:
            self._engine.close("did not start")
            raise EngineStoppedError(f"{context.role}: sglang did not start; its own log says why: {error}") from error
        except BaseException:
            self._engine.close("did not start")
            raise
        logger.info("%s: sglang started in %.1f s", context.role, time.monotonic() - started)
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

        With a seed, sample 0 is what ``generate`` gives and the others have seeds derived from it. A seed gives the
        tokens that it gives in ``hf_infer``.
        """
        limit = check_request(
            request, vocab_size=self._outline.vocab_size, sequence_length=self._context.sequence_length, n=n
        )
        seed = self._seeds.getrandbits(64) if request.params.seed is None else request.params.seed
        # Of one length: SGLang aborts every request whose id begins with the one it is given.
        ids = [f"{next(self._ids):016x}" for _ in range(n)]
        with self._lock:
            if request.request_id in self._open:
                raise ValueError(f"request_id {request.request_id!r} is in flight already; expected a unique id")
            self._open[request.request_id] = ids
        try:
            samples = [
                self._engine.submit("generate", *self._call(request, rid, child_seed(seed, i), limit))
                for i, rid in enumerate(ids)
            ]
            results = await asyncio.gather(*map(asyncio.wrap_future, samples))
        except BaseException:
            with contextlib.suppress(EngineStoppedError):
                self._engine.submit("abort", ids)
            raise
        finally:
            del self._open[request.request_id]
        return [self._completion(request, result) for result in results]

    async def abort(self, request_id: str) -> None:
        """Finishes a request with the tokens it has, reason ABORT; an unknown id is ignored (it may be done)."""
        await self._do("abort", self._open.get(request_id, []))

    async def update_weights(
        self, buckets: AsyncIterator[WeightBucket], version: int, *, recompute_kv: bool = True
    ) -> None:
        """Replaces all weights between two steps; requests in flight go on, and an adapter is dropped.

        Everything is received and checked before anything is changed; updates after the first that lie on the
        worker's GPU are loaded as they come. Requests in flight are prefilled anew, so that no keys and values of the
        old weights are left.

        Args:
            buckets: all of the model's weights under Hugging Face names.
            version: what completions that start from now on report.
            recompute_kv: always so here.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not the model's; the old weights stay.
            EngineStoppedError: something failed while the engine loaded; it cannot be used any more.
        """
        received, names = await self._stream.open(buckets)
        async with self._updating(version):
            await self._do("begin_weights")
            async for bucket in received:
                await self._load(bucket, names)
            await self._do("end_weights")

    async def update_adapter(self, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        """Puts a LoRA adapter on the base weights, in place of the one before; otherwise as ``update_weights``.

        Requests in flight finish with the adapter that they started with.

        Args:
            buckets: the whole adapter under the names of peft's state dict.
            version: what completions that start from now on report.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not those of ``lora``; the old adapter stays.
            EngineStoppedError: the engine failed.
        """
        _, tensors = await receive(buckets)
        spec = self._outline.check_adapter(self._context.lora, tensors)
        (bucket,) = pack_buckets(tensors.items(), sys.maxsize)
        staged = contents(bucket)
        config = peft_config(spec, tensors)
        async with self._updating(version):
            with _memory_file(host_bytes(bucket)) as path:
                await self._do("load_adapter", str(path), len(bucket.data), staged, config)

    async def pause(self) -> None:
        """Returns when the step in progress is done; requests stay, and new ones queue, until ``resume``."""
        await self._do("hold", "pause")

    async def resume(self) -> None:
        await self._do("release", "pause")

    def offload(self, what: States) -> None:
        """Frees the cache, or moves the weights to host memory too; requests wait for both, keeping their tokens.

        On a CPU nothing is freed (see ``can_offload``); requests wait all the same.
        """
        leaving = self._states.leave(what)
        if not leaving:
            return
        if self._on_cpu:
            logger.warning("%s: sglang frees no memory on a CPU; offload only holds the requests", self._context.role)
        self._engine.submit("offload", self._memory(leaving)).result()

    def onload(self, what: States) -> None:
        """Takes weights or cache back to the device; requests go on when nothing is away any more."""
        coming = self._states.come_back(what)
        if coming:
            self._engine.submit("onload", self._memory(coming), not self._states.away).result()

    def stats(self) -> dict[str, float]:
        """Running totals and the present load (requests running or waiting)."""
        totals = {name: float(value) for name, value in asdict(self._counters).items()}
        return {**totals, "in_flight": float(len(self._open)), "weight_version": float(self._weight_version)}

    def shutdown(self) -> None:
        """Stops the engine's processes; requests in flight fail with ``EngineStoppedError``."""
        if hasattr(self, "_engine"):
            self._engine.close()

    async def _do(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._engine.submit(method, *args))

    def _call(self, request: GenerateRequest, rid: str, seed: int, limit: int) -> tuple[Any, ...]:
        """Arguments of ``SglangServer.generate``."""
        params = request.params
        ours = {
            "seed": seed,
            "prompt_len": len(request.prompt_ids),
            "temperature": float(params.temperature),
            "top_k": params.top_k,
            "top_p": float(params.top_p),
            "repetition_penalty": float(params.repetition_penalty),
        }
        sampling = {
            "max_new_tokens": limit,
            "stop": list(params.stop) or None,
            "stop_token_ids": self._outline.eos_ids,
            "custom_params": ours,
        }
        return rid, request.prompt_ids.tolist(), sampling

    def _completion(self, request: GenerateRequest, result: Mapping[str, Any]) -> Completion:
        tokens, logprobs = result["tokens"], result["logprobs"]
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"sglang gave {len(logprobs)} log-probs for {len(tokens)} tokens")
        if any(map(math.isnan, logprobs)):
            raise FloatingPointError(f"request {request.request_id!r}: the model's logits are NaN")
        self._counters.finished += 1
        self._counters.generated_tokens += len(tokens)
        self._counters.shared_tokens += result["cached"]
        self._counters.prefill_tokens += len(request.prompt_ids) - result["cached"]
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(tokens, dtype=np.int64),
            logprobs=np.array(logprobs, dtype=np.float32),
            finish_reason=FinishReason(result["reason"]),
            weight_version=self._weight_version if result["version"] is None else int(result["version"]),
        )

    @contextlib.asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[None]:
        """Between two steps, one update at a time. What fails in here leaves a model that nobody should sample."""
        await self._do("begin_update")
        try:
            yield
            await self._do("end_update", version)
        except BaseException as error:
            logger.exception("%s: the weights may be half replaced, the engine stops", self._context.role)
            self._engine.close(f"failed in a weight update: {type(error).__name__}: {error}")
            raise EngineStoppedError("the generation engine failed in a weight update") from error
        self._weight_version = version

    async def _load(self, bucket: WeightBucket, names: Mapping[str, str]) -> None:
        """Hands a bucket's tensors to the engine under their new names, without a way through the host on a GPU."""
        staged = contents(bucket, names)
        if isinstance(bucket.data, np.ndarray):
            with _memory_file(bucket.data) as path:
                await self._do("load", str(path), len(bucket.data), staged)
            return
        block = bucket.data.clone()  # memory that came from another process cannot be handed on
        description = json.dumps({"path": None, "tensors": staged})
        payloads = [_shared([(description, block)]) for _ in range(self._tp_size)]
        await self._do("load_shared", payloads)

    def _memory(self, what: States) -> list[str]:
        """SGLang's names for it; none on a CPU, where nothing is freed."""
        return [tag for each in what for tag in MEMORY[each]] if self.can_offload else []

    def _environment(self) -> dict[str, str]:
        """What the engine's processes find in their environment. What the user has set stays as it is."""
        wanted = {
            # The context is a little longer than the model's, for the positions that SGLang leaves empty.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "PYTHONWARNINGS": "ignore",
        }
        if self._on_cpu:
            wanted |= cpu.environment(self._tp_size)
        if locate_model(self._context.model_path)[1]:
            wanted["HF_HUB_OFFLINE"] = "1"
        return wanted | {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}


def engine_arguments(
    context: StrategyContext, config: SglangConfig, outline: ModelOutline, on_cpu: bool
) -> dict[str, Any]:
    """The arguments of ``ServerArgs``, for this role, model and machine."""
    arguments: dict[str, Any] = {
        "model_path": locate_model(context.model_path)[0],
        "dtype": str(outline.dtype).removeprefix("torch."),
        "json_model_override_args": json.dumps(context.worker.model_args.model_config_kwargs),
        "context_length": context.sequence_length + CONTEXT_MARGIN,
        "random_seed": context.seed % 2**31,
        "max_running_requests": context.max_running_requests,
        "tp_size": config.tp_size or context.worker.num_gpus_per_worker,
        "mem_fraction_static": config.mem_fraction_static,
        "max_total_tokens": config.max_total_tokens,
        "load_format": config.load_format,
        "disable_radix_cache": config.disable_radix_cache,
        "log_level": "error",
        "trust_remote_code": False,
    }
    if context.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": context.lora.rank,
            "lora_target_modules": sorted(adapted_names(outline.empty_adapter(context.lora))),
            "max_loras_per_batch": ADAPTERS,
        }
    if on_cpu:
        arguments |= cpu.ENGINE_OPTIONS
        arguments["max_total_tokens"] = config.max_total_tokens or _cpu_cache_tokens(context, outline)
    else:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments | (config.model_extra or {})


def _cpu_cache_tokens(context: StrategyContext, outline: ModelOutline) -> int:
    """Room for all running requests, within a share of the free memory; for two in any case."""
    one = context.sequence_length + CONTEXT_MARGIN
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = int(CPU_CACHE_SHARE * free) // outline.cache_bytes_per_token
    return max(2 * one, min(context.max_running_requests * one, affordable))


def _shared(value: Any) -> bytes:
    """A pickle in which memory of a GPU is a handle to it (CUDA IPC), in the form that SGLang reads."""
    return bytes(ForkingPickler.dumps(value))


@contextlib.contextmanager
def _memory_file(data: np.ndarray) -> Iterator[Path]:
    """A private file with these bytes, in shared memory, or on disk where that has no room; gone in the end."""
    with tempfile.NamedTemporaryFile(prefix="roll-sglang-", dir=scratch_folder(len(data))) as file:
        file.write(data.data)
        file.flush()
        yield Path(file.name)
