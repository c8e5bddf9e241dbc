"""Whole runs that train a reward model as a user starts them; what they save is what a verifier loads."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.__main__ import main
from roll.data.columns import Item
from roll.rewards.classifiers import RewardModelConfig
from roll.rewards.reward_model import RewardModelVerifier
from roll.rewards.types import Sample
from tests.integration.conftest import TWO_RANKS, Offline, Run, assert_taken_again, packed
from tests.support.picture_models import make_picture_model
from tests.support.resuming import stop_and_resume

Rm = Callable[..., Run]
RIGHT, WRONG = "Up Up", "Down"


def row(number: int) -> str:
    right = number % 2 == 0
    content = {
        "ask": f"{number}?",
        "chosen": RIGHT,
        "rejected": WRONG,
        "answer": RIGHT if right else WRONG,
        "score": 1.0 if right else -1.0,
        "steps": ["Up ", "Up" if right else "Down"],
        "step_labels": [True, right],
    }
    return json.dumps(content) + "\n"


@pytest.fixture
def rm(offline: Offline) -> Rm:
    return offline("rm", row)


def scores(folder: Path, answers: list[str]) -> list[float]:
    """The verifier's."""
    return scores_of(folder, [Sample("12?", answer, ground_truth=None, data_source="") for answer in answers])


def scores_of(folder: Path, samples: list[Sample]) -> list[float]:
    """The same of any samples, one event loop for all."""

    async def judge() -> list[float]:
        verifier = RewardModelVerifier(RewardModelConfig(model_path=str(folder)))
        verdicts = [await verifier.score(sample) for sample in samples]
        await verifier.close()
        return [verdict.score for verdict in verdicts]

    return asyncio.run(judge())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_run_ends_where_an_undisturbed_one_does_and_is_a_verifier(rm):
    whole, _ = stop_and_resume(rm, last_step=6)
    metrics = whole.metrics
    assert metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-6), "an untrained head says nothing"
    assert metrics[6]["eval/accuracy"] == 1 and metrics[6]["eval/loss"] < 0.5
    assert 0 <= metrics[6]["eval/calibration_error"] <= 0.5

    right, wrong = scores(whole.checkpoint(6) / "actor_train", [RIGHT, WRONG])
    mean = {side: metrics[6][f"eval/{side}_score"] for side in ("chosen", "rejected")}
    assert right > wrong
    assert right == pytest.approx(mean["chosen"], abs=0.3) and wrong == pytest.approx(mean["rejected"], abs=0.3)
    assert not (whole.checkpoint(6) / "actor_train" / "value_head.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("train", ["fsdp2", "megatron"])
def test_an_adapter_resumes_bit_for_bit_and_is_a_verifier(rm, tmp_path, train):
    def start(*overrides: str, **options: Any) -> Run:
        return rm(
            f"train={train}",
            "actor_train.model_args.lora_target=all-linear",
            "actor_train.training_args.learning_rate=0.03",
            *overrides,
            **options,
        )

    whole, _ = stop_and_resume(start, last_step=6)
    assert whole.metrics[6]["eval/loss"] < 0.5 < whole.metrics[0]["eval/loss"]
    folder = whole.checkpoint(6) / "actor_train"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert not (folder / "config.json").exists() and not (folder / "value_head.safetensors").exists()
    answers = [RIGHT, WRONG, "Up", "x"]
    found = scores(folder, answers)
    assert found[0] > found[1]
    assert main(["export", str(folder), "-o", str(tmp_path / "whole"), "--merge-adapter"]) == 0
    assert scores(tmp_path / "whole", answers) == pytest.approx(found, abs=1e-5)


LAYOUTS = {
    "deepspeed": ("train=deepspeed", "actor_train.strategy_args.strategy_config=${deepspeed_zero3}"),
    "megatron": ("train=megatron",),
    "two ranks, packed": (*TWO_RANKS, *packed(90)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_saves_the_same_classifier(rm, layout):
    runs = [rm(), rm(*LAYOUTS[layout], output="other")]
    answers = [RIGHT, WRONG, "Up", "x"]
    found = []
    for run in runs:
        assert run.wait() == 0, run.output
        found.append(scores(run.checkpoint(6) / "actor_train", answers))
    assert found[1] == pytest.approx(found[0], rel=1e-2, abs=2e-3)


@pytest.mark.slow
def test_scores_and_steps_are_learnt_too(rm):
    regression = rm("reward_loss=regression", "max_steps=8", output="regression")
    process = rm("reward_loss=process", "max_steps=8", output="process")
    for run in (regression, process):
        assert run.wait() == 0, run.output
        assert run.metrics[8]["eval/loss"] < 0.8 * run.metrics[0]["eval/loss"]
    assert regression.metrics[8]["eval/correlation"] > 0.9
    assert 0 <= process.metrics[8]["eval/calibration_error"] < 0.5
    right, wrong = scores(regression.checkpoint(8) / "actor_train", [RIGHT, WRONG])
    assert right > wrong


@pytest.mark.slow  # a run and its replay
def test_a_step_is_taken_again_from_the_data_to_the_bit(rm, replay):
    assert_taken_again(replay, rm("save_steps=2").ended(), 3, "rm", "reward_model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "train"),
    [
        ("qwen2_5_vl", ()),
        ("qwen3_vl", ("train=deepspeed",)),
        ("qwen3_vl", ("actor_train.model_args.lora_target=all-linear", "actor_train.training_args.learning_rate=0.03")),
    ],
    ids=["fsdp2", "deepspeed", "adapter"],
)
def test_a_reward_model_sees_what_it_was_trained_to_see(offline, tmp_path, family, train):
    """Which answer is right, the picture alone says; what is saved scores as the run does, and goes on."""
    pixels = np.random.default_rng(0).integers(0, 256, (14, 56, 84, 3), np.uint8)
    pixels[::2] //= 4  # dark ones
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{number}.png")
    sides = [(RIGHT, WRONG), (WRONG, RIGHT)]

    def shown(number: int) -> str:
        chosen, rejected = sides[number % 2]
        return (
            json.dumps({"ask": "<image>?", "images": [f"{number}.png"], "chosen": chosen, "rejected": rejected}) + "\n"
        )

    model = make_picture_model(tmp_path / "model", family)
    rm = offline("rm", shown, *train, "sequence_length=128", "prompt_length=64")
    run = rm(f"pretrain={model}").ended()
    folder = run.checkpoint(6) / "actor_train"
    assert run.metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert run.metrics[6]["eval/loss"] < 0.6
    asked: dict[str, Any] = {
        "ground_truth": None,
        "data_source": "",
        "messages": ({"role": "user", "content": "<image>?"},),
    }
    found = {
        side: [
            Sample("<image>?", sides[number % 2][index], pictures=(Item(pixels[number]),), **asked)
            for number in range(10, 14)
        ]
        for index, side in enumerate(("chosen", "rejected"))
    }
    for side, samples in found.items():
        assert np.mean(scores_of(folder, samples)) == pytest.approx(run.metrics[6][f"eval/{side}_score"], abs=1e-4)
    merging = ["--merge-adapter"] * (folder / "adapter_config.json").is_file()
    assert main(["export", str(folder), "-o", str(tmp_path / "exported"), *merging]) == 0
    both = [scores_of(path, found["chosen"]) for path in (tmp_path / "exported", folder)]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    assert "classifier_class(AutoConfig" in (tmp_path / "exported" / "README.md").read_text()
    again = rm(f"pretrain={tmp_path / 'exported'}", "max_steps=1", output="again").ended()
    assert again.metrics[0]["eval/loss"] == pytest.approx(run.metrics[6]["eval/loss"], abs=1e-4)
