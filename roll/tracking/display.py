"""The terminal's display during a run, and its last line."""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roll.utils.foreign import Fault

logger = logging.getLogger(__name__)

SHOWN_METRICS = {
    "success": "rollout/success",
    "reward": "rollout/reward",
    "valid": "rollout/valid_rate",
    "tokens/s": "tokens_per_s/rollout",
    "eval": "eval/success",
    "loss": "sft/loss",
    "distill loss": "distill/loss",
    "teacher KL": "teacher/reverse_kl",
    "dpo loss": "dpo/loss",
    "preferences": "dpo/accuracy",
    "reward loss": "rm/loss",
    "accuracy": "rm/accuracy",
    "eval loss": "eval/loss",
}
"""Column → name of the metric it shows; a metric that has not come yet shows nothing."""

_MEASURES = {
    "preference_accuracy": ("preference accuracy", "{:.1%}"),
    "pairwise_accuracy": ("accuracy on pairs", "{:.1%}"),
    "divergence": ("divergence from the teacher", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
}
"""Key of an evaluation in the summary → its name and form: those of pipelines that learn from samples, the most telling
first."""
_PERCENT = ("success", "valid", "eval", "preferences", "accuracy")
_BLOCKS = "▁▂▃▄▅▆▇█"
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f\x9b]")
_ASIDE = ("eval", "eval greedy", "checkpoint")
"""Phases that only some steps have: the time that is left counts them apart."""
NOTED = {"noted": True}
"""``extra`` of a log record that is a note already: it goes to the log file alone."""
_Z_95 = 1.959964
"""Standard normal quantile of a two-sided interval of 95%."""
_QUIET_SECONDS = 20.0
"""Off a terminal, a phase seen before is announced again only after this long without a line."""


class Display:
    """Phase, step, success, reward, speed and time left: a live panel on a terminal, plain lines elsewhere.

    Use as a context manager: an exception or Ctrl-C passes through and the terminal is left as it was.
    """

    def __init__(self, title: str = "roll", *, stream: IO[str] | None = None) -> None:
        """``stream`` defaults to standard output."""
        self._stream = _ForgivingStream(stream or sys.stdout)
        self.live = self._stream.isatty()
        self.console = Console(file=cast(IO[str], self._stream), highlight=False)
        self.warnings: deque[str] = deque(maxlen=3)
        self._title = title
        self._total_steps = 0
        self._step = 0
        self._phase, self._progress = "starting", ""
        self._values: dict[str, float] = {}
        self._successes: list[float] = []
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._phase_seconds: dict[str, float] = {}
        """By name, how long a phase took the last time."""
        self._in_phase = self._aside = 0.0
        self._eval_steps = 0
        self._save_steps: int | None = 0
        self._evaluates_last = True
        self._unsaved = False
        self._started = self._last_step = self._last_line = self._phase_mark = time.monotonic()
        self._announced: set[str] = set()
        self._panel: Live | None = None

    def __enter__(self) -> Display:
        if self.live and self._panel is None:
            self._panel = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
            self._panel.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def start(
        self,
        total_steps: int,
        *,
        done_steps: int = 0,
        eval_steps: int = 0,
        save_steps: int | None = 0,
        evaluates_last: bool = True,
    ) -> None:
        """The training loop begins (anew). The clock of a step starts.

        Args:
            eval_steps: an evaluation every so many steps and after the last; 0: after the last alone.
            save_steps: a checkpoint every so many steps and after the last; 0: after the last alone; ``None``: none.
            evaluates_last: false: no evaluation after the last step but for ``eval_steps``.
        """
        self._total_steps, self._step = total_steps, done_steps
        self._eval_steps, self._save_steps = eval_steps, save_steps
        self._evaluates_last = evaluates_last
        self._leave_phase()
        self._last_step, self._aside = time.monotonic(), 0.0
        self._step_seconds.clear()

    def phase(self, name: str) -> None:
        """Activity of the moment: ``warm start``, ``rollout``, ``train``, ``eval`` …"""
        self._leave_phase()
        self._phase, self._progress, self._in_phase = plain_text(name), "", 0.0
        self._unsaved = self._unsaved and name != "checkpoint"
        quiet = time.monotonic() - self._last_line > _QUIET_SECONDS
        if not self.live and (quiet or name not in self._announced):
            self._line(f"[{duration(time.monotonic() - self._started)}] {self._phase} …")
        self._announced.add(name)

    def doing(self) -> str:
        """Phase and step, in words."""
        return f"{self._phase}, step {self._step + 1}" if self._total_steps else self._phase

    def progress(self, done: int, total: int, unit: str) -> None:
        """Progress of the present phase; off a terminal it is said only after a long silence."""
        self._progress = f"{done}/{total} {unit}"
        if not self.live and time.monotonic() - self._last_line > _QUIET_SECONDS:
            self._line(f"[{duration(time.monotonic() - self._started)}] {self._phase}: {self._progress}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number ``step`` (counted from 1) is finished."""
        self._leave_phase()
        now = time.monotonic()
        self._step_seconds.append(now - self._last_step - self._aside)
        self._step, self._last_step, self._aside = step, now, 0.0
        self._unsaved = self._times(step - 1, self._save_steps) > self._times(step, self._save_steps)
        for label, name in SHOWN_METRICS.items():
            if name in metrics:
                self._values[label] = float(metrics[name])
        if SHOWN_METRICS["success"] in metrics:
            self._successes.append(self._values["success"])
        if not self.live:
            cells = [f"{label} {_value(label, value)}" for label, value in self._values.items()]
            self._line("  ".join([f"step {step}/{self._total_steps}", *cells, f"ETA {self._eta()}"]))

    def note(self, text: str) -> None:
        """A line that stays: above the live panel, or among the plain lines."""
        if self.live:
            self.console.print(Text(plain_text(text)))
        else:
            self._line(plain_text(text))

    def finish(self, text: str) -> None:
        """Takes the panel down and leaves ``text`` as the last line."""
        self._stop()
        self.console.print(Text(plain_text(text), style="bold" if self.live else ""), soft_wrap=True)

    def log_handler(self) -> logging.Handler:
        """Writes log records above the live panel (or as plain lines on stderr) and remembers the warnings."""
        handler: logging.Handler
        if self.live:
            handler = RichHandler(console=self.console, show_path=False, rich_tracebacks=False)
        else:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
        handler.addFilter(self._remember)
        return handler

    def _remember(self, record: logging.LogRecord) -> bool:
        text = f"{record.msg} {record.args}"
        with Fault() as fault:  # what a filter raises would end the caller that logged
            text = record.getMessage()
        if fault.error is not None:  # arguments that do not fit the text
            record.msg, record.args = text, None
        if record.levelno >= logging.WARNING:
            self.warnings.append(plain_text(text).partition("\n")[0][:160])
        return not getattr(record, "noted", False)

    def _stop(self) -> None:
        if self._panel is not None:
            self._panel.stop()
            self._panel = None

    def _line(self, text: str) -> None:
        self._stream.write(_CONTROL.sub("", text) + "\n")
        self._stream.flush()
        self._last_line = time.monotonic()

    def _eta(self) -> str:
        if not self._step_seconds or not self._total_steps:
            return "–"
        ahead = statistics.median(self._step_seconds) * max(0, self._total_steps - self._step)
        ahead += self._took("eval") * self._times(self._step, self._eval_steps, self._evaluates_last)
        ahead += self._took("eval greedy") * (
            self._step < self._total_steps and self._evaluates_last
        )  # before and after the run only
        ahead += self._took("checkpoint") * (self._times(self._step, self._save_steps) + self._unsaved)
        return duration(max(0.0, ahead - (time.monotonic() - self._last_step)))

    def _took(self, phase: str) -> float:
        return self._phase_seconds.get(phase, 0.0)

    def _times(self, step: int, every: int | None, with_last: bool = True) -> int:
        """Number of times after ``step`` that something happens every so many steps and, perhaps, after the last one.

        ``every`` is 0 for the last step alone and ``None`` for never.
        """
        last = self._total_steps
        if step >= last or every is None:
            return 0
        return (last // every - step // every if every else 0) + (with_last and bool(not every or last % every))

    def _leave_phase(self) -> None:
        """Notes the time of the present phase so far; a step may end within one."""
        now = time.monotonic()
        passed, self._phase_mark = now - self._phase_mark, now
        self._in_phase += passed
        self._phase_seconds[self._phase] = self._in_phase
        if self._phase in _ASIDE:
            self._aside += passed

    def _render(self) -> RenderableType:
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        head.add_row(
            Text.assemble(("● ", "green"), (self._phase, "bold"), (f"  {self._progress}", "dim")),
            Text(f"{duration(time.monotonic() - self._started)} gone · ETA {self._eta()}", style="dim"),
        )
        steps = Table.grid(expand=True, padding=(0, 1))
        steps.add_column(no_wrap=True)
        steps.add_column(ratio=1)
        total = max(self._total_steps, 1)
        steps.add_row(f"step {self._step}/{self._total_steps or '–'}", ProgressBar(total=total, completed=self._step))
        figures_seen = [(label, self._values[label]) for label in SHOWN_METRICS if label in self._values]
        figures = Table.grid(padding=(0, 3))
        figures.add_row(
            *(Text.assemble((f"{label} ", "dim"), (_value(label, value), "bold cyan")) for label, value in figures_seen)
        )
        rows: list[RenderableType] = [head, steps, figures]
        if len(self._successes) > 1:
            width = max(10, self.console.width - 16)
            rows.append(Text.assemble(("success  ", "dim"), (sparkline(self._successes, width), "green")))
        rows.extend(Text(f"! {text}", style="yellow", no_wrap=True, overflow="ellipsis") for text in self.warnings)
        return Panel(Group(*rows), title=Text(self._title, style="bold"), border_style="dim", padding=(0, 1))


def sparkline(values: list[float], width: int) -> str:
    """``values``, from 0 to 1, as a line of block characters, at most ``width`` of them, each the mean of its share."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) > width:
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [statistics.fmean(finite[a:b]) for a, b in itertools.pairwise(edges)]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(min(1.0, max(0.0, value)) * top)] for value in finite)


def closing_line(summary: Mapping[str, Any], run_dir: Path) -> str:
    """One line that says what was learned and where to look.

    Args:
        summary: as in ``summary.json``; read are ``status``, ``learned``, ``steps``, ``wall_s``, and of ``eval.before``
            and ``eval.after`` what was measured of held-out samples (``_MEASURES``), ``accuracy`` (else ``success``),
            ``episodes`` and ``prompts``. Whatever is missing is not mentioned. Where answers alone are measured,
            something was learned, or lost, if the difference is beyond its 95% confidence interval.
    """
    said = what_was_learned(summary)
    status = summary.get("status", "completed")
    lead = "" if status == "completed" else f"{str(status).capitalize()}. "
    if learned := summary.get("learned"):
        lead += f"Ended as {learned}. "
    steps, wall = summary.get("steps"), summary.get("wall_s")
    work = f" in {steps} steps" if steps is not None else ""
    work += f", {duration(wall)}" if wall is not None else ""
    watch = run_dir / "renders" / "index.html"
    look = f"watch {watch}" if watch.exists() else f"see {run_dir}"
    return f"{lead}{said}{work}; {look}"


def what_was_learned(summary: Mapping[str, Any]) -> str:
    """What the evaluations before and after training say, in words; see ``closing_line``."""
    evals = summary.get("eval") or {}
    first, last, steps = evals.get("before") or {}, evals.get("after") or {}, summary.get("steps")
    return _measures_in_words(first, last, steps) or _answers_in_words(first, last, steps)


def _measures_in_words(first: Mapping[str, Any], last: Mapping[str, Any], steps: int | None) -> str:
    """What a pipeline that learns from samples measured of others, its own measure first; nothing of other runs."""
    known = {key: value for key, value in _MEASURES.items() if key in first or key in last}
    if not known:
        return ""
    unit = " nats per token" if "perplexity" in {**first, **last} else ""
    both = [(*known[key], first[key], last[key]) for key in known if key in first and key in last]
    if both:
        figures = ", ".join(f"{name} {form.format(old)} → {form.format(new)}" for name, form, old, new in both)
        if "success" not in first or "success" not in last:
            return f"Held-out {figures}{unit}"
        answers = f"accuracy of {last.get('episodes')} answers {first['success']:.1%} → {last['success']:.1%}"
        return f"Held-out {figures}{unit}; {answers}"
    found = last or first
    (lead, figure), *rest = [(name, form.format(found[key])) for key, (name, form) in known.items() if key in found]
    more = "".join(f", {name} {value}" for name, value in rest) + unit
    if not last and steps:
        return f"Not evaluated after training; held-out {lead} before was {figure}{more}"
    return f"Held-out {lead}{' after training' if last else ''}: {figure}{more}"


def _answers_in_words(first: Mapping[str, Any], last: Mapping[str, Any], steps: int | None) -> str:
    measure = "accuracy" if "accuracy" in {**first, **last} else "success"
    before, after = first.get(measure), last.get(measure)
    episodes = (last or first).get("episodes")
    where = f" on {episodes} held-out episodes" if episodes else ""
    if before is not None and after is not None:
        sizes = [each.get("prompts") or each.get("episodes") or 0 for each in (first, last)]
        low, high = difference_interval(before, sizes[0], after, sizes[1])
        word = "Learned" if low > 0 else "Worse than before" if high < 0 else "No change beyond noise"
        bounds = f", 95% interval {100 * low:+.1f} to {100 * high:+.1f}" if min(sizes) else ""
        return f"{word}: {measure} {before:.1%} → {after:.1%} ({100 * (after - before):+.1f} points{bounds}){where}"
    if before is not None and steps:
        return f"Not evaluated after training; {measure} before was {before:.1%}{where}"
    if after is not None:
        return f"{measure.capitalize()} after training: {after:.1%}{where}"
    return "No evaluation" if before is None else f"{measure.capitalize()}: {before:.1%}{where}"


def difference_interval(
    before: float, before_size: int, after: float, after_size: int, quantile: float = _Z_95
) -> tuple[float, float]:
    """Confidence interval of ``after - before``, two proportions of that many independent trials each.

    Newcombe 1998, *Interval Estimation for the Difference between Independent Proportions*, method 10: from the two
    Wilson intervals. Without a number of trials everything is possible: −1 to 1.

    Args:
        quantile: of the standard normal distribution; by default that of 95%.
    """
    low1, high1 = share_interval(before, before_size, quantile)
    low2, high2 = share_interval(after, after_size, quantile)
    difference = after - before
    return difference - math.hypot(after - low2, high1 - before), difference + math.hypot(high2 - after, before - low1)


def share_interval(share: float, size: int, quantile: float = _Z_95) -> tuple[float, float]:
    """Wilson's confidence interval of a proportion of so many trials; by default that of 95%."""
    if not size:
        return 0.0, 1.0
    spread = quantile**2 / size
    middle = share + spread / 2
    half = quantile * math.sqrt(share * (1 - share) / size + spread / (4 * size))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


class _ForgivingStream(io.TextIOBase):
    """Passes text on until the other end is gone (``| head``, a closed terminal): the training goes on unseen.

    Characters that the stream's encoding lacks become question marks.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._inner = stream
        self._gone = False

    def write(self, text: str) -> int:
        codec = self.encoding
        self._attempt(lambda: self._inner.write(text.encode(codec, "replace").decode(codec)))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._inner.flush)

    def isatty(self) -> bool:
        return self._inner.isatty()

    def fileno(self) -> int:
        return self._inner.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._inner, "encoding", None) or "utf-8"

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError as error:
            self._gone = True
            logger.warning("the display's output is gone (%s); the run continues without it", error)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub("", super().format(record))


def plain_text(text: str) -> str:
    """Without escape sequences and control characters: text may come from a model or another machine."""
    return _CONTROL.sub("", text)


def _value(label: str, value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if label in _PERCENT:
        return f"{value:.1%}"
    return f"{value:,.0f}" if label == "tokens/s" else f"{value:.3f}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
