"""A run's folder: its archive, small, whole enough and without a secret, and what is shown of it in a terminal."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from roll.report import bundle
from roll.report.live import RunView, watch
from roll.tracking.redact import REDACTED, redact_text
from roll.tracking.run import RunFolder
from tests.support.cli import call, refused
from tests.support.lines import write_lines

SECRETS = {
    "a variable": "s3cr3t-of-the-tracker",
    "a service": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "another": "sk-proj-0123456789abcdefABCDEF",
    "a web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkw.dozjgNryP4J3jVmNHl0w5N",
    "a login": "alice:correct-horse",
    "a header": "Zm9vYmFyYmF6cXV4",
    "a named one": "hunter2!",
    "one in JSON": "tr0ub4dor",
}
LINES = f"""\
tracker key {SECRETS["a variable"]} refused
cannot download with {SECRETS["a service"]}; OPENAI={SECRETS["another"]}
token {SECRETS["a web token"]} expired
GET https://{SECRETS["a login"]}@example.com/data
{{'Authorization': 'Bearer {SECRETS["a header"]}'}}
connecting with password={SECRETS["a named one"]} to db
{{"reward_api_key": "{SECRETS["one in JSON"]}"}} {{\\"api_key\\": \\"{SECRETS["one in JSON"]}\\"}}
-----BEGIN RSA PRIVATE KEY-----
MIIEowIBAAKCAQEA
-----END RSA PRIVATE KEY-----
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["a variable"])
    run = tmp_path / "output" / "mine"
    for folder in ("logs/workers", "trajectories", "checkpoints/checkpoint-1"):
        (run / folder).mkdir(parents=True)
    (run / "config.yaml").write_text("exp_name: mine\nlogging_dir: null\n")
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": LINES}))
    (run / "logs" / "roll.log").write_text(LINES)
    (run / "logs" / "stacks.txt").write_text("what everybody did")
    (run / "logs" / "workers" / "long.out").write_text("begin\n" + "x" * 3_000_000 + "\nend")
    write_lines(run / "metrics.jsonl", [{"step": 1, "rollout/success": 0.5}])
    write_lines(run / "timeline.jsonl", [{"step": 1, "phases": []}])
    rows = [{"id": 1, "success": False}, {"id": 2, "error": "judge: " + SECRETS["a service"]}, {"id": 3}]
    write_lines(run / "trajectories" / "eval-00001.jsonl", rows)
    (run / "checkpoints" / "checkpoint-1" / "model.safetensors").write_bytes(b"weights")
    return run


def texts(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist()}


def test_it_has_what_explains_a_run_and_no_secret(run, tmp_path, capsys):
    told, _ = call(capsys, "bundle", run, "-o", tmp_path / "sent.zip")
    found = texts(tmp_path / "sent.zip")
    logs = {"logs/roll.log", "logs/stacks.txt", "logs/workers/long.out"}
    others = {"config.yaml", "summary.json", "versions.json", "files.txt", "failed_rows.jsonl"}
    others |= {"metrics.jsonl", "timeline.jsonl"}
    assert set(found) == logs | others
    whole = "".join(found.values())
    assert not [name for name, secret in SECRETS.items() if secret in whole] and "MIIEow" not in whole
    assert found["logs/roll.log"].count(REDACTED) == 10 and "GET https://<redacted>@example.com" in whole
    assert "model.safetensors" in found["files.txt"] and json.loads(found["failed_rows.jsonl"])["id"] == 2
    long = found["logs/workers/long.out"]
    assert long.startswith("begin") and long.endswith("end") and "bytes left out" in long and len(long) < 2_001_000
    assert "read it before you send it" in told


def test_it_leaves_rows_out_if_asked_and_never_outgrows_its_bound(run, tmp_path, monkeypatch, capsys):
    call(capsys, "bundle", run, "-o", tmp_path / "a.zip", "--no-rows")
    assert "failed_rows.jsonl" not in texts(tmp_path / "a.zip")
    monkeypatch.setattr(bundle, "MOST_BYTES", 10**6 + 5_000)
    bundle.write_bundle(run, tmp_path / "b.zip")
    found = texts(tmp_path / "b.zip")
    assert {"config.yaml", "logs/roll.log"} <= found.keys() and "logs/workers/long.out" not in found


@pytest.mark.parametrize("command", ["bundle", "watch"])
def test_a_folder_that_is_no_runs_is_refused(command, tmp_path, capsys):
    assert f"got {tmp_path}, expected a run's folder, with config.yaml" in refused(capsys, command, tmp_path)


@pytest.mark.parametrize("text", ["max_tokens=4096", "pad_token: <pad>", "loss 0.1234, step=1000", "skip-connection"])
def test_words_that_are_no_secrets_stay(text):
    assert redact_text(text) == text


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
    write_lines(folder.trajectories / "train-00008.jsonl", [episode])
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


def test_the_command_shows_a_run_once(tmp_path, capsys):
    folder = started(tmp_path, [{"step": 1, "sft/loss": 2.5}])
    (folder.path / "config.yaml").write_text(yaml.safe_dump({"max_steps": 40}))
    assert "2.5" in call(capsys, "watch", folder.path, "--once")[0]
    folder.close()
