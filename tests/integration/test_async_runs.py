"""Runs whose rollouts go on beside training: every draw is used once, whatever is killed and whenever."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Rlvr, Run, assert_same_tensors, position, rows
from tests.integration.test_replayed_choices import KEPT
from tests.support.lines import read_lines, write_lines

pytestmark = pytest.mark.timeout(600)

FILTER = "rewards.letters.query_filter_config={type: std_filter}"
BATCH = 4
OVERLAP = (
    FILTER,
    "async_generation_ratio=1",
    "rollout_window=0.5",
    "train_infer_correction.is_weight.enabled=true",
    "max_worker_restarts=1000",
)
VICTIMS = ("driver", "GatedTrainWorker", "GatedInferWorker", "GatedPromptWorker", "GatedRewardWorker")
ENDS_THE_RUN = VICTIMS[:2]
ORDERS = ["", "linger", "equal", "", "", "linger", "equal", "", "linger", ""]


def schedule(run: Run) -> dict[int, dict[str, Any]]:
    """``schedule.jsonl`` by step, each step once."""
    records = read_lines(run.path / "schedule.jsonl")
    steps = [record.pop("step") for record in records]
    assert steps == list(range(1, len(steps) + 1))
    return dict(zip(steps, records, strict=True))


def used(records: Iterable[dict[str, Any]], what: str) -> list[int]:
    return [int(draw) for record in records for draw in record[what]]


def assert_each_once(run: Run, step: int, checkpoint: Path) -> None:
    """Up to the checkpoint of a step, every draw was trained, was settled, or is pending."""
    state = json.loads((checkpoint / "pipeline_state.json").read_text())["rollouts"]
    records = [record for number, record in schedule(run).items() if number <= step]
    trained, settled = used(records, "taken"), used(records, "settled")
    if (saved := checkpoint / "resume" / "rollouts.json").exists():
        groups = json.loads(saved.read_text())
        assert [group["group_id"] for group in groups["groups"]] == state["ready"], "what is ready is there"
        settled += [group["group_id"] for group in groups["rejected"]]
    else:
        assert state["ready"] == []
    assert sorted([*trained, *settled, *state["ready"], *state["again"]]) == list(range(state["next_draw"]))
    assert (len(trained), len(settled)) == (state["trained"], state["settled"]) and len(trained) == BATCH * step


def assert_finished(run: Run, steps: int) -> None:
    assert run.summary["status"] == "completed"
    assert_each_once(run, steps, run.checkpoint(steps))
    records = schedule(run)
    assert list(records) == list(run.metrics)[1:] == list(range(1, steps + 1))
    told = {"trained": BATCH * steps, "settled": len(used(records.values(), "settled")), "waiting": 0}
    assert run.summary["draws"] == told
    for step, metrics in run.metrics.items():
        if step:
            assert metrics["kept/episodes"] == 4 * BATCH and 0 <= metrics["async/lag_max"] <= 2
            assert metrics["rollout/episodes"] == 4 * (BATCH + len(records[step]["settled"]))
            assert metrics["rollout/filtered"] == len(records[step]["settled"])
            assert sum(value for name, value in metrics.items() if name[:-1] == "async/lag_") == pytest.approx(1)
    assert any(metrics.get("async/token_lag", 0) > 0 for metrics in run.metrics.values()), "it ran beside training"


def check_newest(run: Run) -> int:
    """The step of the newest checkpoint, whose draws are right; 0 if there is none yet."""
    found = [int(path.name.partition("-")[2]) for path in run.path.glob("checkpoints/checkpoint-*")]
    if found:
        assert_each_once(run, max(found), run.checkpoint(max(found)))
    return max(found, default=0)


def kill(run: Run, victim: str, rng: random.Random) -> bool:
    """Kills the driver or a worker of a class; False if there is none at the moment."""
    if victim == "driver":
        run.process.kill()
        return True
    forks = {child.pid for child in psutil.Process().children(recursive=True)}  # of ``tests/support/warm``
    workers = [pid for pid in sorted({*run.processes(), *forks}) if f"ray::{victim}" in command(pid)]
    if not workers:
        return False
    try:
        os.kill(rng.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def killed_at_random(
    rlvr: Rlvr, overrides: Sequence[str], moments: int, victims: Sequence[str], *, resume: bool = False
) -> Run:
    """A run that goes on to its end, started again as often as needed, through so many kills at random moments."""
    rng, killed = random.Random(moments), 0
    while True:
        run = rlvr(*overrides, f"resume_from_checkpoint={str(resume).lower()}")
        resume = True
        if rng.random() < 0.9:  # most kills come when there is something to lose
            run.pid_at("actor_train-0-logprobs")
        while run.process.poll() is None and killed < moments:
            time.sleep(rng.uniform(0.0, 1.5))
            victim = victims[killed % len(victims)]
            if run.process.poll() is None and kill(run, victim, rng):
                killed += 1
                print(f"{killed}: {victim} killed after step {check_newest(run)}")
                if victim in ENDS_THE_RUN:
                    break
        code = run.wait()
        run.assert_nothing_left()
        assert code in (0, 1, -signal.SIGKILL) and "Traceback" not in run.output, run.output
        check_newest(run)
        if code == 0:
            assert killed == moments
            return run


@pytest.mark.slow
def test_every_draw_is_used_once_through_kills_and_groups_that_wait_outlive_the_run(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", ORDERS))
    overrides = (*OVERLAP, "max_steps=8", "validation=null")
    first = rlvr(*overrides, orders=("hold-actor_train-0-train-2", "hold-actor_train-0-train-3"))
    first.pid_at("actor_train-0-train-2")
    time.sleep(2.0)  # the groups of the next step are finished meanwhile
    first.release("hold-actor_train-0-train-2")
    first.pid_at("actor_train-0-train-3")
    assert check_newest(first) == 2
    waiting = position(first, 2)["ready"]
    assert len(waiting) == BATCH
    first.kill()
    second = killed_at_random(rlvr, overrides, 2, ("GatedInferWorker", "GatedPromptWorker"), resume=True)
    assert not {line["draw"] for line in second.logged("played.jsonl")} & set(waiting), "they were not played again"
    assert used([schedule(second)[3]], "taken") == waiting
    assert_finished(second, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_draw_is_used_once_through_forty_kills(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", ORDERS))
    overrides = (*OVERLAP, "max_steps=150", "val_before_train=false", "validation=null")
    assert_finished(killed_at_random(rlvr, overrides, 40, VICTIMS), 150)


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_generator_that_dies_beside_training_and_a_stop_lose_nothing(rlvr, tmp_path, stops):
    write_lines(tmp_path / "train.jsonl", rows("t", ["", "", "equal", "", "", "", "equal", "", "", ""]))
    steps = 5 if stops else 3
    overrides = (*OVERLAP, f"max_steps={steps}", "eval_steps=2")
    run = rlvr(*overrides, orders=("hold-actor_train-0-train-2",))
    # The generator dies while the trainer is at work and groups of the next step are under way.
    run.pid_at("actor_train-0-train-2")
    os.kill(run.pid_at("actor_infer-0-generate-1"), signal.SIGKILL)
    run.release("hold-actor_train-0-train-2")
    if stops:
        run.pid_at("actor_train-0-train-3")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
        done = run.summary["steps"]
        assert 2 <= done <= 3
        assert_each_once(run, done, run.checkpoint(done))
        run = rlvr(*overrides, "resume_from_checkpoint=true")
    run.ended().assert_nothing_left()
    assert_finished(run, steps)


LOAD = re.compile(r"async/((buffer|running)_groups|idle_)")
"""Metrics of an asynchronous run that say how fast it was."""


def repeatable(run: Run) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in metrics.items() if not LOAD.match(name)}
        for step, metrics in run.repeatable_metrics().items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kv", "sampling"), [("recompute", ()), ("keep", KEPT)])
def test_a_run_through_a_kill_and_a_resume_is_repeated_bit_for_bit(rlvr, tmp_path, kv, sampling):
    write_lines(tmp_path / "train.jsonl", rows("t", ORDERS))
    # Answers so long, and so few at a time, that weights come in the middle of them.
    longer = ("response_length=200", "sequence_length=240", "max_steps=5", "eval_steps=2", "max_running_groups=2")
    longer = (*longer, f"kv_after_update={kv}", *sampling)
    first = rlvr(*OVERLAP, *longer, orders=("hold-actor_train-0-train-4",))
    first.pid_at("actor_train-0-train-4")
    first.kill()
    recorded = rlvr(*OVERLAP, *longer, "resume_from_checkpoint=true").ended()
    assert_finished(recorded, 5)
    assert any(recorded.metrics[step]["async/mixed"] > 0 for step in range(1, 6)), "no weights came in between"
    assert not sampling or all(1 < recorded.metrics[step]["rollout/kept_tokens"] <= 20 for step in range(1, 6))

    path = recorded.path / "schedule.jsonl"
    again = rlvr(*OVERLAP, *longer, f"replay_schedule={path}", output="again").ended()
    assert_finished(again, 5)
    assert (again.path / "schedule.jsonl").read_text() == path.read_text()
    assert repeatable(again) == repeatable(recorded)
    assert again.summary["eval"] == recorded.summary["eval"] and again.summary["draws"] == recorded.summary["draws"]
    assert_same_tensors(again.tensors(5), recorded.tensors(5))


@pytest.mark.slow
def test_steps_beside_rollouts_that_find_too_few_groups_are_repeated_by_the_schedule(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 6 + ["right"] * 24 + [""] * 12))
    keys = (*OVERLAP, "actor_train.data_args.shuffle=false", "max_filtered_batches=2", "max_steps=6", "validation=null")
    first = rlvr(*keys).ended()
    records = schedule(first)
    assert len(records[1]["taken"]) == BATCH
    assert any(0 < len(record["taken"]) < BATCH for record in records.values())
    assert any(not record["taken"] and record["settled"] for record in records.values()), "a step without a group"
    drawn = used(records.values(), "taken") + used(records.values(), "settled")
    counts = first.summary["draws"]
    assert len(drawn) == len(set(drawn)) == counts["trained"] + counts["settled"]
    for step, record in records.items():
        assert first.metrics[step]["kept/groups"] == len(record["taken"])
        assert first.metrics[step].get("async/lag_max", 0) <= 2

    again = rlvr(*keys, f"replay_schedule={first.path / 'schedule.jsonl'}", output="again").ended()
    assert (again.path / "schedule.jsonl").read_text() == (first.path / "schedule.jsonl").read_text()
    assert repeatable(again) == repeatable(first)
    assert_same_tensors(again.tensors(6), first.tensors(6))


@pytest.mark.slow
def test_without_partial_rollouts_every_answer_has_one_version_and_the_driver_fetches_no_column(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", ORDERS))
    longer = ("response_length=200", "sequence_length=240", "max_steps=4", "max_running_groups=2")
    longer += ("num_written_groups=0", "probe=off", "save_steps=100")  # what is written, and the probe, is fetched
    longer += (
        "train_infer_correction.is_weight.batch_normalize=true",
        "train_infer_correction.filters=[{enabled: true, ratio_low: 0.999, ratio_high: 1.001}]",
    )
    run = rlvr(*OVERLAP, *longer, "partial_rollout=false", "val_before_train=false", "validation=null").ended()
    assert_finished(run, 4)
    assert {run.metrics[step]["memory/fetched_gb"] for step in range(1, 5)} == {0}
    assert all(run.metrics[step]["actor/weight_mean"] == pytest.approx(1) for step in range(1, 5))
    assert any(0 < run.metrics[step]["mismatch/rejected_frac"] < 1 for step in range(1, 5))
    assert any(name.startswith("async/log_ratio_mean_1") for step in range(1, 5) for name in run.metrics[step])
    assert all(run.metrics[step]["async/mixed"] == 0 for step in range(1, 5))
    assert all(run.metrics[step]["async/running_groups"] <= 2 for step in range(1, 5))
