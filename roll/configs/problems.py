"""Problems of a configuration: one value per mistake, all of them raised together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

SHOWN_CHARACTERS = 80


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()
"""Stands for the value of a key that was not given."""


class Words(str):
    """A description in place of a value; shown without quotes."""


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake.

    Example: ``ConfigProblem("critic.infer_batch_size", 0, "integer, at least 1")``.
    """

    path: str
    """Dotted key, e.g. ``actor_train.training_args.learning_rate``; empty when the whole file is meant."""
    got: object
    """The value found there; ``NOTHING`` when the key is absent."""
    expected: str
    """Value that would have been right."""
    hint: str = ""
    """The nearest valid name, or what to do instead."""
    involves: tuple[str, ...] = ()
    """Other keys that the rule reads. When one of them is itself wrong, the rule has nothing to say."""

    def under(self, prefix: str) -> ConfigProblem:
        """The same problem, its keys relative to the section that ``prefix`` is in."""
        path = ".".join(part for part in (prefix, self.path) if part)
        return replace(self, path=path, involves=tuple(f"{prefix}.{key}" for key in self.involves))

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.path or 'configuration'}: got {show(self.got)}, expected {self.expected}{hint}"


MOST_ALIKE = 3
"""So many equal problems are shown one by one."""


def grouped(problems: Sequence[ConfigProblem]) -> Iterator[tuple[ConfigProblem, str]]:
    """Problems in their order, those of one kind told once where they are many.

    Alike are the same expectation of the same key, or of items of the same list, in sections beside each other.

    Yields:
        A problem, and the line about others like it, which are left out; empty where there is none.
    """
    kinds: dict[tuple[object, ...], list[ConfigProblem]] = {}
    for problem in problems:
        kinds.setdefault(_kind(problem), []).append(problem)
    for problem in problems:
        alike = kinds[_kind(problem)]
        if len(alike) <= MOST_ALIKE:
            yield problem, ""
        elif problem is alike[0]:
            yield problem, f"… and {len(alike) - 1} more like it: {', '.join(each.path for each in alike[1:3])} …"


def _kind(problem: ConfigProblem) -> tuple[object, ...]:
    parts = problem.path.split(".")
    item = parts[-1].isdigit()
    return (len(parts), ".".join(parts[:-1]) if item else parts[-1], problem.expected, "" if item else problem.hint)


class ConfigErrors(ValueError):
    """Every mistake of a configuration, in the order of the keys."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        lines = [line for problem, more in grouped(self.problems) for line in (str(problem), more) if line]
        super().__init__(f"{count} {noun} in the configuration\n" + "\n".join(f"  {line}" for line in lines))


def show(value: object) -> str:
    """A value as one short line of YAML-like text."""
    if value is NOTHING or isinstance(value, Words):
        return str(value)
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def pattern_problems(key: str, pattern: str | None, groups: int = 1) -> Iterator[ConfigProblem]:
    """Reasons why the regular expression at ``key`` cannot be used; ``groups`` is how many it must have."""
    try:
        if pattern is not None and re.compile(pattern).groups < groups:
            yield ConfigProblem(key, pattern, "a group around the answer, as in <answer>(.*?)</answer>")
    except re.error as error:
        yield ConfigProblem(key, pattern, "a regular expression", str(error))
