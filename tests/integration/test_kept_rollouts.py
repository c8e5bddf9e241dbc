"""An agentic run that filters and keeps its rollouts, and one that trains on them again without playing."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.integration.conftest import assert_same_tensors

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


def recounted(folder: Path) -> dict[str, float]:
    """A step's metrics, from the episodes that it left."""
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
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


@pytest.mark.slow
def test_a_run_on_kept_rollouts_is_the_run_that_kept_them(launch, tmp_path):
    first = launch(*KEYS, f"rollout_dump_dir={tmp_path / 'kept'}")
    assert first.wait() == 0, first.output
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

    second = launch(*KEYS, f"rollout_replay_dir={tmp_path / 'kept'}", output="again")
    assert second.wait() == 0, second.output
    assert (first.faults / "turns.jsonl").exists() and not (second.faults / "turns.jsonl").exists(), "nobody played"
    assert second.repeatable_metrics() == first.repeatable_metrics()
    assert_same_tensors(second.tensors(2), first.tensors(2))
