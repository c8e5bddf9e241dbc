"""The archive of a run: small, whole enough, and without a single secret."""

import json
import zipfile
from pathlib import Path

import pytest

from roll.__main__ import main
from roll.report import bundle
from roll.tracking.redact import REDACTED, redact_text

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
    (run / "metrics.jsonl").write_text('{"step": 1, "rollout/success": 0.5}\n')
    (run / "timeline.jsonl").write_text('{"step": 1, "phases": []}\n')
    rows = [{"id": 1, "success": False}, {"id": 2, "error": "judge: " + SECRETS["a service"]}, {"id": 3}]
    (run / "trajectories" / "eval-00001.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "checkpoints" / "checkpoint-1" / "model.safetensors").write_bytes(b"weights")
    return run


def texts(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist()}


def test_it_has_what_explains_a_run_and_no_secret(run, tmp_path, capsys):
    assert main(["bundle", str(run), "-o", str(tmp_path / "sent.zip")]) == 0
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
    assert "read it before you send it" in capsys.readouterr().out


def test_it_leaves_rows_out_if_asked_and_never_outgrows_its_bound(run, tmp_path, monkeypatch):
    assert main(["bundle", str(run), "-o", str(tmp_path / "a.zip"), "--no-rows"]) == 0
    assert "failed_rows.jsonl" not in texts(tmp_path / "a.zip")
    monkeypatch.setattr(bundle, "MOST_BYTES", 10**6 + 5_000)
    bundle.write_bundle(run, tmp_path / "b.zip")
    found = texts(tmp_path / "b.zip")
    assert {"config.yaml", "logs/roll.log"} <= found.keys() and "logs/workers/long.out" not in found


def test_a_folder_that_is_no_runs_is_refused(tmp_path, capsys):
    assert main(["bundle", str(tmp_path)]) == 2
    assert "expected a run's folder, with config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["max_tokens=4096", "pad_token: <pad>", "loss 0.1234, step=1000", "skip-connection"])
def test_words_that_are_no_secrets_stay(text):
    assert redact_text(text) == text
