"""Runs that are stopped in an update, killed in another, taken up again, and end as if nothing had happened."""

import signal
import time
from collections.abc import Callable

from tests.integration.conftest import Run, assert_same_tensors


def stop_and_resume(start: Callable[..., Run], last_step: int, *, thoroughly: bool = True) -> tuple[Run, Run]:
    """An undisturbed run, and one that SIGTERM stops in its second update, SIGKILL in its third, and that ends well.

    The update is finished where the run can. The undisturbed run's last checkpoint is then only evaluated, too.

    Args:
        start: launches the run, with ``GatedTrainWorker`` as its trainer and a checkpoint after every step.
        last_step: its number.
        thoroughly: without it, nothing is killed and the last checkpoint is not evaluated by itself.

    Returns:
        Both, ended well: their metrics, evaluations, weights and optimizer states are the same, bit for bit.
    """
    whole = start()
    first = _held(start, 2, "async_save=true")  # it waits for the save in the background
    first.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    first.release(_gate(2))
    assert first.wait() == 143, first.output
    assert first.summary["status"] == "interrupted" and first.summary["steps"] == 2
    assert whole.wait() == 0, whole.output
    if thoroughly:
        _held(start, 1, "resume_from_checkpoint=true").kill()
        judged = start("eval_only=true", f"resume_from_checkpoint={whole.checkpoint(last_step)}", output="judged")
    second = start("resume_from_checkpoint=true", output="disturbed").ended()
    assert second.repeatable_metrics() == whole.repeatable_metrics()
    assert second.summary["eval"] == whole.summary["eval"]
    assert_same_tensors(second.tensors(last_step), whole.tensors(last_step))
    if thoroughly:
        assert judged.wait() == 0, judged.output
        found, expected = (_evaluated(run, last_step) for run in (judged, whole))
        assert found == expected != {} and judged.summary["eval"] == whole.summary["eval"]
    return whole, second


def _held(start: Callable[..., Run], update: int, *overrides: str) -> Run:
    """The run, once it waits in that update since it started."""
    run = start(*overrides, output="disturbed", orders=(_gate(update),))
    run.pid_at(_gate(update).removeprefix("hold-"))
    return run


def _evaluated(run: Run, step: int) -> dict[str, float]:
    return {name: value for name, value in run.repeatable_metrics()[step].items() if name.startswith("eval/")}


def _gate(update: int) -> str:
    return f"hold-actor_train-0-train-{update}"
