"""Runs that are stopped in an update, taken up again, and end as if nothing had happened."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from tests.integration.conftest import Run, assert_same_tensors

HOLD = "hold-actor_train-0-train-2"


def stop_and_resume(start: Callable[..., Run], last_step: int) -> tuple[Run, Run]:
    """An undisturbed run, and one that SIGTERM stops in its second update, which is finished, and that is resumed.

    Args:
        start: launches the run, with ``GatedTrainWorker`` as its trainer and a checkpoint after every step.
        last_step: its number.

    Returns:
        Both, ended well: their metrics, evaluations, weights and optimizer states are the same, bit for bit.
    """
    whole = start()
    first = start(output="disturbed", orders=(HOLD,))
    first.pid_at(HOLD.removeprefix("hold-"))
    first.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    first.release(HOLD)
    assert first.wait() == 143, first.output
    assert first.summary["status"] == "interrupted" and first.summary["steps"] == 2
    assert whole.wait() == 0, whole.output
    second = start("resume_from_checkpoint=true", output="disturbed")
    assert second.wait() == 0, second.output
    assert second.repeatable_metrics() == whole.repeatable_metrics()
    assert second.summary["eval"] == whole.summary["eval"]
    assert_same_tensors(second.tensors(last_step), whole.tensors(last_step))
    return whole, second
