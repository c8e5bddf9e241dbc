"""Says whether a run learns, and if not, why: the causes of ``causes.py`` that its record shows, in plain words."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roll.report.causes import DECISIVE, Finding, findings
from roll.report.record import RunRecord, held_out
from roll.tracking.display import difference_interval

MANY_SIGMA = 3.0
"""From so many standard errors on, a slope of the training reward is not noise."""
_FEW_STEPS = 5
"""With fewer, nothing is said about a slope that is not clear."""
SOLVED = 0.95
"""Success from which on a task counts as solved."""
_MOST_SHOWN = 5
"""Causes in the terminal."""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome for one run.

    Attributes:
        learns: nothing is wrong: held-out success or the training reward rises, or the task is solved.
        verdict: a sentence about that, with figures.
        findings: causes, the most decisive first; empty if it learns.
    """

    learns: bool
    verdict: str
    findings: Sequence[Finding]

    def text(self) -> str:
        """For the terminal."""
        lines = [self.verdict]
        if not self.learns and not self.findings:
            lines.append(
                "No known cause shows in its metrics. Look at responses in trajectories/ and renders/index.html, "
                "and let it run longer."
            )
        for number, finding in enumerate(self.findings[:_MOST_SHOWN], start=1):
            lines += [
                "",
                f"{number}. {finding.text[0].upper()}{finding.text[1:]}. [{finding.cause}]",
                *(f"     {line}" for line in finding.evidence),
                *textwrap.wrap(
                    f"what to change: {finding.advice}", 110, initial_indent="   ", subsequent_indent="     "
                ),
            ]
        return "\n".join(lines) + "\n"

    @property
    def remark(self) -> str | None:
        """The first cause in a line, if it is decisive."""
        if not (self.findings and self.findings[0].weight >= DECISIVE):
            return None
        return f"the reward does not rise: {self.findings[0].text}; {self.findings[0].advice}"

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"learns": self.learns, "verdict": self.verdict, "findings": [asdict(each) for each in self.findings]}


def diagnose(record: RunRecord) -> Diagnosis:
    """Compares held-out success before and after, else looks at the slope of the training reward."""
    learns, verdict = _verdict(record)
    return Diagnosis(learns, verdict, () if learns else findings(record))


def _verdict(record: RunRecord) -> tuple[bool, str]:
    rewards, count = record.series("rollout/reward"), len(record.steps)
    early, late = record.early("rollout/reward") or 0.0, record.late("rollout/reward")
    trend = f"training reward {early:.3g} → {late:.3g} over {count} steps"
    if record.after:
        was, now = held_out(record.before), held_out(record.after)
        (before, _), (after, _) = was, now
        low, high = difference_interval(*was, *now)
        figures = (
            f"held-out success {before:.1%} → {after:.1%} ({100 * (after - before):+.1f} points, 95% interval "
            f"{100 * low:+.1f} to {100 * high:+.1f}); {trend}"
        )
        rises = slope_in_sigma(rewards) >= MANY_SIGMA and high >= (late - early) / 2  # few were held out
        if low > 0 or rises or min(after, record.late("rollout/success")) >= SOLVED > before:
            return True, f"The run learns: {figures}."
        if high < 0:
            return False, f"The policy got worse: {figures}."
        return False, f"No gain beyond noise: {figures}."
    sigma = slope_in_sigma(rewards)
    figures = f"{trend}, a slope of {sigma:+.1f} standard errors"
    if sigma >= MANY_SIGMA:
        return True, f"The run learns: {figures}."
    if sigma <= -MANY_SIGMA:
        return False, f"The policy gets worse: {figures}."
    if count < _FEW_STEPS:
        return False, f"Too few steps to tell: {trend}."
    return False, f"No gain beyond noise: {figures}."


def slope_in_sigma(values: Sequence[float]) -> float:
    """The slope of the least-squares line through equally spaced values, in its own standard errors."""
    count = len(values)
    if count < 3:
        return 0.0
    xs = range(count)
    slope, intercept = statistics.linear_regression(xs, values)
    residual = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, values, strict=True)) / (count - 2)
    error = math.sqrt(residual / (statistics.pvariance(xs) * count))
    if error == 0:
        return math.copysign(math.inf, slope) if slope else 0.0
    return slope / error
