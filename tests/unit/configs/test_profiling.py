"""Recordings that cannot be made are refused before the start."""

from __future__ import annotations

import pytest

from roll.__main__ import main
from roll.configs.pipeline import ProfilerConfig


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        ("profiler.roles=[actor_train,nobody]", "profiler.roles", "actor_train"),
        ("profiler.ranks=[0,64]", "profiler.ranks", "ranks below"),
        ("profiler.steps=[1,100000]", "profiler.steps", "at most"),
        ("profiler.steps=[0]", "profiler.steps", "at least 1"),
        ("profiler.steps=[2,2]", "profiler.steps", "each once"),
        ("profiler.nsight={output: here}", "profiler.nsight", "without o"),
        ("profiler.peak_tflops=0", "profiler.peak_tflops", "more than 0"),
    ],
)
def test_what_is_not_there_cannot_be_recorded(change: str, path: str, expected: str, capsys) -> None:
    assert main(["validate", "rlvr_math", change]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"1. {path} got" in said and expected in said


def test_nsight_needs_nsys_before_anything_starts(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["train", "rlvr_math", "profiler.nsight={}"]) == 2
    assert "nsys (Nsight Systems)" in capsys.readouterr().err


def test_ranks_by_role() -> None:
    config = ProfilerConfig(roles=["critic"], ranks=[0, 2])
    assert config.profiled("critic", 2) == [0] and config.profiled("actor_train", 2) == []
    assert ProfilerConfig(ranks=None).profiled("actor_train", 3) == [0, 1, 2]
