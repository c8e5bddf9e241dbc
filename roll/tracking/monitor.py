"""Measures the time and the memory that a run uses."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Span:
    """One timed stretch of a phase; the caller sets ``tokens`` once it knows how many were worked on."""

    seconds: float = 0.0
    since: float | None = None
    """``time.perf_counter`` when the work on the tokens began, if that was before the phase and beside others."""
    worked: float = 0.0
    """Seconds of the work on the tokens; those of the phase without ``since``."""
    tokens: int = 0
    flops: float = 0.0
    """Operations that the model asks for."""
    devices: int = 0
    """That worked on them; 0: nobody counted."""
    peak: float | None = None
    """Operations per second of such a device at most, if that is known."""


class PhaseTimer:
    """Adds up seconds and tokens by phase, for the step and for the whole run.

    >>> timer = PhaseTimer()
    >>> with timer.phase("rollout") as span:
    ...     span.tokens = 640
    >>> sorted(timer.step_metrics())
    ['time/rollout', 'tokens_per_s/rollout']
    """

    def __init__(self) -> None:
        self._step: dict[str, Span] = {}
        self._total: dict[str, Span] = {}

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Span]:
        """Times the block, whether it ends well or by an exception."""
        span = Span(tokens=tokens)
        started = time.perf_counter()
        try:
            yield span
        finally:
            ended = time.perf_counter()
            span.seconds = ended - started
            span.worked = ended - (started if span.since is None else span.since)
            for spans in (self._step, self._total):
                entry = spans.setdefault(name, Span())
                entry.seconds += span.seconds
                entry.worked += span.worked
                entry.tokens += span.tokens
                entry.flops += span.flops
                entry.devices, entry.peak = span.devices or entry.devices, span.peak or entry.peak

    def step_metrics(self) -> dict[str, float]:
        """Metrics since the last call, which starts the next step.

        ``time/<phase>`` (seconds), ``tokens_per_s/<phase>`` and ``tokens_per_s_per_device/<phase>``; where operations
        were counted ``tflops_per_device/<phase>``, and as a share of the device's peak ``mfu/<phase>``.
        """
        metrics = {f"time/{name}": span.seconds for name, span in self._step.items()}
        metrics |= {f"tokens_per_s/{name}": _rate(span) for name, span in self._step.items() if span.tokens}
        for name, span in self._step.items():
            if span.devices and span.worked > 0:
                each = span.worked * span.devices
                metrics[f"tokens_per_s_per_device/{name}"] = span.tokens / each
                if span.flops:
                    metrics[f"tflops_per_device/{name}"] = span.flops / each / 1e12
                    metrics |= {f"mfu/{name}": span.flops / each / span.peak} if span.peak else {}
        self._step = {}
        return metrics

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of the whole run."""
        return {name: span.seconds for name, span in self._total.items()}

    def tokens_per_s(self) -> dict[str, float]:
        """Tokens per second of the whole run, of the phases that counted tokens."""
        return {name: _rate(span) for name, span in self._total.items() if span.tokens}


def peak_memory_mb() -> float:
    """Peak resident memory of this process and its living descendants, in MB (10^6 bytes).

    The sum of every process's own high-water mark: an upper bound, since pages that processes share count in each and
    the peaks need not coincide. Without /proc, this process and the largest child that has ended.
    """
    if not Path("/proc/self/status").exists():
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB elsewhere
        usages = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usages) * unit / 1e6
    children: dict[int, list[int]] = {}
    peaks_kib: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended between the listing and the reading, or is not ours
        pid = int(fields["Pid"])
        children.setdefault(int(fields["PPid"]), []).append(pid)
        peaks_kib[pid] = int(fields.get("VmHWM", "0 kB").split()[0])
    family = [int(Path("/proc/self").resolve().name)]
    for pid in family:  # grows while it is walked
        family.extend(children.get(pid, []))
    return sum(peaks_kib.get(pid, 0) for pid in family) * 1024 / 1e6


def _rate(span: Span) -> float:
    return span.tokens / span.worked if span.worked > 0 else 0.0
