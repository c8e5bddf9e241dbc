"""Runs beside each other: what differs in settings, software and data, and which figures differ beyond noise."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from roll.configs.problems import NOTHING, show
from roll.configs.resuming import Effect, effect_of
from roll.configs.schema import settings_of
from roll.report.curve import learning_curve_svg, round_above
from roll.report.parting import partings
from roll.report.record import held_out
from roll.report.sections import numbers
from roll.tracking.display import difference_interval, share_interval
from roll.tracking.run import read_json_lines

_KERNELS = re.compile(r"(^|\.)system_envs\.(ATEN_CPU_CAPABILITY|MKL_\w+|OMP_NUM_THREADS)$")
"""Keys that choose among kernels, which compute the same."""
_LAYOUT = re.compile("actor_|critic|reference|teacher|val_infer|balance_ranks_by|max_running_")
"""Of keys without an effect on results, the beginnings of those on which the order of sums may depend."""
FIGURES = {
    "held-out success": "eval/success",
    "held-out loss": "eval/loss",
    "training reward": "rollout/reward",
    "response tokens": "rollout/response_tokens",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "tokens/s of rollouts": "tokens_per_s/rollout",
    "tokens/s of training": "tokens_per_s/train",
}
"""What is compared, by name; held-out ones at the last evaluation, others as the mean of the last third."""
_CURVES = ("rollout/success", "eval/success", "eval/loss", *list(FIGURES.values())[2:6])


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        settings: by dotted key.
        metrics: of every step, also of the evaluation before the first.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path, name: str) -> Run:
        """Raises ValueError where the folder is no run's."""
        config, summary = folder / "config.yaml", folder / "summary.json"
        if not config.is_file():
            raise ValueError(f"got {folder}, expected a run's folder, with config.yaml")
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
        found = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
        settings = {key: value for key, value, _ in settings_of(values)}
        return cls(name, folder, settings, found, read_json_lines(folder / "metrics.jsonl"))

    @cached_property
    def sections(self) -> set[str]:
        """The dotted beginnings of its keys."""
        parts = [key.split(".") for key in self.settings]
        return {".".join(each[:count]) for each in parts for count in range(1, len(each))}

    def lacking(self, key: str) -> str:
        """The outermost section around a key that this run does not have, else the key."""
        parts = key.split(".")
        places = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((place for place in places if place not in self.sections), key)

    def shown(self, key: str) -> str:
        return _text(self.settings.get(key, NOTHING))

    def figure(self, metric: str) -> float | None:
        """Its value at the end, see ``FIGURES``."""
        values = [value for _, value in numbers(self.metrics, metric)]
        if not values:
            return None
        return values[-1] if metric.startswith("eval") else statistics.fmean(values[-max(1, len(values) // 3) :])

    @property
    def trials(self) -> int:
        """Independent trials of its last evaluation."""
        last = [each for each in self.metrics if each.get("eval/success") is not None][-1:]
        return held_out(last[0])[1] if last else 0

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in all runs: its values, in their order."""

    what: str
    values: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    """Several runs; the first is the one that others are compared with."""

    runs: Sequence[Run]

    @cached_property
    def _keys(self) -> list[str]:
        """Those that differ; of a section that some run lacks, the section alone."""
        keys = dict.fromkeys(key for run in self.runs for key in run.settings)
        differ = [key for key in keys if len({_text(run.settings.get(key, NOTHING)) for run in self.runs}) > 1]
        return list(dict.fromkeys(min((run.lacking(key) for run in self.runs), key=len) for key in differ))

    @property
    def settings(self) -> list[Difference]:
        """Keys that differ and that results depend on."""
        return [self._of(key) for key in self._keys if effect_of(key) is not Effect.FREE]

    @property
    def free(self) -> list[str]:
        """Keys that differ without an effect on results."""
        return [key for key in self._keys if effect_of(key) is Effect.FREE]

    def _of(self, key: str) -> Difference:
        return Difference(key, ["a section" if key in run.sections else run.shown(key) for run in self.runs])

    def recorded(self, section: str) -> list[Difference]:
        """Entries of the summary's ``versions`` or ``data`` that differ."""
        kept = [run.summary.get(section) or {} for run in self.runs]
        names = dict.fromkeys(name for each in kept for name in each)
        rows = [Difference(name, [_text(each.get(name, NOTHING)) for each in kept]) for name in names]
        return [row for row in rows if len(set(row.values)) > 1]

    def nothing(self, title: str) -> str:
        """Why there is no row under a title: earlier versions recorded neither software nor data."""
        section = {"Software and machines that differ": "versions", "Data that differ": "data"}.get(title)
        without = [run.name for run in self.runs if section is not None and section not in run.summary]
        return f"unknown, as {', '.join(without)} did not record them" if without else "none"

    @cached_property
    def groups(self) -> list[list[Run]]:
        """Runs that differ in their seeds alone, or not at all."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            data = run.summary.get("data")
            without = (Effect.FREE, Effect.ROWS) if data else (Effect.FREE,)  # data are compared by their content
            decides = {
                key: value
                for key, value in run.settings.items()
                if key != "seed" and effect_of(key) not in without and not _KERNELS.search(key)
            }
            found.setdefault(_text([decides, data]), []).append(run)
        return list(found.values())

    def label(self, group: Sequence[Run]) -> str:
        """Name of a group."""
        if len(group) == 1:
            return group[0].name
        seeds = list(dict.fromkeys(str(run.seed) for run in group))
        return f"{group[0].name} and {len(group) - 1} more (seed {', '.join(seeds)})"

    def figures(self) -> Iterator[tuple[str, list[str]]]:
        """A row for each figure that some run has: its name, and for each group its mean and interval in words."""
        for name, metric in FIGURES.items():
            cells = [_group_figure(group, metric) for group in self.groups]
            if any(cells):
                yield name, [cell or "–" for cell in cells]

    def verdicts(self) -> Iterator[str]:
        """For each other group and figure, whether it differs from the first group beyond noise."""
        first, *others = self.groups
        for other in others:
            for name, metric in FIGURES.items():
                if verdict := _difference(first, other, metric):
                    yield f"{name}, {self.label(other)} against {self.label(first)}: {verdict}"

    def partings(self) -> Iterator[str]:
        """Where runs with equal settings and seeds begin to differ."""
        for group in self.groups:
            for run in group[1:]:
                if run.seed == group[0].seed:
                    pair = Comparison([group[0], run])
                    kernels = [each for each in pair.settings if _KERNELS.search(each.what)]
                    differ = [
                        f"{each.what} ({' | '.join(each.values)})" for each in [*pair.recorded("versions"), *kernels]
                    ]
                    yield from partings(group[0], run, differ, [key for key in pair.free if _LAYOUT.match(key)])

    def curves(self) -> Iterator[str]:
        """A drawing for each metric, with a line for each run."""
        for metric in _CURVES:
            lines = {run.name: points for run in self.runs if (points := numbers(run.metrics, metric))}
            values = [value for points in lines.values() for _, value in points if math.isfinite(value)]
            if not values:
                continue
            share = metric.endswith("/success")
            low = -round_above(-min(values)) if min(values) < 0 else 0.0
            bounds = (0.0, 1.0) if share else (low, max(round_above(max(values)), low + 1e-9))
            yield learning_curve_svg(lines, title=metric, y_range=bounds, percent=share, width=520, height=300)

    def text(self) -> str:
        """For the terminal."""
        parts = [("Settings that differ", self.settings)]
        parts += [
            ("Software and machines that differ", self.recorded("versions")),
            ("Data that differ", self.recorded("data")),
        ]
        lines = ["runs: " + ", ".join(run.name for run in self.runs)]
        for title, rows in parts:
            lines += ["", f"{title}:" if rows else f"{title}: {self.nothing(title)}"]
            lines += [f"  {row.what}: {' | '.join(row.values)}" for row in rows]
        if self.free:
            lines += ["", f"{len(self.free)} more keys differ, which results do not depend on: {', '.join(self.free)}"]
        lines += ["", "At the end:"]
        lines += [f"  {self.label(group)}" for group in self.groups] if len(self.groups) > 1 else []
        lines += [f"  {name}: {' | '.join(cells)}" for name, cells in self.figures()]
        for title, found in (("Beyond noise?", self.verdicts()), ("Where they part", self.partings())):
            told = list(found)
            lines += ["", title, *(f"  {line}" for line in told)] if told else []
        return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return show(value) if value is NOTHING else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _values(group: Sequence[Run], metric: str) -> list[float]:
    """One for each seed."""
    found = {run.seed: value for run in reversed(group) if (value := run.figure(metric)) is not None}
    return list(found.values())


def _group_figure(group: Sequence[Run], metric: str) -> str:
    """Mean over the seeds with its 95% interval; of one evaluation the interval of its share."""
    values = _values(group, metric)
    if not values:
        return ""
    mean = statistics.fmean(values)
    if len(values) > 1:
        half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return f"{mean:.4g} ± {half:.2g} ({len(values)} seeds)"
    if metric == "eval/success" and (size := next(run.trials for run in group if run.figure(metric) is not None)):
        low, high = share_interval(mean, size)
        return f"{mean:.4g} ({low:.3f} to {high:.3f}, {size} trials)"
    return f"{mean:.4g}"


def _difference(first: Sequence[Run], other: Sequence[Run], metric: str) -> str:
    """Welch's interval of the difference where seeds say how large the noise is; that of two evaluations without."""
    before, after = _values(first, metric), _values(other, metric)
    if not before or not after:
        return ""
    change = statistics.fmean(after) - statistics.fmean(before)
    if len(before) > 1 or len(after) > 1:
        half = _half_width(before, after)
        beyond = "larger than the noise of seeds" if abs(change) > half else "within the noise of seeds"
        return f"{change:+.4g}, 95% interval {change - half:+.4g} to {change + half:+.4g}: {beyond}"
    if metric != "eval/success":
        return ""
    low, high = difference_interval(before[0], first[0].trials, after[0], other[0].trials)
    beyond = "larger than" if low > 0 or high < 0 else "within"
    return (
        f"{change:+.4g}, 95% interval {low:+.4g} to {high:+.4g}: {beyond} the noise of the evaluations; that of "
        "seeds is unknown, for which several runs with other seeds are needed"
    )


def _half_width(before: Sequence[float], after: Sequence[float]) -> float:
    """Of the 95% interval of a difference of means; a single run has the spread of the other group."""
    spreads = {len(each): statistics.variance(each) for each in (before, after) if len(each) > 1}
    known = next(iter(spreads.values()))
    parts = [(statistics.variance(each) if len(each) > 1 else known) / len(each) for each in (before, after)]
    if not sum(parts):
        return 0.0
    degrees = sum(len(each) - 1 for each in (before, after))
    if min(len(before), len(after)) > 1:
        weights = [part**2 / (len(each) - 1) for part, each in zip(parts, (before, after), strict=True)]
        degrees = int(sum(parts) ** 2 / sum(weights))
    return t_quantile(max(1, degrees)) * math.sqrt(sum(parts))


def t_quantile(degrees: int) -> float:
    """Student's t for a two-sided interval of 95%: by Cornish and Fisher's expansion, exact for 1 and 2 degrees."""
    if degrees < 3:
        return (12.7062, 4.3027)[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
