"""What is wrong with a configuration, by key."""

from collections.abc import Callable
from typing import Any

from roll.configs.problems import ConfigErrors, ConfigProblem


def problems_of(load: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, ConfigProblem]:
    """The problems that loading raises, none where it succeeds."""
    try:
        load(*arguments, **options)
    except ConfigErrors as errors:
        return {problem.path: problem for problem in errors.problems}
    return {}


def words_of(load: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, str]:
    return {path: str(problem) for path, problem in problems_of(load, *arguments, **options).items()}
