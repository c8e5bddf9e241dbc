"""What only vllm has: its options, and its life in a Ray worker."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from roll.configs.engines.vllm import CARD, VllmConfig
from roll.distributed.strategy import STRATEGIES, MissingEngineError, require_engine
from roll.distributed.strategy.generation.prompt_scoring import PromptScoring
from roll.distributed.strategy.vllm import strategy, worker
from roll.distributed.strategy.vllm.arguments import engine_arguments, engine_environment
from roll.models.tiny import make_tokenizer
from roll.utils.foreign import environment, replaced
from tests.support.contract import (
    LORA,
    assert_polled_greedy,
    buckets_of,
    context_of,
    forward_logprobs,
    greedy,
    infer_worker,
    load,
    make_model,
    polled,
    prompts,
    put_buckets,
    requests_of,
    weights_of,
)
from tests.support.probe_pair import (
    PENALTIES,
    SPOILED,
    TRUNCATIONS,
    Pair,
    assert_names_another_template,
    causes_in,
    started,
    wrong_names,
)
from tests.support.processes import gone

if find_spec("vllm") is None:
    pytest.skip("vllm: the package vllm is not installed", allow_module_level=True)
if "vllm" not in os.environ.get("ROLL_GENERATORS", "vllm").split(","):
    pytest.skip("vllm: ROLL_GENERATORS leaves it out", allow_module_level=True)


def test_a_missing_engine_is_named_with_its_extra():
    with pytest.raises(MissingEngineError, match=r"pip install 'roll-rl\[nothing\]'"):
        require_engine("no_such_engine", extra="nothing", strategy="none")


def test_options_of_the_engine_are_passed_on_and_others_refused():
    assert list(CARD.option_problems({"block_size": 32, "max_num_batched_tokens": 512})) == []
    (typo,) = CARD.option_problems({"enforce_eagre": True})
    assert str(typo) == (
        "enforce_eagre: got true, expected an argument of vLLM's AsyncEngineArgs (did you mean enforce_eager?)"
    )
    (owned,) = CARD.option_problems({"dtype": "float16"})
    assert str(owned) == 'dtype: got "float16", expected model_args.dtype instead'


@pytest.mark.parametrize(
    ("config", "context", "message"),
    [
        ({"max_model_len": 16}, {}, "max_model_len: 16, expected at least sequence_length"),
        ({"no_such_option": 1}, {}, "no_such_option: got 1"),
        ({"quantization": "fp8"}, {}, "quantization: got fp8, expected fp8_per_channel on a CPU"),
        ({}, {"sequence_length": 10**6}, "the model has positions for at most"),
        ({}, {"head": "value"}, "no 'value' head"),
    ],
)
def test_what_cannot_work_is_refused_before_the_engine_starts(model_path, config, context, message):
    with pytest.raises(ValueError, match=message):
        STRATEGIES.get("vllm")(context_of("vllm", model_path("tied", 0), config, **context)).setup()


@pytest.mark.slow
def test_why_the_engine_could_not_start_is_in_the_error(model_path, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_path("tied", 0), folder)
    save_file({"cpu.0": torch.zeros(2)}, folder / "rng.safetensors")
    with pytest.raises(ValueError, match=f"actor_infer: vllm could not start with {folder}: .*'cpu'"):
        STRATEGIES.get("vllm")(context_of("vllm", str(folder))).setup()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, whose kernels take other heads")
def test_heads_that_the_cpu_kernels_do_not_take_are_refused(tmp_path):
    model = make_model("untied", 0)
    model.config.head_dim = 16
    type(model)(model.config).save_pretrained(tmp_path / "small")
    make_tokenizer().save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="heads have size 16, expected one of 32"):
        STRATEGIES.get("vllm")(context_of("vllm", str(tmp_path / "small"))).setup()


@pytest.mark.slow  # two engines
def test_new_weights_are_quantised_as_those_that_it_starts_with(model_path):
    prompt_list, said, new = prompts(6, seed=4), [], load(model_path("tied", 1))
    for seed in (0, 1):
        context = context_of("vllm", model_path("tied", seed), {"quantization": "fp8_per_channel"})
        context.worker.model_args.dtype = "bf16"
        engine = STRATEGIES.get("vllm")(context)
        engine.setup()
        if seed == 0:
            weights = {name: weight.bfloat16() for name, weight in weights_of(new).items()}
            asyncio.run(engine.update_weights(buckets_of(weights), 1))
        said.append(greedy(engine, prompt_list, 8))
        engine.shutdown()
    gaps = []
    for one, other, prompt in zip(*said, prompt_list, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and np.array_equal(one.logprobs, other.logprobs)
        plain = forward_logprobs(new, prompt, one.token_ids, 1.0)
        gaps.append(float(np.abs(one.logprobs - plain).max()))
    assert 1e-3 < max(gaps) < 1.0, "in fewer bits, and near"


def test_sockets_go_with_the_engines_folder(model_path):
    for folder, expected in ((Path("/tmp/short"), "/tmp/short"), (Path("/tmp", "long" * 20), None)):
        with environment(engine_environment(model_path("tied", 0), True, folder / "logging.json")):
            assert os.environ.get("VLLM_RPC_BASE_PATH") == expected
        assert "VLLM_RPC_BASE_PATH" not in os.environ


@pytest.mark.slow
def test_in_a_ray_worker_with_an_engine_of_two_processes(model_path):
    """Starts, generates, updates over tensor-parallel workers, dies with an error, and leaves no process behind."""
    import ray

    from roll.rollout.router import GenerationError

    if (gpus := torch.cuda.device_count()) == 1:
        pytest.skip("needs no GPU or two, there is one")
    path, new = model_path("tied", 0), load(model_path("tied", 1))
    requests = requests_of(prompts(4, seed=50, low=40, high=60), temperature=0.0, max_new_tokens=12)
    context = context_of("vllm", path, {"tensor_parallel_size": 2}, lora=LORA)
    with infer_worker(context, num_gpus=min(gpus, 2)) as worker:
        assert_polled_greedy(worker, requests, load(path))
        ray.get(worker.update.remote(put_buckets(weights_of(new))), timeout=60)
        assert_polled_greedy(worker, requests, new)
        children = _descendants(ray.get(worker.ping.remote()).pid)
        [engine] = [pid for pid in children if len(_descendants(pid)) == 2]  # it has two tensor-parallel workers
        os.kill(engine, signal.SIGKILL)
        assert all(isinstance(result, GenerationError) for result in polled(worker, requests).values())
        ray.kill(worker)
    assert gone(*children, seconds=20.0)


def _descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_batches_are_those_that_vllm_measured_for_throughput(model_path, monkeypatch):
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    seen = []

    def refuse(arguments: Any, *, usage_context: Any = None) -> Any:
        seen.extend([usage_context, arguments.max_num_seqs])
        raise RuntimeError("far enough")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", refuse)
    with pytest.raises(ValueError, match="vllm could not start"):
        STRATEGIES.get("vllm")(context_of("vllm", model_path("tied", 0), max_running_requests=7)).setup()
    assert seen == [UsageContext.LLM_CLASS, 7]


def test_logits_of_prompts_are_computed_for_some_tokens_at_a_time(monkeypatch):
    """vLLM's own words: it computes logits, their log-probabilities, and gathers those of the tokens."""
    monkeypatch.setattr(worker, "SCORED_LOGITS", 40)
    torch.manual_seed(0)
    output, hidden, tokens, rows = torch.nn.Linear(4, 10), torch.randn(11, 4), torch.arange(11) % 10, []

    class Model(torch.nn.Module):
        def compute_logits(self, hidden_LH: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden_LH))
            return output(hidden_LH)

    sampler = SimpleNamespace(compute_logprobs=None, gather_logprobs=None)
    config = SimpleNamespace(get_vocab_size=lambda: 10)
    runner = SimpleNamespace(model=Model(), sampler=sampler, max_num_reqs=3, model_config=config)

    def ask() -> Any:
        scores = sampler.compute_logprobs(runner.model.compute_logits(hidden))
        return sampler.gather_logprobs(scores, 3, tokens)

    runner._get_prompt_logprobs_dict = ask
    worker.score_prompts(runner, PromptScoring(temperature=0.5, top_k=2))
    found = runner._get_prompt_logprobs_dict()
    assert rows == [4, 4, 3]
    expected = (output(hidden) / 0.5).log_softmax(-1)
    top = expected.topk(2)
    torch.testing.assert_close(found.logprobs[:, 0], expected.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(found.logprobs[:, 1:3], top.values)
    assert found.logprob_token_ids[:, 1:3].equal(top.indices.int())
    assert runner.model.compute_logits(hidden).shape == (11, 10) and sampler.compute_logprobs is None


def test_a_connector_of_keys_and_values_is_vllms_own(tmp_path):
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    (tmp_path / "config.json").write_text("{}")
    outline = SimpleNamespace(dtype=torch.bfloat16, text_config=SimpleNamespace(model_type="qwen2"))
    made = engine_arguments(
        context_of("vllm", str(tmp_path)), VllmConfig(kv_transfer_config=given), outline, on_cpu=False
    )
    assert made["kv_transfer_config"].kv_connector == "OffloadingConnector"
    keys = [key for key, _ in CARD.untested(VllmConfig(kv_transfer_config=given, enable_expert_parallel=True))]
    assert keys == ["enable_expert_parallel", "kv_transfer_config"]


@pytest.fixture(scope="module")
def faulty(model_path):
    """A pair whose engine has the faults that it is told to have."""
    with faulty_workers():
        pair = started("vllm", Path(model_path("tied", 0)), sequence_length=256)
    yield pair
    pair.generator.shutdown()


def faulty_workers():
    """Engines that start meanwhile have ``FaultyWorker``."""

    def with_faults(*args: Any, **named: Any) -> dict[str, Any]:
        own = engine_arguments(*args, **named)
        return own | {"worker_extension_cls": "tests.support.vllm_faults.FaultyWorker"}

    return replaced(strategy, engine_arguments=with_faults)


def plant(pair: Pair, fault: str) -> None:
    pair.generator._loop.submit(pair.generator._rpc("roll_plant", fault)).result()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*SPOILED, "wrong names"])
def test_a_probe_names_a_wrong_tensor(faulty, monkeypatch, fault):
    """By its layer, and where it comes right when it is sent again, as what vLLM calls it: joined with others."""
    number, joined = (1, "mlp.gate_up_proj") if fault == "wrong names" else (0, "self_attn.qkv_proj")
    with monkeypatch.context() as patch:
        if fault == "wrong names":
            patch.setattr(faulty, "rename", wrong_names)
        else:
            patch.setattr(faulty, "spoil", SPOILED[fault][0])
        faulty.update()
        assert f"they part in model.layers.{number}, whose output" in faulty.causes()[-1], "sent again as wrong"
    again, named, layer = faulty.causes()
    assert again.startswith("tensors: both agree since the same weights were sent again")
    assert named.startswith("tensors that changed") and f"model.layers.{number}.{joined}.weight" in named
    assert f"they part in model.layers.{number}, whose output" in layer
    assert faulty.difference()[0] < 1e-4, "a right pair"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        ("hotter", {}, "temperature: both agree where the generator is asked for 0.57"),
        ("cut", {}, "a cut distribution"),
        *(("processed", *each) for each in (*TRUNCATIONS, *PENALTIES)),
        ("rope", {}, "layers: they part in model.layers.0"),
        ("tied weight apart", {}, "part behind them"),
        ("final soft cap", {}, "part behind them"),
    ],
)
def test_a_probe_names_what_the_engine_does_otherwise(faulty, monkeypatch, fault, changes, words):
    params = replace(faulty.request.params, **changes)
    monkeypatch.setattr(faulty, "request", replace(faulty.request, params=params))
    plant(faulty, "")
    assert not faulty.causes()
    plant(faulty, fault)
    causes = faulty.causes()
    plant(faulty, "")
    faulty.update()
    assert words in " ".join(causes), causes


@pytest.mark.slow
def test_a_probe_names_a_token_offset(faulty, monkeypatch):
    right = faulty.generator.completion

    def shifted(request: Any, ids: Any, logprobs: Any, *args: Any, **named: Any) -> Any:
        return right(request, ids, [*logprobs[1:], logprobs[0]], *args, **named)

    monkeypatch.setattr(faulty.generator, "completion", shifted)
    (cause,) = faulty.causes()
    assert cause.startswith("token offset")


@pytest.mark.slow
def test_a_probe_names_keys_and_values_of_old_weights(faulty, monkeypatch):
    """Of a prompt with a block, of 128 tokens on a CPU; that of a run's probe is shorter."""
    ids = np.resize(faulty.request.prompt_ids, 140)
    monkeypatch.setattr(faulty, "request", replace(faulty.request, prompt_ids=ids))
    faulty.update()
    assert not faulty.causes()

    async def forgets_nothing(*_: Any) -> None:
        """As if the cache were neither emptied nor named anew."""

    monkeypatch.setattr(faulty.generator, "_now_at", forgets_nothing)
    with torch.no_grad():
        for parameter in faulty.trainer.weights.scorer.model.parameters():
            parameter *= 1.1
    faulty.update()
    (cause,) = faulty.causes()
    assert cause.startswith("keys and values of old weights")
    monkeypatch.undo()
    faulty.update()


@pytest.mark.slow
def test_a_probe_names_another_chat_template(faulty):
    assert_names_another_template(faulty.generator)


@pytest.mark.slow  # an engine of its own for each
@pytest.mark.parametrize("family", ["experts", "untied"])
def test_a_probe_names_the_layer_of_experts_and_adapters(model_path, family):
    causes = causes_in(family, "vllm", model_path(family, 0))
    assert "they part in model.layers.0" in " ".join(causes), causes
