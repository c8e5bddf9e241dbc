"""Whole runs whose sampling is truncated, and that train with the kept sets."""

import pytest

SAMPLING = tuple(f"actor_infer.generating_args.{each}" for each in ("top_p=0.9", "top_k=20", "min_p=0.01"))
KEPT = (*SAMPLING, "train_infer_correction.replay_kept_sets=512")


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["fsdp2_train", "deepspeed_train", "megatron_train"])
def test_before_its_update_the_policy_is_the_one_that_sampled(rlvr, trainer):
    reference = ("use_kl_loss=true", "kl_loss_coef=0.01", "enable_old_logprobs_recompute=true")
    run = rlvr(*KEPT, *reference, f"actor_train.strategy_args.strategy_name={trainer}").ended()
    for step in (1, 2):
        metrics = run.metrics[step]
        assert 1 < metrics["rollout/kept_tokens"] <= 20 and metrics["rollout/kept_overflow"] == 0
        assert metrics["mismatch/logprob_diff_max"] < 1e-5
    assert run.metrics[1]["actor/kl_loss"] < 1e-10, "the reference starts as the policy, over the same sets"
