"""Evaluation beside rollouts: one version always, on the rollouts' engines or on replicas of its own."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.conftest import START_S, Run, assert_same_tensors
from tests.integration.test_async_runs import schedule, used

BESIDE = ("async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true", "val_before_train=false")


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert run.process.poll() is None, run.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def calls(run: Run, role: str) -> int:
    """Batches of requests that a generating worker has had."""
    return len(list(run.faults.glob(f"at-{role}-0-generate-*")))


@pytest.mark.slow
@pytest.mark.timeout(600)
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
    wait_for(lambda: calls(run, "actor_infer") > before, run)
    run.release("hold-val_infer-0-generate-1")
    assert run.wait() == 0, run.output
    run.assert_nothing_left()

    records = schedule(run)
    assert sorted(used(records.values(), "taken")) == list(range(6)), "in each step a board and a count"
    assert run.summary["draws"] == {"trained": 6, "settled": 0, "waiting": 0}
    metrics = run.metrics
    assert [metrics[step]["rollout/dropped"] for step in (1, 3)] == [4, 0], "what hung was given up"
    assert all(metrics[step]["eval/episodes"] == 4 for step in (1, 2, 3))
    assert all(metrics[step]["async/lag_max"] <= 1 for step in (1, 2, 3))
    assert any(metrics[step]["async/token_lag"] > 0 for step in (1, 2, 3)), "it ran beside training"
    sent = {
        role: {path.name.rpartition("-")[2] for path in run.faults.glob(f"at-{role}-0-weights-*")} for role in ROLES
    }
    assert sent == {"actor_infer": {"0", "1", "2"}, "val_infer": {"1", "2", "3"}}, "each got what it works with"


ROLES = ("actor_infer", "val_infer")


@pytest.mark.slow
@pytest.mark.timeout(300)
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
@pytest.mark.timeout(600)
def test_evaluating_elsewhere_changes_neither_training_nor_what_is_measured(rlvr):
    here = rlvr("eval_steps=1").ended()
    elsewhere = rlvr("eval_steps=1", "val_infer={device_mapping: [1]}", output="elsewhere").ended()
    assert not list(here.faults.glob("at-val_infer-*")) and calls(elsewhere, "val_infer")
    assert elsewhere.repeatable_metrics() == here.repeatable_metrics()
    assert elsewhere.summary["eval"] == here.summary["eval"]
    assert_same_tensors(elsewhere.tensors(2), here.tensors(2))


@pytest.mark.slow
@pytest.mark.timeout(600)
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
    assert run.wait() == 0, run.output
    run.assert_nothing_left()
    assert run.summary["draws"] == {"trained": 12, "settled": 0, "waiting": 0}
    assert all(run.metrics[step]["eval/episodes"] == 8 for step in (1, 2, 3))
