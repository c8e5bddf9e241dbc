"""What a pretrained model learns, and in what time, over seeds and numerical kernels.

    python benchmarks/real_model.py [rlvr_smollm2_stories] --seeds 0 1 2 [--kernels native avx2 scalar] [--out FOLDER]

A run takes minutes and both cores: without seeds, as `make bench` starts it, this is all that it says. Kernels are
those of `scripts/robustness.py`; a run that is complete in ``--out`` is not made again.

*gain* is the 95% interval of the difference, in points, with each held-out question as one trial; *minutes* are from
the start of the command to its end, both evaluations included. Exit code 1 when a run ends below its
configuration's goal or takes longer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from learning_curves import Run  # noqa: E402
from robustness import KERNELS, complete_run  # noqa: E402

GOALS = {"rlvr_smollm2": (0.9, 4.0), "rlvr_smollm2_stories": (0.5, 15.0)}
"""By configuration, the least accuracy at the end and the most minutes."""


def minutes(run: Run) -> float:
    """Of the whole command."""
    return float(run.summary["wall_s"]) / 60


def report(runs: list[tuple[str, Run]], config: str) -> str:
    """A Markdown table, the worst run last, and both worst cases in a sentence."""
    ordered = sorted(runs, key=lambda item: item[1].after, reverse=True)
    rows = ["| kernels | run | before → after | gain | questions | steps | minutes |", "|---|---|---|---|---|---|---|"]
    rows += [f"| {kernels} {run.gain_row()}" for kernels, run in ordered]
    (kernels, worst), (other, slowest) = ordered[-1], max(runs, key=lambda item: minutes(item[1]))
    goal, most_minutes = GOALS[config]
    least = f"worst {worst.after:.1%} (seed {worst.seed}, {kernels}; goal {goal:.0%})"
    longest = f"slowest {minutes(slowest):.1f} minutes (seed {slowest.seed}, {other}; goal {most_minutes:g})"
    return "\n".join([*rows, "", f"{least}; {longest}", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", choices=GOALS, default="rlvr_smollm2", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["native"], help="default: native")
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "real_model", help="default: %(default)s")
    options = parser.parse_intermixed_args()
    runs = []
    for kernels in options.kernels:
        for seed in options.seeds:
            run = complete_run(options.config, seed, kernels, options.out.resolve(), options.overrides)
            runs.append((kernels, run))
            print(report(runs[-1:], options.config), flush=True)
    if not runs:
        print(__doc__)
        return 0
    print(report(runs, options.config), end="")
    least, most_minutes = GOALS[options.config]
    return int(min(run.after for _, run in runs) < least or max(minutes(run) for _, run in runs) > most_minutes)


if __name__ == "__main__":
    sys.exit(main())
