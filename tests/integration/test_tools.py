"""A policy with tools on real Ray: what it calls is answered, scored, trained and evaluated."""

from __future__ import annotations

import pytest

from tests.integration.conftest import RLVR_LAUNCHER, ROOT, Launch

FEW = (
    "pretrain=tiny",
    "max_steps=2",
    "eval_steps=2",
    "save_steps=2",
    "rollout_batch_size=8",
    "val_batch_size=32",
    "actor_train.training_args.per_device_train_batch_size=8",
    "warm_start.max_steps=150",
    "warm_start.eval_steps=150",
    "warm_start.eval_episodes=64",
    "warm_start.min_success=0",
    "rewards.products.query_filter_config={type: std_filter}",
)


@pytest.mark.timeout(300)
def test_a_tool_is_called_answered_and_learnt_from(launch: Launch) -> None:
    run = launch(*FEW, config="rlvr_tools", script=RLVR_LAUNCHER, folder=ROOT / "examples" / "config")
    assert run.wait() == 0, run.output
    for step in (1, 2):
        record = run.metrics[step]
        assert record["rollout/tool_calls"] > 0.1, record
        assert record["rollout/turns"] > 1.1
        assert record["rollout/penalty"] == pytest.approx(-0.1 * record["rollout/malformed_calls"])
    assert run.summary["status"] == "completed"
