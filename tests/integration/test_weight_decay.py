"""Weight decay that changes along a run acts in the step that it is for, under every trainer."""

from dataclasses import replace

import pytest
import torch

from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.engines import packages
from roll.data.batch import Batch
from roll.distributed.strategy import STRATEGIES
from tests.support.ranks import exported
from tests.support.trainers import make_batch, make_context

PACKAGES = packages()
RATE = 0.1


def nothing(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """A loss of 0 without gradient: what moves is decay alone."""
    assert scores.logprobs_T is not None
    return LossOutput(0.0 * scores.logprobs_T.sum())


@pytest.mark.parametrize("name", ["fsdp2_train", "deepspeed_train", "megatron_train"])
def test_each_step_decays_by_its_own_factor(model, name):
    if name in PACKAGES and not PACKAGES[name].installed:
        pytest.skip(f"{PACKAGES[name].module} is not installed")
    keys = {"learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "weight_decay_end": 0.4}
    trainer = STRATEGIES.get(name)(replace(make_context(model, name, training_args=keys), total_optimizer_steps=3))
    trainer.setup()
    before = exported(trainer)
    for step, decay in enumerate((0.0, 0.2, 0.4)):
        trainer.train_step(make_batch(seed=step), nothing)
        after = exported(trainer)
        for key, tensor in after.items():
            factor = 1 - RATE * decay if tensor.ndim > 1 else 1.0
            torch.testing.assert_close(tensor, before[key] * factor, rtol=1e-5, atol=1e-7)
        before = after
