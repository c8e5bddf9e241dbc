"""Whole runs over prompts with pictures and without."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from roll.__main__ import main
from tests.integration.conftest import rows, write
from tests.integration.test_agents import assert_trained_is_what_was_sampled
from tests.support.picture_models import make_picture_model


def pictured(path: Path) -> None:
    """Rows with one or two pictures, and one without."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 56, 84, 3), np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(path / f"{number}.png")
    one, two, both, none = rows("t", [""] * 4)
    shown = [one | {"images": ["0.png"]}, two | {"images": ["1.png"]}, both | {"images": ["2.png", "3.png"]}, none]
    write(path / "train.jsonl", [line | {"prompt": f"{'<image>' * len(line.get('images', 'x'))}?"} for line in shown])
    write(path / "val.jsonl", [one | {"prompt": "which <image>?", "images": ["0.png"]}])


LENGTHS = ("prompt_length=64", "sequence_length=70", "val_batch_size=1", "max_steps=1")


@pytest.mark.slow
def test_generator_and_trainer_agree_on_prompts_with_pictures(rlvr, tmp_path):
    model = make_picture_model(tmp_path / "model", "qwen3_vl")
    pictured(tmp_path)
    run = rlvr(f"pretrain={model}", *LENGTHS)
    assert run.wait() == 0, run.output
    assert run.metrics[1]["mismatch/logprob_diff_max"] < 1e-4
    assert (run.checkpoint(1) / "actor_train" / "preprocessor_config.json").is_file()
    figures = {name: value for name, value in run.metrics[1].items() if name.startswith("eval/mean")}
    assert main(["eval", str(run.path)]) == 0 and figures
    again = json.loads((run.path.with_name("run_eval_1") / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: again[name] for name in figures} == figures


@pytest.mark.slow
def test_what_a_program_shows_is_trained_as_the_engine_saw_it(rlvr, tmp_path):
    model = make_picture_model(tmp_path / "model", "qwen3_vl")
    pictured(tmp_path)
    write(
        tmp_path / "train.jsonl", [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().split("\n")[:3]]
    )
    run = rlvr(
        f"pretrain={model}",
        *LENGTHS[:1],
        "sequence_length=200",
        "max_steps=1",
        "validation=null",
        "agent={type: python, path: 'tests.support.agents:looking', pictures: true}",
        "actor_infer.worker_cls=tests.support.agents:LoggedInferWorker",
        "actor_train.worker_cls=tests.support.agents:LoggedTrainWorker",
    )
    assert run.wait() == 0, run.output
    answers = assert_trained_is_what_was_sampled(run)
    assert sorted(set(answers.values())) == [1, 2], "the grey picture is a row of its own"
    metrics = run.metrics[1]
    assert metrics["rollout/agent/rewritten_pictures"] == 1 and metrics["rollout/agent/refused"] == 0
    assert metrics["mismatch/logprob_diff_max"] < 1e-4
    assert min(min(row["ids"]) for row in run.logged("trained.jsonl")) < 0
