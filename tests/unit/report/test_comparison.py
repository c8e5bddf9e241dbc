"""Runs beside each other: settings, seeds as noise, and where runs part that should agree."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.__main__ import main
from roll.configs.rlvr import RLVRConfig
from roll.report.comparison import Comparison, Run, t_quantile

STEPS = 9


def made(folder: Path, name: str, success: float = 0.5, seed: int = 1, **settings: Any) -> Run:
    """A run that ends with a held-out success."""
    path = folder / name
    (path / "trajectories").mkdir(parents=True)
    config = RLVRConfig(exp_name=name, seed=seed, **settings).model_dump(mode="json")
    (path / "config.yaml").write_text(json.dumps(config))
    versions = {"torch": "2.9.0", "python": "3.12" if name == "b" else "3.11"}
    (path / "summary.json").write_text(json.dumps({"versions": versions, "data": {"train": {"digest": "1"}}}))
    lines: list[dict[str, Any]] = [
        {"step": step, "rollout/reward": 0.1 * step, "actor/entropy": 1.0, "time/train": success}
        for step in range(1, STEPS + 1)
    ]
    lines[-1] |= {"eval/success": success, "eval/prompts": 100}
    write(path, lines)
    for step in range(1, STEPS + 1):
        record = {"group_id": step, "member": 0, "turns": [{"text": "a"}, {"text": f"the answer is {step}"}]}
        (path / "trajectories" / f"train-{step:05d}.jsonl").write_text(json.dumps(record) + "\n")
    return Run.read(path, name)


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_settings_software_and_data_that_differ_are_told_and_free_keys_only_named(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a"), made(tmp_path, "b", use_kl_loss=True, reference={}, num_renders=9)]
    text = Comparison(runs).text()
    assert "  use_kl_loss: false | true\n" in text and "  reference: null | a section\n" in text
    assert "reference." not in text and "2 more keys differ" in text and "exp_name, num_renders\n" in text
    assert '  python: "3.11" | "3.12"\n' in text and "torch" not in text and "Data that differ: none" in text


@pytest.mark.parametrize(
    ("gain", "words"), [(0.2, "larger than the noise of seeds"), (0.01, "within the noise of seeds")]
)
def test_a_difference_is_judged_by_the_noise_of_seeds(tmp_path: Path, gain: float, words: str) -> None:
    old, new = (0.50, 0.52, 0.54), tuple(value + gain for value in (0.50, 0.54, 0.52))
    runs = [made(tmp_path, f"old{seed}", value, seed) for seed, value in enumerate(old)]
    runs += [made(tmp_path, f"new{seed}", value, seed, adv_estimator="grpo") for seed, value in enumerate(new)]
    found = Comparison(runs)
    assert [len(group) for group in found.groups] == [3, 3]
    half = t_quantile(4) * math.sqrt(2 * np.var(old, ddof=1) / 3)
    line = next(each for each in found.verdicts() if each.startswith("held-out success"))
    assert f"{gain:+.4g}, 95% interval {gain - half:+.4g} to {gain + half:+.4g}: {words}" in line
    mean = f"{0.52:.4g} ± {t_quantile(2) * 0.02 / math.sqrt(3):.2g} (3 seeds)"
    assert mean in dict(found.figures())["held-out success"]


def test_single_runs_are_judged_by_the_noise_of_their_evaluations_alone(tmp_path: Path) -> None:
    found = Comparison([made(tmp_path, "a", 0.2), made(tmp_path, "b", 0.6, adv_estimator="grpo")])
    (line,) = (each for each in found.verdicts() if "held-out" in each)
    assert "larger than the noise of the evaluations; that of seeds is unknown" in line


def test_equal_runs_that_part_are_told_with_step_phase_metric_and_response(tmp_path: Path) -> None:
    runs = [made(tmp_path, name) for name in ("a", "b", "c")]
    lines = [dict(each) for each in runs[1].metrics]
    lines[4]["actor/entropy"] = 1.5
    lines[5]["rollout/reward"] = 9.0
    write(tmp_path / "b", lines)
    record = {"group_id": 5, "member": 0, "turns": [{"text": "a"}, {"text": "the answer as 5"}]}
    (tmp_path / "b" / "trajectories" / "train-00005.jsonl").write_text(json.dumps(record) + "\n")
    parted, same = Comparison([Run.read(tmp_path / name, name) for name in ("a", "b", "c")]).partings()
    assert "they part in step 5, phase train: actor/entropy is 1.0 and 1.5 (1 metrics differ)" in parted
    assert "at letter 12 one says 'the answer is 5', the other 'the answer as 5' (step 5, group 5" in parted
    assert same.endswith("all metrics are the same but those of time and memory")


def test_the_command_writes_text_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(made(tmp_path, name, seed=seed).folder) for seed, name in enumerate(("a", "b"))]
    page = tmp_path / "compare.html"
    assert main(["compare", *folders, "-o", str(page)]) == 0
    assert "held-out success: 0.5 ± 0 (2 seeds)" in capsys.readouterr().out
    drawings = page.read_text(encoding="utf-8").split("<svg")[1:]
    assert len(drawings) == 3
    for drawn in drawings:
        ElementTree.fromstring("<svg" + drawn.partition("</svg>")[0] + "</svg>")
    assert main(["compare", folders[0], str(tmp_path)]) == 2 and "expected a run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", folders[0]])


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (60, 2.000)]
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, rel=3e-3)
