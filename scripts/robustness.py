"""Runs a demonstration over seeds and numerical kernels, and prints the distribution of what was learned.

    python scripts/robustness.py agentic_sokoban --seeds 0 1 2 3 4 --kernels scalar avx2 mkl-compatible

Learning must not hang on how one processor rounds. *Kernels* are environment variables: PyTorch's own kernels without
vector instructions (``scalar``) or with AVX2 (``avx2``), matrix products that MKL computes alike on every processor
(``mkl-compatible``), or what PyTorch and MKL choose by themselves (``native``). A complete run is not made again, so
that a table can be made in pieces. It has a row for each run, and the worst and the median of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from learning_curves import Run

from roll.tracking.run import write_atomic

ROOT = Path(__file__).resolve().parents[1]
KERNELS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "scalar": {"ATEN_CPU_CAPABILITY": "default"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
}


def complete_run(config: str, seed: int, kernels: str, out: Path, overrides: list[str]) -> Run:
    """The run of one seed with one choice of kernels, made if it is not there.

    Raises:
        ValueError: it did not end well; its output is beside its folder, in ``<folder>.log``.
    """
    folder = out / kernels / f"{config}_seed{seed}"  # kernels have their own warm starts too
    try:
        return Run.read(folder)
    except ValueError:
        print(f"{folder} …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "roll", "train", config, f"seed={seed}"]
    command += [f"exp_name={folder.name}", f"output_dir={folder.parent}", *overrides]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log:
        environment = os.environ | KERNELS[kernels]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False)
    return Run.read(folder)


def table(runs: list[tuple[str, Run]]) -> str:
    """A Markdown table of (kernels, run), the worst run last, and the distribution in a sentence."""
    ordered = sorted(runs, key=lambda item: item[1].after, reverse=True)
    after = [run.after for _, run in ordered]
    rows = ["| kernels | seed | before | after | greedy before → after | RL minutes |", "|---|---|---|---|---|---|"]
    rows += [f"| {kernels} {run.row()}" for kernels, run in ordered]
    spread = f"worst {after[-1]:.1%}, median {median(after):.1%}, best {after[0]:.1%} of {len(after)} runs"
    return "\n".join([*rows, "", spread, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="name in examples/config, such as agentic_sokoban or rlvr_math")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="default: 0 to 4")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["native", "scalar", "mkl-compatible"])
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "robustness", help="default: %(default)s")
    options = parser.parse_intermixed_args()
    runs, failures = [], []
    for kernels in options.kernels:
        for seed in options.seeds:
            try:
                run = complete_run(options.config, seed, kernels, options.out.resolve(), options.overrides)
            except ValueError as error:
                failures.append(str(error))
                print(error, file=sys.stderr, flush=True)
                continue
            runs.append((kernels, run))
            write_atomic(options.out / f"{options.config}.md", table(runs))
    if runs:
        print(table(runs), end="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
