"""Runs whose rollouts go on beside training: every draw is used once, whatever is killed and whenever.

And under pressure, really caused: nobody starves, what waits is bounded, exits are clean. Evaluation beside rollouts,
too: one version always, on the rollouts' engines or on replicas of its own.
"""

import functools
import itertools
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

from tests.integration.conftest import Rlvr, Run, assert_same_tensors, counting, position
from tests.integration.test_kept_rollouts import KEPT
from tests.support.lines import read_lines

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


LOAD = re.compile(r"async/((buffer|running)_groups|idle_)")
"""Metrics of an asynchronous run that say how fast it was."""


def repeatable(run: Run) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in metrics.items() if not LOAD.match(name)}
        for step, metrics in run.repeatable_metrics().items()
    }


def repeated(rlvr: Rlvr, run: Run, *keys: str, **options: Any) -> Run:
    """The run again by its schedule, which is the same to the bit."""
    path = run.path / "schedule.jsonl"
    again = rlvr(*keys, f"replay_schedule={path}", output="again", **options).ended()
    assert (again.path / "schedule.jsonl").read_text() == path.read_text()
    assert repeatable(again) == repeatable(run)
    assert all(again.summary[name] == run.summary[name] for name in ("status", "eval", "draws", "steps"))
    assert_same_tensors(again.tensors(run.summary["steps"]), run.tensors(run.summary["steps"]))
    return again


def repeated_through_a_kill(rlvr: Rlvr, steps: int, *keys: str) -> Run:
    """A run that is killed in its last update but one, taken up again, and then repeated bit for bit."""
    gate, keys = f"actor_train-0-train-{steps - 1}", (*OVERLAP, *keys, f"max_steps={steps}", "eval_steps=2")
    first = rlvr(*keys, orders=(f"hold-{gate}",))
    first.pid_at(gate)
    first.kill()
    recorded = rlvr(*keys, "resume_from_checkpoint=true").ended()
    assert_finished(recorded, steps)
    assert_finished(repeated(rlvr, recorded, *keys), steps)
    return recorded


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
def test_every_draw_is_used_once_through_kills_and_groups_that_wait_outlive_the_run(rlvr):
    overrides = (*OVERLAP, "max_steps=8", "validation=null")
    first = rlvr(*overrides, train=ORDERS, orders=("hold-actor_train-0-train-2", "hold-actor_train-0-train-3"))
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
def test_every_draw_is_used_once_through_forty_kills(rlvr):
    overrides = (*OVERLAP, "max_steps=150", "val_before_train=false", "validation=null")
    assert_finished(killed_at_random(functools.partial(rlvr, train=ORDERS), overrides, 40, VICTIMS), 150)


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_generator_that_dies_beside_training_and_a_stop_lose_nothing(rlvr, stops):
    steps = 5 if stops else 3
    overrides = (*OVERLAP, f"max_steps={steps}", "eval_steps=2")
    run = rlvr(*overrides, train=["", "", "equal", ""] * 2 + [""] * 2, orders=("hold-actor_train-0-train-2",))
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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kv", "sampling"), [("recompute", ()), ("keep", KEPT)])
def test_a_run_through_a_kill_and_a_resume_is_repeated_bit_for_bit(rlvr, kv, sampling):
    # Answers so long, and so few at a time, that weights come in the middle of them.
    longer = ("response_length=200", "sequence_length=240", "max_running_groups=2", f"kv_after_update={kv}")
    run = repeated_through_a_kill(functools.partial(rlvr, train=ORDERS), 5, *longer, *sampling)
    assert any(run.metrics[step]["async/mixed"] > 0 for step in range(1, 6)), "no weights came in between"
    assert not sampling or all(1 < run.metrics[step]["rollout/kept_tokens"] <= 20 for step in range(1, 6))


@pytest.mark.slow
def test_steps_beside_rollouts_that_find_too_few_groups_are_repeated_by_the_schedule(rlvr):
    keys = (*OVERLAP, "actor_train.data_args.shuffle=false", "max_filtered_batches=2", "max_steps=6", "validation=null")
    first = rlvr(*keys, train=[""] * 6 + ["right"] * 24 + [""] * 12).ended()
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
    repeated(rlvr, first, *keys)


@pytest.mark.slow
def test_without_partial_rollouts_every_answer_has_one_version_and_the_driver_fetches_no_column(rlvr):
    keys = ("response_length=200", "sequence_length=240", "max_steps=4", "max_running_groups=2")
    keys += ("partial_rollout=false", "val_before_train=false", "validation=null")
    keys += ("num_written_groups=0", "probe=off", "save_steps=100")  # what is written, and the probe, is fetched
    keys += (
        "train_infer_correction.is_weight.batch_normalize=true",
        "train_infer_correction.filters=[{enabled: true, ratio_low: 0.999, ratio_high: 1.001}]",
    )
    run = rlvr(*OVERLAP, *keys, train=ORDERS).ended()
    assert_finished(run, 4)
    assert {run.metrics[step]["memory/fetched_gb"] for step in range(1, 5)} == {0}
    assert all(run.metrics[step]["actor/weight_mean"] == pytest.approx(1) for step in range(1, 5))
    assert any(0 < run.metrics[step]["mismatch/rejected_frac"] < 1 for step in range(1, 5))
    assert any(name.startswith("async/log_ratio_mean_1") for step in range(1, 5) for name in run.metrics[step])
    assert all(run.metrics[step]["async/mixed"] == 0 for step in range(1, 5))
    assert all(run.metrics[step]["async/running_groups"] <= 2 for step in range(1, 5))


# ---- pressure

BESIDE = ("async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true", "val_before_train=false")
NO_EVALUATION = ("val_before_train=false", "validation=null")
LONG = ("response_length=200", "sequence_length=240")
"""Answers so long that weights come in the middle of them."""


def started(run: Run) -> set[int]:
    return {line["draw"] for line in run.logged("played.jsonl")}


def calls(run: Run, role: str) -> int:
    """Batches of requests that a generating worker has had."""
    return len(list(run.faults.glob(f"at-{role}-0-generate-*")))


@pytest.mark.slow
def test_the_faster_side_waits_for_the_slower_one_and_what_waits_is_bounded(rlvr):
    """Steps of 4 groups, 4 ahead, in order."""
    run = rlvr(*BESIDE, *NO_EVALUATION, "max_steps=4", orders=("hold-actor_train-0-train-1", "hold-train-group-8"))
    run.pid_at("actor_train-0-train-1")
    run.pid_at("train-mid-7")
    time.sleep(2.0)  # the trainer is slow: the groups of the next step are finished and no others begin
    assert started(run) == set(range(8))
    run.release("hold-actor_train-0-train-1")
    run.until(run.checkpoint(2).exists)
    run.pid_at("train-mid-15")
    time.sleep(1.0)  # the generator is slow: the third step waits for one group, those after it are finished
    assert started(run) == set(range(16))
    run.release("hold-train-group-8")
    run.ended().assert_nothing_left()

    metrics = run.metrics
    assert [used([record], "taken") for record in schedule(run).values()] == [
        list(range(n, n + 4)) for n in (0, 4, 8, 12)
    ]
    assert all(
        metrics[step]["async/buffer_groups"] + metrics[step]["async/running_groups"] <= 4 for step in range(1, 5)
    )
    assert metrics[1]["async/idle_generator_s"] > 0.5 < metrics[3]["async/idle_trainer_s"]
    assert run.summary["draws"] == {"trained": 16, "settled": 0, "waiting": 0}


@pytest.mark.slow
def test_one_environment_of_many_that_is_a_hundred_times_slower_holds_nobody_up(launch):
    """Steps of 16 groups, 16 ahead, a window over all of them; the first draw is the slow one."""
    manager = "{env_groups: 64, group_size: 1, tags: [Slow, Fast], n_groups: [1, 63]}"
    run = launch(
        *BESIDE,
        "rollout_window=1",
        "max_steps=5",
        "rollout_batch_size=16",
        "adv_estimator=reinforce",
        f"train_env_manager={manager}",
        counting("Slow", step_seconds=2.0),
        counting("Fast", step_seconds=0.02),
    ).ended()
    records = schedule(run)
    taken = {draw: step for step, record in records.items() for draw in used([record], "taken")}
    assert sorted(taken) == list(range(80)) and len(used(records.values(), "taken")) == 80
    assert 2 <= taken[0] <= 4, "others went first, and it was not forgotten"
    for metrics in (run.metrics[step] for step in range(1, 6)):
        assert metrics["async/buffer_groups"] + metrics["async/running_groups"] <= 32 and metrics["async/lag_max"] <= 3


@pytest.mark.slow
def test_a_generator_that_dies_with_partial_answers_costs_only_them(rlvr):
    worker = "actor_infer.worker_cls=tests.support.faults:FragileInferWorker"
    keys = (*OVERLAP, *NO_EVALUATION, *LONG, worker, "max_steps=5", "max_running_groups=5")
    run = rlvr(*keys, train=["", "linger"] * 5, orders=("die-partial",)).ended()
    run.assert_nothing_left()
    assert not (run.faults / "die-partial").exists(), "it died"
    draws = [line["draw"] for line in run.logged("played.jsonl")]
    assert len(draws) > len(set(draws)), "what was lost was played again"
    assert_finished(run, 5)


TAKING_TURNS = """
import sys
from roll.pipeline.model_cluster import OffloadManager
OffloadManager.__init__.__defaults__ = (("cpu", "gpu"),)  # CPU slots have memory of their own
from roll.pipeline.cli import RLVR, main
if __name__ == "__main__":
    sys.exit(main(program=RLVR))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_shared_devices_requests_are_parked_while_the_trainer_has_them(rlvr, tmp_path):
    """All roles on one device that they take turns on; and the run is repeated there bit for bit."""
    (script := tmp_path / "start.py").write_text(TAKING_TURNS)
    worker = "actor_infer.worker_cls=tests.support.faults:MovedInferWorker"
    overrides = (*OVERLAP, *LONG, worker, "max_steps=4", "eval_steps=2", "max_running_groups=5")
    run = rlvr(*overrides, train=["", "linger"] * 5, script=script).ended()
    run.assert_nothing_left()
    assert_finished(run, 4)
    moves = run.logged("moves.jsonl")
    parked = [
        (away, back)
        for away, back in itertools.pairwise(moves)
        if (away["call"], back["call"]) == ("offload", "onload")
    ]
    assert len(parked) >= 4 and any(away["in_flight"] for away, _ in parked), moves
    assert all(away["tokens"] == back["tokens"] for away, back in parked), "it sampled on devices that others had"
    assert any(run.metrics[step]["async/mixed"] > 0 for step in range(1, 5)), "no answer went on with new weights"
    repeated(rlvr, run, *overrides, script=script)


@pytest.mark.slow
def test_without_partial_rollouts_the_devices_come_back_until_answers_are_done(rlvr, tmp_path):
    (script := tmp_path / "start.py").write_text(TAKING_TURNS)
    overrides = (*OVERLAP, *NO_EVALUATION, *LONG, "partial_rollout=false", "max_steps=3", "max_running_groups=5")
    run = rlvr(*overrides, script=script).ended()
    assert_finished(run, 3)
    assert all(run.metrics[step]["async/mixed"] == 0 for step in range(1, 4))


# ---- evaluation


@pytest.mark.slow
def test_rollouts_in_environments_go_on_while_replicas_evaluate_and_an_environment_hangs(launch):
    run = launch(
        *BESIDE,
        "max_steps=3",
        "eval_steps=1",
        "val_infer={device_mapping: [1]}",
        counting("Hanging", ", step_timeout: 0.5", fault="sleep", fault_if="faulty"),
        "train_env_manager.tags=[Board,Hanging]",
        "train_env_manager.env_retries=0",
        orders=("faulty", "hold-train_env_manager-group-2", "hold-val_infer-0-generate-1"),
    )
    run.pid_at("actor_train-0-train-1")
    run.release("faulty")
    run.pid_at("val_infer-0-generate-1")  # the evaluation after the first step
    before = calls(run, "actor_infer")
    run.release("hold-train_env_manager-group-2")
    run.until(lambda: calls(run, "actor_infer") > before)
    run.release("hold-val_infer-0-generate-1")
    run.ended().assert_nothing_left()

    records = schedule(run)
    assert sorted(used(records.values(), "taken")) == list(range(6)), "in each step a board and a count"
    assert run.summary["draws"] == {"trained": 6, "settled": 0, "waiting": 0}
    metrics = run.metrics
    assert [metrics[step]["rollout/dropped"] for step in (1, 3)] == [4, 0], "what hung was given up"
    assert all(metrics[step]["eval/episodes"] == 4 for step in (1, 2, 3))
    assert all(metrics[step]["async/lag_max"] <= 1 for step in (1, 2, 3))
    assert any(metrics[step]["async/token_lag"] > 0 for step in (1, 2, 3)), "it ran beside training"
    sent = {
        role: {path.name.rpartition("-")[2] for path in run.faults.glob(f"at-{role}-0-weights-*")}
        for role in ("actor_infer", "val_infer")
    }
    assert sent == {"actor_infer": {"0", "1", "2"}, "val_infer": {"1", "2", "3"}}, "each got what it works with"


@pytest.mark.slow
def test_an_evaluation_over_two_versions_is_an_error(rlvr):
    run = rlvr(
        "eval_only=true",
        "actor_infer.device_mapping=[0,1]",
        "actor_infer.worker_cls=tests.support.faults:LateInferWorker",
        "is_num_return_sequences_expand=true",
    ).ended(1)
    expected = "an evaluation was sampled with weights of the versions [-1, 0], expected 0 alone"
    assert expected in run.summary["error"] and run.summary["eval"] == {}
    run.assert_nothing_left()


@pytest.mark.slow
def test_evaluating_elsewhere_changes_neither_training_nor_what_is_measured(rlvr):
    here = rlvr("eval_steps=1").ended()
    elsewhere = rlvr("eval_steps=1", "val_infer={device_mapping: [1]}", output="elsewhere").ended()
    assert not list(here.faults.glob("at-val_infer-*")) and calls(elsewhere, "val_infer")
    assert elsewhere.repeatable_metrics() == here.repeatable_metrics()
    assert elsewhere.summary["eval"] == here.summary["eval"]
    assert_same_tensors(elsewhere.tensors(2), here.tensors(2))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["val-mid-0", "val_infer-0-generate-1"])
def test_who_dies_in_an_evaluation_beside_rollouts_is_replaced(rlvr, victim):
    """A rollout worker, whose death costs groups of the evaluation and of training; and a replica."""
    orders = ("hold-val-mid-0", "hold-train-mid-5", f"hold-{victim}")
    run = rlvr(*BESIDE, "max_steps=3", "eval_steps=1", "val_infer={device_mapping: [1]}", orders=orders)
    pid = run.pid_at(victim)
    run.pid_at("train-mid-5")
    for order in {*orders}:
        run.release(order)
    os.kill(pid, signal.SIGKILL)
    run.ended().assert_nothing_left()
    assert run.summary["draws"] == {"trained": 12, "settled": 0, "waiting": 0}
    assert all(run.metrics[step]["eval/episodes"] == 8 for step in (1, 2, 3))
