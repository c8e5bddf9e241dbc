"""The demonstrations with rollouts beside training (S = 1) and without: wall time, idle shares and what was learned.

    python benchmarks/async_runs.py agentic_sokoban [--wait 0.02] [--seeds 0 1 2] [--out output/async_runs]
    python benchmarks/async_runs.py rlvr_math --wait 0.2

Six whole runs take half an hour and more: without a name, as `make bench` starts it, this is all that it says.

Both runs of a seed follow each other, with one warm start. ``--wait`` lets every environment turn, or every reward,
take that many seconds more, by sleeping. Times are from the first rollout to the end, evaluations included; *idle* is
the share of all cores that nothing used meanwhile; *waits* the median step's seconds in which the trainer had no
rollouts, and the generator nothing to play. A run that is complete in ``--out`` is not made again.

Exit code 1 when S = 1 takes more than 0.87 of the synchronous time (0.65 with ``--wait``), or ends more than two points
lower over all seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from roll.agentic.env.base import StepResult
from roll.agentic.env.sokoban import SokobanEnv
from roll.extras.maths.final_numbers import FinalAnswerConfig, FinalAnswerVerifier
from roll.rewards import RewardResult, Sample, Verifier
from roll.tracking.run import read_json_lines, write_atomic

RATIO, RATIO_WAITING, POINTS = 0.87, 0.65, 2.0
WAIT = "ROLL_BENCHMARK_WAIT"
AHEAD = ["async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true"]
WAITING = {
    "agentic_sokoban": [
        f"custom_env.{tag}.env_type=async_runs:WaitingSokoban" for tag in ("SimpleSokoban", "SimpleSokobanHeldOut")
    ],
    "rlvr_math": ["rewards.arithmetic.verifiers=[{name: 'async_runs:WaitingAnswer'}]"],
}


class WaitingSokoban(SokobanEnv):
    """Sokoban whose turns wait as if a server played it."""

    def step(self, action: str) -> StepResult:
        time.sleep(float(os.environ[WAIT]))
        return super().step(action)


class WaitingAnswer(Verifier):
    """The verifier ``gsm8k``, as slow as one that asks elsewhere."""

    config_class = FinalAnswerConfig

    def __init__(self, config: FinalAnswerConfig) -> None:
        super().__init__(config)
        self.rule = FinalAnswerVerifier(config)

    async def score(self, sample: Sample) -> RewardResult:
        await asyncio.sleep(float(os.environ[WAIT]))
        return self.rule.check(sample)


@dataclass(frozen=True)
class Measured:
    """One run. Times in seconds, success of held-out episodes or prompts in percent."""

    rl_s: float
    idle: float
    trainer_waits_s: float
    generator_waits_s: float
    success: float


class Idle(threading.Thread):
    """Samples what all cores have done since they were started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float, float]] = []  # time, seconds idle, seconds in all
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.25):
            times = psutil.cpu_times()
            self.samples.append((time.monotonic(), times.idle + getattr(times, "iowait", 0.0), sum(times)))

    def share(self, start: float, end: float) -> float:
        """Share of the cores' time that was idle from ``start`` to ``end`` (``time.monotonic``)."""
        inside = [sample for sample in self.samples if start <= sample[0] <= end]
        (_, idle_0, all_0), (_, idle_1, all_1) = inside[0], inside[-1]
        return (idle_1 - idle_0) / (all_1 - all_0)


def run(config: str, seed: int, ahead: int, wait: float, out: Path) -> Measured:
    """Trains, or reads the run that is there."""
    folder = out / f"{config}_wait{wait:g}" / f"seed{seed}_ahead{ahead}"
    measured = folder / "measured.json"
    if not measured.is_file():
        overrides = [*(AHEAD if ahead else []), *(WAITING[config] if wait else [])]
        command = [sys.executable, "-m", "roll", "train", config, f"seed={seed}", *overrides]
        command += [f"exp_name={folder.name}", f"output_dir={folder.parent}"]
        here = str(Path(__file__).resolve().parent)
        environment = os.environ | {
            WAIT: str(wait),
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
        }
        idle = Idle()
        idle.start()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        ended = time.monotonic()
        idle.ended.set()
        if done.returncode:
            raise SystemExit(f"{folder}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        steps = read_json_lines(folder / "metrics.jsonl")[1:]

        def median(*names: str) -> float:
            return statistics.median(next((row[name] for name in names if name in row), 0.0) for row in steps)

        after = summary["eval"]["after"]
        figures = {
            "rl_s": summary["rl_s"],
            "idle": idle.share(ended - summary["rl_s"], ended - 1),
            "trainer_waits_s": median("async/idle_trainer_s", "time/rollout"),
            "generator_waits_s": median("async/idle_generator_s", "time/train"),
            "success": 100 * after["success" if "success" in after else "accuracy"],
        }
        write_atomic(measured, json.dumps(figures))
    return Measured(**json.loads(measured.read_text(encoding="utf-8")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", choices=sorted(WAITING))
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("output/async_runs"))
    given = parser.parse_args(arguments)
    if given.config is None:
        print(__doc__)
        return 0
    bar = RATIO_WAITING if given.wait else RATIO
    pairs = []
    print("seed   S = 0   S = 1  ratio   idle   trainer waits   generator waits   success")
    for seed in given.seeds:
        pair = [run(given.config, seed, ahead, given.wait, given.out.resolve()) for ahead in (0, 1)]
        pairs.append(pair)
        sync, ahead = pair
        cells = [
            f"{seed:4} {sync.rl_s:6.0f}s {ahead.rl_s:6.0f}s  {ahead.rl_s / sync.rl_s:.2f}",
            f"{sync.idle:.0%} → {ahead.idle:.0%}",
            f"{sync.trainer_waits_s:.2f} → {ahead.trainer_waits_s:.2f} s",
            f"{sync.generator_waits_s:.2f} → {ahead.generator_waits_s:.2f} s",
            f"{sync.success:.1f} → {ahead.success:.1f}%",
        ]
        print("   ".join(cells), flush=True)
    ratio = sum(ahead.rl_s for _, ahead in pairs) / sum(sync.rl_s for sync, _ in pairs)
    gained = statistics.mean(ahead.success - sync.success for sync, ahead in pairs)
    print(f"S = 1 takes {ratio:.2f} of the synchronous time (goal {bar})")
    print(f"success of held-out episodes changes by {gained:+.1f} points (goal {-POINTS:+.0f} or more)")
    return int(ratio > bar or gained < -POINTS)


if __name__ == "__main__":
    sys.exit(main())
