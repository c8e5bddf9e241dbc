"""What of the SGLang strategy runs without SGLang: its sampler, its CPU kernel, and the checks of its options."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from roll.configs.engines.sglang import CARD, SglangConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.strategy import MissingEngineError
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.generation.prompt_scoring import PromptScoring
from roll.distributed.strategy.sglang.cpu import check_tensor_parallel, environment, rotary_embedding
from roll.distributed.strategy.sglang.sampler import SampledBatch, uniforms
from roll.distributed.strategy.sglang.strategy import SglangStrategy, engine_arguments
from roll.models import sampling
from tests.support.contract import context_of

VOCAB = 50


CPU = torch.device("cpu")
DEFAULTS = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": 0.0}
DEFAULTS |= dict.fromkeys(("first_token_temperature", "first_token_top_k"))
DEFAULTS |= dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)


def params_of(seed: int, prompt: list[int], **changes: Any) -> dict[str, Any]:
    request = SimpleNamespace(origin_input_ids=prompt, origin_input_ids_unpadded=prompt, output_ids=[])
    return {**DEFAULTS, **changes, "seed": seed, "prompt_len": len(prompt), "__req__": request}


def test_random_numbers_are_those_of_hf_infer():
    seeds = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15], dtype=np.uint64).repeat(50)
    index = np.tile(np.arange(50, dtype=np.uint64), 6)
    expected = sampling.uniforms(seeds, index)
    found = uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(index.view(np.int64)))
    np.testing.assert_array_equal(found.numpy(), expected)


def test_a_repetition_penalty_follows_its_request_from_batch_to_batch():
    """Oracle: the sampler of hf_infer with the tokens seen, kept as Python sets."""
    torch.manual_seed(0)
    requests = [params_of(2**64 - 1 - i, [i, i + 1, i + 2], repetition_penalty=1.0 + i) for i in range(4)]
    seen = [set(p["__req__"].origin_input_ids) for p in requests]
    position = [2] * 4
    for members in ([0, 1], [0, 1, 2], [2, 1], [3, 2, 1], [3, 2, 1]):
        batch = SampledBatch([requests[i] for i in members], CPU, VOCAB)
        logits = torch.randn(len(members), VOCAB) * 3
        tokens, logprobs = batch.draw(logits, torch.tensor([position[i] for i in members]))
        for row, i in enumerate(members):
            p = requests[i]
            mask = torch.zeros(1, VOCAB, dtype=torch.bool)
            mask[0, list(seen[i])] = True
            rows = sampling.SamplerRows.build([0.8], [0], [1.0], [p["repetition_penalty"]], CPU)
            index = np.array([position[i] - 2], dtype=np.uint64)
            uniform = torch.from_numpy(sampling.uniforms(np.array([p["seed"]], dtype=np.uint64), index))
            token, logprob = sampling.sample(logits[row : row + 1], rows, uniform, mask)
            assert tokens[row] == token[0]
            torch.testing.assert_close(logprobs[row], logprob[0])
            seen[i].add(int(token[0]))
            position[i] += 1


def test_counts_follow_their_request_from_batch_to_batch():
    requests = [params_of(i, [i, i], temperature=0.0, frequency_penalty=i / 2.0) for i in range(3)]
    logits = torch.tensor([3.0, 2.9, 2.8])
    drawn: list[list[int]] = [[], [], []]
    for members in ([0, 1], [2, 1, 0], [1, 2], [1, 2]):
        batch = SampledBatch([requests[i] for i in members], CPU, 3)
        positions = torch.tensor([1 + len(drawn[i]) for i in members])
        for i, token in zip(members, batch.draw(logits.expand(len(members), -1), positions)[0].tolist(), strict=True):
            drawn[i].append(token)
    assert drawn == [[0, 0], [0, 1, 2, 0], [0, 1, 2]]


def test_what_is_drawn_inside_a_prompt_is_not_seen():
    request = params_of(1, list(range(10)), repetition_penalty=5.0, presence_penalty=1.0)
    batch = SampledBatch([request], CPU, VOCAB)
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, 30] = 50.0
    batch.draw(logits, torch.tensor([4]))  # the first half of the prompt
    assert not request["__seen__"][30]
    assert request["__count__"].sum() == 0
    batch.draw(logits, torch.tensor([9]))
    assert request["__seen__"][30]
    assert request["__count__"].tolist() == [0] * 30 + [1] + [0] * (VOCAB - 31)


def test_a_batch_is_known_by_its_requests():
    requests = [params_of(i, [1]) for i in range(3)]
    batch = SampledBatch(requests[:2], CPU, VOCAB)
    assert batch.holds([requests[0], requests[1]])
    assert not batch.holds([requests[1], requests[0]])
    assert not batch.holds(requests)
    assert not batch.holds([requests[0], {**requests[1]}])


@pytest.mark.parametrize("is_neox", [True, False], ids=["llama", "gptj"])
def test_rotary_positions_are_those_of_transformers(is_neox):
    torch.manual_seed(0)
    tokens, heads, key_heads, size, positions = 7, 4, 2, 16, torch.randint(0, 100, (7,))
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos(), angles.sin()
    query, key = torch.randn(tokens, heads * size), torch.randn(tokens, key_heads * size)
    if is_neox:
        both = [torch.cat([part[positions]] * 2, -1)[None] for part in (cos, sin)]
        shaped = [x.view(tokens, -1, size).transpose(0, 1)[None] for x in (query, key)]
        expected = [x[0].transpose(0, 1) for x in llama_rotary(*shaped, *both)]
    else:
        # GPT-J's own function takes half-size tables by position, [1, tokens, size / 2].
        tables = sin[positions][None], cos[positions][None]
        expected = [gptj_rotary(x.view(1, tokens, -1, size), *tables)[0] for x in (query, key)]
    rotary_embedding(positions, query, key, size, torch.cat([cos, sin], -1), is_neox)
    torch.testing.assert_close(query.view(tokens, -1, size), expected[0])
    torch.testing.assert_close(key.view(tokens, -1, size), expected[1])


@pytest.mark.parametrize(("tp_size", "expected"), [(2, "0,1|2,4"), (3, "0|1|2"), (5, "0|1|2|4|0")])
def test_tensor_parallel_processes_share_the_cores(monkeypatch, tp_size, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 2, 1, 0})
    assert environment(tp_size)["SGLANG_CPU_OMP_THREADS_BIND"] == expected


def test_on_a_cpu_tensor_parallel_processes_share_a_model_evenly():
    model = SimpleNamespace(num_key_value_heads=2, intermediate_size=96)
    check_tensor_parallel(model, 1, lora=True)
    check_tensor_parallel(model, 2, lora=False)
    with pytest.raises(ValueError, match="num_key_value_heads 2, expected a multiple of 4"):
        check_tensor_parallel(model, 4, lora=False)
    with pytest.raises(ValueError, match="intermediate_size 96, expected a multiple of 64"):
        check_tensor_parallel(model, 2, lora=True)


@pytest.fixture
def fake_environment(tmp_path: Path) -> str:
    """An interpreter's folder with nothing of SGLang but the file that names its arguments."""
    source = tmp_path / "lib/python3.11/site-packages/sglang/srt/arg_groups/fields"
    source.mkdir(parents=True)
    (source / "schedule.py").write_text(
        "class Schedule(msgspec.Struct):\n"
        '    _NS_PATH = "schedule"\n'
        '    chunked_prefill_size: A[Optional[int], "Tokens."] = None\n'
        '    chunked_by: A[Literal["tokens", "pages"], Arg(help="Unit.")] = "tokens"\n'
        '    chunk_limit: A[int, Arg(help="Text such as 4k.", type_parser=tokens)] = 0\n'
    )
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    return str(python)


def test_an_argument_that_sglang_does_not_have_or_that_is_set_elsewhere_is_named(fake_environment):
    options = {"python_executable": fake_environment, "tp_size": 1, "chunked_prefil_size": 64}
    (problem,) = CARD.option_problems(options)
    assert (problem.path, problem.got) == ("chunked_prefil_size", 64)
    assert problem.hint == "did you mean chunked_prefill_size?"
    assert not list(CARD.option_problems({"python_executable": fake_environment, "chunked_prefill_size": 64}))
    options = {"python_executable": fake_environment, "model_path": "/tmp", "dp_size": 2}
    assert list(map(str, CARD.option_problems(options))) == [
        'model_path: got "/tmp", expected pretrain instead',
        "dp_size: got 2, expected more workers in device_mapping instead",
    ]


def test_arguments_are_those_of_the_sglang_that_is_installed(fake_environment):
    """Not those of the version whose arguments are shipped."""
    known = {"python_executable": fake_environment, "chunked_by": "pages", "chunk_limit": "4k"}
    assert not list(CARD.option_problems(known))
    (wrong,) = CARD.option_problems(known | {"chunked_by": "lines"})
    assert str(wrong) == """chunked_by: got "lines", expected 'tokens' or 'pages'"""
    (other,) = CARD.option_problems(known | {"page_size": 16})
    assert (other.path, other.expected) == ("page_size", "an argument of SGLang's ServerArgs")


@pytest.mark.parametrize(("python", "message"), [("/no/python", "no such program"), (sys.executable, "not installed")])
def test_an_environment_without_sglang_is_refused(python, message, tmp_path):
    with pytest.raises(MissingEngineError, match=message):
        SglangStrategy(context_of("sglang", str(tmp_path), {"python_executable": python}))


def test_the_engines_processes_have_no_setting_that_its_memory_saver_refuses(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    (tmp_path / "config.json").write_text("{}")
    context = SimpleNamespace(role="actor_infer", model_path=str(tmp_path))
    engine: Any = SimpleNamespace(context=context, scoring=PromptScoring(), _on_cpu=False)
    variables = SglangStrategy._environment(engine)
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False,max_split_size_mb:64"
    assert "actor_infer: PYTORCH_CUDA_ALLOC_CONF: SGLang's processes run without" in caplog.text


def test_weights_are_copied_to_host_memory_only_where_no_update_may_follow_and_tokens_come_in_parts(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def arguments(is_whole: bool = True, **options: Any) -> dict[str, Any]:
        outline: Any = SimpleNamespace(dtype=torch.bfloat16, is_whole=is_whole)
        context = StrategyContext(WorkerConfig(), "actor_infer", str(tmp_path), **options)
        return engine_arguments(context, SglangConfig(stream_interval=4) if options else SglangConfig(), outline, False)

    assert arguments()["enable_weights_cpu_backup"] and arguments()["stream_interval"] == 16
    updated = arguments(updated_after_offload=True)
    assert not updated["enable_weights_cpu_backup"] and updated["stream_interval"] == 4
    assert arguments(False, updated_after_offload=True)["enable_weights_cpu_backup"], "a tower is not sent"
