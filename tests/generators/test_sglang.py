"""What only sglang has: seeds shared with hf_infer, its options, and its processes, alone and in a Ray worker."""

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from roll.configs.engines.sglang import CARD, OWNED_OPTIONS, SglangConfig
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.strategy.sglang import cpu
from roll.models.tiny import make_tokenizer
from roll.pipeline.probe import find_causes
from tests.support.contract import (
    LORA,
    OPTIONS,
    assert_polled_greedy,
    buckets_of,
    burst,
    context_of,
    first_token,
    infer_worker,
    load,
    make_adapter,
    make_model,
    prompts,
    put_buckets,
    requests_of,
    weights_of,
)
from tests.support.picture_models import make_picture_model
from tests.support.probe_pair import (
    PENALTIES,
    SPOILED,
    TRUNCATIONS,
    Pair,
    assert_names_another_template,
    causes_in,
    started,
    started_seeing,
    wrong_names,
)
from tests.support.processes import gone

SGLANG = OPTIONS.get("sglang", {})
if "sglang" not in os.environ.get("ROLL_GENERATORS", "sglang").split(","):
    pytest.skip("sglang: ROLL_GENERATORS leaves it out", allow_module_level=True)
if not SGLANG and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: the package sglang is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def sglang(model_path: Any) -> Iterator[Any]:
    engine = STRATEGIES.get("sglang")(context_of("sglang", model_path("tied", 0), SGLANG))
    engine.setup()
    yield engine
    engine.shutdown()


def test_options_are_those_of_the_installed_sglang():
    assert list(CARD.option_problems({**SGLANG, "chunked_prefill_size": 64})) == []
    (typo,) = CARD.option_problems({**SGLANG, "chunked_prefil_size": 64})
    assert typo.hint == "did you mean chunked_prefill_size?"
    ours = SglangConfig.model_fields.keys() | OWNED_OPTIONS.keys() | cpu.ENGINE_OPTIONS.keys()
    assert ours - CARD.signature(SGLANG).arguments.keys() == {"python_executable"}


def test_a_seed_gives_the_tokens_that_it_gives_in_hf_infer(sglang, model_path):
    kinds = [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.3}]
    requests = [
        GenerateRequest(str(i), prompt, SamplingParams(max_new_tokens=32, seed=2**64 - 1 - i, **kinds[i % 3]))
        for i, prompt in enumerate(prompts(12, seed=60))
    ]
    reference = STRATEGIES.get("hf_infer")(context_of("hf_infer", model_path("tied", 0)))
    reference.setup()
    try:
        expected = asyncio.run(burst(reference, requests))
    finally:
        reference.shutdown()
    for found, wanted in zip(asyncio.run(burst(sglang, requests)), expected, strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()


def test_prompts_that_begin_alike_share_their_cache_until_the_next_weights(sglang, model_path):
    (prompt,) = prompts(1, seed=61, low=200, high=200)

    def shared_tokens() -> float:
        before = sglang.stats()["shared_tokens"]
        asyncio.run(burst(sglang, requests_of([prompt], max_new_tokens=1, temperature=0.0)))
        return sglang.stats()["shared_tokens"] - before

    assert shared_tokens() == 0
    assert shared_tokens() > 100
    asyncio.run(sglang.update_weights(buckets_of(weights_of(load(model_path("tied", 0)))), 0))
    assert shared_tokens() == 0


def test_a_model_that_does_not_divide_is_refused_before_the_engine_starts(model_path):
    with pytest.raises(ValueError, match="tp_size: 2, but the model has num_key_value_heads 1"):
        STRATEGIES.get("sglang")(context_of("sglang", model_path("tied", 0), {**SGLANG, "tp_size": 2})).setup()


async def test_requests_fail_when_one_of_the_engines_processes_dies(sglang):
    """The last test of this engine."""
    processes = engine_processes(os.getpid())
    victim = next(process for process in processes if "detokenizer" in title(process))

    requests = requests_of(prompts(2, seed=62), max_new_tokens=900, temperature=2.0)
    tasks = [asyncio.create_task(sglang.generate(request)) for request in requests]
    await first_token(sglang)
    victim.send_signal(signal.SIGKILL)
    for task in tasks:
        with pytest.raises(EngineStoppedError, match=rf"detokenizer \(pid {victim.pid}\) ended with exit code -9"):
            await asyncio.wait_for(task, 20)
    assert gone(*(process.pid for process in processes), seconds=20.0)


def test_in_a_ray_worker_with_an_engine_of_two_processes(tmp_path):
    """Starts, generates, updates weights and adapter over tensor-parallel processes, which end with the worker."""
    import ray

    path, new_path = save_even_model(tmp_path, 0), save_even_model(tmp_path, 1)
    new = load(new_path)
    adapter, adapted = make_adapter(new_path, seed=3)
    requests = requests_of(prompts(4, seed=63, low=40, high=60), temperature=0.0, max_new_tokens=12)
    with infer_worker(context_of("sglang", path, {**SGLANG, "tp_size": 2}, lora=LORA)) as worker:
        assert_polled_greedy(worker, requests, load(path))
        ray.get(worker.update.remote(put_buckets(weights_of(new))), timeout=60)
        assert_polled_greedy(worker, requests, new)
        ray.get(worker.adapt.remote(put_buckets(adapter)), timeout=60)
        assert_polled_greedy(worker, requests, adapted)
        processes = engine_processes(ray.get(worker.ping.remote()).pid)
        assert sum("scheduler" in title(process) for process in processes) == 2
        ray.kill(worker)
        assert gone(*(process.pid for process in processes), seconds=20.0)


def save_even_model(folder: Path, seed: int) -> str:
    """A model that two processes share evenly."""
    model = make_model("untied", seed)
    model.config.num_key_value_heads, model.config.intermediate_size = 2, 128
    path = folder / str(seed)
    even = type(model)(model.config)
    even.generation_config = model.generation_config
    even.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def engine_processes(pid: int) -> list[psutil.Process]:
    """SGLang's, below a process: its own three or more."""
    found = [p for p in psutil.Process(pid).children(recursive=True) if "sglang" in title(p)]
    assert len(found) >= 3
    return found


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


FAULTS = Path(__file__).parents[1] / "support" / "sglang_faults.py"
"""Not imported: it prepares its process for SGLang."""


@pytest.fixture(scope="module")
def faulty(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Path]]:
    """A pair whose engine has the fault that is named in a file."""
    yield from pair_with_faults(tmp_path_factory.mktemp("faulty"), started, Path(model_path("tied", 0)))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Path]]:
    """The same, whose question has a picture."""
    root = tmp_path_factory.mktemp("seeing")
    yield from pair_with_faults(root, started_seeing, make_picture_model(root / "model", "qwen2_5_vl"))


def pair_with_faults(root: Path, start: Callable[..., Pair], model: Path) -> Iterator[tuple[Pair, Path]]:
    python = Path(SGLANG.get("python_executable", sys.executable))
    (root / "bin").mkdir()
    (root / "lib").symlink_to(python.parent.parent / "lib")
    started_by = root / "bin" / "python"
    started_by.write_text(f'#!/bin/sh\nexec {python} -P {FAULTS} "$3"\n')
    started_by.chmod(0o755)
    planted = root / "planted"
    planted.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLL_PLANTED", str(planted))
        pair = start("sglang", model, options={"python_executable": str(started_by)})
    yield pair, planted
    pair.generator.shutdown()


@pytest.mark.parametrize("fault", SPOILED)
def test_a_probe_names_a_wrong_tensor(faulty, monkeypatch, fault):
    pair, _ = faulty
    spoil, words = SPOILED[fault]
    monkeypatch.setattr(pair, "spoil", spoil)
    pair.update()
    assert words in pair.causes()[0]
    monkeypatch.undo()
    pair.update()
    assert pair.difference()[0] < 1e-4, "a right pair"


def test_a_probe_names_right_bytes_under_wrong_names(faulty, monkeypatch):
    pair, _ = faulty
    monkeypatch.setattr(pair, "rename", wrong_names)
    pair.update()
    assert "gate_proj.weight has the values of model.layers.1.mlp.up_proj.weight" in pair.causes()[0]
    monkeypatch.undo()
    pair.update()


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        ("hotter", {}, "temperature: both agree where the generator is asked for 0.57"),
        ("cut", {}, "a cut distribution"),
        *(("truncated", *each) for each in TRUNCATIONS),
        *(("penalised", *each) for each in PENALTIES),
        ("offset", {}, "token offset: what the generator reports for a token is what the trainer computes"),
        ("old keys and values", {}, "keys and values of old weights"),
        ("rope", {}, "layers: they part in model.layers.0"),
        ("tied weight apart", {}, "is tied to another tensor in the trainer"),
        ("final soft cap", {}, "part behind them"),
    ],
)
def test_a_probe_names_what_the_engine_does_otherwise(faulty, monkeypatch, fault, changes, words):
    pair, planted = faulty
    monkeypatch.setattr(pair, "request", replace(pair.request, params=replace(pair.request.params, **changes)))
    assert not pair.causes()
    planted.write_text(fault)
    with torch.no_grad():
        for parameter in pair.trainer.weights.scorer.model.parameters():
            parameter *= 1.01
    pair.update()
    causes = pair.causes()
    planted.write_text("")
    pair.update()
    assert words in " ".join(causes), causes


def test_a_probe_names_another_chat_template(faulty):
    assert_names_another_template(faulty[0].generator)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other picture", "pictures: the generator sees another one: "),
        ("other pixel", "pictures: pixels have changed on the way to the generator's tower: 1 of 28,224 numbers of"),
        ("old features", "pictures: of equal pixels the generator's vision tower makes features that are "),
    ],
)
def test_a_probe_names_what_the_engine_sees_otherwise(seeing, fault, words):
    pair, planted = seeing
    assert not pair.causes()
    planted.write_text(fault)
    with torch.no_grad():
        for parameter in pair.trainer.weights.scorer.model.parameters():
            parameter *= 1.1
    pair.update()
    difference, bound, completion = pair.difference()
    assert difference > bound.value or fault == "other pixel"
    causes = find_causes(pair, pair.request, completion, bound)
    planted.write_text("")
    pair.update()
    assert causes[0].startswith(words), causes


@pytest.mark.slow  # an engine of its own for each
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("experts", "experts.1.down_proj.weight has the values of model.layers.0.mlp.experts.0.down_proj.weight"),
        ("untied", "q_proj.weight is without the adapter"),
    ],
)
def test_a_probe_names_experts_and_adapters(model_path, family, words):
    assert words in causes_in(family, "sglang", model_path(family, 0), SGLANG)[0]
