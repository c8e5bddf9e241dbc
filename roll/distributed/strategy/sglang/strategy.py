"""``sglang``: generation and log-probs with SGLang's asynchronous engine, on GPUs or on a CPU.

SGLang has a process to itself (``server.py``), which may run under another interpreter: its pinned packages
agree with no other engine's. This file is the near side: what crosses to that process, and when. Sampling and loading
weights happen in a third process, next to the model (``sampler.py``, ``scheduler.py``).

Several workers of a role are independent replicas; one worker has ``tp_size`` devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # makes ForkingPickler know tensors
from torch import Tensor

from roll.configs.engines.sglang import CARD, SglangConfig, interpreter_problem, window_problem
from roll.configs.problems import ConfigErrors
from roll.data.batch import Batch
from roll.data.columns import IntArray, Item
from roll.data.identity import items_along, spans_along, vocabulary_ids
from roll.data.requests import Completion, GenerateRequest
from roll.distributed.strategy import MissingEngineError, require_engine
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.evidence import Sketch, change_by
from roll.distributed.strategy.generation.engine_process import EngineCallError, EngineProcess, EngineStoppedError
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.generation.prompt_scoring import SCORING
from roll.distributed.strategy.generation.scoring import PromptScores, ScoringGenerator
from roll.distributed.strategy.sglang import cpu
from roll.distributed.weights.adapters import peft_config
from roll.distributed.weights.buckets import WeightBucket, as_tensor, pack_buckets, renamed
from roll.distributed.weights.messages import Lender
from roll.distributed.weights.receiver import on_device
from roll.distributed.weights.segments import EXPANDABLE, own_copy, without_expandable_segments
from roll.models.lora import adapted_names
from roll.models.pictures import Tower
from roll.models.tokenizer import locate_model

logger = logging.getLogger(__name__)


def require_sglang(python: str | None) -> None:
    """Checks that SGLang is installed for an interpreter (``None``: this one), without starting it.

    Raises:
        MissingEngineError: it is not, or there is no such interpreter.
    """
    if python is None:
        require_engine("sglang", extra="sglang", strategy="sglang")
    elif problem := interpreter_problem(python):
        raise MissingEngineError(str(problem.under("strategy_config")))


SERVER = "roll.distributed.strategy.sglang.server"
CPU_CACHE_SHARE = 0.25  # of the host memory that is free, at most, unless max_total_tokens says otherwise
CONTEXT_MARGIN = 8  # SGLang leaves the last positions of its context empty
MEMORY = {States.WEIGHTS: ("weights",), States.CACHE: ("kv_cache", "cuda_graph")}  # SGLang's names
HOLD = "generator"  # the reason that the engine's process knows for all holds of this side
ENGINE = "sglang"  # who reads the buckets, as one
STREAM_INTERVAL = 16  # tokens that cross SGLang's three processes at once; only an abort of what is paused loses some
ADAPTERS = 3  # in one batch: none, the old one of requests in flight, and the new one


class SglangStrategy(ScoringGenerator[dict[str, str]]):
    """A ``GenerateStrategy`` and ``ScoreStrategy`` whose engine has its own process.

    A seed gives the tokens that it gives in ``hf_infer``. Requests in flight are prefilled anew by an update, so that
    no keys and values of the old weights are left; they finish with the adapter that they started with.
    """

    name = "sglang"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        options = context.worker.strategy_args.strategy_config
        self._config = SglangConfig.model_validate(options)
        require_sglang(self._config.python_executable)
        if problems := list(CARD.option_problems(options)):
            prefix = f"{context.role}.strategy_args.strategy_config"
            raise ConfigErrors([problem.under(prefix) for problem in problems])
        self._on_cpu = not torch.accelerator.is_available()
        self.can_offload = not self._on_cpu
        self._tp_size = self._config.tp_size or context.worker.num_gpus_per_worker
        self._lender = Lender()
        self._numbers = itertools.count()
        self._ids: dict[str, str] = {}
        """SGLang's id of each request in flight."""
        self._adapter: dict[str, Tensor] = {}
        """The one that was loaded last over the present weights."""

    def start(self) -> None:
        context = self.context
        self._outline = ModelOutline(context)
        self.vocab_size = self._outline.vocab_size
        self._outline.check_role(context)
        self.drops_weights = not keeps_weights(context, self._outline) and self.can_offload
        if problem := window_problem(self._outline.text_config, context.sequence_length):
            raise ValueError(f"{context.role}.strategy_args.strategy_name: sglang, expected another: {problem}")
        if self._on_cpu:
            cpu.check_layers(self._outline.text_config, has_states=self._outline.has_states)
            cpu.check_tensor_parallel(self._outline.text_config, self._tp_size, lora=context.lora is not None)
            if context.pictures:
                cpu.check_tower(self._outline.config, self._tp_size)
        self._prompts = Prompts(self._outline.tower(context, CARD))
        started = time.monotonic()
        self._engine = EngineProcess(
            [self._config.python_executable or sys.executable, "-m", SERVER],
            self._environment(),
            name=f"sglang of {context.role}[{context.rank}]",
        )
        try:
            arguments = engine_arguments(context, self._config, self._outline, self._on_cpu)
            self._engine.submit("start", arguments, context.pictures).result()
        except EngineCallError as error:
            self._engine.close("did not start")
            raise EngineStoppedError(f"{context.role}: sglang did not start, see its log: {error}") from error
        except BaseException:
            self._engine.close("did not start")
            raise
        logger.info("%s: sglang started in %.1f s", context.role, time.monotonic() - started)

    def stop(self, why: str) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(why)

    async def sample(self, request: GenerateRequest, limit: int) -> Completion:
        # Of one length: SGLang aborts every request whose id begins with the one it is given.
        rid = self._ids[request.request_id] = f"{next(self._numbers):016x}"
        try:
            result = await self._do("generate", *self._call(request, rid, limit))
        except BaseException:
            with contextlib.suppress(EngineStoppedError):
                self._engine.submit("abort", [rid])
            raise
        finally:
            del self._ids[request.request_id]
        return self.completion(
            request,
            result["tokens"],
            result["logprobs"],
            result["reason"],
            cached=result["cached"],
            spans=result["spans"],
        )

    def score(self, name: str, token_ids: IntArray, items: Sequence[Item]) -> Future[PromptScores]:
        prompt = self._prompts.of(token_ids, items)
        return self._engine.submit("score", f"{next(self._numbers):016x}", *prompt, self.scoring.width)

    def end(self, request_id: str) -> Future[None]:
        rid = self._ids.get(request_id)
        return self._engine.submit("abort", [] if rid is None else [rid])

    def halt(self) -> Future[None]:
        return self._engine.submit("hold", HOLD)

    def go_on(self) -> Future[None]:
        return self._engine.submit("release", HOLD)

    def check_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return self._outline.check_weights(tensors)

    async def load_weights(self, buckets: AsyncIterator[WeightBucket], plan: dict[str, str]) -> None:
        await self._do("begin_update")
        await self._do("begin_weights")
        async for bucket in buckets:
            await self._load(bucket, plan)
        await self._do("end_weights")
        self._adapter = {}
        self._take_back()

    def check_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        self._outline.check_adapter(self.context.lora, tensors)

    async def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.context.lora is not None
        (bucket,) = pack_buckets(tensors.items(), sys.maxsize)
        await self._do("begin_update")
        place, config = self._lender.lend(bucket, [ENGINE]), peft_config(self.context.lora, tensors)
        await self._do("load_adapter", place.path, len(bucket.data), bucket.outline.contents, config)
        self._take_back()
        self._adapter = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def sketches(self) -> dict[str, Sketch]:
        shapes = self._outline.shapes()
        found, adapted = self._sketches("sketches", shapes)
        for name, sketch in found.items():
            if adapted and (delta := change_by(self._adapter, self.context.lora, name, sketch.shape)) is not None:
                found[name] = sketch.plus(delta)
        return found

    def own_sketches(self) -> dict[str, Sketch]:
        return self._sketches("own_sketches", None)[0]

    def layer_outputs(self, row: Batch) -> dict[str, Tensor]:
        self._engine.submit("show", "watch", None).result()
        try:
            self.forward_logprobs(row)
        finally:
            told, _, _ = self._shown("layers", row.num_tokens)
        return told

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        if row.items_I is None or not (along := items_along(row.tokens_T, row.items_I[0])):
            return {}
        self._engine.submit("show", "look", None).result()
        try:
            self.forward_logprobs(row)
        finally:
            told, _, _ = self._shown("pictures", [item.hash for _, item in along])
        return told

    def _sketches(self, what: str, given: Any) -> tuple[dict[str, Sketch], bool]:
        told, metadata, adapted = self._shown(what, given)
        plain = {name: (*json.loads(metadata[name]), own.tolist()) for name, own in told.items()}
        return {name: Sketch.of_plain(each) for name, each in plain.items()}, adapted

    def _shown(self, what: str, given: Any) -> tuple[dict[str, Tensor], dict[str, str], bool]:
        """Tensors and metadata that ``SglangServer.show`` gives, and whether there is an adapter."""
        from safetensors import safe_open

        try:
            path, adapted = self._engine.submit("show", what, given).result()
        except EngineCallError as error:
            logger.warning("%s: sglang does not show its %s: %s", self.context.role, what.replace("_", " "), error)
            return {}, {}, False
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # it cannot be looped over itself
            found = {name: file.get_tensor(name) for name in names}, file.metadata() or {}
        os.unlink(path)
        return *found, adapted

    def use_version(self, version: int, recompute_kv: bool) -> Future[None]:
        return self._engine.submit("end_update", version)

    def move_out(self, leaving: States) -> Future[None]:
        return self._engine.submit("offload", self._memory(leaving))

    def move_in(self, coming: States) -> Future[None]:
        return self._engine.submit("onload", self._memory(coming), not self._states.away)

    async def _do(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._engine.submit(method, *args))

    def _call(self, request: GenerateRequest, rid: str, limit: int) -> tuple[Any, ...]:
        """Arguments of ``SglangServer.generate``."""
        params = request.params
        ours = {
            "seed": self.seed_of(request),
            "prompt_len": len(request.prompt_ids),
            "temperature": float(params.temperature),
            "top_k": params.top_k,
            "top_p": float(params.top_p),
            "min_p": float(params.min_p),
            "first_token_temperature": params.first_token_temperature,
            "first_token_top_k": params.first_token_top_k,
            "repetition_penalty": float(params.repetition_penalty),
            "presence_penalty": float(params.presence_penalty),
            "frequency_penalty": float(params.frequency_penalty),
        }
        sampling = {
            "max_new_tokens": limit,
            "stop": list(params.stop) or None,
            "stop_token_ids": None if params.ignore_eos else self._outline.stop_ids,
            "ignore_eos": params.ignore_eos,
            "custom_params": ours,
        }
        return rid, *self._prompts.of(request.prompt_ids, request.items), sampling

    async def _load(self, bucket: WeightBucket, names: Mapping[str, str]) -> None:
        """Hands a bucket's tensors to the engine under their new names, without a way through the host on a GPU."""
        staged = renamed(bucket.outline.contents, names)
        if not on_device(bucket):
            place = await asyncio.to_thread(self._lender.lend, bucket, [ENGINE])
            await self._do("load", place.path, len(bucket.data), staged)
            return
        block = own_copy(as_tensor(bucket.data))
        description = json.dumps({"path": None, "tensors": staged})
        payloads = [_shared([(description, block)]) for _ in range(self._tp_size)]
        await self._do("load_shared", payloads)

    def _take_back(self) -> None:
        """SGLang has loaded all: nothing of it is left in what was lent."""
        self._lender.take_back(self._lender.segments, ENGINE)
        self._lender.end(0)

    def _memory(self, what: States) -> list[str]:
        """SGLang's names for it; none on a CPU, where nothing is freed."""
        return [tag for each in what for tag in MEMORY[each]] if self.can_offload else []

    def _environment(self) -> dict[str, str]:
        """Environment of the engine's processes. What the user has set stays as it is."""
        wanted = {
            # The context is a little longer than the model's, for the positions that SGLang leaves empty.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "PYTHONWARNINGS": "ignore",
            SCORING: json.dumps(dataclasses.astuple(self.scoring)),
        }
        if self._on_cpu:
            wanted |= cpu.environment(self._tp_size)
        if locate_model(self.context.model_path)[1]:
            wanted["HF_HUB_OFFLINE"] = "1"
        given = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            if EXPANDABLE in given.get(name, ""):
                given[name] = without_expandable_segments(given[name])
                logger.warning(
                    "%s: %s: SGLang's processes run without %s, with which it cannot free memory between steps",
                    self.context.role,
                    name,
                    EXPANDABLE,
                )
        return wanted | given


_KEPT = 16
"""Pictures whose numbers are kept: the requests of a group bring the same."""


class Prompts:
    """Makes what the engine's process is given; pictures go there as the numbers that a trainer's tower is given.

    SGLang's own processing is not used: it would look for pictures at tokens of their number, of which a policy may
    sample some.
    """

    def __init__(self, tower: Tower | None) -> None:
        self._tower = tower
        self._of_item = functools.lru_cache(_KEPT)(self._inputs)

    def of(self, ids: IntArray, items: Sequence[Item]) -> tuple[list[int], dict[str, Any] | None]:
        """The vocabulary's ids of a prompt, and the pictures in it.

        Args:
            ids: those of pictures are below zero (``roll.data.identity``).

        Returns:
            Of a prompt with pictures ``positions`` int64 [3, L], and of each of its ``pictures`` the first and the last
            place, its hash, and what the tower takes of it.

        Raises:
            ValueError: the ids show content of none of the items.
        """
        along, words = spans_along(ids, items) if len(items) else [], vocabulary_ids(ids).tolist()
        if not along:
            return words, None
        assert self._tower is not None, "requests of other runs have no pictures"
        grid_of = lambda item: torch.from_numpy(self._of_item(item)["image_grid_thw"][0])  # noqa: E731
        pictures = [(at, at + size - 1, item.hash, self._of_item(item)) for at, size, item in along]
        positions_3L = self._tower.positions([(ids, items)], [along], grid_of)
        return words, {"positions": positions_3L.numpy(), "pictures": pictures}

    def _inputs(self, item: Item) -> dict[str, np.ndarray]:
        assert self._tower is not None
        return self._tower.pictures.inputs([item])


def engine_arguments(
    context: StrategyContext, config: SglangConfig, outline: ModelOutline, on_cpu: bool
) -> dict[str, Any]:
    """The arguments of ``ServerArgs``, for this role, model and machine."""
    arguments: dict[str, Any] = {
        "model_path": locate_model(context.model_path)[0],
        "tokenizer_path": locate_model(context.tokenizer_path or context.model_path, tokenizer_alone=True)[0],
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
        "stream_interval": STREAM_INTERVAL,
        "log_level": "error",
        "trust_remote_code": context.worker.model_args.trust_remote_code,
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
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": keeps_weights(context, outline)}
    return arguments | (config.model_extra or {})


def keeps_weights(context: StrategyContext, outline: ModelOutline) -> bool:
    """Tells whether weights that leave the device wait in host memory, as no update may follow, or not of all."""
    return not (context.updated_after_offload and outline.is_whole)


def _cpu_cache_tokens(context: StrategyContext, outline: ModelOutline) -> int:
    """Room for all running requests, within a share of the free memory; for two in any case."""
    one = context.sequence_length + CONTEXT_MARGIN
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = int(CPU_CACHE_SHARE * free) // outline.cache_bytes_per_token
    return max(2 * one, min(context.max_running_requests * one, affordable))


def _shared(value: Any) -> bytes:
    """A pickle in which memory of a GPU is a handle to it (CUDA IPC), in the form that SGLang reads."""
    return bytes(ForkingPickler.dumps(value))
