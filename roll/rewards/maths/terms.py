"""Equality of numbers and terms: exact, to as many decimals as were written, or by values at points."""

from __future__ import annotations

import itertools
from typing import Any

import sympy

from roll.rewards.maths.values import PERCENT, Term

MIN_DECIMALS = 6
"""A decimal number with fewer is exact: 0.33 is not 1/3. Numbers of which one has as many are compared to its decimals,
and six significant digits."""
MAX_DECIMALS = 12
"""Of floats the last decimals are noise."""
_PRECISION = 40
_POINTS = tuple(
    tuple(sympy.Rational(real) + sympy.Rational(imaginary) * sympy.I for real, imaginary in numbers)
    for numbers in (
        (("1.2345", "0"), ("0.7182", "0"), ("2.4142", "0"), ("0.5772", "0"), ("1.9021", "0")),
        (("-0.8346", "0"), ("1.4513", "0"), ("-1.7724", "0"), ("0.2614", "0"), ("-2.2361", "0")),
        (("0.4142", "0.9159"), ("-0.7391", "0.3029"), ("1.1319", "-0.6181")),
    )
)
"""Values for the symbols, negative and complex ones too: the square root of x² is not x."""
_ENOUGH = 2
"""Points at which two terms must agree; a term may have no value at some."""


def symbols_of(expr: Any) -> set[Any]:
    """Symbols and unknown functions of a term."""
    return (expr.free_symbols - {PERCENT}) | expr.atoms(sympy.core.function.AppliedUndef)


def same_term(gold: Term, answer: Term) -> bool:
    """Tells whether two numbers, terms or matrices are equal."""
    one, other = gold.expr, answer.expr
    if isinstance(one, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        return (
            isinstance(one, sympy.MatrixBase)
            and isinstance(other, sympy.MatrixBase)
            and one.shape == other.shape
            and all(_same_expr(a, b) for a, b in zip(one.flat(), other.flat(), strict=True))
        )
    if one.has(PERCENT) or other.has(PERCENT):
        return _same_percentage(gold, answer)
    given = [decimals for decimals in (gold.decimals, answer.decimals) if decimals >= MIN_DECIMALS]
    if given and one.is_number and other.is_number:
        return _same_rounded(one, other, min(*given, MAX_DECIMALS))
    return _same_expr(one, other)


def _same_percentage(gold: Term, answer: Term) -> bool:
    """50% is 0.5; beside a number without the sign it may stand for 50 too."""
    one, other = gold.expr, answer.expr
    hundredths = {PERCENT: sympy.Rational(1, 100)}
    if same_term(Term(one.subs(hundredths), gold.decimals), Term(other.subs(hundredths), answer.decimals)):
        return True
    if one.has(PERCENT) and other.has(PERCENT):
        return False
    bare = {PERCENT: 1}
    one, other = one.subs(bare), other.subs(bare)
    return bool(one.is_number and one.is_real and abs(one) >= 1) and _same_expr(one, other)


def _same_rounded(one: Any, other: Any, decimals: int) -> bool:
    if not (one.is_finite and other.is_finite):
        return False
    difference = abs(sympy.N(one - other, _PRECISION))
    size = max(abs(sympy.N(one, 20)), abs(sympy.N(other, 20)))
    if size == 0:
        return True
    leading = int(sympy.floor(sympy.log(size, 10).evalf()))
    places = max(decimals, MIN_DECIMALS - 1 - leading)
    return bool(difference <= sympy.Rational(5, 10 ** (places + 1)))


def _same_expr(one: Any, other: Any) -> bool:
    if one == other:
        return True
    if one.is_Rational and other.is_Rational:
        return False
    if one.has(sympy.oo, -sympy.oo) or other.has(sympy.oo, -sympy.oo):
        return False
    symbols = sorted(symbols_of(one) | symbols_of(other), key=str)
    if not symbols:
        return _same_number(one, other, {}) is True
    stand_ins = {symbol: sympy.Dummy() for symbol in symbols}
    pair = [expr.xreplace(stand_ins) for expr in (one, other)]
    agreed = 0
    for numbers in _POINTS:
        # No two symbols have the same value.
        values = {
            symbol: sympy.N(number + sympy.Rational(index, 7), _PRECISION + 20)
            for index, (symbol, number) in enumerate(zip(stand_ins.values(), itertools.cycle(numbers), strict=False))
        }
        agrees = _same_number(pair[0], pair[1], values)
        if agrees is False:
            return False
        agreed += agrees is True
    return agreed >= _ENOUGH


def _same_number(one: Any, other: Any, values: dict[Any, Any]) -> bool | None:
    """Equal to 35 digits, which no two different answers of a few hundred characters are; ``None``: no value."""
    try:
        left, right = (_complex_parts(expr, values) for expr in (one, other))
    except (ArithmeticError, TypeError, ValueError):
        return None
    size = max(abs(part) for part in (*left, *right))
    if size == 0:
        return True
    tiny = sympy.Float(10, _PRECISION) ** (5 - _PRECISION)
    return all(abs(a - b) <= size * tiny for a, b in zip(left, right, strict=True))


def _complex_parts(expr: Any, values: dict[Any, Any]) -> tuple[Any, Any]:
    """Real and imaginary part as floats of high precision.

    Raises:
        ValueError: it has no value.
    """
    value = expr.evalf(_PRECISION, subs=values, maxn=400)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        raise ValueError("no number")
    if not (real.is_finite and imaginary.is_finite):
        raise ValueError("no finite number")
    return real, imaginary
