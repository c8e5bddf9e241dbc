"""``roll replay`` before anything starts: what it needs of a run's folder, and the changes that it cannot follow."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from roll.pipeline.cli import read_config
from roll.pipeline.commands import replaying
from roll.rollout.types import Collected
from roll.tracking.checkpointer import Checkpointer
from tests.support.cli import call, refused
from tests.support.lines import write_lines

CONFIGS = Path(__file__).resolve().parents[3] / "integration" / "config"


def recorded(folder: Path, name: str, *words: str) -> Any:
    """The configuration and the metrics of a run of four steps; returns its pipeline."""
    config, program = read_config(name, CONFIGS, ["max_steps=4", "pretrain=some/model", *words])
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    write_lines(folder / "metrics.jsonl", [{"step": step, "actor/loss": 1.5} for step in range(5)])
    return program


def save_checkpoints(folder: Path, *steps: int) -> None:
    for step in steps:
        Checkpointer(folder / "checkpoints").save(step, lambda path: None, {"step": step})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps with checkpoints after 1 and 3 and kept rollouts of 2 and 4; nothing is launched."""
    folder = tmp_path / "run"
    recorded(folder, "small", f"rollout_dump_dir={tmp_path / 'kept'}")
    save_checkpoints(folder, 3, 1)  # as a run that was resumed earlier leaves them
    for step in (2, 4):
        Collected([], []).save(tmp_path / "kept" / f"step-{step:05d}")
    return folder


def launched(monkeypatch: pytest.MonkeyPatch, loss: float) -> SimpleNamespace:
    """Stands in for a launch: notes the configuration and writes the metrics of the last step."""
    seen = SimpleNamespace()

    def launch(config: Any, program: Any, body: Any, workers: Any, **_: Any) -> int:
        seen.config, seen.workers = config, workers
        folder = Path(config.output_dir) / config.exp_name
        folder.mkdir(exist_ok=True)
        write_lines(folder / "metrics.jsonl", [{"step": 4, "actor/loss": loss, "time/step": 2.0}])
        return 0

    monkeypatch.setattr(replaying, "launch", launch)
    return seen


def test_a_replay_starts_from_the_nearest_checkpoint_without_players(run, monkeypatch, capsys):
    seen = launched(monkeypatch, 1.5)
    out, _ = call(capsys, "replay", run, "--step", 4)
    assert seen.config.resume_from_checkpoint == str(run / "checkpoints" / "checkpoint-3")
    assert (seen.config.exp_name, seen.config.max_steps, seen.config.save_steps) == ("run_replay_4", 4, None)
    assert "actor_infer" not in seen.workers and "train_env_manager" not in seen.workers
    assert "all 1 are equal to the bit" in out


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        ([1], "step 4 is replayed from checkpoint-1, the nearest before it, so 2 steps before it will be taken again"),
        ([], "step 4 is replayed from the first step on, so 3 steps before it will be taken again"),
        ([2], "step 4 is replayed from checkpoint-2, the nearest before it, so a step before it will be taken again"),
        ([3], ""),
    ],
)
def test_steps_that_come_first_are_told_before_they_are_taken(run, tmp_path, monkeypatch, capsys, checkpoints, said):
    launched(monkeypatch, 1.5)
    shutil.rmtree(run / "checkpoints")
    save_checkpoints(run, *checkpoints)
    for step in (1, 3):
        Collected([], []).save(tmp_path / "kept" / f"step-{step:05d}")
    _, told = call(capsys, "replay", run, "--step", 4)
    assert told.startswith(said) and bool(told) == bool(said)


@pytest.mark.parametrize(("words", "code"), [([], 1), (["pg_clip=0.01"], 0)])
def test_figures_that_differ_are_told(run, monkeypatch, capsys, words, code):
    launched(monkeypatch, 1.5000001)
    said, _ = call(capsys, "replay", run, "--step", 4, *words, code=code)
    assert ("changed: pg_clip: was 0.2, is 0.01" in said) == bool(words)
    assert "actor/loss       1.5  1.5000001  differs" in said and "1 of 1 differ" in said


@pytest.mark.parametrize(
    ("step", "words", "expected"),
    [
        ("3", (), "from checkpoint-1, the nearest before it, with the rollouts of each step from 2 on; those of 3"),
        ("1", (), "from the first step on, with the rollouts of each step from 1 on; those of 1 are not in"),
        ("1", (), "it begins with step-00002, as rollout_dump_gb bounds it"),
        ("9", (), "--step 9: {run} has recorded the steps 1 to 4"),
        ("4", ("save_steps=1",), "save_steps: a replay sets this itself"),
        ("4", ("rollout_batch_size=16",), "a replay takes the episodes of the run"),
        ("4", ("custom_envs.Counting.max_steps=2",), "custom_envs.Counting.max_steps"),
        ("4", ("pg_clip=-1",), "pg_clip"),
    ],
)
def test_what_a_replay_lacks_or_cannot_follow_is_said(run, capsys, step, words, expected):
    assert expected.format(run=run) in refused(capsys, "replay", run, "--step", step, *words)


def test_a_run_without_kept_rollouts_or_that_is_none_is_refused(run, tmp_path, capsys):
    values = yaml.safe_load((run / "config.yaml").read_text()) | {"rollout_dump_dir": None}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert "a run with rollout_dump_dir can be replayed" in refused(capsys, "replay", run, "--step", 4)
    (run / "config.yaml").write_text("exp_name: run\n")
    assert "a configuration of no pipeline" in refused(capsys, "replay", run, "--step", 4)


@pytest.mark.parametrize("name", ["sft", "dpo", "distill", "rm"])
def test_a_step_on_a_dataset_needs_no_rollouts_and_nobody_who_answers(tmp_path, monkeypatch, capsys, name):
    """The pipeline's own start gets the configuration, and what is done with its steps."""
    run, seen = tmp_path / "run", SimpleNamespace()
    program = recorded(run, name, *(["teacher_pretrain=some/other"] if name == "distill" else []))
    save_checkpoints(run, 2)

    def start(config: Any, started: float, take: Any) -> int:
        seen.config, seen.take = config, take
        folder = Path(config.output_dir) / config.exp_name
        folder.mkdir()
        write_lines(folder / "metrics.jsonl", [{"step": 3, "actor/loss": 1.5}])
        return 0

    monkeypatch.setattr(replaying, "import_path", lambda path: start if path == program.run else pytest.fail(path))
    call(capsys, "replay", run, "--step", 3, "actor_train.training_args.learning_rate=0.5")
    assert seen.config.resume_from_checkpoint == str(run / "checkpoints" / "checkpoint-2")
    assert (seen.config.validation, seen.config.actor_infer, seen.config.max_steps) == (None, None, 4)
    assert seen.config.actor_train.training_args.learning_rate == 0.5
    assert seen.take.keywords == {"last": 3}
    told = refused(capsys, "replay", run, "--step", 3, "actor_infer.infer_batch_size=2")
    assert "actor_infer: a replay sets this itself" in told
    told = refused(capsys, "replay", run, "--step", 3, "--rollouts", "kept")
    assert f"--rollouts kept: expected none, as {run} learns from a dataset" in told
