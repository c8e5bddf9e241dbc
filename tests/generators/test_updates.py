"""New weights: after an update every generator is the new model, and nothing of the old one shows."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.weights.buckets import (
    WeightChecksumError,
    WeightMismatchError,
    host_bytes,
    pack_buckets,
    packing_into,
)
from roll.distributed.weights.contents import WeightBucket
from roll.distributed.weights.segments import SegmentPool, SegmentReader
from tests.support.contract import (
    MAX_RUNNING,
    assert_greedy,
    buckets_of,
    burst,
    first_token,
    forward_logprobs,
    greedy_oracle,
    likeliest,
    load,
    pause,
    prompts,
    requests_of,
    resume,
    weights_of,
)
from tests.support.probe_pair import Pair


@pytest.fixture(scope="module")
def old(model_path: Any) -> PreTrainedModel:
    return load(model_path("tied", 0))


@pytest.fixture(scope="module")
def new(model_path: Any) -> PreTrainedModel:
    return load(model_path("tied", 1))


@pytest.fixture
def fresh(engine: Any, old: PreTrainedModel) -> Iterator[Any]:
    """The engine with its first weights, before and after."""
    yield engine
    asyncio.run(resume(engine))
    asyncio.run(engine.update_weights(buckets_of(weights_of(old)), 0))


def greedy(engine: Any, prompt_list: list[np.ndarray], max_new_tokens: int = 16) -> list[Completion]:
    requests = requests_of(prompt_list, temperature=0.0, max_new_tokens=max_new_tokens)
    return asyncio.run(burst(engine, requests))


@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 24], ids=["a bucket each", "one bucket"])
def test_an_update_makes_the_engine_the_new_model(fresh, old, new, bucket_bytes):
    prompt_list = prompts(12, seed=20, low=40, high=100)  # long enough for blocks of a prefix cache
    assert_greedy(greedy(fresh, prompt_list), old, prompt_list, 16)
    asyncio.run(fresh.update_weights(buckets_of(weights_of(new), bucket_bytes), 3))
    for _ in range(2):  # the second time from the cache
        completions = greedy(fresh, prompt_list)
        assert_greedy(completions, new, prompt_list, 16)
        assert {c.weight_version for c in completions} == {3} == {fresh.weight_version}
    for completion, prompt in zip(completions, prompt_list, strict=True):
        expected = forward_logprobs(new, prompt, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_updates_follow_each_other(fresh, old, new):
    prompt_list = prompts(6, seed=21, low=40, high=80)
    for version, model in enumerate([new, old, new], start=1):
        asyncio.run(fresh.update_weights(buckets_of(weights_of(model)), version))
        assert_greedy(greedy(fresh, prompt_list), model, prompt_list, 16)


def test_shared_memory_is_read_where_it_lies_and_given_back(fresh, old, new):
    """What is free is overwritten, so that an engine that still needs it shows."""
    prompt_list = prompts(6, seed=24, low=40, high=80)
    pool, reader = SegmentPool(), SegmentReader()

    async def shared(model: PreTrainedModel) -> AsyncIterator[WeightBucket]:
        with packing_into(pool.allocate):
            buckets = list(pack_buckets(weights_of(model).items(), 1 << 16))
        for bucket in buckets:
            segment = pool.find(bucket.data)
            assert segment is not None
            pool.hand_over(segment, ["it"])
            yield replace(bucket, data=reader.read(segment.place, len(bucket.data)), place=segment.place)

    for version, model in enumerate([new, old, new], start=1):
        asyncio.run(fresh.update_weights(shared(model), version))
        gc.collect()
        pool.release(reader.take_released(), "it")
        lives_there = fresh.name == "hf_infer" and not torch.cuda.is_available()
        assert bool(reader.holding) is lives_there, "on a CPU its weights are what it is sent"
        size = len(pool.ids)
        while len(pool.ids) == size:
            segment = pool.find(pool.allocate(1))
            assert segment is not None
            segment.array.fill(255)
        pool.abandon_unwritten()
        assert_greedy(greedy(fresh, prompt_list), model, prompt_list, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_engines_dtype(fresh, new, dtype):
    prompt_list = prompts(4, seed=22)
    weights = {name: tensor.to(dtype) for name, tensor in weights_of(new).items()}
    asyncio.run(fresh.update_weights(buckets_of(weights), 1))
    rounded = new if dtype is torch.float32 else load(new.name_or_path)
    rounded.to(dtype).to(torch.float32)
    assert_greedy(greedy(fresh, prompt_list), rounded, prompt_list, 16)


@pytest.mark.parametrize("recompute", [False, True], ids=["stale", "recomputed"])
async def test_requests_in_flight_go_on(fresh, old, new, recompute):
    prompt_list = prompts(30, seed=23, low=40, high=60)
    running = [*itertools.islice((p for p in prompt_list if len(greedy_oracle(old, p, 100)) == 100), 2)]
    assert running

    requests = requests_of(running, temperature=0.0, max_new_tokens=400)
    tasks = [asyncio.create_task(fresh.generate(request)) for request in requests]
    await first_token(fresh)
    await fresh.update_weights(buckets_of(weights_of(new)), 5, recompute_kv=recompute)
    later = await fresh.generate(
        GenerateRequest("later", running[0], SamplingParams(temperature=0.0, max_new_tokens=16))
    )
    completions = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert_greedy([later], new, running[:1], 16)
    assert later.weight_version == 5
    for completion, prompt in zip(completions, running, strict=True):
        tokens, versions = completion.token_ids.tolist(), completion.versions.tolist()
        switch = versions.count(0)
        assert 0 < switch < len(tokens), "begun with the old weights, ended with the new ones"
        assert versions == [0] * switch + [5] * (len(tokens) - switch)
        assert tokens[:switch] == likeliest(old, prompt, tokens[:switch])
        if recompute:  # from there on, exactly the new model's continuation
            history = np.concatenate([prompt, completion.token_ids[:switch]])
            assert tokens[switch:] == likeliest(new, history, tokens[switch:])
            expected = forward_logprobs(new, history, completion.token_ids[switch:], 1.0)
            np.testing.assert_allclose(completion.logprobs[switch:], expected, atol=1e-5)


async def test_a_prompt_that_waited_for_a_slot_is_computed_with_the_new_weights(fresh, new):
    prompt, *others = prompts(1 + MAX_RUNNING, seed=25, low=150, high=200)

    await burst(fresh, requests_of([prompt], max_new_tokens=1))  # its keys and values may be found again
    busy = requests_of(others, max_new_tokens=500, ignore_eos=True, seed=1)
    running = asyncio.create_task(burst(fresh, busy))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(fresh.generate(GenerateRequest("waits", prompt, SamplingParams(seed=1))))
    await asyncio.sleep(0.05)
    await fresh.update_weights(buckets_of(weights_of(new)), 7)
    assert [len(completion.token_ids) for completion in await running] == [500] * MAX_RUNNING
    completion = await waiting
    assert set(completion.versions.tolist()) == {7}
    expected = forward_logprobs(new, prompt, completion.token_ids, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_a_request_that_an_update_lets_begin_anew_can_be_ended(fresh, new):
    prompt_list = prompts(3, seed=26, low=40)
    requests = requests_of(prompt_list, temperature=0.0, max_new_tokens=16)

    await pause(fresh)
    task = asyncio.create_task(burst(fresh, requests))
    await asyncio.sleep(0.05)
    await fresh.update_weights(buckets_of(weights_of(new)), 2)
    await fresh.abort("0")
    await fresh.update_weights(buckets_of(weights_of(new)), 3)
    await fresh.abort("1")
    await resume(fresh)
    *ended, whole = await asyncio.wait_for(task, 60)
    assert [(len(c.token_ids), c.finish_reason) for c in ended] == [(0, FinishReason.ABORT)] * 2
    assert_greedy([whole], new, prompt_list[2:], 16)
    assert set(whole.versions.tolist()) == {3}


async def test_an_update_while_paused_leaves_the_engine_paused(fresh, new):
    prompt_list = prompts(2, seed=24, low=40)

    await pause(fresh)
    task = asyncio.create_task(burst(fresh, requests_of(prompt_list, temperature=0.0, max_new_tokens=16)))
    await asyncio.sleep(0.02)
    await fresh.update_weights(buckets_of(weights_of(new)), 2)
    await asyncio.sleep(0.2)
    done = task.done()
    await resume(fresh)
    completions = await task
    assert not done
    assert_greedy(completions, new, prompt_list, 16)
    assert {c.weight_version for c in completions} == {2}


async def damaged(weights: dict[str, Tensor]) -> AsyncIterator[WeightBucket]:
    for index, bucket in enumerate(pack_buckets(weights.items(), 40_000)):
        if index == 3:
            data = host_bytes(bucket).copy()
            data[100] ^= 1
            bucket = replace(bucket, data=data)
        yield bucket


async def broken(weights: dict[str, Tensor]) -> AsyncIterator[WeightBucket]:
    async for bucket in buckets_of(weights):
        yield bucket
        raise ConnectionError("the trainer died")


NAME, UNKNOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight"
WRONG: dict[str, tuple[type[Exception], Callable[[dict[str, Tensor]], AsyncIterator[WeightBucket]]]] = {
    "a missing name": (WeightMismatchError, lambda weights: buckets_of({n: weights[n] for n in weights if n != NAME})),
    "an unknown name": (
        WeightMismatchError,
        lambda weights: buckets_of({**weights, UNKNOWN: weights[NAME]}),
    ),
    "a wrong shape": (WeightMismatchError, lambda weights: buckets_of({**weights, NAME: weights[NAME].T})),
    "nothing": (WeightMismatchError, lambda weights: buckets_of({})),
    "a damaged bucket": (WeightChecksumError, damaged),
    "a sender that fails": (ConnectionError, broken),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_update_that_goes_wrong_changes_nothing(fresh, old, new, kind):
    error, send = WRONG[kind]
    prompt_list = prompts(4, seed=25, low=40)
    with pytest.raises(error) as raised:
        asyncio.run(fresh.update_weights(send(weights_of(new)), 9))
    assert error is not WeightMismatchError or "the old weights stay" in str(raised.value)
    assert fresh.weight_version == 0
    assert_greedy(greedy(fresh, prompt_list), old, prompt_list, 16)


def test_a_probe_names_what_differs_from_the_trainer(fresh, old, model_path, monkeypatch):
    pair = Pair(model_path("tied", 0), fresh, temperature=1.0)
    assert not pair.causes()
    wrong = {name: weight.clone() for name, weight in weights_of(old).items()}
    wrong["model.layers.1.self_attn.q_proj.weight"] *= 1.2

    def has_wrong_weights():
        asyncio.run(fresh.update_weights(buckets_of(wrong), 1))
        return pair.causes()

    causes = has_wrong_weights()
    if fresh.name != "vllm":
        assert causes[0].startswith("tensors: model.layers.1.self_attn.q_proj.weight is 0.2")
    else:
        assert "since the same weights were sent again" in causes[0]
        monkeypatch.setattr(pair, "resend", lambda: None)
        causes = has_wrong_weights()
    assert "they part in model.layers.1" in causes[-1]
    pair.update()
    assert not pair.causes()
    monkeypatch.setattr(pair.trainer.weights.scorer, "temperature", 1.3)
    assert any("generator is asked for 1.3 in place of 1" in cause for cause in pair.causes())
