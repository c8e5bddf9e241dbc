"""The chain of examples, run with few steps as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEW = ("max_steps=2", "save_steps=2", "eval_steps=0", "val_batch_size=16")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_reads_what_the_one_before_saved(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(ROOT / "examples" / "chain_math.sh"), "3", str(tmp_path / "chain"), *FEW]

    def run() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": path}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=800, env=environment, cwd=tmp_path, check=False
        )

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    stages = ["1-sft", "2-student", "3-reward", "4-rl", "5-distill"]
    table = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in table] == stages
    assert all(" → " in line and "| 2 |" in line for line in table)
    models = {path.name: path.resolve().parent.parent.parent.name for path in (tmp_path / "chain" / "models").iterdir()}
    assert models == {stage: stage for stage in stages}
    again = run()
    assert again.returncode == 0 and again.stdout.splitlines() == done.stdout.splitlines()[-len(table) - 2 :]
