"""What goes wrong in a run, by really doing it: a clear message, the right exit code, nothing lost.

And a run that is stopped in every way and taken up again ends where an undisturbed one does.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from roll.tracking.checkpointer import find_damage
from tests.integration.conftest import Launch, Run, assert_same_tensors


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


# ---- stopped and taken up again

STEPS = 3
FULL = (
    f"max_steps={STEPS}",
    "eval_steps=2",
    "adv_estimator=gae",
    "ppo_epochs=2",
    "add_token_level_kl=true",
    "target_kl=0.001",
    "reward_norm=running",
)
"""A critic, an adaptive KL in the reward, running statistics: all the state that a resumed run needs."""


def resumed(launch: Launch, *overrides: str, **options: object) -> Run:
    return launch(*FULL, "resume_from_checkpoint=true", *overrides, output="disturbed", **options)


def assert_stopped(run: Run, exit_code: int, steps: int) -> None:
    assert run.wait() == exit_code, run.output
    assert run.summary["status"] == "interrupted"
    assert run.summary["steps"] == steps
    assert run.summary["checkpoint"] == str(run.checkpoint(steps))
    assert "resume_from_checkpoint=true" in run.output
    run.assert_nothing_left()


def plant_half_written_checkpoints(run: Run) -> None:
    """One without its manifest, one with a file cut short, and a temporary folder of a dead process."""
    good = run.checkpoint(1)
    for name in ("checkpoint-98", "checkpoint-99", ".tmp-checkpoint-100-999999"):
        folder = good.with_name(name)
        (folder / "actor_train").mkdir(parents=True)
        weights = (good / "actor_train" / "model.safetensors").read_bytes()
        (folder / "actor_train" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    manifest = json.loads((good / "manifest.json").read_text())
    manifest["saved_at"] += 1000  # newer than every whole one
    good.with_name("checkpoint-99").joinpath("manifest.json").write_text(json.dumps(manifest))


def check_run_folder(run: Run, model: Path) -> None:
    """What a completed run leaves behind."""
    summary = run.summary
    assert summary["status"] == "completed" and summary["steps"] == STEPS
    for when in ("before", "after"):
        assert 0 <= summary["eval"][when]["success"] <= 1 and summary["eval"][when]["episodes"] == 4
    assert 0 < summary["first_rollout_s"] < summary["wall_s"]
    assert {"rollout", "train"} <= summary["tokens_per_s"].keys()
    assert summary["peak_memory_mb"] > 100
    assert list(run.metrics) == list(range(STEPS + 1))
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["max_steps"] == STEPS and config["pretrain"] == str(model)
    for file in (run.path / "config.yaml", run.path / "logs" / "roll.log"):
        assert "hunter2" not in file.read_text()
    assert (run.path / "trajectories" / f"eval-{STEPS:05d}.jsonl").stat().st_size
    assert (run.path / "renders" / "index.html").stat().st_size
    assert list((run.path / "renders").rglob("*.gif")) or list((run.path / "renders").rglob("*-*.html"))
    assert "Traceback" not in run.output


def check_checkpoint_is_a_hugging_face_model(run: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.checkpoint(STEPS) / "actor_train"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 0"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.isfinite().all() and logits.shape == (1, ids.shape[1], len(tokenizer))


def assert_same_end(run: Run, whole: Run) -> None:
    assert run.summary["status"] == "completed"
    assert run.summary["eval"] == whole.summary["eval"]
    assert run.repeatable_metrics() == whole.repeatable_metrics()
    assert_same_tensors(run.tensors(STEPS), whole.tensors(STEPS))
    run.assert_nothing_left()


@pytest.mark.timeout(600)
def test_a_run_that_is_stopped_and_loses_workers_ends_where_an_undisturbed_one_does(launch, model):
    whole = launch(*FULL, "num_renders=1", "track_with=[stdout]", "system_envs.API_TOKEN=hunter2")
    first = launch(*FULL, output="disturbed", local=True, orders=("hold-train_env_manager-group-3",))

    # Ctrl-C in the rollout of step 2, to the whole process group as a terminal does.
    first.pid_at("train_env_manager-group-3")
    os.killpg(first.process.pid, signal.SIGINT)
    assert_stopped(first, 130, steps=1)
    assert whole.wait() == 0, whole.output
    whole.assert_nothing_left()
    check_run_folder(whole, model)
    check_checkpoint_is_a_hugging_face_model(whole)

    # On the way to the end both kinds of rollout workers die, one of them while weights come; what they played is
    # played again. Half-written checkpoints are in the way.
    plant_half_written_checkpoints(first)
    orders = ("die-train_env_manager-mid-4", "die-actor_infer-0-generate-5", f"die-actor_infer-0-weights-{STEPS - 1}")
    second = resumed(launch, "max_worker_restarts=3", "async_save=true", orders=orders).ended()
    assert all(f"ignoring checkpoint {first.checkpoint(step)}" in second.output for step in (98, 99))
    assert f"resumed from {first.checkpoint(1)}" in (second.path / "logs" / "roll.log").read_text()
    assert not any((second.faults / order).exists() for order in orders), "nobody died"
    assert_same_end(second, whole)

    # Nothing is left to do: no worker is started for it.
    third = resumed(launch).ended()
    assert f"run run is finished at step {STEPS}" in third.output
    assert not list(third.faults.glob("at-*")) and third.summary == second.summary


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_while_it_saves_in_the_background_ends_where_an_undisturbed_one_does(launch):
    whole = launch(*FULL)
    orders = ("hold-train_env_manager-group-2", "hold-train_env_manager-group-5")
    first = launch(*FULL, "async_save=true", output="disturbed", local=True, orders=orders)
    first.pid_at("train_env_manager-group-2")
    first.until(first.checkpoint(1).exists)
    first.order("hold-actor_train-0-written")
    first.release("hold-train_env_manager-group-2")
    first.pid_at("train_env_manager-group-5")
    first.kill()
    assert not first.checkpoint(2).exists() and list(first.checkpoint(2).parent.glob(".tmp-checkpoint-2-*"))
    second = resumed(launch)
    assert second.wait() == 0 and whole.wait() == 0, second.output + whole.output
    assert_same_end(second, whole)
