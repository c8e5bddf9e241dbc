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


def test_a_cause_in_one_tag_alone_is_named_with_it() -> None:
    sound = record(SOUND)
    good, bad = {"rollout/maths/valid_rate": 0.95}, {"rollout/code/valid_rate": 0.02, "rollout/code/no_spread": 0.9}
    counts = {"rollout/maths/episodes": 64.0, "rollout/code/episodes": 192.0, "rollout/maths/no_spread": 0.1}
    steps = [{**step, "rollout/reward": 0.3, **counts, **good, **bad} for step in sound.steps]
    found = {each.cause: each for each in diagnose(RunRecord(sound.config, steps)).findings}
    judged = found["nothing-to-judge"]
    assert judged.text.startswith("of code, 75% of the episodes: in 98% of the responses no answer")
    assert judged.weight == pytest.approx(0.98 * 0.75) and judged.evidence[0].startswith(
        "rollout/code/valid_rate: 0.02"
    )
    assert "groups-have-no-spread" in found and "maths" not in str(list(found.values()))
    steps = [{**step, "rollout/valid_rate": 0.2} for step in steps]
    judged = diagnose(RunRecord(sound.config, steps)).findings[0]
    assert judged.cause == "nothing-to-judge" and judged.evidence[-1].startswith("only in: code (in 98% of")


@pytest.mark.parametrize(("prompt", "cause"), [("user: 1+1=", True), ("<|im_start|>user\n1+1=<|im_end|>\n", False)])
def test_prompts_without_the_models_template_are_found(tmp_path: Path, prompt: str, cause: bool) -> None:
    sound = record(SOUND)
    sampled = [{name: each for name, each in step.items() if not name.startswith("eval")} for step in sound.steps]
    steps = [{**step, "rollout/reward": 0.3, "rollout/cut_off": 0.95} for step in sampled]
    (tmp_path / "config.yaml").write_text(json.dumps({**sound.config, "pretrain": str(tmp_path / "model")}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    for folder in ("model", "trajectories"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m }}<|im_end|>{% endfor %}"
    )
    row = {"tokens": [prompt, ["2", -1.0], ["<|im_end|>", -1.0], ["3", -1.0]]}
    (tmp_path / "trajectories" / "tokens-00009.jsonl").write_text(json.dumps(row) + "\n")
    found = diagnose(RunRecord.read(tmp_path)).findings
    never = next(each for each in found if each.cause == "responses-never-end")
    assert "<|im_end|> is written, but it does not end the response" in never.text
    assert [each.cause for each in found].count("template-is-another") == cause
    if cause:
        assert found[0].cause == "template-is-another" and "a prompt begins with: user: 1+1=" in found[0].evidence


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
