"""Every trainer that leaves a GPU gives its memory back, and goes on afterwards as if it had stayed."""

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.data.batch import Batch
from roll.distributed.strategy.base import States
from roll.models.lora import LoraSpec
from tests.support.batches import batch_of
from tests.support.choice import needs
from tests.support.harness import TEMPERATURE, Layout, policy_loss, started
from tests.support.layouts_deepspeed import zero
from tests.support.ranks import run_ranks
from tests.support.sizes import save_random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]
VOCABULARY = 8192
SPEC = LoraSpec(rank=4, alpha=8, targets=("q_proj", "down_proj"))
LEFT = 0.1
"""Of the memory before, what may stay of engines' own, beside ``WORKSPACES``."""
WORKSPACES = 80 * 2**20
"""Bytes of cuBLAS (32 MiB each for two of its libraries on a Hopper GPU)."""


def row(name: str, strategy: str, config: dict[str, Any] | None = None, **options: Any) -> Layout:
    return Layout(name, strategy, 1, config or {}, **options)


BF16 = {"model_args": {"dtype": "bf16"}}
ROWS = [
    row("alone", "fsdp2_train"),
    row("lora", "fsdp2_train", lora=SPEC),
    row("cpu-offload", "fsdp2_train", {"cpu_offload": True}),
    row("sharded-checkpoint", "fsdp2_train", {"cpu_offload": True, "checkpoint": "sharded"}),
    *(row(f"zero{stage}", "deepspeed_train", zero(stage)) for stage in range(4)),
    *(row(f"zero{stage}-bf16", "deepspeed_train", zero(stage), **BF16) for stage in (2, 3)),
    *(row(f"zero{stage}-lora", "deepspeed_train", zero(stage), lora=SPEC) for stage in (2, 3)),
    # With the default threshold small parameters stay whole between passes, and may hold on to the others' memory.
    row("zero3-persistent", "deepspeed_train", {"zero_optimization": {"stage": 3}}),
    row("zero3-cpu", "deepspeed_train", zero(3, offload_param={"device": "cpu"})),
    row("alone", "megatron_train"),
    row("whole-optimizer", "megatron_train", {"use_distributed_optimizer": False}),
    row("bf16", "megatron_train", **BF16),
]

SCORERS = [
    row("alone", "fsdp2_infer"),
    row("cpu-offload", "fsdp2_infer", {"cpu_offload": True}),
    *(row(f"zero{stage}", "deepspeed_infer", zero(stage)) for stage in (0, 3)),
    row("zero3-cpu", "deepspeed_infer", zero(3, offload_param={"device": "cpu"})),
    row("alone", "megatron_infer"),
]


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, VOCABULARY, (4, 16), generator=generator)
    return batch_of(rows, prompts=3, advantages_T=torch.randn(64, generator=generator))


def taken() -> int:
    """Bytes of the device that this process has, but for its context."""
    return torch.cuda.memory_reserved()


def rank_main(rank: int, layout: Layout, model: Path, folder: Path) -> None:
    try:
        result = train(layout, model, folder) if layout in ROWS else score(layout, model)
    except Exception:
        result = {"error": traceback.format_exc()}
    torch.save(result, folder / "result.pt")
    os._exit(0)  # torch's threads sometimes abort the interpreter's own end


def score(layout: Layout, model: Path) -> dict[str, Any]:
    strategy, batch = started(layout, model), make_batch()
    result = {"stayed": strategy.logprobs(batch).logprobs_T, "before": taken()}
    strategy.offload(States.ALL)
    result["away"] = taken()
    strategy.onload(States.WEIGHTS)
    return result | {"left and came back": strategy.logprobs(batch).logprobs_T}


def train(layout: Layout, model: Path, folder: Path) -> dict[str, Any]:
    strategy, batch, result = started(layout, model), make_batch(), {}
    strategy.train_step(batch, policy_loss)
    result["stayed"] = strategy.logprobs(batch).logprobs_T
    strategy.save(folder / "checkpoint")
    result["before"] = taken()
    strategy.offload(States.GRADS | States.OPTIMIZER)
    result["scoring"] = taken()
    strategy.offload(States.WEIGHTS)
    result["away"] = taken()
    strategy.onload(States.WEIGHTS)
    result["left and came back"] = strategy.logprobs(batch).logprobs_T
    strategy.offload(States.WEIGHTS)
    strategy.onload(States.ALL)
    for _ in range(2):
        result["loss"] = strategy.train_step(batch, policy_loss)["actor/loss"]
    result["trained on"] = strategy.logprobs(batch).logprobs_T
    strategy.load(folder / "checkpoint")
    result["loaded"] = strategy.logprobs(batch).logprobs_T
    for _ in range(2):
        loss = strategy.train_step(batch, policy_loss)["actor/loss"]
    result["loss without leaving"] = loss
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB of weights in float32: the allocator's granularity does not show."""
    shape = (VOCABULARY, 512, 2048, 8, 8, 4)
    options = {"max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.02}
    ids = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    return save_random(tmp_path_factory.mktemp("model") / "larger", "Qwen2", *shape, **options, **ids)


def measured(layout: Layout, model: Path, folder: Path) -> dict[str, Any]:
    """What a process of its own found out."""
    needs(layout.strategy)
    if layout.lora is not None:
        pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    run_ranks(rank_main, 1, layout, model, folder, on_gpus=True)
    found = torch.load(folder / "result.pt", weights_only=True)
    assert "error" not in found, found["error"]
    print({name: f"{found[name] / 2**20:.0f} MiB" for name in ("before", "scoring", "away") if name in found})
    offloads = "offload" in str(layout.strategy_config)  # little is there to begin with
    assert offloads or found["away"] < LEFT * found["before"] + WORKSPACES
    assert torch.equal(found["left and came back"], found["stayed"])
    return found


@pytest.mark.parametrize("layout", ROWS, ids=lambda layout: layout.id)
def test_a_trainer_that_leaves_gives_its_memory_back_and_goes_on(layout, model, tmp_path):
    found = measured(layout, model, tmp_path)
    assert found["away"] <= found["scoring"] <= found["before"]
    assert not torch.equal(found["trained on"], found["stayed"])
    torch.testing.assert_close(found["loaded"], found["stayed"], atol=1e-5 / TEMPERATURE, rtol=0)
    assert found["loss"] == pytest.approx(found["loss without leaving"], rel=1e-3)


@pytest.mark.parametrize("layout", SCORERS, ids=lambda layout: layout.id)
def test_a_scorer_that_leaves_gives_its_memory_back_and_goes_on(layout, model, tmp_path):
    measured(layout, model, tmp_path)
