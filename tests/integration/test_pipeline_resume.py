"""A run that is stopped in every way and taken up again ends where an undisturbed one does."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.integration.conftest import Launch, Run, assert_same_tensors

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
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.checkpoint(STEPS) / "actor_train"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() <= model.state_dict().keys()
    for name, tensor in stored.items():
        assert model.state_dict()[name].equal(tensor)
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
    while not first.checkpoint(1).exists():
        time.sleep(0.1)
    first.order("hold-actor_train-0-written")
    first.release("hold-train_env_manager-group-2")
    first.pid_at("train_env_manager-group-5")
    first.kill()
    assert not first.checkpoint(2).exists() and list(first.checkpoint(2).parent.glob(".tmp-checkpoint-2-*"))
    second = resumed(launch)
    assert second.wait() == 0 and whole.wait() == 0, second.output + whole.output
    assert_same_end(second, whole)
