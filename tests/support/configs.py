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


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key in nested dictionaries; sections on the way are made."""
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value
