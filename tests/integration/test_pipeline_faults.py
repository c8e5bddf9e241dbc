"""What goes wrong in a run, by really doing it: a clear message, the right exit code, nothing lost."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from roll.tracking.checkpointer import find_damage
from tests.integration.conftest import Run, assert_same_tensors


def assert_failed(run: Run, *messages: str, steps: int) -> None:
    """Exit code 1, the messages, a checkpoint of the last finished step, and no process left behind."""
    assert run.wait() == 1, run.output
    missing = [message for message in messages if message not in run.said]
    assert not missing, f"{missing} not in:\n{run.output}"
    assert "Traceback" not in run.output
    assert run.summary["status"] == "failed"
    assert run.summary["steps"] == steps == max(run.metrics)
    if steps:
        checkpoint = Path(run.summary["checkpoint"])
        assert checkpoint.name == f"checkpoint-{steps}" and find_damage(checkpoint) is None
        assert f"to continue from {checkpoint}: resume_from_checkpoint=true" in run.output
    run.assert_nothing_left()


def test_a_wrong_configuration_is_told_at_once_and_whole_before_ray_starts(launch):
    run = launch(
        "train_env_manager.tags=[Conting]",
        "actor_train.strategy_args.strategy_name=fsdp3_train",
        "track_with=tensorbord",
        "adv_estimator=grop",
        "pretrain=/no/such/model",
        "actor_infer.device_mapping=[7]",
        "custom_envs.Board.env_type=sokobann",
    ).ended(2)
    hints = ("Counting", "fsdp2_train", "tensorboard", "mean grpo?", "/no/such/model", "ids from 0 to 1", "'sokoban'")
    assert not [hint for hint in hints if hint not in run.output], run.output
    assert not run.path.exists(), "nothing was started"


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "later"), [("start …", "start workers …"), ("start workers …", "setup …")])
def test_a_signal_while_ray_or_workers_start_ends_the_run_before_they_are_up(launch, phase, later):
    run = launch(local=True)
    assert run.process.stdout
    while phase not in run.process.stdout.readline():
        pass
    time.sleep(0.7)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert "Interrupted. No evaluation in 0 steps" in run.output and later not in run.output, run.output
    assert run.summary["status"] == "interrupted"
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("daemon", "words"), [("gcs_server", "head"), ("raylet", "node")])
def test_the_death_of_a_daemon_of_a_runs_own_cluster_ends_it_soon_with_the_reason(launch, daemon, words):
    hold = "hold-actor_train-0-train-3"
    run = launch("max_steps=50", "save_steps=1", local=True, orders=(hold,))
    run.pid_at("actor_train-0-train-3")
    (victim,) = (pid for pid in run.processes() if psutil.Process(pid).name() == daemon)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    run.release(hold)
    run.ended(1)
    assert time.monotonic() - killed < 45  # 7 to 14 s when nothing else uses the machine
    reason = f"{words} process ({daemon}) ended"
    assert reason in run.said and "Traceback" not in run.output, run.output
    assert run.summary["status"] == "failed" and reason in run.summary["error"]
    assert reason in (run.path / "renders" / "index.html").read_text()
    assert find_damage(run.checkpoint(2)) is None
    run.assert_nothing_left()


@pytest.mark.slow  # test_cluster.py has the death of a worker, test_rollout.py several of a kind
def test_two_workers_of_each_kind_and_the_death_of_a_trainer(launch, ray_cluster):
    run = launch(
        "max_steps=4",
        "actor_train.device_mapping=[0,1]",
        "actor_infer.device_mapping=[0,1]",
        "train_env_manager.max_env_num_per_worker=4",
        "train_env_manager.group_size_redundancy=1",
        "custom_envs.Counting.env_manager_cls=traj",
        "is_use_additional_prompts=true",
        "max_additional_running_prompts=1",
        "generate_opt_level=0",
        "enable_old_logprobs_recompute=true",
        "ray_init={num_cpus: 4, object_store_memory_mb: 128}",  # of a cluster that is started, so of no use here
        orders=("die-actor_train-1-train-3",),
    )
    assert_failed(run, "WorkerDiedError: actor_train rank 1 died in train at step 3", steps=2)
    for step in (1, 2):
        assert run.metrics[step]["rollout/episodes"] == 8
        assert run.metrics[step]["rollout/turns"] == 3
        assert run.metrics[step]["actor/grad_norm"] > 0
        assert run.metrics[step]["mismatch/logprob_diff_max"] < 1e-4
    workers = [
        run.faults / f"at-{role}-{rank}-{call}-1"
        for role, call in (("actor_train", "train"), ("actor_infer", "generate"))
        for rank in (0, 1)
    ]
    assert all(worker.exists() for worker in workers)
    assert len({path.read_text() for path in run.faults.glob("at-train_env_manager-group-*")}) == 2
    assert ray_cluster.placement_groups() == []


@pytest.mark.slow
def test_a_dead_rollout_worker_that_may_not_be_replaced_ends_the_run_with_a_checkpoint(launch):
    run = launch("max_worker_restarts=0", "save_steps=50", orders=("die-train_env_manager-mid-2",))
    assert_failed(run, "train_env_manager rank 0 died in", "step 2", "max_worker_restarts=0", steps=1)


@pytest.mark.slow
def test_steps_with_a_nan_loss_are_skipped_and_counted_and_too_many_end_the_run(launch):
    run = launch("max_steps=6", "max_bad_steps=4", orders=("nan-2", "nan-4", "nan-5"))
    assert_failed(run, "TrainingDivergedError: 4 optimizer steps in a row", "max_bad_steps=4", steps=5)
    assert [run.metrics[step]["actor/skipped_steps"] for step in range(1, 6)] == [0, 2, 0, 2, 2]
    assert_same_tensors(run.tensors(2), run.tensors(1))
    assert_same_tensors(run.tensors(5), run.tensors(3))
    assert all(tensor.isfinite().all() for tensor in run.tensors(5).values())


@pytest.mark.slow
def test_an_environment_that_never_starts_ends_the_run_before_models_are_loaded(launch):
    run = launch("custom_envs.Counting.env_type=tests.support.faults:MuteEnv").ended(1)
    assert "custom_envs.Counting: MuteEnv.reset returned observation None (NoneType), expected text" in run.output
    assert "Traceback" not in run.output and not list(run.faults.glob("at-actor_*"))
    assert "MuteEnv.reset returned observation None" in (run.path / "renders" / "index.html").read_text()
    run.assert_nothing_left()


@pytest.mark.slow
def test_environments_fail_alone(launch):
    run = launch(config="faulty_envs", orders=("hold-actor_train-0-train-1", "hold-actor_train-0-train-2"))
    run.pid_at("actor_train-0-train-1")
    turns = run.logged("turns.jsonl")
    last = {name: max(turn["time"] for turn in turns if turn["name"] == name) for name in ("fine", "slow")}
    first_slow = min(turn["time"] for turn in turns if turn["name"] == "slow")
    assert last["fine"] < first_slow + 0.5 < last["slow"], "a slow environment delayed the others"

    for order in ("faulty", "long"):
        run.order(order)
    run.release("hold-actor_train-0-train-1")
    run.pid_at("actor_train-0-train-2")
    run.order("all")
    run.release("hold-actor_train-0-train-2")
    messages = ("RuntimeError: the floor gave way", "Spinning group 16 member")
    assert_failed(run, "no episode to train on", *messages, steps=2)
    assert [run.metrics[step]["rollout/dropped"] for step in (1, 2)] == [0, 8]
    assert [run.metrics[step]["rollout/env_errors"] for step in (1, 2)] == [0, 16]
    assert [run.metrics[step]["rollout/episodes"] for step in (1, 2)] == [12, 4]
    assert {"rollout/Fine/reward", "rollout/Slow/reward"} <= run.metrics[2].keys()
    assert "Long: the first prompt has" in run.output and "prompt_length is 64" in run.output
    assert (run.faults / "at-spin-ended").exists(), "the busy loop goes on"
    log = (run.path / "logs" / "traceback.txt").read_text()
    assert "no episode to train on" in log


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 3 MB: one checkpoint fits, a second does not."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small filesystem: {mount.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["false", "true"])
def test_a_full_disk_leaves_the_earlier_checkpoint(launch, small_disk, beside):
    run = launch(f"checkpoint_config.output_dir={small_disk}/checkpoints", f"async_save={beside}").ended(1)
    assert f"the disk under {small_disk}/checkpoints is full" in run.said
    assert run.summary["status"] == "failed" and run.summary["steps"] in ((2, 3) if beside == "true" else (2,))
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert find_damage(small_disk / "checkpoints" / "checkpoint-1") is None
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_hung_call_is_named_after_rpc_timeout(launch):
    run = launch("rpc_timeout=40", orders=("hold-actor_train-0-logprobs",))
    run.pid_at("actor_train-0-logprobs")
    assert_failed(run, "RpcTimeoutError: actor_train rank 0: logprobs at step 1 has not returned", steps=0)
    stuck = (run.path / "logs" / "stacks.txt").read_text().partition("----- actor_train rank 0")[2]
    assert " in gate\n" in stuck.partition("----- ")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "place"),
    [
        ("hold-actor_train-0-train-2", "actor_train rank 0: gate (faults.py"),
        ("hold-actor_infer-0-generate-9", "actor_infer rank 0: async_gate (faults.py"),
        ("hold-train_env_manager-mid-3", "train_env_manager rank 0: async_gate (faults.py"),
        ("hold-reward_letters-0-score-3", "reward_letters rank 0: async_gate (faults.py"),
    ],
    ids=["trainer", "engine", "environment", "reward"],
)
def test_a_run_in_which_nothing_moves_ends_with_who_waits_for_whom(request, hold, place):
    launch = request.getfixturevalue("rlvr" if "reward" in hold else "launch")
    run = launch("stall_timeout=20", "save_steps=1", orders=(hold,)).ended(1)
    output = run.said
    assert "StallError: nothing has moved for" in output and "the driver waits for:" in output, output
    assert place in output, output
    assert "Traceback" not in run.output and run.summary["status"] == "failed"
    assert re.split("[:(]", place)[0].strip() in (run.path / "logs" / "stacks.txt").read_text()
    run.assert_nothing_left()
