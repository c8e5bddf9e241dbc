"""Speed of the Sokoban environment on one core: text steps and generated boards a second, beside their limits.

    python benchmarks/env.py [--seconds 2]

A step parses ``<answer>…</answer>``, moves, and makes the observation's text and the state's key; the time that
``reset`` takes between episodes is not counted. Exit code 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import roll.agentic.env as envs

STEPS_PER_S = 100_000
BOARDS_PER_S = 3_000


def steps_per_second(seconds: float, **env_config: Any) -> float:
    """Random moves, one in ten of them unreadable."""
    env = envs.make("sokoban", max_steps=50, max_solution=4, **env_config)
    rng = random.Random(0)
    answers = [f"<answer>{name}</answer>" for name in ("Up", "Down", "Left", "Right")]
    texts = [rng.choice(answers) if rng.random() < 0.9 else "I would go up." for _ in range(4096)]
    num_steps, spent, seed = 0, 0.0, 0
    while spent < seconds:
        env.reset(seed=seed)
        seed += 1
        start = time.perf_counter()
        for index in range(50):
            _, _, terminated, truncated, _ = env.step(texts[(seed * 50 + index) % len(texts)])
            num_steps += 1
            if terminated or truncated:
                break
        spent += time.perf_counter() - start
    return num_steps / spent


def boards_per_second(seconds: float, **env_config: Any) -> float:
    """Whole resets, each with the next seed."""
    env = envs.make("sokoban", **env_config)
    num_boards, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        env.reset(seed=num_boards)
        num_boards += 1
    return num_boards / (time.perf_counter() - start)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    seconds = parser.parse_args().seconds
    small = {"max_solution": 4, "num_walls": 4}
    large = {"dim_room": (10, 10), "num_boxes": 4, "max_steps": 100}
    rows: list[tuple[str, Callable[[], float], int | None]] = [
        ("text steps/s, 6x6, 1 box", lambda: steps_per_second(seconds), STEPS_PER_S),
        ("text steps/s, with coordinates", lambda: steps_per_second(seconds, show_coordinates=True), STEPS_PER_S),
        (
            "text steps/s, 10x10, 4 boxes",
            lambda: steps_per_second(seconds, dim_room=(10, 10), num_boxes=4),
            STEPS_PER_S,
        ),
        ("boards/s, 6x6, 1 box, length 1-4", lambda: boards_per_second(seconds, **small), BOARDS_PER_S),
        ("boards/s, the same, train split", lambda: boards_per_second(seconds, split="train", **small), BOARDS_PER_S),
        ("boards/s, the same, eval split", lambda: boards_per_second(seconds, split="eval", **small), None),
        ("boards/s, 10x10, 4 boxes, length 1-100", lambda: boards_per_second(seconds, **large), None),
    ]
    missed = False
    for label, measure, limit in rows:
        value = measure()
        missed |= limit is not None and value < limit
        ratio = "" if limit is None else f"   {value / limit:5.2f} x the limit of {limit:,}"
        print(f"{label:40} {value:10,.0f}{ratio}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
