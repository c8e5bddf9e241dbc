"""Draws the learning curves of finished runs, one line per seed, and copies one of their episodes.

    python scripts/learning_curves.py output/agentic_sokoban output/seed1 output/seed2

Writes ``learning_curve.svg`` and ``episode.gif`` into the first run's ``renders/curves``, or with ``--docs`` over the
tracked pictures in ``docs/images``, and prints the rows of the README's table. With ``--worlds`` the lines and rows are
of different tasks, named after the folders of their runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.report.curve import learning_curve_svg
from roll.tracking.display import difference_interval
from roll.tracking.run import read_json_lines, write_atomic

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


@dataclass(frozen=True)
class Run:
    """What is left of one run."""

    path: Path
    seed: int
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Reads a run's folder.

        Raises:
            ValueError: it is none, or the run did not end well.
        """
        summary_path = path / "summary.json"
        if not summary_path.is_file():
            raise ValueError(f"{path}: no summary.json in it, expected the folder of a run")
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        if summary["status"] != "completed":
            raise ValueError(f"{path}: status is {summary['status']!r}, expected 'completed'")
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        return cls(path, config["seed"], read_json_lines(path / "metrics.jsonl"), summary)

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) of the steps that have the metric.

        Raises:
            ValueError: none has.
        """
        points = [(record["step"], record[metric]) for record in self.metrics if record.get(metric) is not None]
        if not points:
            raise ValueError(f"{self.path / 'metrics.jsonl'}: no step has {metric}")
        return points

    def row(self) -> str:
        """Sampled and greedy success before and after, and the minutes from the first rollout to the end."""
        before, after = self.summary["eval"]["before"], self.summary["eval"]["after"]
        minutes = (self.summary["wall_s"] - self.summary["first_rollout_s"]) / 60
        greedy = f"{before[f'{self.measure}_greedy']:.1%} → {after[f'{self.measure}_greedy']:.1%}"
        return f"| {self.seed} | {before[self.measure]:.1%} | {self.after:.1%} | {greedy} | {minutes:.1f} |"

    def gain_row(self) -> str:
        """Sampled success before and after, the 95% interval of the gain in points, steps and minutes in all."""
        before, after = self.summary["eval"]["before"], self.summary["eval"]["after"]
        size = after.get("prompts") or after["episodes"]
        low, high = difference_interval(before[self.measure], size, self.after, size)
        gain = f"{100 * low:+.0f} to {100 * high:+.0f}"
        shares = f"{before[self.measure]:.1%} → {self.after:.1%}"
        steps, minutes = self.summary["steps"], self.summary["wall_s"] / 60
        return f"| `{self.path.name}` | {shares} | {gain} | {size} | {steps} | {minutes:.1f} |"

    @property
    def measure(self) -> str:
        """Name of what the evaluations measure."""
        return "accuracy" if "accuracy" in self.summary["eval"]["after"] else "success"

    @property
    def after(self) -> float:
        """Sampled success after training."""
        return float(self.summary["eval"]["after"][self.measure])


def named(runs: list[Run]) -> dict[str, Run]:
    """Runs by the name of their line: their seed, or their folder where a seed occurs twice."""
    seeds = [run.seed for run in runs]
    return {f"seed {run.seed}" if seeds.count(run.seed) == 1 else run.path.name: run for run in runs}


def worlds(runs: list[Run]) -> dict[str, Run]:
    """Runs by the tasks that their folders are named after."""
    return {run.path.name.removeprefix("agentic_").removeprefix("rlvr_").removeprefix("tiny_"): run for run in runs}


def longest_solved_episode(run: Run) -> Path:
    """The GIF of the solved episode with the most turns among those of the last step that has one.

    Raises:
        ValueError: no solved episode was rendered.
    """
    renders = run.path / "renders"
    solved = [record for record in read_json_lines(renders / "episodes.jsonl") if record["success"]]
    if not solved:
        raise ValueError(f"{renders}: no solved episode in episodes.jsonl; choose one with --episode")
    chosen = max(solved, key=lambda record: (record["step"], record["turns"]))
    return renders / Path(chosen["page"]).with_suffix(".gif")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, <output_dir>/<exp_name>")
    parser.add_argument("--metric", default="eval/success", help="name in metrics.jsonl (default: %(default)s)")
    parser.add_argument("--title", default="Success on held-out boards", help="default: %(default)s")
    parser.add_argument("--episode", type=Path, help="GIF to copy (default: a solved episode of the first run)")
    parser.add_argument("--name", default="learning_curve", help="of the picture, without .svg (default: %(default)s)")
    parser.add_argument("--no-episode", action="store_true", help="copy no GIF: answers to prompts do not move")
    parser.add_argument("--worlds", action="store_true", help="a line and a row for each task instead of each seed")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, help="folder of the pictures (default: renders/curves of the first run)")
    place.add_argument("--docs", action="store_true", help=f"replace the tracked pictures in {IMAGES}")
    options = parser.parse_args()
    out = IMAGES if options.docs else options.out or options.runs[0] / "renders" / "curves"
    try:
        runs = [Run.read(path.resolve()) for path in options.runs]
        lines = worlds(runs) if options.worlds else named(runs)
        curve = learning_curve_svg(
            {name: run.points(options.metric) for name, run in lines.items()},
            title=options.title,
            width=960 if options.worlds else 760,  # longer names
        )
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / f"{options.name}.svg", curve)
        if not options.no_episode:
            shutil.copyfile(options.episode or longest_solved_episode(runs[0]), out / "episode.gif")
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print(f"pictures in {out}", file=sys.stderr)
    by_seed = (run.row() for run in sorted(runs, key=lambda run: run.seed))
    print(*((run.gain_row() for run in runs) if options.worlds else by_seed), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
