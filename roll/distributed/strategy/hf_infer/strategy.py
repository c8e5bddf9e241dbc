"""``hf_infer``: generation and scoring with plain Hugging Face models, on any device that torch has.

Several workers of a role are independent replicas: each loads the whole model and takes its own requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.engines.card import task_of
from roll.configs.engines.hf_infer import HfInferConfig
from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.generation.generator import Generator
from roll.distributed.strategy.generation.model_outline import stop_token_ids
from roll.distributed.strategy.generation.requests import EngineStoppedError
from roll.distributed.strategy.hf_infer.continuous_batching import ContinuousBatching
from roll.distributed.strategy.hf_infer.engine_thread import EngineThread
from roll.distributed.strategy.hf_infer.model_fit import foreign_attention
from roll.distributed.strategy.hf_infer.running_sequence import RunningSequence
from roll.distributed.weights.adapters import MergedAdapter, check_adapter
from roll.distributed.weights.buckets import WeightUpdate
from roll.distributed.weights.contents import WeightBucket
from roll.distributed.weights.update_stream import tensors_of
from roll.models.loading import load_causal_lm, resolve_dtype
from roll.models.packing_support import check_packing
from roll.models.routing import ExpertRouting
from roll.models.scoring import TokenScorer, score_batch
from roll.models.stop_strings import StopStrings
from roll.models.tokenizer import check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

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
        context, model_args = self.context, self.context.worker.model_args
        self._model: PreTrainedModel = load_causal_lm(
            context.model_path,
            dtype=None if model_args.dtype is None else resolve_dtype(model_args.dtype),
            device=self._device,
            attn_implementation=_attention(model_args.attn_implementation),
            config_kwargs=model_args.model_config_kwargs,
            trust_remote_code=model_args.trust_remote_code,
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
        self._scorer = TokenScorer(self._model, temperature=context.temperature, needs=context.needs)
        self._batching = ContinuousBatching(
            self._model,
            stop_ids=stop_token_ids(self._model.generation_config, tokenizer, context.template),
            stop_strings=StopStrings(tokenizer),
            max_running=context.max_running_requests,
            max_prefill_tokens=self._config.max_prefill_tokens,
            max_cache_tokens=_cache_budget(self._model),
            routing=ExpertRouting(self._model) if context.router_replay == "R3" else None,
        )
        self.counters = self._batching.counters
        self._engine = EngineThread(self._batching, name=f"hf_infer-{context.role}-{context.rank}")

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
        worker = self.context.worker
        dynamic = worker.use_dynamic_batching_in_infer
        return self._engine.call(
            lambda: score_batch(
                self._scorer,
                batch,
                max_sequences=None if dynamic else worker.infer_batch_size,
                max_tokens=worker.max_tokens_per_microbatch_in_infer if dynamic else None,
                round_to=worker.sequence_length_round_in_infer,
                packing=worker.use_sequence_packing,
                checks=True,
            )
        ).result()

    def stats(self) -> dict[str, float]:
        running, waiting = len(self._batching.running), len(self._batching.waiting)
        return {**super().stats(), "running": float(running), "waiting": float(waiting)}


def _attention(name: str) -> str:
    """The engine passes 4D masks, which FlashAttention 2 does not take."""
    if name == "fa2":
        logger.warning("model_args.attn_implementation: hf_infer uses sdpa instead of fa2, which takes no 4D masks")
    return "eager" if name == "eager" else "sdpa"


def _check_model(model: PreTrainedModel, sequence_length: int) -> None:
    config = model.config.get_text_config()
    if foreign := foreign_attention(config, sequence_length):
        raise ValueError(
            f"hf_infer: {type(model).__name__} has layers of kind {foreign} at sequence_length {sequence_length}, "
            "expected full attention; use vllm or sglang for this model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise ValueError(f"sequence_length: {sequence_length}, but the model has positions for at most {positions}")


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
