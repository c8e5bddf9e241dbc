"""What is run on a machine with a GPU, rehearsed on one without: the same steps, smaller."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # two minutes of other tests and a demonstration
def test_the_gpu_check_is_rehearsed_without_a_gpu_and_leaves_its_figures(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GPU_CHECK_SECONDS": "780"}
    script = [str(ROOT / "scripts" / "gpu_check.sh"), "--rehearse", str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=800)
    log = (tmp_path / "check.log").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    check = json.loads((tmp_path / "check.json").read_text())
    assert set(check["steps"]) == {"versions", "tests", "demonstration", "benchmarks"}
    assert check["demonstration"]["status"] == "completed"
    assert all("error" not in figures for figures in check["figures"].values())
    assert {"train/fsdp2_train", "generate/hf_infer", "weights/fsdp2_train"} <= set(check["figures"])


def test_a_wrong_call_shows_the_usage():
    done = subprocess.run([str(ROOT / "scripts" / "gpu_check.sh")], capture_output=True, text=True)
    assert done.returncode == 2 and "KIT_FOLDER OUT_FOLDER" in done.stderr


def test_a_damaged_kit_is_not_installed_and_the_figures_say_so(tmp_path):
    kit = tmp_path / "kit"
    kit.mkdir()
    (kit / "kit.tar.xz.00").write_bytes(b"damaged")
    (kit / "SHA256SUMS").write_text(f"{'0' * 64}  kit.tar.xz.00\n")
    environment = {**os.environ, "GPU_CHECK_ENV": str(tmp_path / "env")}
    script = [str(ROOT / "scripts" / "gpu_check.sh"), str(kit), str(tmp_path / "out")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "cannot be installed" in done.stderr
    steps = json.loads((tmp_path / "out" / "check.json").read_text())["steps"]
    assert list(steps) == ["install"] and steps["install"]["exit_code"] == 1
    assert "FAILED" in (tmp_path / "out" / "check.log").read_text()
