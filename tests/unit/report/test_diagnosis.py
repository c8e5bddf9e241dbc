"""Whether a run learns, and the cause that is found where it does not: over the records of real broken runs."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.__main__ import main
from roll.report.diagnosis import diagnose, slope_in_sigma
from roll.report.record import RunRecord

SOUND = "sound"
RECORDS: dict[str, Any] = json.loads(gzip.decompress(Path(__file__).with_name("recipes.json.gz").read_bytes()))


def record(name: str) -> RunRecord:
    return RunRecord(**RECORDS[name]["record"])


@pytest.mark.parametrize("name", [name for name, each in RECORDS.items() if each["cause"] is not None])
def test_the_cause_of_a_broken_run_is_first(name: str) -> None:
    found = diagnose(record(name))
    assert not found.learns
    assert found.findings[0].cause == RECORDS[name]["cause"]
    assert found.findings[0].advice in found.text().replace("\n     ", " ")


@pytest.mark.parametrize("name", [name for name, each in RECORDS.items() if each["cause"] is None])
def test_a_sound_run_is_never_accused(name: str) -> None:
    """Nor is its beginning, from where a run looks at itself."""
    whole = record(name)
    found = diagnose(whole)
    assert found.learns and not found.findings
    for count in range(10, len(whole.steps)):
        begun = dataclasses.replace(whole, steps=whole.steps[:count], before={}, after={}, groups=())
        assert diagnose(begun).remark is None


@pytest.mark.parametrize(
    ("cause", "metrics", "settings"),
    [
        ("nothing-to-judge", {"rollout/valid_rate": 0.1}, {}),
        ("episodes-fail", {"rollout/dropped": 200.0}, {}),
        ("groups-of-one", {}, {"num_return_sequences_in_group": 1}),
        ("tasks-are-too-easy", {"rollout/no_spread": 0.9, "rollout/all_right": 0.9}, {}),
        ("groups-have-no-spread", {"rollout/no_spread": 0.8, "rollout/all_wrong": 0.6}, {}),
        ("clipping-binds", {"actor/clip_frac": 0.75}, {}),
        ("steps-are-skipped", {"actor/skipped_steps": 1.0}, {}),
        ("generator-has-old-weights", {"mismatch/logprob_diff_mean": 0.4}, {}),
        ("rollouts-are-old", {"async/token_lag": 5.0}, {}),
    ],
)
def test_other_causes_are_found(cause: str, metrics: dict[str, float], settings: dict[str, Any]) -> None:
    sound = record(SOUND)
    steps = [{**step, "rollout/reward": 0.3, **metrics} for step in sound.steps]
    found = diagnose(RunRecord({**sound.config, **settings}, steps))
    assert [each.cause for each in found.findings][:1] == [cause]
    assert all(name in " ".join(found.findings[0].evidence) for name in metrics if name != "rollout/all_wrong")


def test_a_collapse_of_the_entropy_is_found() -> None:
    sound = record(SOUND)
    steps = [{**step, "rollout/reward": 0.3, "actor/entropy": 0.8 * 0.7**n} for n, step in enumerate(sound.steps)]
    assert diagnose(RunRecord(sound.config, steps)).findings[0].cause == "entropy-collapsed"


@pytest.mark.parametrize("seed", range(3))
def test_the_slope_in_standard_errors_is_that_of_least_squares(seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=9) + 0.2 * seed * np.arange(9)
    (slope, _), covariance = np.polyfit(np.arange(9), values, 1, cov=True)
    assert slope_in_sigma(values.tolist()) == pytest.approx(slope / np.sqrt(covariance[0, 0]))


def test_the_command_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = record("tiny_learning_rate")
    (tmp_path / "config.yaml").write_text(json.dumps(broken.config))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in broken.steps))
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "[learning-rate-is-too-low]" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["cause"] == "learning-rate-is-too-low"
    assert main(["diagnose", str(tmp_path / "nothing")]) == 2
    assert "expected a run's folder" in capsys.readouterr().err
