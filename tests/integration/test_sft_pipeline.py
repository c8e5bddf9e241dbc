"""Whole supervised runs as a user starts them, on an untrained model."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import TWO_RANKS, Offline, Run, assert_as_expected, assert_taken_again, packed
from tests.support.imitation import Imitator, learnt, row, talk
from tests.support.resuming import stop_and_resume

Sft = Callable[..., Run]


@pytest.fixture(scope="session")
def expected(model: Path) -> dict[int, dict[str, float]]:
    """Held-out loss and accuracy by step: the run of ``config/sft.yaml`` in float64, without the library's training."""
    imitator, held_out = Imitator(model), [talk(number) for number in range(10, 14)]

    def measure() -> dict[str, float]:
        with torch.no_grad():
            return {"loss": imitator.loss(held_out).item(), "token_accuracy": imitator.accuracy(held_out)}

    return learnt(imitator, "sft", lambda rows: imitator.loss(map(talk, rows)), measure)


@pytest.fixture
def sft(offline: Offline) -> Sft:
    return offline("sft", row)


@pytest.mark.slow  # as test_pipeline_resume.py, without environments
@pytest.mark.timeout(600)
def test_a_stopped_run_ends_where_an_undisturbed_one_does(sft, expected):
    whole, _ = stop_and_resume(sft, last_step=4, thoroughly=False)
    assert_as_expected(whole, expected)
    before, after = whole.summary["eval"]["before"], whole.summary["eval"]["after"]
    assert after["loss"] < before["loss"]
    assert before["perplexity"] == pytest.approx(math.exp(before["loss"]))
    assert whole.metrics[2]["sft/epoch"] == 1.0 and "eval/loss" in whole.metrics[2]
    assert "eval/success" not in whole.metrics[2], "no verifier has judged"
    index = (whole.path / "renders" / "index.html").read_text()
    assert "shown" in index and "Loss by training step" in index


PACKED = packed(48)
TENSOR_PARALLEL = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2"
LAYOUTS = {
    "deepspeed": ("train=deepspeed",),
    "megatron": ("train=megatron",),
    "fsdp2, two ranks, packed": ("train=fsdp2", *TWO_RANKS, *PACKED),
    "deepspeed, two ranks, ZeRO-3": (
        "train=deepspeed",
        "actor_train.strategy_args.strategy_config=${deepspeed_zero3}",
        *TWO_RANKS,
    ),
    "megatron, two tensor-parallel ranks, packed": (
        "train=megatron",
        TENSOR_PARALLEL,
        "actor_train.device_mapping=[0,1]",
        *PACKED,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_and_layout_learns_as_float64_does(sft, expected, layout):
    run = sft(*LAYOUTS[layout], "actor_infer=null", "save_steps=4")
    assert_as_expected(run, expected)
    assert (run.checkpoint(4) / "actor_train" / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_adapter_learns_alike_in_two_engines(sft, expected):
    lora = ("actor_train.model_args.lora_target=all-linear", "actor_train.model_args.lora_rank=4")
    faster = "actor_train.training_args.learning_rate=0.01"
    engines = ("fsdp2", "megatron")
    runs = {
        engine: sft(f"train={engine}", "actor_infer=null", "save_steps=4", faster, *lora, output=engine)
        for engine in engines
    }
    for engine, run in runs.items():
        assert run.wait() == 0, run.output
        assert run.metrics[0]["eval/loss"] == pytest.approx(expected[0]["loss"], rel=1e-5), "it starts as nothing"
        assert run.metrics[4]["eval/loss"] < run.metrics[0]["eval/loss"]
        assert (run.checkpoint(4) / "actor_train" / "adapter_model.safetensors").is_file(), engine
    losses = [[runs[engine].metrics[step]["eval/loss"] for step in (2, 4)] for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_without_a_generator_it_trains_and_wrong_rows_are_told_before_ray_starts(sft, tmp_path):
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[1] = lines[1][:-1]
    lines[2] = lines[2].replace("assistant", "asistant")
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    wrong = sft("actor_train.data_args.file_name=bad.jsonl", output="wrong")
    run = sft("actor_infer=null", "num_train_epochs=2", "train_on=last", "loss_agg_mode=seq-mean-token-mean")
    assert wrong.wait() == 2, wrong.output
    assert "bad.jsonl:2: invalid JSON" in wrong.output and "bad.jsonl:3: messages[1].role" in wrong.output
    assert not wrong.path.exists(), "something was started"
    assert run.wait() == 0, run.output
    assert list(run.metrics) == list(range(5)), "10 conversations, 4 at least in a step: 2 steps an epoch"
    assert "actor_infer" not in run.output and run.summary["eval"]["after"]["loss"] > 0


@pytest.mark.slow  # a run and its replay
def test_a_step_is_taken_again_from_the_data_to_the_bit(sft, replay):
    assert_taken_again(replay, sft("save_steps=2").ended(), 4, "sft")
