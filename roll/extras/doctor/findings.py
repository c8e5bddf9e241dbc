"""Findings about a machine, as text for a terminal and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from roll.utils.foreign import Fault

Level = Literal["ok", "warning", "error"]
"""``error``: a run fails, or cannot save. ``warning``: it is slower, or fails in some configurations."""
WIDTH = 110


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    name: str
    got: str
    fix: str = ""
    """Advice on what to do, where the level is not ``ok``."""
    node: str = ""
    """Machine of a cluster; empty for this one."""


Check: TypeAlias = Callable[[], Iterable[Finding]]


def judged(name: str, got: str, *, error: bool = False, warning: bool = False, fix: str = "") -> Finding:
    """A finding whose level is the worst that holds; the fix is dropped where nothing is wrong."""
    level: Level = "error" if error else "warning" if warning else "ok"
    return Finding(level, name, got, fix if level != "ok" else "")


def examine(name: str, check: Check) -> list[Finding]:
    """Runs a check; one that fails itself is a warning, so that the others are still heard."""
    with Fault() as fault:  # of drivers and libraries
        return list(check())
    got = f"could not be checked: {type(fault.error).__name__}: {fault.error}"
    return [Finding("warning", name, got, "Look at it by hand.")]


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where there is an error, else 0."""
    return int(any(finding.level == "error" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """All findings, machine-readable, with a line end."""
    content = {"healthy": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def page(findings: Sequence[Finding]) -> str:
    """A line per finding, its fix below it, machines one after the other, and a last line that counts."""
    wide = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    node = ""
    for finding in findings:
        if finding.node != node:
            node = finding.node
            lines += ["", f"node {node}"]
        lines += _wrapped(f"{finding.level:<8} {finding.name:<{wide}}  ", finding.got)
        lines += _wrapped(" " * (9 + wide + 2) + "fix: ", finding.fix) if finding.fix else []
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "ok")}
    told = f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok"
    return "\n".join([*lines, "", told]) + "\n"


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]
