"""Tries an environment: seeds, resets, rewards, tricks, threads, processes. ``roll env check``, and for tests:

>>> from roll.extras.env_check import assert_env_ok
>>> assert_env_ok("frozen_lake", {"size": 5})
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv
from roll.configs.problems import ConfigErrors
from roll.extras.env_check.findings import RULES, Finding, Report, Severity, check_names
from roll.extras.env_check.probes import PROBES
from roll.extras.env_check.trial import StopCheckError, Subject, Trial
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
    return asyncio.run(_check(Trial(Subject(name, config, tuple(answers), **effort)), tell))


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


async def _check(trial: Trial, tell: Callable[[str], None]) -> Report:
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
