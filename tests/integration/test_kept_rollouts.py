"""What runs leave of their steps: rollouts that are trained on again, steps that are replayed or recorded.

And whole runs that train with what sampling chose: the sets of tokens that truncation kept, and a mixture's experts.
"""

import functools
import gzip
import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from roll.__main__ import main
from tests.integration.conftest import assert_same_tensors
from tests.support.contract import save_model
from tests.support.lines import read_lines
from tests.support.resuming import stop_and_resume

pytestmark = pytest.mark.slow

KEYS = (
    "max_steps=2",
    "save_steps=2",
    "val_before_train=false",
    "val_after_train=false",
    "train_env_manager.query_filter_config={type: mean_filter, low: -0.5}",
    "use_kl_loss=true",
    "kl_loss_coef=0.1",
    "kl_loss_penalty=k3+",
    "kl_loss_target=0.0001",
    "train_infer_correction.bypass=true",
    "ppo_epochs=2",
)


ONE_STEP = tuple(f"{role}.training_args.per_device_train_batch_size=8" for role in ("actor_train", "critic"))


def recounted(folder: Path) -> dict[str, float]:
    """A step's metrics, from the episodes that it left."""
    episodes = read_lines(folder / "episodes.jsonl")
    turns = [turn for episode in episodes for turn in episode["turns"]]
    of_episodes = {
        "success": [episode["success"] for episode in episodes],
        "reward": [episode["score"] for episode in episodes],
        "turns": [len(episode["turns"]) for episode in episodes],
        **{
            part: [sum(turn[part] for turn in episode["turns"]) for episode in episodes]
            for part in ("task_reward", "penalty")
        },
    }
    of_turns = {
        "valid_rate": [turn["action"] is not None for turn in turns],
        "response_tokens": [turn["completion_tokens"] for turn in turns],
        "prompt_tokens": [turn["prompt_tokens"] for turn in turns],
    }
    means = {f"rollout/{name}": fmean(values) for name, values in (of_episodes | of_turns).items()}
    trained = [episode for episode in episodes if episode["trained"]]
    tokens = sum(turn["prompt_tokens"] + turn["completion_tokens"] for each in trained for turn in each["turns"])
    return {
        **means,
        "rollout/episodes": len(episodes),
        "rollout/tokens": sum(turn["completion_tokens"] for turn in turns),
        "rollout/cut_off": fmean(turn["finish_reason"] == "length" for turn in turns),
        "kept/episodes": len(trained),
        "kept/reward": fmean(episode["score"] for episode in trained),
        "global_seqlen/mean": tokens,
    }


def test_a_run_on_kept_rollouts_is_the_run_that_kept_them(launch, tmp_path):
    first = launch(*KEYS, f"rollout_dump_dir={tmp_path / 'kept'}").ended()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-00001", "step-00002"]
    assert sum(first.metrics[step]["rollout/filtered"] for step in (1, 2)) > 0
    assert not any(name.startswith(("eval/", "mismatch/")) for step in (0, 1, 2) for name in first.metrics[step])
    assert first.metrics[1]["actor/kl"] == pytest.approx(0, abs=1e-6), "the policy is its reference"
    assert first.metrics[1]["actor/kl_loss_coef"] == 0.1
    assert first.metrics[2]["actor/kl_loss_coef"] == pytest.approx(0.1 * (1 - 0.2 * 24 / 10_000), rel=1e-9)
    assert first.metrics[2]["actor/ratio_mean"] != 1.0

    for step in (1, 2):
        expected = recounted(tmp_path / "kept" / f"step-0000{step}")
        assert {name: first.metrics[step][name] for name in expected} == pytest.approx(expected, rel=1e-12)

    second = launch(*KEYS, f"rollout_replay_dir={tmp_path / 'kept'}", output="again").ended()
    assert (first.faults / "turns.jsonl").exists() and not (second.faults / "turns.jsonl").exists(), "nobody played"
    assert second.repeatable_metrics() == first.repeatable_metrics()
    assert_same_tensors(second.tensors(2), first.tensors(2))


@pytest.mark.parametrize(
    "keys",
    [
        ("adv_estimator=gae", "add_token_level_kl=true", "target_kl=0.001", "reward_norm=running", *ONE_STEP),
        ("async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true"),
    ],
    ids=["gae", "async"],
)
def test_a_step_is_replayed_to_the_bit_and_its_figures_follow_from_what_was_kept(
    launch, replay, tmp_path, keys, capsys
):
    first = launch(*keys, "max_steps=3", "save_steps=2", f"rollout_dump_dir={tmp_path / 'kept'}").ended()
    assert main(["verify", str(first.path)]) == 0
    unchecked = capsys.readouterr().out
    assert "reward/shaped_mean" not in unchecked and ("actor/pg_loss" in unchecked) == (ONE_STEP[0] not in keys)

    said, again = replay(first, 3)
    recorded = first.metrics[3]
    assert {"actor/loss", "actor/grad_norm", "reward/shaped_mean"} <= again.keys()
    assert {name for name in recorded if name.startswith(("actor/", "critic/"))} <= again.keys()
    assert "checkpoint-2" in said

    said, other = replay(first, 3, "actor_train.training_args.learning_rate=0.5", "entropy_loss_coef=0.1")
    assert other["actor/lr"] != recorded["actor/lr"] and other["actor/grad_norm"] != recorded["actor/grad_norm"]
    assert other["reward/shaped_mean"] == recorded["reward/shaped_mean"]
    assert "changed: entropy_loss_coef: was 0.0, is 0.1" in said
    assert re.search(r"actor/grad_norm +\S+ +\S+  differs", said)


# ---- traces of each role and rank, Ray's timeline, model FLOPs beside a peak, the same bits


def test_a_recorded_step_computes_what_another_does(rlvr):
    keys = ("max_steps=2", "save_steps=2", "use_kl_loss=true", "kl_loss_coef=0.1")
    plain = rlvr(*keys, output="plain").ended()
    recorded = "profiler={steps: [2], shapes: true, memory: true, ray_timeline: true, peak_tflops: 0.01}"
    run = rlvr(*keys, recorded, output="recorded").ended()

    assert_same_tensors(run.tensors(2), plain.tensors(2))
    assert run.repeatable_metrics() == plain.repeatable_metrics()
    folder, roles = run.path / "profile", ("actor_infer", "actor_train", "reference")
    assert not (plain.path / "profile").exists()
    traces = {role: folder / f"step-00002-{role}-0.trace.json.gz" for role in roles}
    assert set(folder.iterdir()) == {folder / "ray_timeline.json", *traces.values()}
    for role, file in traces.items():
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        matrices = [event for event in events if event.get("name") in ("aten::mm", "aten::addmm")]
        assert len(matrices) > 5 and all("Input Dims" in event["args"] for event in matrices), role
        resident = [event["args"]["MiB"] for event in events if event["name"] == "resident memory"]
        assert len(resident) > 5 and min(resident) > 100, role
    timeline = json.loads((folder / "ray_timeline.json").read_text())
    assert any("train" in event["name"] for event in timeline)
    for metrics in (run.metrics[1], run.metrics[2]):
        assert metrics["mfu/train"] == pytest.approx(metrics["tflops_per_device/train"] / 0.01)
        assert metrics["tokens_per_s_per_device/train"] == pytest.approx(metrics["tokens_per_s/train"])
    assert "tflops_per_device/train" in plain.metrics[1] and "mfu/train" not in plain.metrics[1]


# ---- what sampling chose; generators/test_experts.py has both engines, unit/rollout/test_trajectory.py the way between

SAMPLING = tuple(f"actor_infer.generating_args.{each}" for each in ("top_p=0.9", "top_k=20", "min_p=0.01"))
KEPT = (*SAMPLING, "train_infer_correction.replay_kept_sets=512")
ASYNC = ("async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true", "kv_after_update=keep")
REFERENCE = ("use_kl_loss=true", "kl_loss_coef=0.01")


@pytest.mark.parametrize("trainer", ["fsdp2_train", "deepspeed_train", "megatron_train"])
def test_before_its_update_the_policy_is_the_one_that_sampled(rlvr, trainer):
    engine = f"actor_train.strategy_args.strategy_name={trainer}"
    run = rlvr(*KEPT, *REFERENCE, "enable_old_logprobs_recompute=true", engine).ended()
    for step in (1, 2):
        metrics = run.metrics[step]
        assert 1 < metrics["rollout/kept_tokens"] <= 20 and metrics["rollout/kept_overflow"] == 0
        assert metrics["mismatch/logprob_diff_max"] < 1e-5
    assert run.metrics[1]["actor/kl_loss"] < 1e-10, "the reference starts as the policy, over the same sets"


@pytest.fixture
def experts(tmp_path: Path) -> tuple[str, ...]:
    """The overrides of a run of a mixture of experts, two optimizer steps to each rollout."""
    save_model(tmp_path / "experts", "experts", 0)
    return f"pretrain={tmp_path / 'experts'}", "ppo_epochs=2", "enable_old_logprobs_recompute=true"


@pytest.mark.parametrize(
    ("mode", "trainer"),
    [
        ("R3", "fsdp2_train"),
        ("R2", "fsdp2_train"),
        ("R3", "megatron_train"),
        ("R2", "megatron_train"),
        ("R3", "deepspeed_train"),
    ],
)
def test_a_policy_is_trained_with_the_experts_that_were_chosen_before(rlvr, experts, mode, trainer):
    engine = (f"actor_train.strategy_args.strategy_name={trainer}", f"actor_train.router_replay.mode={mode}")
    run = rlvr(*experts, *REFERENCE, *engine).ended()  # the reference's routers choose by themselves
    for step in (1, 2):
        metrics = run.metrics[step]
        assert metrics["router_replay/share"] == 1 and metrics["actor/skipped_steps"] == 0
        assert metrics["mismatch/logprob_diff_max"] < 2e-5


def test_a_stopped_run_beside_training_resumes_with_the_experts_of_its_rollouts(rlvr, experts):
    start = functools.partial(rlvr, *experts, "actor_train.router_replay.mode=R3", "max_steps=4")
    whole, _ = stop_and_resume(start, 4)
    assert {metrics["router_replay/share"] for step, metrics in whole.metrics.items() if step} == {1.0}


def test_what_was_sampled_under_several_weights_keeps_its_experts(rlvr, experts):
    run = rlvr(*experts, *ASYNC, "actor_train.router_replay.mode=R3", "max_steps=4").ended()
    assert {metrics["router_replay/share"] for step, metrics in run.metrics.items() if step} == {1.0}
