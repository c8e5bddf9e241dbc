"""What the tests of all generators share: models, requests, and transformers as the oracle."""

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roll.configs.worker import StrategyArguments, WorkerConfig
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.generation.generator import Generator
from roll.distributed.weights.buckets import WeightBucket, pack_buckets
from roll.models.loading import to_hf_weights
from roll.models.lora import LoraSpec
from roll.models.tiny import make_tokenizer

SEQUENCE_LENGTH = 1024
MAX_RUNNING = 32
BUCKET_BYTES = 40_000
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "untied": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "head_dim": 32}),
    "experts": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"tie_word_embeddings": False, "head_dim": 32, **EXPERTS}),
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Of size 32, which every engine's kernels take."""
SGLANG_PYTHON = os.environ.get("ROLL_SGLANG_PYTHON")
"""Interpreter of the environment that SGLang is installed in (``make test-sglang``)."""
OPTIONS: dict[str, dict[str, Any]] = {"sglang": {"python_executable": SGLANG_PYTHON}} if SGLANG_PYTHON else {}
LORA = LoraSpec(rank=4, alpha=12, targets=("q_proj", "v_proj", "o_proj", "down_proj"))


def random_model(config_class: Any, model_class: Any, seed: int, **config: Any) -> PreTrainedModel:
    """A model of two layers for the tiny tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        # Wide enough for peaked distributions: near-ties would make greedy comparisons a matter of rounding.
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return model_class(config_class(**shape, **config)).eval()


def make_model(family: str, seed: int) -> PreTrainedModel:
    config_class, model_class, extra = FAMILIES[family]
    model = random_model(config_class, model_class, seed, max_position_embeddings=SEQUENCE_LENGTH, **HEADS, **extra)
    # Many tokens that end a completion, stated where only the generation defaults are: random text meets some of them.
    model.generation_config.eos_token_id = [model.config.eos_token_id, *range(40, 70)]
    return model


def save_model(folder: Path, family: str, seed: int) -> str:
    make_model(family, seed).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def context_of(name: str, path: str, config: Mapping[str, Any] | None = None, **context: Any) -> StrategyContext:
    worker = WorkerConfig(strategy_args=StrategyArguments(strategy_name=name, strategy_config=dict(config or {})))
    defaults = {"sequence_length": SEQUENCE_LENGTH, "max_running_requests": MAX_RUNNING}
    return StrategyContext(worker, model_path=path, **{"role": "actor_infer", **defaults, **context})


@contextlib.contextmanager
def started(name: str, path: str | Path, config: Mapping[str, Any] | None = None, **context: Any) -> Iterator[Any]:
    """A generator until the end of the block.

    Args:
        config: ``None``: what it needs in this environment.
    """
    engine: Any = STRATEGIES.get(name)(context_of(name, str(path), config or OPTIONS.get(name), **context))
    engine.setup()
    try:
        yield engine
    finally:
        engine.shutdown()


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[np.ndarray]:
    rng = random.Random(seed)
    vocab = len(make_tokenizer())
    return [np.array([rng.randrange(vocab) for _ in range(rng.randint(low, high))]) for _ in range(count)]


def requests_of(
    prompt_list: Iterable[np.ndarray], *, first_seed: int | None = None, **params: Any
) -> list[GenerateRequest]:
    """``first_seed``: gives each a seed of its own, one more than the one before."""
    seeds = itertools.repeat({}) if first_seed is None else ({"seed": seed} for seed in itertools.count(first_seed))
    numbered = enumerate(zip(prompt_list, seeds, strict=False))
    return [GenerateRequest(str(i), prompt, SamplingParams(**params | seed)) for i, (prompt, seed) in numbered]


async def burst(engine: Any, requests: Iterable[GenerateRequest]) -> list[Completion]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def greedy(engine: Any, prompt_list: Iterable[np.ndarray], max_new_tokens: int = 16) -> list[Completion]:
    return asyncio.run(burst(engine, requests_of(prompt_list, temperature=0.0, max_new_tokens=max_new_tokens)))


async def pause(engine: Generator) -> None:
    """Returns when the step in progress is done; requests stay, and new ones queue, until ``resume``."""
    await asyncio.wrap_future(engine._hold("pause"))


async def resume(engine: Generator) -> None:
    await asyncio.wrap_future(engine._release("pause"))


def polled(worker: Any, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """What an ``InferWorker`` in a process of its own makes of requests, completion or error by id."""
    import ray

    ray.get(worker.submit.remote("me", requests))
    results: dict[str, Any] = {}
    while len(results) < len(requests):
        outcomes = ray.get(worker.poll.remote("me"), timeout=60)
        results |= {completion.request_id: completion for completion in outcomes.completions}
        results |= dict(outcomes.errors)
    return results


@contextlib.contextmanager
def infer_worker(context: StrategyContext, num_gpus: int = 0) -> Iterator[Any]:
    """An ``InferWorker`` in a Ray of its own, which takes weights and adapters from the object store, too."""
    import ray

    from roll.pipeline.workers import InferWorker

    class Worker(InferWorker):
        async def update(self, refs: list[Any]) -> None:
            await self.strategy.update_weights(self.buckets(refs), 1)

        async def adapt(self, refs: list[Any]) -> None:
            await self.strategy.update_adapter(self.buckets(refs), 2)

        async def buckets(self, refs: list[Any]) -> AsyncIterator[WeightBucket]:
            for ref in refs:
                yield await ref

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    try:
        kind: Any = ray.remote(num_cpus=1, num_gpus=num_gpus)(Worker)
        worker = kind.remote("actor_infer", 0, 1, {"OMP_NUM_THREADS": "1"})
        ray.get(worker.setup.remote(context), timeout=300)
        yield worker
    finally:
        ray.shutdown()


def put_buckets(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Tensors for ``infer_worker``."""
    import ray

    return [ray.put(bucket) for bucket in pack_buckets(tensors.items(), BUCKET_BYTES)]


def assert_polled_greedy(worker: Any, requests: Sequence[GenerateRequest], model: PreTrainedModel) -> None:
    results = polled(worker, requests)
    for request in requests:
        expected = greedy_oracle(model, request.prompt_ids, request.params.max_new_tokens)
        assert results[request.request_id].token_ids.tolist() == expected


async def staggered(engine: Any, requests: Iterable[GenerateRequest]) -> list[Completion]:
    """Each request enters a little after the one before, so that steps hold old and new ones."""

    async def later(index: int, request: GenerateRequest) -> Completion:
        await asyncio.sleep(0.004 * index)
        return await engine.generate(request)

    return list(await asyncio.gather(*(later(i, r) for i, r in enumerate(requests))))


def greedy_oracle(model: Any, prompt: np.ndarray, max_new_tokens: int, **options: Any) -> list[int]:
    ids = torch.from_numpy(prompt)[None]
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **options
    )
    return output[0, len(prompt) :].tolist()


def forward_logprobs(model: PreTrainedModel, prompt: np.ndarray, token_ids: np.ndarray, temperature: float) -> Any:
    """float32, of the whole distribution at that temperature."""
    ids = torch.from_numpy(np.concatenate([prompt, token_ids]))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.from_numpy(token_ids)[:, None])[:, 0].numpy()


def likeliest(model: PreTrainedModel, prompt: np.ndarray, token_ids: Iterable[int]) -> list[int]:
    """The likeliest token in the place of each, after those before it: they are greedy where these are the same."""
    tokens = np.array([*token_ids])
    with torch.no_grad():
        logits = model(torch.from_numpy(np.concatenate([prompt, tokens]))[None]).logits
    return logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def assert_scored(
    completions: Iterable[Completion],
    model: PreTrainedModel,
    prompt_list: Iterable[np.ndarray],
    temperature: float = 1.0,
    atol: float = 1e-4,
) -> None:
    """The completions say of their tokens what the model says at that temperature; greedy ones at 1."""
    for completion, prompt in zip(completions, prompt_list, strict=True):
        expected = forward_logprobs(model, prompt, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=atol)


def assert_greedy(
    completions: Iterable[Completion], model: PreTrainedModel, prompt_list: Iterable[np.ndarray], max_new_tokens: int
) -> None:
    """The completions are transformers' greedy ones, and say rightly why they ended."""
    eos_ids = model.generation_config.eos_token_id
    for completion, prompt in zip(completions, prompt_list, strict=True):
        tokens = completion.token_ids.tolist()
        assert tokens == likeliest(model, prompt, tokens)
        ended = tokens[-1] in eos_ids
        assert not set(eos_ids).intersection(tokens[:-1]) and (ended or len(tokens) == max_new_tokens)
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """As a trainer exports them."""
    return {
        part: tensor.detach()
        for name, parameter in model.named_parameters()
        for part, tensor in to_hf_weights(model, name, parameter).items()
    }


async def buckets_of(tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> AsyncIterator[WeightBucket]:
    for bucket in pack_buckets(tensors.items(), bucket_bytes):
        yield bucket


def make_adapter(base_path: str, seed: int, spec: LoraSpec = LORA) -> tuple[dict[str, Tensor], Any]:
    """A random adapter as peft's state dict, and the model with it merged by peft."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets))
    model = peft.get_peft_model(load(base_path), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tensors = {name: tensor.detach().clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    return tensors, model.merge_and_unload().eval()


async def first_token(engine: Any) -> None:
    """Waits until requests that were handed in before have a token: a later one that wants a single token is done."""
    await asyncio.sleep(0)
    await engine.generate(GenerateRequest("probe", np.array([5, 6, 7]), SamplingParams(max_new_tokens=1)))


def needs_seeing(engine: str) -> None:
    """Skips a test of an engine that is not here, or sees no pictures here."""
    if engine == "sglang" and not OPTIONS:
        pytest.skip("ROLL_SGLANG_PYTHON names no environment (make test-sglang)")
    if engine == "vllm" and find_spec("torchvision") is None:
        pytest.skip("vLLM's towers need torchvision: tests/support/torchvision_alone")
