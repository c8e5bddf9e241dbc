"""A reward model divided over processes: the scores of the whole one, and nothing left of it however it ends."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig

from roll.configs.loader import derive
from roll.configs.problems import ConfigErrors
from roll.configs.rewards import RewardConfig
from roll.models.tiny import make_tokenizer
from roll.rewards import reward_model as device_classifiers
from roll.rewards.classifiers import RewardModelConfig
from roll.rewards.reward_model import RewardModelVerifier
from roll.rewards.scorer import check_rewards
from roll.rewards.types import RewardError, Sample
from tests.support.processes import ended, gone
from tests.support.verifiers import closing
from tests.unit.rewards.test_reward_model import SAMPLES, SHAPE, llama, qwen, save, scores, verifier_of

__all__ = ["llama", "qwen"]  # fixtures

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Config": {"head_dim": 8},
    "Gemma2Config": {"head_dim": 8},  # the embedding is divided too
    "MistralConfig": {},
    "GPTNeoXConfig": {"num_key_value_heads": 4},
    "Phi3Config": {"bos_token_id": 1, "eos_token_id": 2},
    "Qwen3MoeConfig": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}


def make(name: str, folder: Path, **fields: Any) -> Path:
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    return save(folder / name, getattr(transformers, name)(**SHAPE | sizes | fields), tokenizer)


def sharded(folder: Path, **args: Any) -> RewardModelVerifier:
    return verifier_of(folder, **{"tensor_parallel_size": 2, **args})


def pids(verifier: RewardModelVerifier) -> list[int]:
    assert isinstance(verifier.classifier, device_classifiers.ShardedClassifier)
    return verifier.classifier.pids


def running(process_ids: Iterable[int]) -> list[int]:
    return [pid for pid in process_ids if not ended(pid)]


def close_to(whole: list[float], tolerance: float = 1e-5) -> Any:
    return pytest.approx(whole, abs=tolerance)


async def score_each(verifier: RewardModelVerifier, samples: Sequence[Sample] = SAMPLES) -> list[float]:
    return [verdict.score for verdict in await asyncio.gather(*map(verifier.score, samples))]


async def score_while_away(verifier: RewardModelVerifier, samples: Sequence[Sample] = SAMPLES) -> list[float]:
    await verifier.offload()
    waiting = asyncio.create_task(score_each(verifier, samples))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await verifier.onload()
    return await waiting


async def test_its_scores_are_those_of_the_whole_model_before_and_after_a_turn_of_others(llama):
    whole = await asyncio.to_thread(scores, llama, label=1)
    async with closing(sharded(llama, label=1)) as verifier:
        before, ranks = await score_each(verifier), pids(verifier)
        after = await score_while_away(verifier)
    assert before == close_to(whole) and after == close_to(whole)
    assert len(ranks) == 2 and not running(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_divided_in_other_ways(family, tmp_path):
    folder = make(family, tmp_path, **FAMILIES[family])
    for size in (2, 4) if family == "GPTNeoXConfig" else (2,):
        assert scores(folder, tensor_parallel_size=size) == close_to(scores(folder))


@pytest.mark.slow
async def test_a_rank_that_is_killed_costs_its_batch_and_all_start_anew(qwen):
    async with closing(sharded(qwen)) as verifier:
        await verifier.start()
        first = pids(verifier)
        os.kill(first[1], signal.SIGKILL)
        with pytest.raises(RewardError, match=r"rank 1 of the 2 of the reward model: its process died \(SIGKILL\)"):
            await verifier.score(SAMPLES[0])
        assert not running(first)
        found = await score_each(verifier)
        os.kill(pids(verifier)[0], signal.SIGKILL)
        await verifier.offload()  # nobody fails for it: it is told, and the next batch starts them
        await verifier.onload()
        assert await score_each(verifier, SAMPLES[:1]) == close_to(found[:1])
    assert found == close_to(await asyncio.to_thread(scores, qwen))


@pytest.mark.slow
async def test_a_rank_that_hangs_is_a_failure_too(qwen, monkeypatch):
    monkeypatch.setattr(device_classifiers, "PASS_TIMEOUT", 2.0)
    async with closing(sharded(qwen)) as verifier:
        await verifier.start()
        ranks = pids(verifier)
        os.kill(ranks[1], signal.SIGSTOP)
        with pytest.raises(RewardError, match=r"rank 0, 1 of the 2 of the reward model took longer than 2 s"):
            await verifier.score(SAMPLES[0])
    assert not running(ranks)


@pytest.mark.slow
def test_ranks_die_with_a_worker_that_is_killed(qwen, tmp_path):
    program = """
import asyncio, sys
from pathlib import Path
from tests.unit.rewards.test_sharded_reward_model import pids, sharded

async def main():
    verifier = sharded(Path(sys.argv[1]))
    await verifier.start()
    print(*pids(verifier), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", program, str(qwen)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert worker.stdout is not None
    ranks = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(ranks) == 2 and running(ranks) == ranks
    worker.kill()
    worker.wait()
    assert all(map(gone, ranks)) and not list(tmp_path.iterdir()) and set(os.listdir("/dev/shm")) <= before


@pytest.mark.slow
async def test_what_cannot_be_loaded_is_told_in_words(qwen, tmp_path):
    headless = tmp_path / "headless"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen)).save_pretrained(headless)
    make_tokenizer().save_pretrained(headless)
    odd = make("LlamaConfig", tmp_path, intermediate_size=49)

    missing = "rank 0 of the 2 of the reward model: model_path: 1 weights are missing"
    uneven = "tensor_parallel_size: 2, expected a divisor of 49, the size of model.layers.0.mlp"
    for folder, told in ((headless, missing), (odd, uneven)):
        async with closing(sharded(folder)) as verifier:
            with pytest.raises(ValueError, match=re.escape(told)):
                await verifier.start()
            assert not running(pids(verifier))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_it_leaves_its_gpus_and_comes_back(qwen):
    async with closing(sharded(qwen, device="auto")) as verifier:
        found = await score_each(verifier, SAMPLES[:1]) + await score_while_away(verifier, SAMPLES[:1])
    assert found == close_to(await asyncio.to_thread(scores, qwen, SAMPLES[:1], device="cuda") * 2, 1e-3)


def test_what_cannot_be_divided_is_told_before_the_run(qwen, tmp_path):
    def problems(folder: Path, **args: Any) -> list[str]:
        config = RewardModelConfig(**{"model_path": str(folder), "tensor_parallel_size": 2, **args})
        return [*map(str, config.problems())]

    key = "tensor_parallel_size"
    assert problems(qwen, tensor_parallel_size=4) == [f"{key}: got 4, expected a divisor of num_key_value_heads = 2"]
    BertConfig(hidden_size=32).save_pretrained(tmp_path / "bert")
    assert problems(tmp_path / "bert") == [f"{key}: got 2, expected 1: Transformers has no plan for dividing bert"]
    [chosen] = problems(qwen, device="cuda:1")
    assert chosen.startswith("device: ") and "the first ones that are visible" in chosen
    remote = {"url": "http://10.0.0.5:8000"}
    assert problems(qwen, remote=remote) == [f"{key}: got 2, expected no such key with remote: the server decides"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"task_type": "SEQ_CLS", "base_model_name_or_path": "{qwen}"}}')
    (adapter / "adapter_model.safetensors").touch()
    assert any(", expected a whole model with tensor_parallel_size" in problem for problem in problems(adapter))
    with pytest.raises(ConfigErrors, match="num_key_value_heads = 2"):
        sharded(qwen, tensor_parallel_size=4)
    assert not problems(qwen)


def domain(folder: Path, **keys: Any) -> dict[str, Any]:
    args = {"model_path": str(folder), "tensor_parallel_size": 2}
    return {"tag_included": ["chat"], "verifiers": [{"name": "reward_model", "args": args}], **keys}


def derived(section: Mapping[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate(derive({"rewards": {"chat": section}})["rewards"]["chat"])


def test_a_worker_takes_as_many_devices_as_the_model_is_divided_over_and_no_fewer(qwen):
    config = derived(domain(qwen, device_mapping=[0, 1, 2, 3], num_gpus_per_worker=None))
    assert config.num_gpus_per_worker == 2 and config.worker_config().num_workers == 2
    assert not list(check_rewards(config))
    on_the_cpu = derived(domain(qwen))
    assert on_the_cpu.num_gpus_per_worker == 1 and not list(check_rewards(on_the_cpu))
    [wrong] = derived(domain(qwen, device_mapping=[0, 1, 2])).problems()
    assert (wrong.path, wrong.expected) == ("num_gpus_per_worker", "a divisor of 3, the devices of device_mapping")
    [wrong] = check_rewards(derived(domain(qwen, device_mapping=[0, 1], num_gpus_per_worker=1)))
    assert wrong.path == "verifiers.0.args.tensor_parallel_size" and wrong.got == 2
    assert wrong.expected == "at most num_gpus_per_worker = 1, the devices of one worker"
