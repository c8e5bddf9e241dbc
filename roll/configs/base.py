"""The base of every configuration section: strict, typed, documented."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator

from roll.configs.problems import ConfigProblem, show

_ITS_VALUE: Any = object()
LARGEST_INT = 2**63 - 1
ConfigT = TypeVar("ConfigT", bound="Config")


class Config(BaseModel):
    """A configuration section. Unknown keys are errors; every field carries its description and default.

    Conventions: ``Field(default, description="…")`` on every field; bounds (``ge``, ``gt``, ``le``) on the field;
    choices as ``Literal``; cross-field rules in ``problems()``.
    """

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=False, frozen=False, allow_inf_nan=False
    )

    switches: ClassVar[tuple[str, ...]] = ()
    """Switches: if none of them is on, nothing reads the other keys of this class."""
    choices: ClassVar[Mapping[str, Mapping[str, type[Config]]]] = {}
    """By key that chooses: by its value, the class with the keys that are then read. This section inherits from all."""

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """Python's integers have no bounds; those of engines, torch and NumPy do."""
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and abs(each) > LARGEST_INT:
                raise ValueError(f"int{'s' * (each is not value)} of at most 64 bits, up to {LARGEST_INT}")
        return value

    def problems(self) -> Iterable[ConfigProblem]:
        """Cross-field rules that do not hold, keys relative to this section. Sections inside say their own."""
        for key, expected, involved in self.unread(self.choice_of):
            value = getattr(self, key)
            if self.given(key) and not (value == 0 and value is not False):  # 0 asks for nothing
                default = type(self).model_fields[key].get_default(call_default_factory=True)
                hint = f"leave it out: ~{key} on the command line, or its default, {key}: {show(default)}"
                yield self.problem(key, expected, *involved, hint=hint)

    def problem(self, key: str, expected: str, *beside: str, got: object = _ITS_VALUE, hint: str = "") -> ConfigProblem:
        """A problem of one key of this section.

        Args:
            key: its name, or the dotted path of one in a section inside.
            expected: what would have been right.
            beside: the other keys that the rule reads.
            got: the value found; that of ``key`` if not given.
            hint: what to do instead.
        """
        value = functools.reduce(getattr, key.split("."), self) if got is _ITS_VALUE else got
        return ConfigProblem(key, value, expected, hint, involves=beside)

    def order_problems(self, low: str, high: str) -> Iterator[ConfigProblem]:
        """A lower bound above the upper one."""
        if getattr(self, low) > getattr(self, high):
            yield self.problem(low, f"at most {high} = {getattr(self, high)}", high)

    def part(self, kind: type[ConfigT]) -> ConfigT:
        """The keys of one class that this section inherits from, as a value of their own."""
        return kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields})

    def choice_of(self, key: str) -> Any:
        """The value by which ``key`` chooses in ``choices``."""
        return getattr(self, key)

    def given(self, key: str) -> bool:
        """Tells whether a key of this section has another value than its default."""
        field = type(self).model_fields.get(key)
        return field is not None and getattr(self, key) != field.get_default(call_default_factory=True)

    def without(self, part: type[Config]) -> Iterator[str]:
        """Keys that are given though ``part``, the class whose keys are read, does not declare them."""
        return (key for key in type(self).model_fields if key not in part.model_fields and self.given(key))

    @classmethod
    def unread(cls, value: Callable[[str], Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Keys that nothing reads under what others choose, what is expected in words, and the keys that decide it.

        Args:
            value: the value of a key, defaults included.
        """
        for section in cls.__mro__:
            for chooser, parts in vars(section).get("choices", {}).items():
                part = parts.get(value(chooser))
                if part is None:  # a function of the user's own, which may read anything
                    continue
                for key in dict.fromkeys(key for each in parts.values() for key in each.model_fields):
                    if key not in part.model_fields:
                        readers = ", ".join(name for name, each in parts.items() if key in each.model_fields)
                        yield key, f"no such key with {chooser} {value(chooser)}: read with {readers}", (chooser,)
            switches: tuple[str, ...] = vars(section).get("switches", ())
            if switches and not any(value(switch) for switch in switches):
                fields = cls.model_fields
                lone = len(switches) == 1 and fields[switches[0]].annotation is bool
                on = f"{switches[0]}: true" if lone else " or ".join(switches)
                for key in section.__annotations__:
                    if key in fields and key not in switches:
                        yield key, f"no such key without {on}: nothing reads it", switches
