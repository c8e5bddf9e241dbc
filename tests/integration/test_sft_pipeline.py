"""Whole supervised runs as a user starts them, on an untrained model."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT, Launch, Run, assert_same_tensors

Sft = Callable[..., Run]


def talk(number: int) -> dict[str, Any]:
    words = [("user", f"{number}?"), ("assistant", "Up" * (1 + number % 3)), ("user", "more"), ("assistant", "Down")]
    return {"messages": [{"role": role, "content": text} for role, text in words]}


@pytest.fixture
def sft(launch: Launch, tmp_path: Path) -> Sft:
    """``launch`` of ``config/sft.yaml``, with 10 conversations to imitate and 4 held out."""
    for name, numbers in (("train", range(10)), ("val", range(10, 14))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(talk(n)) + "\n" for n in numbers))
    script = ROOT / "examples" / "start_sft_pipeline.py"

    def start(*overrides: str, **options: Any) -> Run:
        return launch(*overrides, config="sft", script=script, **options)

    return start


@pytest.mark.timeout(600)
def test_a_stopped_run_ends_where_an_undisturbed_one_does(sft: Sft) -> None:
    whole = sft()
    first = sft(output="disturbed", orders=("hold-actor_train-0-train-2",))
    first.pid_at("actor_train-0-train-2")  # SIGTERM in the second update, which is finished
    first.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    first.release("hold-actor_train-0-train-2")
    assert first.wait() == 143, first.output
    assert first.summary["status"] == "interrupted" and first.summary["steps"] == 2
    assert whole.wait() == 0, whole.output

    second = sft("resume_from_checkpoint=true", output="disturbed")
    assert second.wait() == 0, second.output
    assert second.repeatable_metrics() == whole.repeatable_metrics()
    assert_same_tensors(second.tensors(4), whole.tensors(4))
    assert second.summary["eval"] == whole.summary["eval"]
    before, after = whole.summary["eval"]["before"], whole.summary["eval"]["after"]
    assert after["loss"] < before["loss"]
    assert before["perplexity"] == pytest.approx(math.exp(before["loss"]))
    assert whole.metrics[2]["sft/epoch"] == 1.0 and "eval/loss" in whole.metrics[2]
    assert "eval/success" not in whole.metrics[2], "no verifier has judged"
    assert "shown" in (whole.path / "renders" / "index.html").read_text()


def test_without_a_generator_it_trains_and_wrong_rows_are_told_before_ray_starts(sft: Sft, tmp_path: Path) -> None:
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
