"""``roll env check``: runs the check in a child process, which an environment may end, and prints its findings."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.text import Text

from roll.configs.compose import mapping_of
from roll.configs.problems import ConfigErrors
from roll.extras.env_check import check_env, check_names
from roll.extras.env_check.findings import Finding, Report, Severity
from roll.utils.children import ending


def check_in_child(env_type: str, env_config: Mapping[str, Any], tell: Callable[[str], None], **options: Any) -> Report:
    """``check_env`` in another process; where that one ends, the report says so.

    Raises:
        ValueError: what ``check_env`` refuses.
    """
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=_check, args=(theirs, env_type, env_config, options))
    child.start()
    theirs.close()
    tried: list[str] = []
    try:
        while True:
            said = ours.recv()
            if isinstance(said, Report):
                return said
            if isinstance(said, ValueError):
                raise said
            tried.append(said)
            tell(said)
    except EOFError:
        child.join()
        words = f"{ending(child.exitcode or 0)}; tried at that time: {tried[-1] if tried else 'the import'}"
        return Report(env_type, (Finding("ends-process", words),), tuple(tried), ())
    finally:
        child.kill()
        child.join()
        ours.close()


def _check(pipe: Connection, env_type: str, env_config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    try:
        pipe.send(check_env(env_type, env_config, tell=pipe.send, **options))
    except (ConfigErrors, ValueError) as error:
        pipe.send(ValueError(str(error)))


EXIT_OK, EXIT_FINDINGS, EXIT_USAGE = 0, 1, 2

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
_LABEL = 9
_WIDTH = 110
"""Columns where nobody sees a terminal."""


def check(env_type: str, overrides: Sequence[str], *, allow: Collection[str] = (), **options: Any) -> int:
    """Checks an environment and prints what was found.

    Args:
        env_type: a name or ``package.module:Class``.
        overrides: ``key=value`` of its ``env_config``, values as in YAML.

    Returns:
        0: no error and no warning; 1: some; 2: no such environment, configuration or option.
    """
    try:
        check_names(allow)
        with Console(stderr=True).status("starts") as status:  # where somebody sees a terminal
            config = _env_config(overrides)
            report = check_in_child(env_type, config, lambda probe: status.update(f"tries: {probe}"), **options)
    except ValueError as error:
        sys.stderr.write(f"roll env check: {error}\n")
        return EXIT_USAGE
    # Colours come with a terminal alone, and go with NO_COLOR.
    print_page(report, allow, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH))
    return EXIT_FINDINGS if report.problems(allow) else EXIT_OK


def _env_config(overrides: Sequence[str]) -> dict[str, Any]:
    if wrong := [word for word in overrides if "=" not in word.strip("=")]:
        raise ValueError(f"got {', '.join(wrong)}, expected key=value")
    config, problems = mapping_of(overrides)
    if problems:
        raise ValueError("; ".join(str(problem.under("env_config")) for problem in problems))
    return config


def print_page(report: Report, allow: Collection[str], console: Console) -> None:
    """The findings, worst first, each with its fix, below what was measured."""
    console.print(Text(report.env_type, "bold"))
    facts = (*report.facts, ("tried", ", ".join(report.tried)))
    width = max(len(name) for name, _words in facts)
    for name, words in facts:
        _print(console, f"  {name:{width}}  ", words)
    order = list(_STYLES)
    for finding in sorted(report.findings, key=lambda each: order.index(each.severity)):
        allowed = finding.name in allow
        label = "allowed" if allowed else finding.severity
        style = _STYLES["note" if allowed else finding.severity]
        console.print()
        console.print(Text.assemble((f"{label:{_LABEL}}", style), (finding.name, "bold")))
        _print(console, " " * _LABEL, finding.got)
        _print(console, " " * _LABEL, f"fix: {finding.fix}")
    console.print()
    console.print(_verdict(report, allow))


def _print(console: Console, head: str, words: str) -> None:
    """Words behind their head, further lines below the first."""
    for line in Text(words).wrap(console, max(20, console.width - len(head))):
        line.rstrip()
        console.print(Text(head).append_text(line), soft_wrap=True)
        head = " " * len(head)


def _verdict(report: Report, allow: Collection[str]) -> str:
    problems = report.problems(allow)
    if not problems:
        return "no problem was found"
    errors = sum(problem.severity == "error" for problem in problems)
    parts = [(errors, "error"), (len(problems) - errors, "warning")]
    return " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in parts if count)
