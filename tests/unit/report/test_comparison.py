"""Figures of runs: beside those of others, which they should agree with or not, and counted again from their rows."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from roll.algorithms.shaping import Shaping
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import WorkerConfig
from roll.data.requests import FinishReason
from roll.pipeline.prompts import reward_metrics
from roll.pipeline.rollouts import drop_oldest, token_rows, training_lines, write_rollouts, write_scores
from roll.report.comparison import Comparison, Run, t_quantile
from roll.report.verification import verify
from roll.rollout.metrics import rollout_metrics, step_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Collected, RolloutGroup
from roll.tracking.run import to_json
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


# Metrics counted again from rows: all follow, and each that is perturbed is found; and rows token by token

CONFIG = RLVRConfig(
    adv_estimator="grpo",
    num_return_sequences_in_group=4,
    rewards={"maths": {"tag_included": ["a"], "verifiers": [{"name": "math"}]}},
    reward_norm="running",
)


def group(number: int, rng: np.random.Generator) -> RolloutGroup:
    """Four responses of random lengths and scores."""
    members = []
    for member in range(4):
        ids = rng.integers(5, 90, rng.integers(3, 20))
        ids = np.resize(ids, 2 * len(ids)) if member == 1 else ids  # it says all of it twice
        reason = FinishReason.LENGTH if member == 3 else FinishReason.STOP
        score = float(rng.integers(0, 2)) if number else 1.0
        said, penalty = (None, -0.25) if member == 2 else (str(score), 0.0)
        turn = told_turn("so", "how many?", said, score, penalty, ids=ids, prompt=range(5), finish_reason=reason)
        info = {"math/score": score, "length": len(ids)} | ({"over_budget": "too long"} if member == 3 else {})
        members.append(make_trajectory([turn], tag="a", group=number, member=member, success=score > 0, info=info))
    return RolloutGroup(number, "a", tuple(members))


def a_run(folder: Path, steps: int = 2) -> tuple[Path, list[dict[str, float]]]:
    """What a run writes of two steps and an evaluation, and its metrics."""
    rng, shaping = np.random.default_rng(0), Shaping(CONFIG.parts)
    config = {**CONFIG.model_dump(mode="json"), "rollout_dump_dir": str(folder / "kept")}
    (folder / "trajectories").mkdir()
    (folder / "config.yaml").write_text(json.dumps(config))
    held_out = [group(number, rng) for number in range(3)]
    (folder / "trajectories" / "eval-00000.jsonl").write_text(training_lines(held_out, []))
    lines: list[dict[str, float]] = [{"step": 0, **rollout_metrics(held_out, "eval"), "time/eval": 1.0}]
    for step in range(1, steps + 1):
        collected = Collected([group(4 * step + n - 4, rng) for n in range(3)], [group(4 * step - 1, rng)])
        write_rollouts(str(folder / "kept"), step, collected)
        finished = [*collected.groups, *collected.rejected]
        metrics = step_metrics(collected, filters=True) | reward_metrics(finished, CONFIG)
        metrics["rollout/attained"] = float(np.mean([each.score for one in finished for each in one.trajectories]))
        metrics |= shaping(groups_to_batch(collected.groups, ["a"]))[1]
        lines.append({"step": step, **metrics, "actor/loss": 0.5})
    write_lines(folder / "metrics.jsonl", lines)
    return folder, lines


def trained_by(kept: Path, args: dict[str, Any], **changes: Any) -> RLVRConfig:
    """Three groups a step, on one device."""
    worker = WorkerConfig(model_args={"dtype": "fp32"}, training_args=args, device_mapping=[0])
    same = {"rollout_batch_size": 3, "rollout_dump_dir": str(kept), "actor_train": worker}
    return CONFIG.model_copy(update=same | changes)


def test_all_figures_follow_from_the_rows_and_each_that_is_perturbed_is_found(tmp_path):
    folder, lines = a_run(tmp_path)
    config = CONFIG.model_copy(update={"rollout_dump_dir": str(tmp_path / "kept")})
    found = verify(folder, config)
    assert not found.wrong
    areas = {name.partition("/")[0] for name in found.checked}
    assert areas == {"rollout", "kept", "reward", "actor", "eval"} and len(found.checked) > 35
    some = {"reward/shaped_mean", "actor/advantage_std", "rollout/no_spread", "reward/maths/math/score"}
    others = {"rollout/repetition", "rollout/attained", "reward/maths/over_budget", "reward/over_budget"}
    assert some | others <= found.checked.keys() and all(lines[2][name] > 0 for name in others)
    assert found.unchecked["trainer"] == ["actor/loss"] and "time/eval" in found.unchecked["measured"]
    for name in found.checked:
        at = 0 if name.startswith("eval/") else 2
        changed = lines[at] | {name: lines[at][name] + 1e-3}
        write_lines(folder / "metrics.jsonl", [*lines[:at], changed, *lines[at + 1 :]])
        (wrong,) = verify(folder, config).wrong
        assert (wrong.step, wrong.metric, wrong.counted) == (at, name, pytest.approx(lines[at][name]))


@pytest.mark.parametrize("scored", ["all", "none"])
def test_losses_follow_from_the_log_probs_before_the_update(tmp_path, scored):
    """One optimizer step: the policy's figures by their formulas in float64, and each that is perturbed is found."""
    rng = np.random.default_rng(2)
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_penalty": "k3", "loss_agg_mode": "token-mean"}
    config = trained_by(tmp_path, {"per_device_train_batch_size": 12}, **changes)
    collected = Collected([group(number, rng) for number in range(1, 4)], [])
    write_rollouts(str(tmp_path), 1, collected)
    batch = groups_to_batch(collected.groups, ["a"])
    mask_T = batch.loss_mask_T
    given_T = torch.from_numpy(rng.normal(-1.0, 0.3, (2, batch.num_tokens))).float() * mask_T
    batch = batch.replace(ref_logprobs_T=given_T[1], **({"old_logprobs_T": given_T[0]} if scored == "all" else {}))
    write_scores(str(tmp_path), 1, batch)
    advantages_T = Shaping(config.parts)(batch)[0].advantages_T
    pg = -float(advantages_T[mask_T].double().mean())
    gap_M = (given_T[1] - given_T[0])[mask_T].double()
    kl = float((gap_M.exp() - 1 - gap_M).mean())
    printed = {"actor/pg_loss": pg, "actor/ratio_mean": 1.0, "actor/clip_frac": 0.0, "actor/approx_kl": 0.0}
    printed |= {"actor/kl_loss": kl, "actor/loss": pg + 0.1 * kl, "actor/entropy": 2.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **printed}])
    found = verify(tmp_path, config)
    assert not found.wrong
    unknown = {"actor/entropy"} | ({"actor/kl_loss", "actor/loss"} if scored == "none" else set())
    assert set(found.checked) == printed.keys() - unknown
    for name in found.checked:
        write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **printed, name: printed[name] + 0.01}])
        assert [each.metric for each in verify(tmp_path, config).wrong] == [name]


def test_schedules_tokens_by_rank_and_passes_over_the_data_follow_from_the_steps_so_far(tmp_path):
    """Two optimizer steps in each of three steps; the rate falls by a sixth of its peak with each that is taken."""
    args = {"learning_rate": 6e-8, "lr_scheduler_type": "linear", "per_device_train_batch_size": 6}
    config = trained_by(tmp_path, args, max_steps=3)
    (tmp_path / "summary.json").write_text('{"data": {"actor_train.data_args": {"samples": 4}}}')
    rng, lines = np.random.default_rng(3), list[dict[str, Any]]()
    for step, rate, skipped in ((1, 5.5e-8, 0), (2, None, 1), (3, 2.5e-8, 0)):
        groups = [group(3 * step + number - 2, rng) for number in range(3)]
        write_rollouts(str(tmp_path), step, Collected(groups, []))
        batch = groups_to_batch(groups, ["a"])
        lengths = batch.lengths_B.tolist()
        parts = {"min": min(sum(lengths[:6]), sum(lengths[6:])), "mean": sum(lengths) / 2}
        line = {"step": step, "actor/num_tokens": batch.num_tokens / 2, "actor/skipped_steps": skipped}
        line["rollout/epoch"] = (3 * step + 1) // 4
        line |= {f"global_seqlen/{name}": float(value) for name, value in parts.items()}
        lines.append(line | ({} if rate is None else {"actor/lr": rate}))
    write_lines(tmp_path / "metrics.jsonl", lines)
    found = verify(tmp_path, config)
    assert not found.wrong and found.checked["actor/lr"] == 2 and found.checked["rollout/epoch"] == 3
    for name, change in (("actor/lr", 1e-10), ("actor/num_tokens", 1), ("rollout/epoch", 1), ("global_seqlen/min", 1)):
        write_lines(tmp_path / "metrics.jsonl", [*lines[:2], {**lines[2], name: lines[2][name] + change}])
        assert [each.metric for each in verify(tmp_path, config).wrong] == [name]


def test_steps_that_the_bound_has_deleted_are_told(tmp_path, capsys):
    folder, _ = a_run(tmp_path, steps=4)
    kept = tmp_path / "kept"
    size = sum(file.stat().st_size for file in kept.glob("step-*/*"))
    assert drop_oldest(kept, 4, size) == [] and drop_oldest(kept, 4, size - 1) == [1]
    assert drop_oldest(kept, 4, 1) == [2], "the two newest stay"
    assert "the rollouts of step 1 to 2 are not kept: rollout_dump_gb" in call(capsys, "verify", folder)[0]


def test_a_changed_row_is_found_and_an_incomplete_evaluation_is_not_counted(tmp_path):
    folder, _ = a_run(tmp_path, steps=1)
    rows = (folder / "trajectories" / "eval-00000.jsonl").read_text().splitlines()
    path = folder / "kept" / "step-00001" / "episodes.jsonl"
    path.write_text(path.read_text().replace('"finish_reason": "stop"', '"finish_reason": "length"', 1))
    (folder / "trajectories" / "eval-00000.jsonl").write_text("\n".join(rows[1:]) + "\n")
    found = verify(folder, CONFIG.model_copy(update={"num_written_episodes": 11}), folder / "kept")
    assert [each.metric for each in found.wrong] == ["rollout/cut_off"]
    assert "eval/success" in found.unchecked["num_written_episodes"]
    assert "eval/episodes" in {each.metric for each in verify(folder, CONFIG).wrong}, "with room for more it is whole"


def test_the_command_tells_what_differs_and_what_would_have_to_be_recorded(tmp_path, capsys):
    folder, lines = a_run(tmp_path)
    out, _ = call(capsys, "verify", folder)
    assert "metrics were counted again: all follow from the rows on disk" in out
    assert "1 metrics follow from what a model computes while it trains" in out and "  actor/loss\n" in out
    lines[1]["rollout/reward"] += 0.125
    write_lines(folder / "metrics.jsonl", lines)
    assert "1 differ:\n  step 1: rollout/reward is" in call(capsys, "verify", folder, code=1)[0]
    (tmp_path / "kept").rename(tmp_path / "moved")
    call(capsys, "verify", folder)  # the evaluation alone
    call(capsys, "verify", folder, "--rollouts", tmp_path / "moved", code=1)
    (folder / "trajectories" / "eval-00000.jsonl").unlink()
    assert "nothing can be counted again" in refused(capsys, "verify", folder)


def test_telling_rows_are_written_token_by_token():
    rng, shaping = np.random.default_rng(1), Shaping(CONFIG.parts)
    batch, _ = shaping(groups_to_batch([group(number, rng) for number in range(1, 4)], ["a"]))
    sampled_T = batch.rollout_logprobs_T
    on_policy_B = torch.arange(12) > 5
    batch = batch.replace(old_logprobs_T=sampled_T - (batch.rows_T == 3) * 0.5, on_policy_B=on_policy_B)
    mean_B = [float(batch.advantages_T[(batch.rows_T == row) & batch.loss_mask_T].mean()) for row in range(12)]
    rows = list(token_rows(batch, ["a"], lambda ids: "".join(chr(index) for index in ids)))
    moved = batch.select([3])
    for number, row in ((0, int(np.argmax(mean_B))), (1, int(np.argmin(mean_B))), (2, 3)):
        one, found = batch.select([row]), rows[number]
        given, *said = found["tokens"]
        assert given == "\x00\x01\x02\x03\x04" and [each[0] for each in said] == [chr(i) for i in one.tokens_T[5:]]
        assert [each[3] for each in said] == pytest.approx(one.advantages_T[5:].tolist(), abs=1e-4)
        assert (said[0][2] is None) == bool(on_policy_B[row]) and found["group"] == int(one.group_B[0])
        assert sum(each[4] for each in said) == pytest.approx(float(one.rewards_T.sum()), abs=1e-4)
    assert {each[2] for each in rows[2]["tokens"][1:]} == {-0.5} and len(rows[2]["tokens"]) == moved.num_tokens - 4
    assert json.loads(to_json(rows)) == rows
