"""hf_infer beyond the contract of all generators (``tests/generators``), against transformers' own ``generate``."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from roll.configs.worker import WorkerConfig
from roll.data.kept_sets import kept_sizes
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.strategy.hf_infer import continuous_batching
from roll.distributed.strategy.hf_infer.strategy import HfInfer
from roll.distributed.weights.buckets import WeightBucket
from roll.models.tiny import make_tokenizer
from tests.support import contract
from tests.support.batches import batch_of
from tests.support.choice import one_in, slow_but
from tests.support.contract import (
    assert_scored,
    burst,
    forward_logprobs,
    greedy_oracle,
    load,
    pause,
    prompts,
    requests_of,
    resume,
    staggered,
    started,
    threads,
    weights_of,
)
from tests.support.families import tiny_config, tiny_model
from tests.support.trainers import make_trainer

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True, "intermediate_size": 96},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32},
    "gpt_neox": {},
}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-3}
"""A state begins near zero, and a normalisation would show its rounding in place of its value."""
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
"""Of eight tokens."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {},
    "falcon_h1": {},
    "nemotron_h": {"layer_norm_epsilon": 1e-3},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mistral": {},
    "gemma3_text": WINDOWED,
    "gpt_oss": WINDOWED,
}
"""Gated delta nets, Mamba layers (alone, beside attention in one layer, between attention), short convolutions, windows
in all layers and in some."""


def make_model(family: str, seed: int, **config: Any) -> PreTrainedModel:
    ids = {"eos_token_id": make_tokenizer().eos_token_id, "pad_token_id": 0, "bos_token_id": None}
    sizes = {"vocab_size": len(make_tokenizer()), "num_hidden_layers": 2}
    return tiny_model(tiny_config(family, **sizes | ids | (FAMILIES | HYBRIDS)[family] | config), seed)


def save_model(folder: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folder of a random model by (family, seed), made once."""
    root = tmp_path_factory.mktemp("models")

    def path(family: str = "qwen2", seed: int = 0) -> str:
        folder = root / f"{family}-{seed}"
        return str(folder) if folder.exists() else save_model(folder, make_model(family, seed))

    return path


engine_of = partial(started, "hf_infer", sequence_length=256)


def buckets_of(path: str) -> AsyncIterator[WeightBucket]:
    return contract.buckets_of(weights_of(load(path)))


def assert_said(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    completions: Sequence[Completion],
    temperature: float = 1.0,
) -> None:
    """Completions say of their tokens what the model says at that temperature."""
    assert_scored(completions, model, [request.prompt_ids for request in requests], temperature, atol=1e-5)


def assert_greedy(model: PreTrainedModel, requests: Sequence[GenerateRequest], completions: Sequence[Completion]):
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids.tolist() == greedy_oracle(model, request.prompt_ids, request.params.max_new_tokens)


async def held_at(engine: HfInfer, num_tokens: int) -> None:
    """Waits until the engine has sampled ``num_tokens`` and stands still right there, however loaded the machine is.

    Undone with ``engine._release("test")``.
    """
    batching, held = engine._batching, asyncio.Event()
    loop, step = asyncio.get_running_loop(), batching.step

    def step_and_hold() -> Any:
        finished = step()
        if batching.counters.generated_tokens >= num_tokens:
            engine._holds.add("test")
            engine._engine.halted = True
            del batching.step  # back to the class's own
            loop.call_soon_threadsafe(held.set)
        return finished

    batching.step = step_and_hold  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        await held.wait()


def test_the_engine_alone_computes_with_several_threads(model_path):
    """OpenMP keeps helpers for each thread that has."""
    with threads(3), engine_of(model_path()) as engine, ThreadPoolExecutor(1) as other:
        assert engine._engine.call(torch.get_num_threads).result() == 3
        assert (torch.get_num_threads(), other.submit(torch.get_num_threads).result()) == (1, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of a GPU depend on the batch's shape")
@pytest.mark.parametrize(
    ("family", "count", "low", "high"),
    [
        ("qwen2", 40, 1, 60),
        ("qwen2", 40, 120, 240),
        ("qwen3_5_text", 20, 1, 60),
        pytest.param("falcon_h1", 20, 1, 60, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("block", [32, 8], ids=["small", "large"])
def test_on_a_cpu_the_rest_of_the_batch_changes_not_one_bit(family, count, low, high, block, model_path, monkeypatch):
    """Nor where prompts are filled up as those of a large model are."""
    monkeypatch.setattr(continuous_batching, "PREFILL_BLOCK", block)
    with threads(1), engine_of(model_path(family)) as engine:
        requests = requests_of(prompts(count, seed=3, low=low, high=high), max_new_tokens=6, seed=7)
        together = asyncio.run(burst(engine, requests))
        alone = [asyncio.run(engine.generate(request)) for request in requests]
        mixed = asyncio.run(staggered(engine, requests))
    for other in (alone, mixed):
        for a, b in zip(together, other, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_padding_of_a_prompt_needs_no_room(tmp_path):
    """520 tokens are computed as 640, of which a cache of 576 positions keeps what it needs."""
    model = make_model("qwen2", 0, max_position_embeddings=1024)
    (prompt,) = prompts(1, low=520, high=520)
    with engine_of(save_model(tmp_path, model), sequence_length=560) as engine:
        (completion,) = asyncio.run(burst(engine, requests_of([prompt], temperature=0, max_new_tokens=4)))
    assert completion.token_ids.tolist() == greedy_oracle(model, prompt, 4)


@pytest.mark.parametrize("family", slow_but(("qwen2", "gpt_neox"), FAMILIES))
def test_staggered_greedy_requests_equal_transformers_generate(family, model_path):
    path = model_path(family)
    rng = random.Random(1)
    requests = [
        GenerateRequest(str(i), p, SamplingParams(temperature=0, max_new_tokens=rng.randint(1, 24)))
        for i, p in enumerate(prompts(40))
    ]
    # Few slots and a small prefill budget: the queue, gaps in the slots and several prefills per step all occur.
    with engine_of(path, max_running_requests=7, config={"max_prefill_tokens": 100}) as engine:
        completions = asyncio.run(staggered(engine, requests))
        assert engine.stats()["finished"] == 40
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert [completion.request_id for completion in completions] == [request.request_id for request in requests]
    assert_greedy(load(path), requests, completions)
    assert_said(load(path), requests, completions)


@pytest.mark.parametrize("family", one_in(2, HYBRIDS))
async def test_states_and_windows_are_those_of_a_whole_forward(family, model_path):
    """More requests than slots, equal prompts, prompts of one token, one that is aborted and goes on as another."""
    lengths = [1, 2, 5, 17, 17, 70, 3, 1]
    texts = [prompt for n, length in enumerate(lengths) for prompt in prompts(1, seed=n, low=length, high=length)]
    requests = [
        GenerateRequest(str(n), prompt, SamplingParams(temperature=0, max_new_tokens=3 + 5 * n % 11, ignore_eos=True))
        for n, prompt in enumerate([*texts, texts[5]])
    ]
    long = GenerateRequest("long", texts[3], SamplingParams(temperature=0, max_new_tokens=99, ignore_eos=True))
    with engine_of(model_path(family), max_running_requests=4, config={"max_prefill_tokens": 60}) as engine:
        task = asyncio.create_task(engine.generate(long))
        await held_at(engine, 9)
        await engine.abort("long")
        engine._release("test")
        rest = replace(long, prompt_ids=np.concatenate([long.prompt_ids, (await task).token_ids]))
        requests.append(replace(rest, params=replace(rest.params, max_new_tokens=9)))
        completions = await staggered(engine, requests)
    model = load(model_path(family))
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]))
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
        logprobs, best = logits.log_softmax(-1).max(-1)
        assert completion.token_ids.tolist() == best.tolist()
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-3)


@pytest.mark.parametrize("attention", ["fa2", "eager"])
def test_sampled_logprobs_are_those_of_the_full_tempered_distribution(attention, model_path):
    """``fa2`` falls back to sdpa."""
    rng = random.Random(2)
    choices = [{"top_k": 3}, {"top_p": 0.6}, {"repetition_penalty": 1.5}, {}]
    requests = [
        GenerateRequest(str(i), p, SamplingParams(max_new_tokens=9, temperature=0.7, seed=i, **rng.choice(choices)))
        for i, p in enumerate(prompts(20))
    ]
    engine = make_trainer(
        Path(model_path()), "hf_infer", model_args={"attn_implementation": attention}, sequence_length=256
    )
    try:
        assert_said(load(model_path()), requests, asyncio.run(burst(engine, requests)), temperature=0.7)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kept", [{}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_kept": 16}])
def test_scores_of_a_batch_agree_with_the_sampled_logprobs(kept, model_path):
    requests = requests_of(prompts(18), max_new_tokens=8, temperature=0.8, seed=5, **kept)  # more than 16 at a time
    with engine_of(model_path(), temperature=0.8) as engine:
        completions = asyncio.run(burst(engine, requests))
        rows = [np.concatenate([r.prompt_ids, c.token_ids]) for r, c in zip(requests, completions, strict=True)]
        items = tuple(c.kept for c in completions) if kept else None
        batch = batch_of(rows, [len(r.prompt_ids) for r in requests], kept_I=items)
        scores = engine.logprobs(batch)
    if kept:
        sizes = np.concatenate([kept_sizes(c.kept[0]) for c in completions])
        assert len(sizes) == int(batch.loss_mask_T.sum()) and {0, 16} < {*sizes} <= {*range(17)}
    assert scores.logprobs_T is not None
    sampled = np.concatenate([c.logprobs for c in completions])
    np.testing.assert_allclose(scores.logprobs_T[batch.loss_mask_T].numpy(), sampled, atol=1e-5)


def test_requests_without_a_seed_differ_and_repeat_with_the_run_seed(model_path):
    prompt = prompts(1)[0]
    requests = requests_of([prompt] * 4, max_new_tokens=12)

    def run(seed: int) -> list[list[int]]:
        with engine_of(model_path(), seed=seed) as engine:
            return [c.token_ids.tolist() for c in asyncio.run(burst(engine, requests))]

    first = run(1)
    assert len({tuple(tokens) for tokens in first}) > 1
    assert run(1) == first
    assert run(2) != first


async def test_samples_of_one_prompt_share_its_prefill(model_path):
    prompt = prompts(1, low=40)[0]
    requests = requests_of([prompt] * 5, max_new_tokens=6, first_seed=0)
    with engine_of(model_path()) as engine:
        await pause(engine)  # so that they are admitted in one step
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await resume(engine)
        samples = await asyncio.gather(*tasks)
        stats = engine.stats()
        assert stats["prefill_tokens"] == len(prompt) - 1
        assert stats["shared_tokens"] == 4 * (len(prompt) - 1)
        single = await engine.generate(requests[0])
    assert samples[0].token_ids.tolist() == single.token_ids.tolist()
    assert len({tuple(s.token_ids.tolist()) for s in samples}) > 1
    assert_said(load(model_path()), requests, samples)


async def test_a_completion_ends_with_the_token_that_completed_a_stop_string(model_path):
    tokenizer = make_tokenizer()
    with engine_of(model_path()) as engine:
        for index, request in enumerate(requests_of(prompts(12), temperature=0, max_new_tokens=20)):
            full = (await engine.generate(request)).token_ids.tolist()
            text = tokenizer.decode(full)
            start = random.Random(index).randrange(len(text))
            stop = text[start : start + 3]
            params = SamplingParams(temperature=0, max_new_tokens=20, stop=("no such text", stop))
            completion = await engine.generate(GenerateRequest("stop", request.prompt_ids, params))
            expected = next(n for n in range(1, len(full) + 1) if stop in tokenizer.decode(full[:n]))
            assert completion.token_ids.tolist() == full[:expected], repr(stop)
            assert completion.finish_reason is FinishReason.STOP


async def test_offload_keeps_requests_which_go_on_after_onload(model_path):
    requests = requests_of(prompts(5), temperature=0, max_new_tokens=60)
    with threads(1), engine_of(model_path()) as engine:
        undisturbed = await burst(engine, requests)
        task = asyncio.create_task(burst(engine, requests))
        await held_at(engine, engine._batching.counters.generated_tokens + 20)
        engine.offload(States.OPTIMIZER)
        assert engine.stats()["running"] == 5
        engine.offload(States.ALL)
        engine._release("test")
        steps = engine.stats()["steps"]
        on_cpu = not torch.cuda.is_available()
        assert engine.stats()["running"] == (5 if on_cpu else 0)
        await asyncio.sleep(0.03)
        assert engine.stats()["steps"] == steps
        engine.onload(States.ALL)
        completions = await task
    assert_greedy(load(model_path()), requests, completions)
    for completion, before in zip(completions, undisturbed, strict=True):
        assert not on_cpu or completion.logprobs.tobytes() == before.logprobs.tobytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of a GPU depend on the batch's shape")
@pytest.mark.parametrize(
    ("family", "recompute_kv"),
    [
        ("qwen2", True),
        ("qwen2", False),
        ("qwen3_5_text", False),
        pytest.param("falcon_h1", False, marks=pytest.mark.slow),
    ],
)
async def test_recorded_requests_are_sampled_again_bit_for_bit(family, recompute_kv, model_path):
    """In another order, in fewer slots, with updates at other times."""
    requests = [
        GenerateRequest(f"{n}", prompt, SamplingParams(seed=n, max_new_tokens=8 + 5 * n, repetition_penalty=1 + n % 2))
        for n, prompt in enumerate(prompts(8))
    ]
    with engine_of(model_path(family), max_running_requests=5) as engine:
        task = asyncio.create_task(burst(engine, requests))
        for version, num_tokens in ((1, 40), (2, 90)):
            await held_at(engine, num_tokens)
            await engine.update_weights(buckets_of(model_path(family, version)), version, recompute_kv=recompute_kv)
            engine._release("test")
        first = await task
    assert {len(one.runs) for one in first} >= {2, 3} and {one.versions[0] for one in first} > {0}
    again = [replace(request, recorded=one.runs) for request, one in zip(requests, first, strict=True)]
    with engine_of(model_path(family), max_running_requests=2) as engine:
        task = asyncio.create_task(burst(engine, reversed(again)))
        for version in (1, 2):
            expected = sum(int((one.versions == version - 1).sum()) for one in first)
            async with asyncio.timeout(20):
                while engine.num_recorded(version - 1) < expected:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert engine.num_recorded(version - 1) == expected, "the others wait"
            await engine.update_weights(buckets_of(model_path(family, version)), version, recompute_kv=recompute_kv)
        second = [*reversed(await task)]
        late = await engine.generate(again[0])
        assert {version for version, _ in late.runs} == {2}, "it does not wait for ever"
    for one, other in zip(first, second, strict=True):
        assert one.runs == other.runs
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("family", ["qwen2", "falcon_h1", pytest.param("lfm2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", [True, False])
async def test_logprobs_after_an_update_are_those_of_a_fresh_scoring_when_recomputed(family, recompute, model_path):
    requests = requests_of(prompts(4), temperature=1.0, max_new_tokens=40)
    with engine_of(model_path(family), recompute_kv=recompute) as engine:
        task = asyncio.create_task(burst(engine, requests))
        await held_at(engine, 40)
        await engine.update_weights(buckets_of(model_path(family, 1)), 1)
        engine._release("test")
        completions = await task
    differences = []
    for request, completion in zip(requests, completions, strict=True):
        (first, switch), (second, _) = completion.runs
        assert (first, second) == (0, 1)
        history = np.concatenate([request.prompt_ids, completion.token_ids[:switch]])
        expected = forward_logprobs(load(model_path(family, 1)), history, completion.token_ids[switch:], 1.0)
        differences.append(np.abs(completion.logprobs[switch:] - expected).max())
    assert bool(max(differences) < 1e-5) is recompute


async def test_drained_requests_end_before_an_update_and_new_ones_wait_for_it(model_path):
    first, second = (requests_of(prompts(4, seed=seed), temperature=1.0, max_new_tokens=40) for seed in (1, 2))
    second = [replace(request, request_id=f"later {n}") for n, request in enumerate(second)]
    with engine_of(model_path()) as engine:
        running = asyncio.create_task(burst(engine, first))
        await held_at(engine, 40)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.05)
        later = [asyncio.create_task(engine.generate(request)) for request in second]
        engine._release("test")
        await draining
        done = await running
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in later)
        await engine.update_weights(buckets_of(model_path(seed=1)), 1)
        new = await asyncio.gather(*later)
    assert {version for one in done for version, _ in one.runs} == {0}
    assert {version for one in new for version, _ in one.runs} == {1}


async def test_a_request_that_waits_for_an_update_ends_when_it_is_aborted(model_path):
    first, second = requests_of(prompts(2), temperature=1.0, max_new_tokens=10)
    with engine_of(model_path()) as engine:
        await engine.drain()
        waiting = [asyncio.create_task(engine.generate(request)) for request in (first, second)]
        await asyncio.sleep(0.05)
        await engine.abort(first.request_id)
        aborted = await asyncio.wait_for(waiting[0], 20)
        assert not waiting[1].done() and engine.stats()["in_flight"] == 1
        await engine.update_weights(buckets_of(model_path(seed=1)), 1)
        other = await waiting[1]
    assert (aborted.request_id, aborted.finish_reason) == (first.request_id, FinishReason.ABORT)
    assert len(aborted.token_ids) == len(aborted.logprobs) == len(aborted.versions) == 0
    assert len(other.token_ids) == 10 and engine.counters.generated_tokens == 10


async def test_an_update_that_fails_half_way_stops_the_engine_and_whoever_waits(model_path, monkeypatch):
    with engine_of(model_path()) as engine:
        running = asyncio.create_task(engine.generate(GenerateRequest("x", prompts(1)[0])))
        await held_at(engine, 1)
        monkeypatch.setattr(engine, "load_weights", Mock(side_effect=MemoryError("no room for the new weights")))
        update = engine.update_weights(buckets_of(model_path(seed=1)), 1)
        for call in (update, running, engine.generate(GenerateRequest("y", prompts(1)[0]))):
            with pytest.raises(EngineStoppedError, match="failed in a weight update: MemoryError"):
                await asyncio.wait_for(call, 20)


async def test_an_error_in_a_step_fails_every_pending_request_and_all_later_ones(model_path, monkeypatch):
    requests = requests_of(prompts(5), max_new_tokens=200, seed=0)
    with engine_of(model_path(), max_running_requests=3) as engine:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await held_at(engine, 10)
        monkeypatch.setattr(engine._model, "forward", Mock(side_effect=MemoryError("no room for the logits")))
        engine._release("test")
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, EngineStoppedError)
            assert "no room for the logits" in str(outcome)
            assert isinstance(outcome.__cause__, MemoryError)
        for call in (engine.generate(requests[0]), engine.update_weights(buckets_of(model_path()), 1)):
            with pytest.raises(EngineStoppedError, match="failed earlier: MemoryError"):
                await call


async def test_nan_weights_fail_the_requests(model_path):
    with engine_of(model_path()) as engine:
        broken = {"model.norm.weight": torch.full((64,), torch.nan)}
        await engine.update_weights(contract.buckets_of(weights_of(load(model_path())) | broken), version=1)
        with pytest.raises(EngineStoppedError, match="NaN logits"):
            await engine.generate(GenerateRequest("x", prompts(1)[0]))


def test_a_bounded_cache_makes_requests_wait_and_changes_no_token(model_path):
    requests = requests_of(prompts(12), temperature=0, max_new_tokens=20)
    with engine_of(model_path()) as engine:
        engine._batching._max_cache_tokens = engine._batching._cache._max_positions = 200
        completions = asyncio.run(burst(engine, requests))
        plan = engine._batching._cache._plan
        assert plan.slots * plan.capacity <= 16 * 128
        assert engine.stats()["steps"] > 40  # far from all twelve at once
    assert_greedy(load(model_path()), requests, completions)


@pytest.mark.parametrize(
    ("family", "name", "config"),
    [
        ("mamba2", "Mamba2", {}),
        ("falcon_h1", "FalconH1", {"mamba_rms_norm": True}),
        ("gpt_neo", "GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": 32}),
    ],
)
def test_only_models_are_taken_whose_generation_is_their_own(family, name, config, tmp_path):
    """Mamba 2 takes its cache by another name, so that a decode step would get one token; Falcon-H1's norm mixes the
    rows of one; GPT-Neo's windows, of another name too, end where the widest row ends."""
    sizes = {"vocab_size": len(make_tokenizer()), "num_layers" if family == "gpt_neo" else "num_hidden_layers": 2}
    folder = save_model(tmp_path, tiny_model(tiny_config(family, **sizes, **config)))
    wrong = pytest.raises(ValueError, match=rf"hf_infer: {name}ForCausalLM with this engine's cache .* use vllm")
    with wrong, engine_of(folder):
        pass


def test_what_cannot_work_is_refused_before_the_first_request(model_path):
    refused = pytest.raises(ValueError, match=r"sequence_length: 1024, but the model has positions for at most 256")
    with refused, engine_of(model_path(), sequence_length=1024):
        pass
    with pytest.raises(ValueError, match="'value' head"):
        HfInfer(StrategyContext(WorkerConfig(), "critic", model_path(), head="value"))
