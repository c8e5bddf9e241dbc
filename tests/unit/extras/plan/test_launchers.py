"""The files that ``roll plan --write`` makes: the batch file is run with stand-ins for a cluster's programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from roll.__main__ import main

SCHEMA = Path(__file__).parents[3] / "support" / "schemas" / "rayjob.json"
NODES = {"one": ("1", "[0,1]"), "two": ("2", "[0,1,2,3]")}
PROGRAMS = {
    # What a run does when it is told to stop: it saves, and says so by its code.
    "roll": 'echo "roll $*" >> calls; trap "sleep 0.3; echo saved >> calls; exit 143" TERM; '
    "touch started; for _ in $(seq 200); do sleep 0.05; [ -e finish ] && exit $(cat finish); done",
    "srun": 'echo "srun $*" >> calls; exec sleep 60',
    "ray": 'echo "ray $*" >> calls',
    "python": "cat > /dev/null",
    "scontrol": 'echo "scontrol $*" >> calls',
    "hostname": "echo 10.0.0.1",
}
"""By name, lines of shell."""


def written(kind: str, tmp_path: Path, nodes: str, *more: str) -> Path:
    count, devices = NODES[nodes]
    layout = [f"num_nodes={count}", f"actor_train.device_mapping={devices}", f"actor_infer.device_mapping={devices}"]
    sizes = ["actor_train.training_args.per_device_train_batch_size=32"] if nodes == "two" else []
    file = tmp_path / kind
    command = ["plan", "rlvr_math", *layout, *sizes, *more, "--devices", "A100", "--write", kind, "-o", str(file)]
    assert main(command) == 0
    return file


def start(file: Path) -> subprocess.Popen[str]:
    """The batch file under way, its run having begun."""
    folder = file.parent
    programs = folder / "bin"
    programs.mkdir()
    for name, lines in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{lines}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", str(file)], cwd=folder, env=environment, text=True, start_new_session=True)
    end = time.monotonic() + 30
    while not (folder / "started").exists():
        assert time.monotonic() < end and process.poll() is None, "the run did not start"
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("nodes", NODES)
def test_a_batch_file_is_sound_shell(nodes: str, tmp_path: Path) -> None:
    file = written("slurm", tmp_path, nodes)
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    text = file.read_text()
    assert "#SBATCH --signal=B:TERM@600" in text and f"#SBATCH --nodes={NODES[nodes][0]}\n" in text
    assert "#SBATCH --gpus-per-node=2\n" in text and ("ray start" in text) == (nodes == "two")
    if (checker := shutil.which("shellcheck")) is not None:
        assert subprocess.run([checker, str(file)], check=False).returncode == 0


@pytest.mark.parametrize("nodes", NODES)
def test_a_batch_file_passes_the_signal_on_and_goes_on_later(nodes: str, tmp_path: Path) -> None:
    process = start(written("slurm", tmp_path, nodes))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line for line in calls if line in ("saved", "scontrol requeue 7")] == ["saved", "scontrol requeue 7"]
    run = next(line for line in calls if line.startswith("roll "))
    assert run.startswith("roll train rlvr_math num_nodes=") and run.endswith(" resume_from_checkpoint=true")
    starts = [line for line in calls if "ray start" in line]
    assert len(starts) == (2 if nodes == "two" else 0)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none" / "run.sh"
    assert main(["plan", "rlvr_math", "--devices", "A100", "--write", "slurm", "-o", str(file)]) == 2
    assert f"roll plan: -o {file}: No such file or directory" in capsys.readouterr().err


def test_a_batch_file_ends_with_the_code_of_the_run(tmp_path: Path) -> None:
    process = start(written("slurm", tmp_path, "one"))
    (tmp_path / "finish").write_text("3")
    assert process.wait(timeout=30) == 3
    assert "requeue" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("nodes", NODES)
def test_a_manifest_follows_the_schema(nodes: str, tmp_path: Path) -> None:
    manifest: dict[str, Any] = yaml.safe_load(written("kuberay", tmp_path, nodes, "exp_name=My_Run").read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)
    assert manifest["metadata"]["name"] == "my-run"
    cluster = manifest["spec"]["rayClusterSpec"]
    assert len(cluster.get("workerGroupSpecs", ())) == (1 if nodes == "two" else 0)
    resources = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "2"
    manifest["spec"]["entryPoint"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        jsonschema.Draft202012Validator(schema).validate(manifest)
