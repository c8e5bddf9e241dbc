"""Whole runs that train with what sampling chose: the sets of tokens that truncation kept, and a mixture's experts."""

import functools
from pathlib import Path

import pytest

from tests.support.contract import save_model
from tests.support.resuming import stop_and_resume

pytestmark = pytest.mark.slow
"""generators/test_experts.py has both engines, unit/rollout/test_trajectory.py the way between."""

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
