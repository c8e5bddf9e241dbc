"""``roll watch``: what the folder of a run shows in a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from roll.__main__ import main
from roll.report.live import RunView, watch
from roll.tracking.run import RunFolder

PIPELINES = {
    "agentic": ("rollout/reward", "actor/entropy", "eval/success"),
    "rlvr": ("rollout/reward", "reward/kl", "eval/success"),
    "sft": ("sft/loss", "sft/token_accuracy", "eval/loss"),
    "dpo": ("dpo/loss", "dpo/accuracy", "eval/accuracy"),
    "distill": ("distill/loss", "distill/divergence", "eval/divergence"),
    "reward_model": ("rm/loss", "rm/accuracy", "eval/accuracy"),
}


def started(tmp_path: Path, metrics: list[dict[str, Any]], **summary: Any) -> RunFolder:
    """The folder of a run, which this process has."""
    folder = RunFolder(tmp_path, "run")
    folder.claim(fresh=True)
    folder.write_config({"max_steps": 40, "actor_infer": {}})
    for record in metrics:
        folder.log_metrics(record.pop("step"), record)
    seconds = {"start": 9.0, "rollout": 30.0, "train": 10.0}
    folder.write_summary({"status": "running", "steps": len(metrics), "wall_s": 75.0, "seconds": seconds, **summary})
    return folder


def shown(folder: Path, width: int = 120) -> str:
    out = io.StringIO()
    watch(folder, Console(file=out, width=width), 1.0, once=True)
    return out.getvalue()


@pytest.mark.parametrize("names", PIPELINES.values(), ids=PIPELINES)
def test_the_curves_of_every_pipeline_are_drawn(tmp_path, names):
    rows = [
        {"step": step, "time/rollout": 3.0, "time/train": 1.0, **dict.fromkeys(names, step / 8)} for step in range(1, 9)
    ]
    folder = started(tmp_path, rows)
    folder.write_phase("rollout")
    for width in (90, 140):
        said = shown(folder.path, width)
        assert said.count("▁▂▃▄▅▆▇█") == len(names) and "● rollout for" in said and "step 8/40" in said
        assert "1m 15s gone · about 2m 08s left" in said, "32 steps of 4 s"
        assert "75%" in said and "3.00" in said
        assert max(map(len, said.splitlines())) <= width
    folder.close()


def test_episodes_alarms_and_warnings_are_shown_without_control_characters(tmp_path):
    alarm = {"text": "entropy fell to 5%", "last": 7}
    rows = [{"step": step, "rollout/episodes": 8.0, "rollout/reward": 0.0} for step in range(1, 9)]
    folder = started(tmp_path, rows, watches={"entropy_collapse": alarm})
    (folder.logs / "roll.log").write_text("a INFO b: fine\na WARNING b: too \x1b[2Jlong\n")
    turn = {"text": "go \x1b]0;title\x07left\nnow", "finish_reason": "stop"}
    episode = {"tag": "Sokoban", "group_id": 3, "member": 1, "success": True, "score": 0.5, "turns": [turn]}
    (folder.trajectories / "train-00008.jsonl").write_text(json.dumps(episode) + "\n")
    said = shown(folder.path)
    assert "watch entropy_collapse, step 7: entropy fell to 5%" in said and "No gain beyond noise" in said
    assert "! a WARNING b: too long" in said and "fine" not in said
    assert "last episodes (train-00008)" in said and "✓ Sokoban 3/1, score 0.5: go left now" in said
    assert "\x1b" not in said
    folder.close()


def test_a_run_that_has_ended_failed_or_been_killed_says_so(tmp_path):
    folder = started(tmp_path, [])
    folder.write_phase("setup")
    assert "no step has been reported yet" in shown(folder.path) and not RunView(folder.path).ended
    folder.close()  # its lock is gone, as after a kill
    assert "its process is gone" in shown(folder.path) and RunView(folder.path).ended
    (folder.path / "phase.json").write_text(json.dumps({"phase": "train", "since": 0, "host": "elsewhere"}))
    assert "train for" in shown(folder.path) and not RunView(folder.path).ended, "nobody knows from here"
    folder.write_summary({"status": "failed", "steps": 3, "error": "RunFailedError: no episode"})
    said = io.StringIO()
    watch(folder.path, Console(file=said, width=90), 1.0)
    assert "● failed" in said.getvalue() and "RunFailedError: no episode" in said.getvalue()


def test_the_command_shows_a_run_once_and_refuses_other_folders(tmp_path, capsys):
    folder = started(tmp_path, [{"step": 1, "sft/loss": 2.5}])
    (folder.path / "config.yaml").write_text(yaml.safe_dump({"max_steps": 40}))
    assert main(["watch", str(folder.path), "--once"]) == 0
    assert "2.5" in capsys.readouterr().out
    folder.close()
    assert main(["watch", str(tmp_path)]) == 2
    assert f"got {tmp_path}, expected a run's folder, with config.yaml" in capsys.readouterr().err
