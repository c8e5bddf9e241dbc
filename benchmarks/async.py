"""Rollouts beside training: steps per second at several lags, beside what a scheduler without any cost would reach.

    python benchmarks/async.py [--lags 0 1 2 4] [--steps 16] [--batch 32] [--median 0.6]

Episodes of four turns wait, in ``time.sleep``, as tools and slow environments do: for the whole episode a log-normal
time (median ``--median`` seconds, sigma 0.8) that follows from its seed, and one of 64 ten times as long. Everything
else is a real run of ``roll train``: Ray, environment threads, ``hf_infer``, optimizer steps on the embedded tiny model
with random weights.

The *bound* is a simulation of the same draws with the same latencies under the same admission rules
(``roll.rollout.admission``). It assumes that generating, messages and scheduling take no time, that as many episodes
wait at once as the run has slots, and that each training step takes the median of those that this run took. No
scheduler with that lag and window is faster on these latencies but by chance, since each draw starts as soon as the
rules let it.

Exit code 1 when a lag reaches less than 0.95 of its bound, or lag 1 less than 1.7 × lag 0 though its bound is above.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.agentic.env.base import StepResult, TextEnv, step_result
from roll.rollout.admission import Admission
from roll.utils.hashing import derive_seed

TURNS, SIGMA, SLOW_ONE_OF, SLOWER = 4, 0.8, 64, 10
SEED = 0
SHARE_OF_BOUND, GAIN = 0.95, 1.7
TRAINING = ("sync", "logprobs", "advantage", "train")
"""Phases of a step in which the trainer does not wait for episodes."""


def latency(env_seed: int, median: float) -> float:
    """Seconds that an episode waits."""
    slow = SLOWER if env_seed % SLOW_ONE_OF == 0 else 1
    return slow * median * math.exp(SIGMA * random.Random(env_seed).gauss(0, 1))


class Waiting(TextEnv):
    """An environment that only takes time.

    Args:
        median: see ``latency``.
    """

    def __init__(self, median: float) -> None:
        self.median = median
        self.turns, self.pause = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.turns, self.pause = 0, latency(seed, self.median) / TURNS
        return "Up", {"state_key": "0"}

    def step(self, action: str) -> StepResult:
        time.sleep(self.pause)
        self.turns += 1
        return step_result(
            "Up",
            task_reward=action.count("U") / 8,
            penalty=0.0,
            terminated=self.turns == TURNS,
            truncated=False,
            action=action,
            action_is_effective=True,
            success=False,
            state_key=str(self.turns),
        )


@dataclass(frozen=True)
class Measured:
    """One run. Seconds are means of a step, without the first, which warms up."""

    step_s: float
    waiting_s: float
    """Of the trainer, for episodes."""
    training_s: float
    """Median of the rest."""
    lag: float
    """Mean lag of the sampled tokens, in steps."""


def configuration(lag: float, batch: int, steps: int, median: float, folder: Path) -> dict[str, Any]:
    """The run at one lag: a step takes ``batch`` episodes, and all that may run ahead do."""
    trained = {
        "model_args": {"dtype": "fp32", "attn_implementation": "sdpa", "disable_gradient_checkpointing": True},
        "system_envs": {"OMP_NUM_THREADS": "1"},
    }
    return {
        "exp_name": f"lag{lag:g}",
        "output_dir": str(folder),
        "seed": SEED,
        "track_with": [],
        "pretrain": str(folder / "model"),
        "num_gpus_per_node": 2,
        "max_steps": steps,
        "save_steps": steps,
        "val_before_train": False,
        "val_batch_size": 1,
        "rollout_batch_size": batch,
        "prompt_length": 64,
        "response_length": 8,
        "sequence_length": 96,
        "adv_estimator": "reinforce",
        "async_generation_ratio": lag,
        "rollout_window": 1.0 if lag else 0.0,
        "train_infer_correction": {"is_weight": {"enabled": bool(lag)}},
        "custom_envs": {
            "Waiting": {
                "env_type": "async:Waiting",
                "env_manager_cls": "step",
                "max_steps": TURNS,
                "env_config": {"median": median},
                "step_timeout": 600,
            }
        },
        "train_env_manager": {"env_groups": round(batch * (1 + lag)), "group_size": 1, "tags": ["Waiting"]},
        "val_env_manager": {"env_groups": 1, "group_size": 1, "tags": ["Waiting"]},
        "actor_train": {
            **trained,
            "training_args": {"learning_rate": 1e-5, "per_device_train_batch_size": batch},
            "strategy_args": {"strategy_name": "fsdp2_train"},
            "device_mapping": [0],
        },
        "actor_infer": {
            **trained,
            "generating_args": {"max_new_tokens": 8, "temperature": 1.0},
            "strategy_args": {"strategy_name": "hf_infer"},
            "device_mapping": [1],
        },
    }


def run(lag: float, batch: int, steps: int, median: float, folder: Path) -> Measured:
    """Trains at one lag."""
    file = folder / f"lag{lag:g}.yaml"
    file.write_text(json.dumps(configuration(lag, batch, steps, median, folder)), encoding="utf-8")  # JSON is YAML
    here = str(Path(__file__).resolve().parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "roll", "train", str(file)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"lag {lag:g}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = (folder / file.stem / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 1]
    training = [sum(row[f"time/{phase}"] for phase in TRAINING) for row in rows]
    waiting = [row["time/rollout"] for row in rows]
    return Measured(
        step_s=statistics.mean(map(sum, zip(training, waiting, strict=True))),
        waiting_s=statistics.mean(waiting),
        training_s=statistics.median(training),
        lag=statistics.mean(row.get("async/token_lag", 0.0) for row in rows),
    )


def bound(lag: float, batch: int, steps: int, latencies: Sequence[float], training_s: float) -> float:
    """Seconds of a step, without the first, when only waiting and training take time (see the module's docstring)."""
    ahead = math.floor(lag * batch)
    admission = Admission(batch, ahead, batch + ahead if lag else 1, last_step=steps if lag else None)
    running: list[tuple[float, int]] = []
    now = first = 0.0

    def play(until: float) -> None:
        """Starts what may start and finishes what does by then."""
        nonlocal now
        while True:
            while admission.may_start:
                draw = admission.start()
                heapq.heappush(running, (now + latencies[draw], draw))
            if not running or running[0][0] > until:
                break
            now, draw = heapq.heappop(running)
            admission.finish(draw)

    for step in range(1, steps + 1):
        admission.open(step)
        play(now)
        while admission.take() is None:
            play(running[0][0])
        end = now + training_s
        if lag:
            play(end)
        now = end
        admission.commit()
        first = first or now
    return (now - first) / (steps - 1)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=float, nargs="+", default=[0, 1, 2, 4], help="default: 0 1 2 4")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--batch", type=int, default=32, help="episodes per step")
    parser.add_argument("--median", type=float, default=0.6, help="seconds that an episode waits")
    options = parser.parse_args()
    from roll.models.tiny import make_tiny_model

    draws = options.batch * (options.steps + math.ceil(max(options.lags)) + 1)
    latencies = [latency(derive_seed(SEED, "train", draw), options.median) for draw in range(draws)]
    print(f"{'lag':>4} {'s/step':>8} {'bound':>8} {'of bound':>9} {'× lag 0':>8} {'waiting':>8} {'token lag':>10}")
    missed, synchronous = False, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", seed=SEED)
        for lag in options.lags:
            measured = run(lag, options.batch, options.steps, options.median, folder)
            best = bound(lag, options.batch, options.steps, latencies, measured.training_s)
            synchronous = synchronous if lag else measured.step_s
            gain = synchronous / measured.step_s
            print(
                f"{lag:4g} {measured.step_s:8.2f} {best:8.2f} {best / measured.step_s:9.2f} {gain:8.2f}"
                f" {measured.waiting_s / measured.step_s:8.0%} {measured.lag:10.2f}",
                flush=True,
            )
            missed |= best / measured.step_s < SHARE_OF_BOUND
            missed |= lag == 1 and synchronous > 0 and gain < GAIN <= synchronous / best
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
