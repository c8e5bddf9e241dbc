"""Progress of a command: a bar on a terminal, a line from time to time elsewhere; on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 20.0
"""Off a terminal, between two lines."""


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Counts what is finished.

    Args:
        done: how many of them were finished before.

    Yields:
        A function to call for each, with what else is worth saying (tokens per second, failures).
    """
    if sys.stderr.isatty():
        beside = TextColumn("{task.fields[beside]}")
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), beside)
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done, beside="")

            def move(beside: str = "") -> None:
                bar.update(task, advance=1, beside=beside)

            yield move
        return
    count, words, started, ended = done, "", time.monotonic(), threading.Event()

    def advance(beside: str = "") -> None:
        nonlocal count, words
        count, words = count + 1, beside

    def tell() -> None:
        while not ended.wait(QUIET_SECONDS):  # also where nothing is finished yet
            after = f"after {time.monotonic() - started:,.0f} s"
            sys.stderr.write(f"{what}: {count:,} of {total:,} {after}{f', {words}' if words else ''}\n")
            sys.stderr.flush()

    threading.Thread(target=tell, name="progress", daemon=True).start()
    try:
        yield advance
    finally:
        ended.set()


def page(figures: Mapping[str, float | None]) -> str:
    """The figures as text, a standard error beside its mean."""
    width = max(map(len, figures))
    lines = []
    for name, value in figures.items():
        if name.endswith("_error") or value is None:
            continue
        beside = figures.get(f"{name}_error")
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        lines.append(f"{name:<{width}}  {shown}{'' if beside is None else f' ± {beside:.4f}'}\n")
    return "".join(lines)
