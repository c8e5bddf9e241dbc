"""Metrics counted again from rows: all follow, and each that is perturbed is found; and rows token by token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms.shaping import Shaping
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import WorkerConfig
from roll.data.requests import FinishReason
from roll.pipeline.prompts import reward_metrics
from roll.pipeline.rollouts import drop_oldest, token_rows, training_lines, write_rollouts, write_scores
from roll.report.verification import verify
from roll.rollout.metrics import rollout_metrics, step_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Collected, RolloutGroup
from roll.tracking.run import to_json
from tests.support.cli import call, refused
from tests.support.lines import write_lines
from tests.support.rollouts import make_trajectory, told_turn

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
