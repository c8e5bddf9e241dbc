"""Whole RLVR runs as a user starts them, on an untrained model and verifiers that go wrong on request."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import RLVR_LAUNCHER, Launch, Run, assert_same_tensors

from roll.tracking.checkpointer import find_damage

Rlvr = Callable[..., Run]
FILTER = "rewards.letters.query_filter_config={type: std_filter}"


def rows(name: str, orders: Sequence[str], tag: str = "letters") -> list[dict[str, str]]:
    """Questions named ``<name>0``, ``<name>1`` …, each with an order for the verifier (see ``tests/scoring.py``)."""
    return [
        {"id": f"{name}{n}", "tag": tag, "prompt": f"{name} {n}", "solution": order} for n, order in enumerate(orders)
    ]


def write(path: Path, lines: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def rlvr(launch: Launch, tmp_path: Path) -> Rlvr:
    """``launch`` of ``config/rlvr.yaml``, with 20 rows to train on and 4 held out unless a test writes its own."""
    write(tmp_path / "train.jsonl", rows("t", [""] * 20))
    write(tmp_path / "val.jsonl", rows("v", [""] * 4))

    def start(*overrides: str, **options: Any) -> Run:
        return launch(*overrides, config="rlvr", script=RLVR_LAUNCHER, **options)

    return start


def draws(run: Run) -> list[tuple[int, str]]:
    """Number and prompt of the training groups that were started, in order of the numbers; repeats included."""
    return sorted((line["draw"], line["prompt"]) for line in run.logged("played.jsonl") if line["what"] == "train")


def position(run: Run, step: int) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run.checkpoint(step) / "pipeline_state.json").read_text())["data"]
    return data


def words(run: Run) -> str:
    """The output without its line breaks."""
    return " ".join(run.output.split())


@pytest.mark.timeout(600)
def test_a_stopped_run_meets_the_data_and_ends_as_an_undisturbed_one_does(rlvr: Rlvr, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows("t", ["", "", "equal", "", "", "", "equal", "", "", ""]))
    steps = 5
    overrides = (FILTER, f"max_steps={steps}", "eval_steps=2")
    whole = rlvr(*overrides)
    assert whole.wait() == 0, whole.output

    # Ctrl-C in the rollout of step 2: its prompts come again.
    first = rlvr(*overrides, output="disturbed", orders=("hold-train-group-6",))
    first.pid_at("train-group-6")
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.output
    assert first.summary["steps"] == 1
    # SIGTERM in its update, which is finished: its prompts are used up.
    resume = (*overrides, "resume_from_checkpoint=true")
    second = rlvr(*resume, output="disturbed", orders=("hold-actor_train-0-train-1",))
    second.pid_at("actor_train-0-train-1")
    second.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    second.release("hold-actor_train-0-train-1")
    assert second.wait() == 143, second.output
    assert second.summary["steps"] == 2
    assert [position(second, step) for step in (1, 2)] == [position(whole, step) for step in (1, 2)]
    # On the way to the end a worker of each kind that rollouts need is killed.
    orders = ("die-train-mid-14", "die-reward_letters-0-score-2", "die-actor_infer-0-generate-4")
    third = rlvr(*resume, "max_worker_restarts=3", output="disturbed", orders=orders)
    assert third.wait() == 0, third.output
    assert not any((third.faults / order).exists() for order in orders), "nobody died"
    third.assert_nothing_left()

    assert third.repeatable_metrics() == whole.repeatable_metrics()
    assert third.summary["eval"] == whole.summary["eval"]
    assert_same_tensors(third.tensors(steps), whole.tensors(steps))
    assert position(third, steps) == position(whole, steps)

    # Every epoch has every prompt once, in an order of its own, and no stop repeats or skips one.
    played = draws(whole)
    met = [prompt for _, prompt in played]
    assert [draw for draw, _ in played] == list(range(position(whole, steps)["next_id"]))
    epochs = [met[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == [f"t{n}" for n in range(10)] for epoch in epochs[:2]) and epochs[0] != epochs[1]
    one, two = position(whole, 1)["next_id"], position(whole, 2)["next_id"]
    assert draws(first)[:one] == played[:one]
    assert draws(second) == played[one:two]
    assert sorted(set(draws(third))) == played[two:]

    # Groups of equal scores were dropped and made up for.
    filtered = [whole.metrics[step]["rollout/filtered"] for step in range(1, steps + 1)]
    assert sum(filtered) == len([prompt for prompt in met if prompt in ("t2", "t6")]) >= 4
    assert all(whole.metrics[step]["rollout/episodes"] == 16 for step in range(1, steps + 1))
    assert [whole.metrics[step]["rollout/epoch"] for step in (1, 2, 4)] == [0, position(whole, 2)["next_id"] // 10, 1]
