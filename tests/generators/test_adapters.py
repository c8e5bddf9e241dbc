"""LoRA: every generator with an adapter is the model that peft merges; the last test stops the engine."""

import asyncio
from typing import Any

import pytest
import torch

from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.weights.buckets import WeightMismatchError
from tests.support.contract import (
    LORA,
    assert_greedy,
    assert_scored,
    buckets_of,
    greedy,
    load,
    make_adapter,
    pause,
    prompts,
    requests_of,
    weights_of,
)


def test_before_the_first_adapter_the_model_is_the_base(lora_engine, model_path):
    prompt_list = prompts(6, seed=30)
    assert_greedy(greedy(lora_engine, prompt_list), load(model_path("untied", 0)), prompt_list, 16)


def test_an_adapter_makes_the_engine_pefts_merged_model(lora_engine, model_path):
    prompt_list = prompts(8, seed=31, low=40, high=90)
    path = model_path("untied", 0)
    for version in (1, 2, 3):  # each replaces the one before, and nothing of its cache is used
        tensors, merged = make_adapter(path, seed=version)
        asyncio.run(lora_engine.update_adapter(buckets_of(tensors), version))
        completions = greedy(lora_engine, prompt_list)
        assert_greedy(completions, merged, prompt_list, 16)
        assert {c.weight_version for c in completions} == {version} == {lora_engine.weight_version}
        assert_scored(completions, merged, prompt_list)


def test_new_base_weights_drop_the_adapter(lora_engine, model_path):
    prompt_list = prompts(6, seed=32, low=40)
    tensors, _ = make_adapter(model_path("untied", 0), seed=4)
    other = load(model_path("untied", 1))
    asyncio.run(lora_engine.update_adapter(buckets_of(tensors), 4))
    asyncio.run(lora_engine.update_weights(buckets_of(weights_of(other)), 5))
    assert_greedy(greedy(lora_engine, prompt_list), other, prompt_list, 16)
    tensors, merged = make_adapter(model_path("untied", 1), seed=6)
    asyncio.run(lora_engine.update_adapter(buckets_of(tensors), 6))
    assert_greedy(greedy(lora_engine, prompt_list), merged, prompt_list, 16)
    asyncio.run(lora_engine.update_weights(buckets_of(weights_of(load(model_path("untied", 0)))), 0))


def test_requests_in_flight_survive_updates_of_adapter_and_base(lora_engine, model_path):
    path = model_path("untied", 0)
    (first, _), (second, merged) = (make_adapter(path, seed=seed) for seed in (7, 8))
    prompt_list = prompts(8, seed=33, low=40)
    asyncio.run(lora_engine.update_adapter(buckets_of(first), 7))

    async def run() -> Any:
        requests = requests_of(prompt_list, temperature=1.0, seed=1, max_new_tokens=400)
        tasks = [asyncio.create_task(lora_engine.generate(request)) for request in requests]
        await asyncio.sleep(0.05)
        await lora_engine.update_weights(buckets_of(weights_of(load(path))), 8)
        await lora_engine.update_adapter(buckets_of(second), 9)
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert {c.weight_version for c in asyncio.run(run())} == {7}
    assert_greedy(greedy(lora_engine, prompt_list), merged, prompt_list, 16)


@pytest.mark.parametrize("kind", ["missing name", "unknown name", "has shape"])
def test_an_adapter_that_does_not_fit_changes_nothing(lora_engine, model_path, kind):
    path = model_path("untied", 0)
    good, merged = make_adapter(path, seed=10)
    asyncio.run(lora_engine.update_adapter(buckets_of(good), 10))
    bad, _ = make_adapter(path, seed=11)
    name = next(iter(bad))
    if kind == "missing name":
        del bad[name]
    elif kind == "unknown name":
        bad[name.replace("layers.0", "layers.7")] = bad[name]
    else:
        bad[name] = torch.zeros(LORA.rank + 1, bad[name].shape[1])
    with pytest.raises(WeightMismatchError, match=kind):
        asyncio.run(lora_engine.update_adapter(buckets_of(bad), 11))
    prompt_list = prompts(4, seed=34)
    assert lora_engine.weight_version == 10
    assert_greedy(greedy(lora_engine, prompt_list), merged, prompt_list, 16)


async def test_shutdown_fails_what_is_in_flight_and_what_comes_after(lora_engine):
    request = GenerateRequest("last", prompts(1, seed=35)[0], SamplingParams(max_new_tokens=900, temperature=2.0))

    await pause(lora_engine)
    task = asyncio.create_task(lora_engine.generate(request))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(lora_engine.shutdown)
    with pytest.raises(EngineStoppedError):
        await asyncio.wait_for(task, 20)
    with pytest.raises(EngineStoppedError):
        await lora_engine.generate(request)
