"""The training commands of the README and the documents, and the chain of examples, run for a step or two."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.pipeline.test_documented_commands import FOUND, ROOT

ELSEWHERE = ("RAY_ADDRESS", "http://", "nsight", "--config_path", "agentic_frozen_lake", "smollm2")
"""A cluster, a server, a program, a file that a reader has, eight GPUs with a model of the hub, and a package."""
TRAINING = [
    command
    for command in FOUND
    if command.removeprefix(".venv/bin/").startswith(("roll train ", "python examples/start_"))
    and not any(mark in command for mark in ELSEWHERE)
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, where models and data that one command makes are there for the next."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "mine.yaml").write_text("defaults: [agentic_sokoban, _self_]\n")
    return folder


def test_every_start_script_and_the_demonstrations_are_among_them():
    scripts = {word for command in TRAINING for word in command.split() if word.endswith("_pipeline.py")}
    assert len(scripts) >= 5 and len(TRAINING) >= 20
    assert any("train=megatron infer=vllm" in command for command in TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_a_documented_run_trains_and_ends(number, checkout):
    name = f"run-{number}"
    words = shlex.split(TRAINING[number])
    tool = [sys.executable, "-m", "roll"] if words[0].endswith("roll") else [sys.executable]
    steps = 4 if "profiler" in TRAINING[number] else 1
    short = [f"max_steps={steps}", "eval_steps=0", f"exp_name={name}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [*tool, *words[1:], *short],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    summary = json.loads((checkout / "output" / name / "summary.json").read_text())
    assert summary["status"] == "completed", summary
    shutil.rmtree(checkout / "output" / name)


@pytest.mark.slow
def test_every_stage_reads_what_the_one_before_saved(tmp_path):
    few = ("max_steps=2", "save_steps=2", "eval_steps=0", "val_batch_size=16")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(ROOT / "examples" / "chain_math.sh"), "3", str(tmp_path / "chain"), *few]

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
