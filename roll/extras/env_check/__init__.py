"""Tries an environment: seeds, resets, rewards, tricks, threads, processes. ``roll env check``, and for tests:

>>> from roll.extras.env_check import assert_env_ok
>>> assert_env_ok("frozen_lake", {"size": 5})
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.text import Text

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv
from roll.configs.compose import mapping_of
from roll.configs.problems import ConfigErrors
from roll.extras.env_check.findings import RULES, Finding, Report, Severity, check_names
from roll.extras.env_check.probes import PROBES
from roll.extras.env_check.trial import StopCheckError, Subject, Trial
from roll.utils.children import ending
from roll.utils.registry import importable_path

__all__ = ["RULES", "Finding", "Report", "Severity", "assert_env_ok", "check_env", "check_names"]


def check_env(
    env_type: str | type[TextEnv],
    env_config: Mapping[str, Any] | None = None,
    *,
    answers: Sequence[str] = (),
    tell: Callable[[str], None] = lambda probe: None,
    **effort: Any,
) -> Report:
    """Plays an environment in many ways and tells what it found. Event loops of its own: not to be called in one.

    Args:
        env_type: a name, ``package.module:Class``, or the class.
        answers: texts to play; without them ``action_names``, ``expert_actions()``, and guesses.
        tell: is told what is tried next.
        effort: ``episodes`` (6) to play in each way, ``max_steps`` (32) of an episode, ``timeout`` (30) seconds of a
            call, of which ``slow`` (1) are too many, ``max_chars`` (16384) of an observation, and
            what the judge of environments that ask says (``judge_says``, "Score: 1").

    Raises:
        ConfigErrors: there is no such environment, or it does not understand ``env_config``.
        ValueError: an effort that is not one.
    """
    name = env_type if isinstance(env_type, str) else importable_path(env_type)
    config = dict(env_config or {})
    if problems := envs.check_env_config(name, config):
        raise ConfigErrors(problems)
    return asyncio.run(_tried(Trial(Subject(name, config, tuple(answers), **effort)), tell))


def assert_env_ok(
    env_type: str | type[TextEnv],
    env_config: Mapping[str, Any] | None = None,
    *,
    allow: Collection[str] = (),
    **options: Any,
) -> None:
    """Asserts that ``check_env`` finds nothing, for a test of an environment.

    Args:
        env_type: a name, ``package.module:Class``, or the class.
        options: further ones of ``check_env``.

    Raises:
        AssertionError: an error or a warning was found; its text has all of them, each with its fix.
        ValueError: a name of ``allow`` is unknown, or the environment is.
    """
    check_names(allow)
    report = check_env(env_type, env_config, **options)
    problems = report.problems(allow)
    if problems:
        raise AssertionError("\n".join([f"{report.env_type}:", *(f"  {problem}" for problem in problems)]))


async def _tried(trial: Trial, tell: Callable[[str], None]) -> Report:
    findings: list[Finding] = []
    tried = []
    for probe in PROBES:
        tried.append(probe.__name__.replace("_", " "))
        tell(tried[-1])
        try:
            async for finding in probe(trial):
                findings.append(finding)
        except StopCheckError:
            break
    ordered = sorted(dict.fromkeys(findings), key=lambda finding: list(RULES).index(finding.name))
    return Report(trial.subject.env_type, tuple(ordered), tuple(tried), tuple(_facts(trial)))


def _facts(trial: Trial) -> Iterator[tuple[str, str]]:
    """Figures that were measured, as (name, words)."""
    if not trial.moments:
        return
    wins = sum(episode.success for episode in trial.episodes)
    steps = sum(len(episode.texts) for episode in trial.episodes)
    yield "episodes", f"{len(trial.episodes)} by script, {wins} of them a success, {steps} steps"
    medians = [f"{call} {1000 * statistics.median(seconds):.3g} ms" for call, seconds in trial.seconds.items()]
    yield "speed", f"{', '.join(medians)} (medians)"
    subject = trial.subject
    yield "threads", f"instant {_word(subject.instant)}, own_thread {_word(subject.own_thread)}"
    rewards = [moment.reward for moment in trial.moments]
    yield "rewards", f"{min(rewards):g} to {max(rewards):g} for a step"
    sizes = {item.data.shape[1::-1] for moment in trial.all_moments for item in moment.pictures}
    drawn = "".join(f", pictures of {width}x{height}" for width, height in sorted(sizes)[:3])
    yield "observations", f"up to {max(map(len, trial.observations)):,} characters{drawn}"


def _word(flag: bool) -> str:
    return "yes" if flag else "no"


def check_in_child(env_type: str, env_config: Mapping[str, Any], tell: Callable[[str], None], **options: Any) -> Report:
    """``check_env`` in another process; where that one ends, the report says so.

    Raises:
        ValueError: what ``check_env`` refuses.
    """
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=_check_here, args=(theirs, env_type, env_config, options))
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


def _check_here(pipe: Connection, env_type: str, env_config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
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
