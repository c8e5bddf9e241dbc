"""Tells what each stage of a chain of runs has gained on held-out data: a table, and a picture.

    python scripts/stage_gains.py output/chain_math/seed0 [output/chain_math/seed1 ...] [--picture FILE.svg]

A chain is a folder of runs, which are its stages in the order of their names. A reward model's figure is the share of
held-out pairs that it tells apart, that of the others the share of held-out questions that they answer right, sampled.
One chain is shown with the 95% intervals of its gains, several side by side. The picture has the right answers of all
runs that answer, a stage as wide as any other: one that trains or learns from an earlier stage's model begins where
that one ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from learning_curves import Run

from roll.report.curve import learning_curve_svg
from roll.tracking.display import difference_interval
from roll.tracking.run import write_atomic

MEASURES = {
    "pairwise_accuracy": "pairs ranked correctly",
    "accuracy": "correct responses",
    "success": "correct responses",
}
"""What a summary may have of an evaluation, and what the table calls it; the first that is there counts."""


class Stage:
    """A finished run, and the figure that tells what it is good for."""

    def __init__(self, run: Run) -> None:
        evaluations = run.summary["eval"]
        measure = next((name for name in MEASURES if name in evaluations["after"]), None)
        if measure is None:
            raise ValueError(f"{run.path / 'summary.json'}: none of {', '.join(MEASURES)} in it")
        self.run = run
        self.measured = MEASURES[measure]
        self.before, self.after = (float(evaluations[name][measure]) for name in ("before", "after"))
        self.size = int(evaluations["after"].get("prompts") or evaluations["after"]["episodes"])
        """Held-out questions; 0 where it answers none."""
        self.minutes = float(run.summary["wall_s"]) / 60
        config = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
        self.trained, self.teacher = (_stage_of(config.get(key)) for key in ("pretrain", "teacher_pretrain"))

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def gain(self) -> str:
        return f"{self.before:.1%} → {self.after:.1%}"

    def row(self) -> str:
        """Name, measure, before and after, the gain's 95% interval in points, steps, minutes."""
        low, high = difference_interval(self.before, self.size, self.after, self.size)
        interval = f"{100 * low:+.0f} to {100 * high:+.0f}" if self.size else ""
        cells = [f"`{self.name}`", self.measured, self.gain, interval, str(self.run.summary["steps"])]
        return f"| {' | '.join([*cells, f'{self.minutes:.1f}'])} |"


def _stage_of(model: str | None) -> str | None:
    """The run's folder that a model was saved in; ``None`` where it is in no checkpoint."""
    parts = Path(model or "").resolve().parts
    return parts[-4] if len(parts) > 3 and parts[-3] == "checkpoints" else None


def read_chain(folder: Path) -> list[Stage]:
    """The stages in a folder, in the order of their names.

    Raises:
        ValueError: there is none, or one did not end well.
    """
    runs = [Run.read(path.parent) for path in sorted(folder.glob("*/summary.json"))]
    if not runs:
        raise ValueError(f"{folder}: no folder of a run in it")
    return [Stage(run) for run in runs]


def table(chains: Sequence[Sequence[Stage]]) -> list[str]:
    """One chain in detail, or the gains of several side by side.

    Raises:
        ValueError: the chains have other stages.
    """
    names = [[stage.name for stage in chain] for chain in chains]
    if any(other != names[0] for other in names):
        raise ValueError(f"the chains have other stages: {'; '.join(', '.join(own) for own in names)}")
    if len(chains) == 1:
        head = "| stage | held out | before → after | gain, 95%, points | steps | minutes |"
        rows = [stage.row() for stage in chains[0]]
        return [head, "|---|---|---|---|---|---|", *rows]
    seeds = [chain[0].run.seed for chain in chains]
    columns = ["stage", "held out", *(f"seed {seed}" for seed in seeds), "minutes"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for stages in zip(*chains, strict=True):
        minutes = sorted(stage.minutes for stage in stages)
        cells = [f"`{stages[0].name}`", stages[0].measured, *(one.gain for one in stages)]
        lines.append(f"| {' | '.join([*cells, f'{minutes[0]:.1f} to {minutes[-1]:.1f}'])} |")
    return lines


def picture(chains: Sequence[Sequence[Stage]]) -> str:
    """The held-out answers along each chain, one line for every model that no later stage trains on."""
    lines = {}
    for chain in chains:
        ends: dict[str | None, float] = {None: 0.0}
        points: dict[str | None, list[tuple[float, float]]] = {None: []}
        for stage in chain:
            if not stage.size:
                continue
            begin = max(ends.get(stage.trained, 0.0), ends.get(stage.teacher, 0.0))
            ends[stage.name] = begin + 1
            steps = stage.run.summary["steps"]
            own = [(begin + step / steps, value) for step, value in stage.run.points("eval/success")]
            points[stage.name] = points.get(stage.trained, []) + own
        goes_on = {stage.trained for stage in chain if stage.size}
        for name, own in points.items():
            if name is not None and name not in goes_on:
                label = name.lstrip("0123456789-")
                lines[label if len(chains) == 1 else f"{label} {chain[0].run.seed}"] = own
    return learning_curve_svg(lines, title="Right answers to held-out questions", x_label="stage", width=960)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chains", nargs="+", type=Path, help="folders with a run's folder for each stage")
    parser.add_argument("--picture", type=Path, help="SVG file to write")
    options = parser.parse_args()
    try:
        chains = [read_chain(folder.resolve()) for folder in options.chains]
        lines = table(chains)
        if options.picture is not None:
            write_atomic(options.picture, picture(chains))
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
