"""``hf_infer``: generation and scoring with plain Hugging Face models, on any device that torch has.

Several workers of a role are independent replicas: each loads the whole model and takes its own requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import torch

from roll.algorithms.types import TokenScores
from roll.configs.engines.hf_infer import HfInferConfig
from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.generation.model_outline import eos_token_ids
from roll.distributed.strategy.generation.requests import EngineStoppedError, ResidentStates, check_request
from roll.distributed.strategy.hf_infer.continuous_batching import ContinuousBatching, RunningSequence
from roll.distributed.strategy.hf_infer.engine_thread import EngineThread
from roll.distributed.strategy.hf_infer.model_fit import foreign_attention
from roll.distributed.weights.adapters import MergedAdapter, check_adapter
from roll.distributed.weights.buckets import WeightUpdate
from roll.distributed.weights.contents import WeightBucket
from roll.distributed.weights.update_stream import receive
from roll.models.loading import load_causal_lm, load_tokenizer, resolve_dtype
from roll.models.sampling import child_seed
from roll.models.scoring import TokenScorer, score_batch
from roll.models.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.6  # of the device memory that is free after loading; the rest is for activations and logits


class HfInfer:
    """A ``GenerateStrategy`` and ``ScoreStrategy`` in one process. Call ``setup`` first and ``shutdown`` last."""

    def __init__(self, context: StrategyContext) -> None:
        if context.head != "lm":
            raise ValueError(f"{context.role}: hf_infer has no {context.head!r} head; expected 'lm'")
        self._context = context
        self._config = HfInferConfig.model_validate(context.worker.strategy_args.strategy_config)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # The stream of seeds for requests that bring none: it differs by worker and repeats with the run's seed.
        self._seeds = random.Random(f"{context.seed}/{context.role}/{context.rank}")
        self._states = ResidentStates()

    def setup(self) -> RankInfo:
        """Loads the model and starts the engine.

        Raises:
            ValueError: the model cannot be loaded, or its attention is of a kind that the engine does not have.
        """
        context, model_args = self._context, self._context.worker.model_args
        self._model: PreTrainedModel = load_causal_lm(
            context.model_path,
            dtype=None if model_args.dtype is None else resolve_dtype(model_args.dtype),
            device=self._device,
            attn_implementation=_attention(model_args.attn_implementation),
            config_kwargs=model_args.model_config_kwargs,
        )
        _check_model(self._model, context.sequence_length)
        tokenizer = load_tokenizer(context.model_path)
        self._adapter = MergedAdapter(self._model, context.lora) if context.lora is not None else None
        self._vocab_size = self._model.config.get_text_config().vocab_size
        self._scorer = TokenScorer(self._model, temperature=context.temperature, returns_hidden=context.returns_hidden)
        self._batching = ContinuousBatching(
            self._model,
            eos_ids=eos_token_ids(self._model.generation_config, tokenizer),
            stop_strings=StopStrings(tokenizer),
            max_running=context.max_running_requests,
            max_prefill_tokens=self._config.max_prefill_tokens,
            max_cache_tokens=_cache_budget(self._model),
        )
        self._engine = EngineThread(self._batching, name=f"hf_infer-{context.role}-{context.rank}")
        return RankInfo(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )

    @property
    def weight_version(self) -> int:
        return self._batching.weight_version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one completion.

        A cancelled caller aborts its request.

        Raises:
            ValueError: the prompt is empty or longer than ``sequence_length``, a token id is outside the vocabulary,
                a sampling parameter is out of range, or the request id is in flight.
            EngineStoppedError: the engine failed, now or earlier.
        """
        return (await self.generate_n(request, 1))[0]

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Completion]:
        """Samples ``n`` completions of one prompt, which is prefilled once. Otherwise as ``generate``.

        With a seed, sample 0 is what ``generate`` gives and the others have seeds derived from it.
        """
        limit = check_request(request, vocab_size=self._vocab_size, sequence_length=self._context.sequence_length, n=n)
        seed = self._seeds.getrandbits(64) if request.params.seed is None else request.params.seed
        futures = self._engine.submit(
            request.request_id, [RunningSequence(request, child_seed(seed, i), limit) for i in range(n)]
        )
        try:
            return list(await asyncio.gather(*futures))
        except asyncio.CancelledError:
            with contextlib.suppress(EngineStoppedError):
                self._engine.abort(request.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        """Finishes a request with the tokens it has, reason ABORT; an unknown id is ignored (it may be done)."""
        await asyncio.wrap_future(self._engine.abort(request_id))

    async def update_weights(
        self, buckets: AsyncIterator[WeightBucket], version: int, *, recompute_kv: bool = False
    ) -> None:
        """Replaces all weights between two steps; requests in flight go on, and an adapter is dropped.

        Everything is received and checked before anything is changed. Keys and values that were computed with the old
        weights stay, as in other engines: they are stale by one update for the rest of those requests.

        Args:
            buckets: all of the model's weights under Hugging Face names. On a CPU they are not copied: the model lives
                in them until the next update.
            version: what completions that start from now on report.
            recompute_kv: prefill the running requests anew, so that nothing is stale.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not the model's; the old weights stay.
        """
        _, tensors = await receive(buckets)
        update = await asyncio.to_thread(WeightUpdate, self._model, tensors)

        def apply() -> None:
            update.apply()
            if self._adapter is not None:
                self._adapter.forget()
            self._batching.weight_version = version
            if recompute_kv:
                self._batching.preempt()

        await asyncio.wrap_future(self._engine.call(apply))

    async def update_adapter(self, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        """Puts a LoRA adapter on the base weights, in place of the one before; otherwise as ``update_weights``.

        The base weights of the adapted layers are kept, so that nothing of an old adapter stays behind.

        Args:
            buckets: the whole adapter under the names of peft's state dict.
            version: what completions that start from now on report.

        Raises:
            WeightChecksumError: a bucket was damaged.
            WeightMismatchError: names or shapes are not those of ``lora``; the old adapter stays.
        """
        _, tensors = await receive(buckets)
        check_adapter(self._model, self._context.lora, tensors)
        adapter = self._adapter
        assert adapter is not None

        def apply() -> None:
            adapter.apply(tensors)
            self._batching.weight_version = version

        await asyncio.wrap_future(self._engine.call(apply))

    async def pause(self) -> None:
        """Returns when the step in progress is done; requests stay, and new ones queue, until ``resume``."""
        await asyncio.wrap_future(self._engine.hold("pause"))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._engine.release("pause"))

    def logprobs(self, batch: Batch) -> TokenScores:
        """Log-probabilities and entropies of the batch's loss tokens; runs between two generation steps."""
        worker = self._context.worker
        dynamic = worker.use_dynamic_batching_in_infer
        return self._engine.call(
            lambda: score_batch(
                self._scorer,
                batch,
                max_sequences=None if dynamic else worker.infer_batch_size,
                max_tokens=worker.max_tokens_per_microbatch_in_infer if dynamic else None,
                round_to=worker.sequence_length_round_in_infer,
                packing=worker.use_sequence_packing,
            )
        ).result()

    def offload(self, what: States) -> None:
        """Frees the cache, or moves the weights to the CPU too; requests wait for both, keeping their tokens."""
        leaving = self._states.leave(what)
        if not leaving:
            return

        def apply() -> None:
            self._batching.preempt()
            if States.WEIGHTS in leaving:
                self._model.to("cpu")  # type: ignore[arg-type]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        self._engine.hold("offload")
        self._engine.call(apply).result()

    def onload(self, what: States) -> None:
        """Takes the weights back to the device; requests go on when nothing is away any more."""
        coming = self._states.come_back(what)
        if States.WEIGHTS in coming:
            self._engine.call(lambda: self._model.to(self._device)).result()  # type: ignore[arg-type]
        if coming and not self._states.away:
            self._engine.release("offload").result()

    def stats(self) -> dict[str, float]:
        """Running totals and the present load."""
        counters = {name: float(value) for name, value in dataclasses.asdict(self._batching.counters).items()}
        return {
            **counters,
            "running": float(len(self._batching.running)),
            "waiting": float(len(self._batching.waiting)),
            "weight_version": float(self._batching.weight_version),
        }

    def shutdown(self) -> None:
        """Stops the engine; requests in flight fail with ``EngineStoppedError``."""
        self._engine.close()


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
