"""What is told of the batches of a run on samples that are there before."""

from __future__ import annotations

from typing import Any

import pytest

from roll.configs.batches import describe_batches
from roll.configs.dpo import DPOConfig


@pytest.mark.parametrize(
    ("given", "begin", "warned"),
    [
        ({"max_steps": 5}, "5 optimizer steps, each on 32 pairs = 16 per device × 2 accumulated × 1 data-par", True),
        ({"max_steps": 50}, "50 optimizer steps, each on 32 pairs", False),
        ({"max_steps": 1}, "1 optimizer step, each on 32 pairs", True),
        ({"num_train_epochs": 1}, "1 epoch of optimizer steps, each on 32 pairs", False),
    ],
)
def test_the_length_of_a_run_on_given_samples(given: dict[str, Any], begin: str, warned: bool) -> None:
    training = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "warmup_steps": 10}
    actor = {"training_args": training, "device_mapping": [0], "strategy_args": {"strategy_name": "fsdp2_train"}}
    (line,) = describe_batches(DPOConfig.model_validate({"pretrain": "tiny", "actor_train": actor, **given}))
    assert line.startswith(begin)
    assert ("warmup_steps 10 are not over before the run is" in line) == warned
