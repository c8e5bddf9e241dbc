"""Rollouts beside training under pressure, really caused: nobody starves, what waits is bounded, exits are clean.

Evaluation beside rollouts, too: one version always, on the rollouts' engines or on replicas of its own.
"""

import itertools
import os
import signal
import time

import pytest

from tests.integration.conftest import Run, assert_same_tensors, rows
from tests.integration.test_async_runs import OVERLAP, assert_finished, repeatable, schedule, used
from tests.support.lines import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BESIDE = ("async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true", "val_before_train=false")
NO_EVALUATION = ("val_before_train=false", "validation=null")
LONG = ("response_length=200", "sequence_length=240")
"""Answers so long that weights come in the middle of them."""


def started(run: Run) -> set[int]:
    return {line["draw"] for line in run.logged("played.jsonl")}


def calls(run: Run, role: str) -> int:
    """Batches of requests that a generating worker has had."""
    return len(list(run.faults.glob(f"at-{role}-0-generate-*")))


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


def test_one_environment_of_many_that_is_a_hundred_times_slower_holds_nobody_up(launch):
    """Steps of 16 groups, 16 ahead, a window over all of them; the first draw is the slow one."""

    def env(name: str, seconds: float) -> str:
        config = f"{{name: {name}, step_seconds: {seconds}}}"
        options = f"max_steps: 3, agent_system_template: '', env_config: {config}"
        return f"custom_envs.{name}={{env_type: tests.support.faults:CountingEnv, {options}}}"

    manager = "{env_groups: 64, group_size: 1, tags: [Slow, Fast], n_groups: [1, 63]}"
    run = launch(
        *BESIDE,
        "rollout_window=1",
        "max_steps=5",
        "rollout_batch_size=16",
        "adv_estimator=reinforce",
        f"train_env_manager={manager}",
        env("Slow", 2.0),
        env("Fast", 0.02),
    ).ended()
    records = schedule(run)
    taken = {draw: step for step, record in records.items() for draw in used([record], "taken")}
    assert sorted(taken) == list(range(80)) and len(used(records.values(), "taken")) == 80
    assert 2 <= taken[0] <= 4, "others went first, and it was not forgotten"
    for metrics in (run.metrics[step] for step in range(1, 6)):
        assert metrics["async/buffer_groups"] + metrics["async/running_groups"] <= 32 and metrics["async/lag_max"] <= 3


def test_a_generator_that_dies_with_partial_answers_costs_only_them(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", ["", "linger"] * 5))
    worker = "actor_infer.worker_cls=tests.support.faults:FragileInferWorker"
    run = rlvr(
        *OVERLAP, *NO_EVALUATION, *LONG, worker, "max_steps=5", "max_running_groups=5", orders=("die-partial",)
    ).ended()
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


@pytest.mark.timeout(900)
def test_on_shared_devices_requests_are_parked_while_the_trainer_has_them(rlvr, tmp_path):
    """All roles on one device that they take turns on; and the run is repeated there bit for bit."""
    write_lines(tmp_path / "train.jsonl", rows("t", ["", "linger"] * 5))
    (script := tmp_path / "start.py").write_text(TAKING_TURNS)
    worker = "actor_infer.worker_cls=tests.support.faults:MovedInferWorker"
    overrides = (*OVERLAP, *LONG, worker, "max_steps=4", "eval_steps=2", "max_running_groups=5")
    run = rlvr(*overrides, script=script).ended()
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

    again = rlvr(*overrides, f"replay_schedule={run.path / 'schedule.jsonl'}", script=script, output="again").ended()
    assert repeatable(again) == repeatable(run)
    assert_same_tensors(again.tensors(4), run.tensors(4))


def test_without_partial_rollouts_the_devices_come_back_until_answers_are_done(rlvr, tmp_path):
    (script := tmp_path / "start.py").write_text(TAKING_TURNS)
    overrides = (*OVERLAP, *NO_EVALUATION, *LONG, "partial_rollout=false", "max_steps=3", "max_running_groups=5")
    run = rlvr(*overrides, script=script).ended()
    assert_finished(run, 3)
    assert all(run.metrics[step]["async/mixed"] == 0 for step in range(1, 4))


# ---- evaluation


def test_rollouts_in_environments_go_on_while_replicas_evaluate_and_an_environment_hangs(launch):
    hanging = (
        "{env_type: tests.support.faults:CountingEnv, max_steps: 3, agent_system_template: '', step_timeout: 0.5, "
        "env_config: {name: hanging, fault: sleep, fault_if: faulty}}"
    )
    run = launch(
        *BESIDE,
        "max_steps=3",
        "eval_steps=1",
        "val_infer={device_mapping: [1]}",
        f"custom_envs.Hanging={hanging}",
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


def test_evaluating_elsewhere_changes_neither_training_nor_what_is_measured(rlvr):
    here = rlvr("eval_steps=1").ended()
    elsewhere = rlvr("eval_steps=1", "val_infer={device_mapping: [1]}", output="elsewhere").ended()
    assert not list(here.faults.glob("at-val_infer-*")) and calls(elsewhere, "val_infer")
    assert elsewhere.repeatable_metrics() == here.repeatable_metrics()
    assert elsewhere.summary["eval"] == here.summary["eval"]
    assert_same_tensors(elsewhere.tensors(2), here.tensors(2))


@pytest.mark.parametrize("victim", ["val-mid-0", "val_infer-0-generate-1"])
def test_who_dies_in_an_evaluation_beside_rollouts_is_replaced(rlvr, tmp_path, victim):
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
