"""The values that mathematical answers have. When two of them are equal is in ``roll.extras.maths.equality``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy

PLUS_MINUS = sympy.Symbol("±")
PERCENT = sympy.Symbol("%")
DEGREE = sympy.Symbol("°")
LOG_BASE = sympy.Symbol("log base")
r"""Of ``\log`` without a base, which is 10 to some and e to others."""


@dataclass(frozen=True)
class Text:
    """An answer without a meaning here; white space and LaTeX's decoration are normalised."""

    text: str


@dataclass(frozen=True)
class Word:
    """A word, or letters whose order counts: ``blue``, ``HTH``."""

    text: str
    product: Any = None
    """The product of the letters as a ``Term``, where it may be meant (``xy``)."""


@dataclass(frozen=True)
class Term:
    """A number, a term, a matrix."""

    expr: Any
    """Of SymPy, exact: decimals are rational numbers."""
    decimals: int = 0
    """Digits behind the point, where the term is one decimal number: it may be rounded."""


@dataclass(frozen=True)
class Quantity:
    """Numbers with units: ``5 cm``, ``5 ft 6 in``, ``$5``, ``30°``."""

    parts: tuple[tuple[Term, str], ...]


@dataclass(frozen=True)
class Group:
    """Several values: ``(1, 2]`` has the brackets ``(]``, a set ``{}``, an enumeration none."""

    items: tuple[Value, ...]
    brackets: str = ""
    joined: Literal[",", "or", "and"] = ","


@dataclass(frozen=True)
class Relation:
    """``0 < x < 1`` has the signs ``<``, ``<`` and three sides; in ``≥ 5`` the first side is ``None``."""

    sides: tuple[Value | None, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Sets:
    """Sets under one operation, or a set that has a name (without operands)."""

    sign: str
    operands: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Residue:
    """``value`` modulo ``modulus``."""

    value: Value
    modulus: Term


@dataclass(frozen=True)
class Digits:
    """A number in a base: ``101_2``."""

    digits: str
    base: int


@dataclass(frozen=True)
class Choice:
    """A letter with what it stands for: ``(B) 42``."""

    letter: str
    content: Value


Value = Text | Word | Term | Quantity | Group | Relation | Sets | Residue | Digits | Choice
