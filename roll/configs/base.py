"""The base of every configuration section: strict, typed, documented."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from roll.configs.problems import ConfigProblem

_ITS_VALUE: Any = object()


class Config(BaseModel):
    """A configuration section. Unknown keys are errors; every field carries its description and default.

    Conventions: ``Field(default, description="…")`` on every field; bounds (``ge``, ``gt``, ``le``) on the field;
    choices as ``Literal``; cross-field rules in ``problems()``.
    """

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=False, frozen=False, allow_inf_nan=False
    )

    def problems(self) -> Iterable[ConfigProblem]:
        """Cross-field rules that do not hold, keys relative to this section. Sections inside say their own."""
        return ()

    def problem(
        self, key: str, expected: str, *beside: str, seen: object = _ITS_VALUE, hint: str = ""
    ) -> ConfigProblem:
        """A problem of one key of this section.

        Args:
            key: its name, or the dotted path of one in a section inside.
            expected: what would have been right.
            beside: the other keys that the rule reads.
            seen: the value found; that of ``key`` if not given.
            hint: what to do instead.
        """
        value = functools.reduce(getattr, key.split("."), self) if seen is _ITS_VALUE else seen
        return ConfigProblem(key, value, expected, hint, involves=beside)

    def unread(self, readers: Mapping[str, Sequence[str]], chosen: str) -> Iterator[tuple[str, Sequence[str]]]:
        """Keys that are given though the choice does not read them, with the choices that do.

        Args:
            readers: by key of this section, the choices that read it.
        """
        for key, those in readers.items():
            if chosen not in those and getattr(self, key) != type(self).model_fields[key].default:
                yield key, those
