"""A run in the terminal, drawn from its folder alone: ``roll watch``, on any machine that sees the files."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roll.report.diagnosis import Diagnosis, diagnose
from roll.report.record import RunRecord
from roll.report.sections import evaluations, numbers
from roll.tracking.display import duration, plain_text, sparkline
from roll.tracking.run import PHASE, TRAINED, is_claimed, read_json_lines

_CURVES = (
    ("reward", "rollout/reward"),
    ("success", "rollout/success"),
    ("held-out success", "eval/success"),
    ("loss", "sft/loss"),
    ("loss", "dpo/loss"),
    ("loss", "rm/loss"),
    ("loss", "distill/loss"),
    ("held-out loss", "eval/loss"),
    ("token accuracy", "sft/token_accuracy"),
    ("preference accuracy", "dpo/accuracy"),
    ("pair accuracy", "rm/accuracy"),
    ("held-out accuracy", "eval/accuracy"),
    ("divergence from teacher", "distill/divergence"),
    ("held-out divergence", "eval/divergence"),
    ("KL from reference", "reward/kl"),
    ("KL from reference (loss)", "actor/kl_loss"),
    ("KL from teacher", "teacher/reverse_kl"),
    ("KL of the update", "actor/approx_kl"),
    ("entropy", "actor/entropy"),
    ("response tokens", "rollout/response_tokens"),
    ("cut off", "rollout/cut_off"),
    ("gradient norm", "actor/grad_norm"),
    ("tokens/s of rollouts", "tokens_per_s/rollout"),
    ("tokens/s of training", "tokens_per_s/train"),
)
"""Metrics that are drawn, in this order, where a run has them."""
_SHARES = ("success", "accuracy", "cut_off")
_RECENT = 10
"""Steps whose seconds are shown by phase."""
_TAIL_BYTES = 100_000
_LINES = 3
"""Of warnings, and of episodes."""
_COLORS = {"completed": "green", "running": "cyan", "interrupted": "yellow"}


@dataclass
class RunView:
    """What the folder of a run shows; ``frame`` reads what has changed since the last one."""

    folder: Path

    def __post_init__(self) -> None:
        """Reads the configuration.

        Raises:
            ValueError: the folder is no run's.
        """
        path = self.folder / "config.yaml"
        if not path.is_file():
            raise ValueError(f"got {self.folder}, expected a run's folder, with config.yaml")
        self._config: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        self._summary: dict[str, Any] = {}
        self._seen: tuple[int, int] | None = None
        self._metrics: list[dict[str, Any]] = []
        self._diagnosis: Diagnosis | None = None

    @property
    def ended(self) -> bool:
        """Nothing is going to change."""
        return _json(self.folder / "summary.json").get("status", "running") != "running" or self._is_dead()

    def frame(self, width: int = 100) -> RenderableType:
        """The run as it is now."""
        self._read()
        parts: list[RenderableType] = [self._head()]
        if self._metrics:
            wide = width >= 110
            curves, times = self._curves(max(10, width - (95 if wide else 55))), self._times()
            parts.append(Columns([curves, times], padding=(0, 4)) if wide else Group(curves, times))
        else:
            parts.append(Text("no step has been reported yet", style="dim"))
        parts += [*self._remarks(), *self._warnings(), *self._episodes()]
        return Panel(Group(*parts), title=Text(self.folder.resolve().name, style="bold"), border_style="dim")

    def _read(self) -> None:
        self._summary = _json(self.folder / "summary.json")
        path = self.folder / "metrics.jsonl"
        stat = path.stat() if path.exists() else None
        seen = None if stat is None else (stat.st_size, stat.st_mtime_ns)
        if seen == self._seen:
            return
        self._seen, self._metrics = seen, read_json_lines(path)
        try:
            self._diagnosis = diagnose(RunRecord.read(self.folder))
        except ValueError:  # it samples nothing, or has not yet
            self._diagnosis = None

    def _is_dead(self) -> bool:
        """Its process is gone without a word; known on its own machine alone."""
        return is_claimed(self.folder, _json(self.folder / PHASE).get("host")) is False

    def _head(self) -> RenderableType:
        summary, phase = self._summary, _json(self.folder / PHASE)
        status = str(summary.get("status", "running"))
        color = _COLORS.get(status, "red")
        done, last = int(summary.get("steps", 0)), int(self._config.get("max_steps", 0))
        if status == "running" and self._is_dead():
            status, color = "its process is gone", "red"
        elif status == "running" and phase:
            status = f"{phase['phase']} for {duration(max(0.0, time.time() - phase['since']))}"
        seconds = [sum(self._seconds(each).values()) for each in self._metrics[-_RECENT:] if each["step"]]
        left = statistics.median(seconds) * (last - done) if seconds and not self.ended else 0.0
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        gone = f"{duration(float(summary['wall_s']))} gone" if "wall_s" in summary else ""
        ahead = f"about {duration(left)} left" if left else ""
        bar = ProgressBar(total=max(1, last), completed=done)
        head.add_row(
            Text.assemble(("● ", color), (plain_text(status), "bold"), f"  step {done}/{last}"),
            bar,
            Text(" · ".join(filter(None, (gone, ahead))), style="dim"),
        )
        error = summary.get("error")
        return Group(head, Text(plain_text(str(error)), style="red")) if error else head

    def _curves(self, width: int) -> RenderableType:
        table = _table("", "", "now", "lowest", "highest")
        for label, name in _CURVES:
            points = [value for _, value in numbers(self._metrics, name) if math.isfinite(value)]
            if not points:
                continue
            low, high = min(points), max(points)
            scaled = [(value - low) / (high - low) if high > low else 0.5 for value in points]
            cells = (_figure(name, value) for value in (points[-1], low, high))
            table.add_row(Text(label, style="dim"), Text(sparkline(scaled, min(48, width)), style="cyan"), *cells)
        rows = evaluations(self._metrics)
        if not rows:
            return table
        last = rows[-1]
        line = f"held out at step {last['step']}: {last['share']}, 95% interval {last['interval']}"
        return Group(table, Text(line, style="dim"))

    def _seconds(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Of a step by phase; single calls within phases are left out."""
        phases = self._summary.get("seconds") or {}
        return {name: float(record.get(f"time/{name}") or 0.0) for name in phases if f"time/{name}" in record}

    def _times(self) -> RenderableType:
        steps = [self._seconds(each) for each in self._metrics[-_RECENT:] if each["step"]]
        names = dict.fromkeys(name for each in steps for name in each)
        means = {name: statistics.fmean(each.get(name, 0.0) for each in steps) for name in names}
        whole = sum(means.values()) or 1.0
        table = _table("phase", "", "s a step", "share")
        for name, mean in sorted(means.items(), key=lambda item: -item[1]):
            bar = Text("█" * round(20 * mean / whole), style="blue")
            table.add_row(Text(plain_text(name), style="dim"), bar, f"{mean:.2f}", f"{mean / whole:.0%}")
        return table

    def _remarks(self) -> Iterator[RenderableType]:
        for name, alarm in (self._summary.get("watches") or {}).items():
            yield Text(plain_text(f"watch {name}, step {alarm['last']}: {alarm['text']}"), style="yellow")
        if (found := self._diagnosis) is None:
            return
        yield Text(found.verdict, style="green" if found.learns else "")
        for cause in found.findings[:_LINES]:
            yield Text(plain_text(f"  {cause.cause}: {cause.text}"), style="dim")

    def _warnings(self) -> Iterator[RenderableType]:
        folder = self._config.get("logging_dir")
        path = (Path(folder).expanduser() if folder else self.folder / "logs") / "roll.log"
        lines = [line for line in _tail(path) if " WARNING " in line or " ERROR " in line]
        for line in lines[-_LINES:]:
            yield Text(plain_text(f"! {line}"), style="yellow", no_wrap=True, overflow="ellipsis")

    def _episodes(self) -> Iterator[RenderableType]:
        files = [
            path for start in (TRAINED, "eval-") for path in (self.folder / "trajectories").glob(f"{start}*.jsonl")
        ]
        if not files:
            return
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        yield Text(f"last episodes ({newest.stem})", style="bold")
        for episode in read_json_lines(newest)[-_LINES:]:
            said = " ".join(str(episode["turns"][-1]["text"]).split()) if episode["turns"] else ""
            mark = ("✓ ", "green") if episode["success"] else ("✗ ", "red")
            what = f"{episode['tag']} {episode['group_id']}/{episode['member']}, score {episode['score']:.3g}: "
            yield Text.assemble(mark, (plain_text(what), "dim"), plain_text(said), no_wrap=True, overflow="ellipsis")


def watch(folder: Path, console: Console, every: float, *, once: bool = False) -> None:
    """Shows a run until it ends, or a single frame.

    Args:
        every: seconds between two looks.

    Raises:
        ValueError: the folder is no run's.
    """
    view = RunView(folder)
    if once or view.ended:
        console.print(view.frame(console.width))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            ended = view.ended
            live.update(view.frame(console.width), refresh=True)
            if ended:
                return
            time.sleep(every)


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(heads), header_style="dim")
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _figure(name: str, value: float) -> str:
    if name.endswith(_SHARES):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _json(path: Path) -> dict[str, Any]:
    """An object in a file that a run replaces as it goes on; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(path: Path) -> Sequence[str]:
    """The last lines of a long file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
