"""A program that is run with each checkpoint: what it is given, and what its end means."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from roll.configs.pipeline import RunConfig
from roll.pipeline.session import RunSession
from roll.tracking.checkpointer import PostSaveHook

TELL = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["ROLL_CHECKPOINT"])
assert sys.argv[1:] == ["$HOME; true", str(folder)], sys.argv
(folder / "told").write_text(os.environ["ROLL_STEP"])
"""


def test_it_finds_the_folder_and_the_step_and_no_shell_reads_its_arguments(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint-7").mkdir()
    hook = PostSaveHook([sys.executable, "-c", TELL, "$HOME; true"])
    assert hook.metrics() == {}
    assert hook.run(Path("checkpoint-7"), 7) is None
    assert (tmp_path / "checkpoint-7" / "told").read_text() == "7"
    assert hook.metrics() == {"checkpoint/hook_runs": 1, "checkpoint/hook_failures": 0} and hook.exit_code == 0


def test_how_it_ended_is_told(tmp_path: Path, caplog) -> None:
    hook = PostSaveHook([sys.executable, "-c", "import sys; print('x' * 9000, 'the end'); sys.exit(3)"])
    problem = hook.run(tmp_path, 1)
    assert problem is not None and "ended with exit code 3: xx" in problem and problem.endswith("the end")
    assert len(problem) < 2200 and problem in caplog.text and hook.exit_code == 3
    killed = PostSaveHook([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert "SIGKILL" in str(killed.run(tmp_path, 1)) and killed.exit_code == -9
    absent = PostSaveHook(["/no/such/program"])
    assert "could not be started: [Errno 2]" in str(absent.run(tmp_path, 1)) and absent.exit_code is None
    assert absent.failures == 1


def test_what_takes_too_long_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    script = "sleep 60 & echo $! > child; sleep 60"
    hook = PostSaveHook(["sh", "-c", f"cd {tmp_path}; {script}"], timeout=1.0)
    started = time.monotonic()
    assert "took longer than 1 s and was killed" in str(hook.run(tmp_path, 1))
    assert time.monotonic() - started < 10
    child = int((tmp_path / "child").read_text())
    stat = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_what_it_leaves_running_does_not_hold_the_save(tmp_path: Path) -> None:
    hook = PostSaveHook(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child"])
    started = time.monotonic()
    assert hook.run(tmp_path, 1) is None
    assert time.monotonic() - started < 10
    os.kill(int((tmp_path / "child").read_text()), 9)


def test_a_run_counts_its_failures(tmp_path: Path) -> None:
    saving = {"post_save_hook": ["sh", "-c", "exit 5"], "post_save_timeout": 30}
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "exp_name": "run", "checkpoint_config": saving})
    with RunSession(config, time.time()) as session:
        session.checkpointer.save(1, lambda path: None, {})
        session.log_step(2, {"loss": 1.0})
    assert session.summary["post_save_hook"] == {"runs": 1, "failures": 1, "last_exit_code": 5}
    (line,) = (session.folder.path / "metrics.jsonl").read_text().splitlines()
    assert '"checkpoint/hook_failures": 1' in line and '"checkpoint/hook_runs": 1' in line
    assert "ended with exit code 5" in (session.folder.logs / "roll.log").read_text()
