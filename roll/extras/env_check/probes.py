"""Probes of an environment: each says what it found."""

from __future__ import annotations

import re
import statistics
from collections.abc import AsyncIterator, Callable

from roll.extras.env_check.findings import Finding
from roll.extras.env_check.plays import shown
from roll.extras.env_check.rewards import ends, pays, resists
from roll.extras.env_check.sameness import (
    differs_by_seed,
    hops_threads,
    interleaves,
    meets_threads,
    renders,
    repeats,
    repeats_elsewhere,
    resets,
)
from roll.extras.env_check.trial import Trial, can_be_made, plays, travels

_INSTANT_S = 0.005
"""Several times what ``instant`` promises; a busy machine must not be taken for a slow environment."""
_QUICK_S = 0.0002
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


async def shows(trial: Trial) -> AsyncIterator[Finding]:
    """Observations are of a bearable size and of plain characters."""
    longest = max(trial.observations, key=len)
    if len(longest) > trial.subject.max_chars:
        yield Finding("observation-size", f"{len(longest):,} characters, more than {trial.subject.max_chars:,}")
    for text in trial.observations:
        if found := _CONTROL.search(text):
            yield Finding("observation-characters", f"{found[0]!r} in {shown(text)}")
            return


async def is_quick(trial: Trial) -> AsyncIterator[Finding]:
    """Calls are as quick as the class says."""
    subject = trial.subject
    for call, seconds in trial.seconds.items():
        median, quartile = statistics.median(seconds), statistics.quantiles(seconds)[0]
        if subject.instant and quartile > _INSTANT_S:
            words = f"three of four calls of {call} take more than {1000 * quartile:.1f} ms ({len(seconds)} calls)"
            yield Finding("not-instant", words)
        elif median > subject.slow:
            yield Finding("slow", f"{call} takes {median:.1f} s (median of {len(seconds)})")
    medians = [statistics.median(seconds) for seconds in trial.seconds.values()]
    if not (subject.instant or subject.own_thread or subject.asks) and max(medians) < _QUICK_S:
        yield Finding("could-be-instant", f"no call takes {1000 * _QUICK_S:g} ms (medians)")


Probe = Callable[[Trial], AsyncIterator[Finding]]

PROBES: tuple[Probe, ...] = (
    travels,
    can_be_made,
    plays,
    pays,
    shows,
    repeats,
    repeats_elsewhere,
    resets,
    is_quick,
    renders,
    differs_by_seed,
    resists,
    ends,
    interleaves,
    hops_threads,
    meets_threads,
)
"""In the order in which they run; what follows ``repeats`` compares with the episodes of ``plays``."""
