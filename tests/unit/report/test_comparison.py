"""Runs beside each other: settings, seeds as noise, and where runs part that should agree."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from roll.configs.rlvr import RLVRConfig
from roll.report.comparison import Comparison, Run, t_quantile
from roll.rollout.types import Collected, RolloutGroup
from tests.support.cli import call, refused
from tests.support.lines import write_lines
from tests.support.rollouts import make_trajectory, told_turn

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
    write_lines(path / "metrics.jsonl", lines)
    for step in range(1, STEPS + 1):
        answered(path, step, f"the answer is {step}")
    return Run.read(path, name)


def answered(path: Path, step: int, text: str) -> None:
    record = {"group_id": step, "member": 0, "turns": [{"text": "a"}, {"text": text}]}
    write_lines(path / "trajectories" / f"train-{step:05d}.jsonl", [record])


def partings(folder: Path, *names: str) -> list[str]:
    return Comparison([Run.read(folder / name, name) for name in names]).partings()


def test_settings_software_and_data_that_differ_are_told_and_free_keys_only_named(tmp_path):
    runs = [made(tmp_path, "a"), made(tmp_path, "b", use_kl_loss=True, reference={}, num_renders=9)]
    text = Comparison(runs).text()
    assert "  use_kl_loss: false | true\n" in text and "  reference: null | a section\n" in text
    assert "reference." not in text and "2 more keys differ" in text and "exp_name, num_renders\n" in text
    assert '  python: "3.11" | "3.12"\n' in text and "torch" not in text and "Data that differ: none" in text


@pytest.mark.parametrize(
    ("gain", "words"), [(0.2, "larger than the noise of seeds"), (0.01, "within the noise of seeds")]
)
def test_a_difference_is_judged_by_the_noise_of_seeds(tmp_path, gain, words):
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


def test_single_runs_are_judged_by_the_noise_of_their_evaluations_alone(tmp_path):
    found = Comparison([made(tmp_path, "a", 0.2), made(tmp_path, "b", 0.6, adv_estimator="grpo")])
    (line,) = (each for each in found.verdicts() if "held-out" in each)
    assert "larger than the noise of the evaluations; that of seeds is unknown" in line


def test_equal_runs_that_part_are_told_with_step_phase_metric_and_response(tmp_path):
    runs = [made(tmp_path, name) for name in ("a", "b", "c")]
    lines = [dict(each) for each in runs[1].metrics]
    lines[4]["actor/entropy"] = 1.5
    lines[5]["rollout/reward"] = 9.0
    write_lines(tmp_path / "b" / "metrics.jsonl", lines)
    answered(tmp_path / "b", 5, "the answer as 5")
    parted, response, weights, cause, *same = partings(tmp_path, "a", "b", "c")
    assert "they part in step 5, phase train: actor/entropy is 1.0 and 1.5 (1 metrics differ)" in parted
    place = "in step 5, group 5, member 0, turn 2: at letter 12"
    assert f"{place} one says 'the answer is 5', the other 'the answer as 5'" in response
    assert "no checkpoint" in weights and "nothing but python (" in cause and "does not explain it" in cause
    assert same[0].endswith("all metrics are the same but those of time and memory")
    assert same[1].startswith("  response: those that were written up to then are the same") and len(same) == 2

    lines[4]["actor/entropy"], lines[5]["rollout/reward"] = 1.0, runs[2].metrics[5]["rollout/reward"]
    write_lines(tmp_path / "b" / "metrics.jsonl", lines)  # another response of the same length and reward
    same, response, cause = partings(tmp_path, "c", "b")
    assert same.endswith("all metrics are the same but those of time and memory")
    assert "in step 5, group 5" in response and "how large the first difference is, is not known" in cause


def test_rows_that_differ_are_found_where_all_metrics_are_the_same(tmp_path):
    for number, name in enumerate(("a", "c")):
        made(tmp_path, name, rollout_dump_dir=str(tmp_path / f"kept_{name}"))
        for step in (1, 2):
            kept(tmp_path / f"kept_{name}", step, 0.0, flip=bool(number) and step == 2)
    same, token, cause = partings(tmp_path, "a", "c")
    assert same.endswith("all metrics are the same but those of time and memory")
    assert "the first that differs is in step 2, group 2, member 1, turn 1, token 3: id 7 and 8" in token
    assert "the first difference is a token after equal log-probs" in cause


def kept(folder: Path, step: int, size: float, flip: bool) -> None:
    """Rollouts of a step; ``size``: how far log-probs are away; ``flip``: one response has another third token."""
    groups = []
    for number in (1, 2):
        episodes = []
        for member in range(2):
            other = flip and (number, member) == (2, 1)
            told = {"logprobs": np.full(3, -1 - size * member, np.float32), "engine": member}
            turn = told_turn("five" if other else "four", reward=1.0, ids=[5, 6, 8 if other else 7], **told)
            episodes.append(
                make_trajectory([turn], tag="maths", group=number, member=member, success=True, history=False)
            )
        groups.append(RolloutGroup(number, "maths", episodes))
    Collected(groups, []).save(folder / f"step-{step:05d}")


@pytest.mark.parametrize(("size", "words"), [(2e-7, "That explains it"), (0.01, "does not explain it")])
def test_runs_with_other_kernels_part_at_a_token_and_in_tensors_and_the_kernels_are_judged(tmp_path, size, words):
    for number, name in enumerate(("a", "c")):
        dump = tmp_path / f"kept_{name}"
        run = made(tmp_path, name, rollout_dump_dir=str(dump))
        for step in (1, 2, 3):
            kept(dump, step, size * number if step > 1 else 0.0, flip=bool(number) and step == 3)
        lines = [dict(each) for each in run.metrics]
        lines[2]["rollout/reward"] += number
        write_lines(run.folder / "metrics.jsonl", lines)
        summary = json.loads((run.folder / "summary.json").read_text())
        summary["versions"]["kernels"] = ("AVX2", "DEFAULT")[number]
        (run.folder / "summary.json").write_text(json.dumps(summary))
        for step in (1, 2):
            model = run.folder / "checkpoints" / f"checkpoint-{step}" / "actor_train"
            model.mkdir(parents=True)
            tensors = {each: torch.linspace(-2, 3, 8) for each in ("near", "far", "same")}
            if number and step == 2:
                tensors["near"][0] = torch.nextafter(tensors["near"][0], torch.tensor(9.0))
                tensors["far"][:4] += 0.5
            save_file(tensors, model / "model.safetensors")
    told = "\n".join(partings(tmp_path, "a", "c"))
    workers = " (sampled by generating worker 1 and 1)"
    place = f"in group 1, member 1, turn 1, token 1{workers}"
    assert f"differ from step 2 on, there by up to {np.float32(1 + size) - 1:.2g} {place}" in told
    token = f"token 3: id 7 and 8{workers}; at letter 2 one says 'four'"
    assert f"in step 3, group 2, member 1, turn 1, {token}" in told
    assert "equal in checkpoint-1, in checkpoint-2 2 of 3 tensors differ" in told
    far = told.index("actor_train far: 50.0% of the values, by up to 0.5 (0.17 of")
    near = told.index("actor_train near")
    assert far < near and "in the last 1 bits" in told[near:]
    assert f'differ in nothing but kernels ("AVX2" | "DEFAULT"){". " if size < 1e-3 else ", which "}{words}' in told


def test_the_command_writes_text_and_a_page(tmp_path, capsys):
    folders = [made(tmp_path, name, seed=seed).folder for seed, name in enumerate(("a", "b"))]
    page = tmp_path / "compare.html"
    assert "held-out success: 0.5 ± 0 (2 seeds)" in call(capsys, "compare", *folders, "-o", page)[0]
    drawings = page.read_text(encoding="utf-8").split("<svg")[1:]
    assert len(drawings) == 3
    for drawn in drawings:
        ElementTree.fromstring("<svg" + drawn.partition("</svg>")[0] + "</svg>")
    assert "expected a run's folder" in refused(capsys, "compare", folders[0], tmp_path)
    refused(capsys, "compare", folders[0])


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (60, 2.000)]
)
def test_students_quantiles_are_those_of_the_tables(degrees, value):
    assert t_quantile(degrees) == pytest.approx(value, rel=3e-3)
