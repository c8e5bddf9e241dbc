"""A whole RLVR run whose reward model is divided over two devices of its worker, one of which is lost on the way."""

import os
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import Run
from tests.unit.rewards.test_sharded_reward_model import make

HOLD = "hold-train-group-6"


def ranks(run: Run) -> list[int]:
    """Process ids of the parts of its reward model."""
    own = ((pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in run.processes())
    return [pid for pid, command in own if b"roll.rewards.reward_model" in command.split(b"\0")]


@pytest.mark.slow
def test_a_run_scores_as_with_the_whole_model_and_outlives_a_part_of_it(rlvr, tmp_path):
    folder = make("Qwen2Config", tmp_path)

    def launched(devices: str, size: int, *orders: str) -> Run:
        verifier = f"{{name: reward_model, args: {{model_path: {folder}, tensor_parallel_size: {size}}}}}"
        return rlvr(
            f"rewards.letters.verifiers=[{verifier}]",
            f"rewards.letters.device_mapping={devices}",
            "rewards.letters.worker_cls=null",
            "rewards.letters.retries=1",
            output=f"of-{size}",
            orders=orders,
        )

    whole = launched("[0]", 1).ended()
    divided = launched("[0,1]", 2, HOLD)
    divided.pid_at("train-group-6")
    first = ranks(divided)
    assert len(first) == 2
    os.kill(first[1], signal.SIGKILL)
    divided.release(HOLD)
    assert divided.wait() == 0, divided.output
    one, two = (run.metrics for run in (whole, divided))
    for step in (1, 2):
        assert two[step]["reward/letters/score"] == pytest.approx(one[step]["reward/letters/score"], abs=1e-4)
        assert two[step]["reward/letters/errors"] == 0
    assert sum(two[step]["reward/letters/retries"] for step in (1, 2)) > 0
    divided.assert_nothing_left()
