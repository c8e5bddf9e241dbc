"""The contract of the generators (``tests/generators``) on one GPU, and what only a GPU has to give back: memory."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.distributed.strategy.base import States
from tests.gpu.conftest import OPTIONS, PACKAGES, require
from tests.support.contract import (
    assert_greedy,
    buckets_of,
    first_token,
    greedy,
    greedy_oracle,
    load,
    prompts,
    requests_of,
    save_model,
    started,
    weights_of,
)

ROOT = Path(__file__).resolve().parents[2]
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton's matrix products round float32 to TF32 otherwise, in the attention of both engines."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    pytest.mark.timeout(3600),  # an engine that captures graphs takes a minute or two to start
]


@pytest.fixture
def exact(monkeypatch):
    for variable, value in EXACT.items():
        monkeypatch.setenv(variable, value)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_contract_holds_on_a_gpu(name):
    """In a process of its own: the engines of one leave the device to those of the next."""
    require(name)
    environment = os.environ | EXACT | {"ROLL_GENERATORS": name}
    command = [sys.executable, "-m", "pytest", "tests/generators", "-m", "not slow", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout[-20_000:])
    assert run.returncode == 0, run.stdout[-4_000:] + run.stderr[-2_000:]


def in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_that_sleeps_frees_the_device_and_wakes_as_it_was(name, tmp_path, exact):
    """Weights and cache leave; requests in flight wait, and go on although their keys and values are gone."""
    require(name)
    path, other = tmp_path / "old", tmp_path / "new"
    save_model(path, "tied", 0)
    save_model(other, "tied", 1)
    old, new = load(str(path)), load(str(other))
    prompt_list = prompts(8, seed=40, low=40, high=60)
    endless = next(p for p in prompts(60, seed=7, low=4, high=12) if len(greedy_oracle(old, p, 300)) == 300)
    before = in_use()

    async def asleep(engine: Any) -> Any:
        awake = in_use()
        tasks = [
            asyncio.create_task(engine.generate(r)) for r in requests_of([endless], temperature=0.0, max_new_tokens=300)
        ]
        await first_token(engine)
        await asyncio.to_thread(engine.offload, States.ALL)
        away = in_use()
        done = tasks[0].done()
        await asyncio.to_thread(engine.onload, States.WEIGHTS)
        updatable = in_use()
        await asyncio.to_thread(engine.onload, States.CACHE)
        return awake, away, updatable, done, await asyncio.wait_for(asyncio.gather(*tasks), 120)

    with started(name, path, OPTIONS[name]) as engine:
        assert engine.can_offload
        for round_ in range(2):
            awake, away, updatable, done, completions = asyncio.run(asleep(engine))
            figures = f"{awake >> 20} awake, {away >> 20} asleep, {updatable >> 20} with its weights alone"
            print(f"{name}: {before >> 20} MiB before, {figures}")
            assert updatable - away < 0.3 * (awake - away), "the cache, most of a tiny model's memory, is still away"
            assert away - before < 0.3 * (awake - before), "the context and the graphs stay"
            assert not done, f"round {round_}: the request was over before the engine slept"
            assert_greedy(completions, old, [endless], 300)
        engine.offload(States.CACHE)
        asyncio.run(engine.update_weights(buckets_of(weights_of(new)), 1))
        engine.onload(States.CACHE)
        assert_greedy(greedy(engine, prompt_list), new, prompt_list, 16)
        engine.offload(States.ALL)
        engine.onload(States.ALL)
        assert_greedy(greedy(engine, prompt_list), new, prompt_list, 16)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_that_is_sent_its_weights_again_drops_them(name, tmp_path, exact):
    require(name)
    for folder in (path := tmp_path / "0", tmp_path / "1"):
        save_model(folder, "tied", int(folder.name))
    prompt_list = prompts(8, seed=40, low=40, high=60)
    with started(name, path, OPTIONS[name], updated_after_offload=True) as engine:
        assert engine.drops_weights
        for version, seed in enumerate((1, 0, 1), start=1):
            model = load(str(tmp_path / str(seed)))
            engine.offload(States.ALL)
            engine.onload(States.WEIGHTS)
            asyncio.run(engine.update_weights(buckets_of(weights_of(model)), version))
            engine.onload(States.CACHE)
            assert_greedy(greedy(engine, prompt_list), model, prompt_list, 16)
