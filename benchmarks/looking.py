"""CPU seconds of what a run records to be looked into, as a share of a demonstration's steps.

    python benchmarks/looking.py [--steps 24]

One run of `rlvr_math` records everything in every second step and nothing in the others: all rollouts and what models
said of their tokens (`rollout_dump_dir`), sampled groups for people, the probe, and the timeline. CPU seconds are those
of the driver and of every process that it has started, from one step's end to the next's. Responses change in length,
so each recording step is compared with the mean of its two neighbours, and the first steps, which warm up, are left
out. In the steps that record, a probe is due twice as often as in a run, so the share is rather too large.

What the driver itself does for it is measured directly; the workers' part is the probe (`benchmarks/probe.py`), and an
answer that holds a few numbers. Exit code 1 where the former, or the difference by more than its error, is above 3%.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from roll.__main__ import main as roll
from roll.pipeline import loop, rollouts
from roll.pipeline.loop import TrainingLoop
from roll.pipeline.probe import Probe
from roll.pipeline.rollouts import StepRollouts
from roll.utils.progress import descendants

MOST = 0.03
_TICKS = os.sysconf("SC_CLK_TCK")
_recording = [True]
"""In this step."""
_own: dict[str, float] = {}
"""CPU seconds in the driver, by function."""
_seconds: list[float] = []
"""So far, after each step."""


def cpu_seconds() -> float:
    """Of this process and of all that it has started, those that have ended included."""
    total = 0
    for pid in [os.getpid(), *descendants(os.getpid())]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        total += sum(map(int, fields[11:15]))
    return total / _TICKS


def measured(owner: Any, name: str) -> None:
    """Counts the CPU seconds of a function, which does nothing in the steps that do not record."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not _recording[0]:
            return {} if name == "check" else None
        started = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            _own[name] = _own.get(name, 0.0) + time.thread_time() - started

    setattr(owner, name, wrapped)


def alternate() -> None:
    """Has every second step record, and counts the seconds of each."""
    finish, take = TrainingLoop.after_step, StepRollouts.take

    def after_step(self: Any) -> None:
        finish(self)
        self.session._aside.submit(lambda: None).result()  # what is written beside the step is written
        _seconds.append(cpu_seconds())
        _recording[0] = not _recording[0]

    def taken(self: Any, *args: Any) -> Any:
        whole = self._config
        if not _recording[0]:
            self._config = whole.model_copy(update={"rollout_dump_dir": None, "num_written_groups": 0})
        try:
            return take(self, *args)
        finally:
            self._config = whole

    TrainingLoop.after_step, StepRollouts.take = after_step, taken  # type: ignore[method-assign, assignment]
    for owner, name in (
        (rollouts, "write_rollouts"),
        (rollouts, "write_samples"),
        (rollouts, "write_scores"),
        (Probe, "ask"),
        (Probe, "check"),
        (loop, "record_timeline"),
    ):
        measured(owner, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    alternate()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"max_steps={options.steps}", "eval_steps=0", "val_before_train=false", "val_after_train=false"]
        words += [f"output_dir={folder}", f"rollout_dump_dir={folder}/kept", "save_steps=null", "track_with=[]"]
        if code := roll(["train", "rlvr_math", *words]):
            return code
        kept = sum(file.stat().st_size for file in Path(folder, "kept").rglob("*") if file.is_file())
    steps = [after - before for before, after in pairwise(_seconds)][1:]  # of step 3 on: it records
    triples = [(steps[i], (steps[i - 1] + steps[i + 1]) / 2) for i in range(2, len(steps) - 1, 2)]
    costs = [recording - without for recording, without in triples]
    step = statistics.fmean(without for _, without in triples)
    difference, error = statistics.fmean(costs) / step, statistics.stdev(costs) / math.sqrt(len(costs)) / step
    recorded = options.steps // 2
    own = sum(_own.values()) / recorded
    parts = ", ".join(f"{name} {1e3 * seconds / recorded:.1f}" for name, seconds in _own.items())
    print(
        f"a step takes {step:.2f} CPU seconds. Recording, in the driver: {1e3 * own:.0f} ms, {own / step:.2%} "
        f"(ms: {parts}); "
        f"{kept / 1e6 / recorded:.2f} MB on disk. All processes: {len(costs)} steps that record take "
        f"{difference:+.1%} beside their neighbours, with a standard error of {error:.1%}"
    )
    return int(own > MOST * step or difference - 2 * error > MOST)


if __name__ == "__main__":
    sys.exit(main())
