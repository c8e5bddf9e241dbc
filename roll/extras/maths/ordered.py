r"""Products of letters that stand for matrices: ``AB^{-1}`` is not ``B^{-1}A``, ``X^T X`` is not ``XX^T``.

Matrices are meant where capital letters are transposed, or inverted among several, or stand in both orders; sets or
vectors where they have a cross between them (``A \times B``). Such letters do not commute, and terms of them are
compared by their values for random matrices.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
from typing import Any

import mpmath
import sympy

from roll.extras.maths.tokens import Token, tokens_of

TRANSPOSED = sympy.Symbol("⊤")
"""As an exponent."""
_SIGN = r"(?:T|\\(?:top|intercal)(?![a-zA-Z])|\\(?:math(?:rm|sf|bf|tt)|text|operatorname)\s*(?:\{\s*T\s*\}|\s+T))"
_TRANSPOSE = re.compile(rf"(?<=[A-Z)\]}}])\s*\^\s*(?:{_SIGN}|\{{\s*{_SIGN}\s*\}})")
_INVERSE = re.compile(r"[A-Z)\]}]\s*\^\s*\{\s*-\s*\d+\s*\}")
_CROSSED = re.compile(r"(?<![\\a-zA-Z])[A-Z]\s*\\times\s*[A-Z](?![a-zA-Z])")
_ROWS = 4
"""Of the matrices: smaller ones have identities of their own."""
_DIGITS = 120
_AGREED_DIGITS = 60
_MOST = 64
"""Factors of a power that is computed."""


def in_order(text: str) -> list[Token] | None:
    """The tokens of a text with capital letters that do not commute; ``None`` where no matrices are meant."""
    marked, transposes = _TRANSPOSE.subn(r"^\\top ", text)
    tokens = tokens_of(marked)
    capitals = [token.text for token in tokens if _is_capitals(token)]
    words = {word for word in capitals if len(word) > 1}
    turned = any(sorted(one) == sorted(other) for one, other in itertools.combinations(words, 2))
    inverted = (_INVERSE.search(text) or _CROSSED.search(text)) is not None
    if not capitals or not (transposes or (len(set("".join(capitals))) > 1 and (inverted or turned))):
        return None
    found: list[Token] = []
    for token in tokens:
        if _is_capitals(token):
            found += [Token("name", char, token.spaced, sympy.Symbol(char, commutative=False)) for char in token.text]
        elif token[:2] == ("sign", r"\top"):
            found.append(Token("name", "top", value=TRANSPOSED))
        else:
            found.append(token)
    return found


def _is_capitals(token: Token) -> bool:
    return token.kind in ("letter", "word") and token.text.isalpha() and token.text.isupper()


def same_in_order(gold: Any, answer: Any) -> bool | None:
    """Tells whether an answer is a product in the reference's order; ``None`` where the reference has no order."""
    if not _has_order(gold):
        return None
    if gold == answer:
        return True
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for seed, columns in ((0, _ROWS), (1, _ROWS), (2, _ROWS - 1)):
        numbers = random.Random(seed)
        values = {symbol: _value(symbol, numbers, columns) for symbol in symbols}
        agrees = _agree(gold, answer, values)
        # (X^T X)^{-1} X^T has a value for matrices that are not square too, and must agree there.
        if not agrees and (columns == _ROWS or agrees is False):
            return False
    return True


def _agree(gold: Any, answer: Any, values: dict[Any, Any]) -> bool | None:
    """Tells whether two terms have the same matrix as value; ``None``: the reference has none."""
    left, right = (_matrix(expr, values) for expr in (gold, answer))
    if left is None:
        return None
    if right is None or (left.rows, left.cols) != (right.rows, right.cols):
        return False
    with mpmath.workdps(_DIGITS):
        tiny = mpmath.mpf(10) ** -_AGREED_DIGITS
        return bool(mpmath.mnorm(left - right) <= mpmath.mnorm(left) * tiny)


def _matrix(expr: Any, values: dict[Any, Any]) -> Any | None:
    try:
        with mpmath.workdps(_DIGITS):
            value = _evaluated(expr, values)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None
    return value if isinstance(value, mpmath.matrix) else mpmath.eye(_ROWS) * value


def without_order(expr: Any) -> Any:
    """The term with letters that commute."""
    letters = {symbol: sympy.Symbol(symbol.name) for symbol in expr.free_symbols if not symbol.is_commutative}
    return expr.xreplace(letters | {TRANSPOSED: sympy.Symbol("T")})


def _has_order(expr: Any) -> bool:
    """Tells whether letters stand in an order that may matter."""
    products = (sum(not arg.is_commutative for arg in product.args) > 1 for product in expr.atoms(sympy.Mul))
    return not expr.is_commutative and (expr.has(TRANSPOSED) or any(products))


def _value(symbol: Any, numbers: random.Random, columns: int) -> Any:
    if symbol.is_commutative:
        return sympy.Rational(numbers.randint(10_000, 99_999), 7919)
    return mpmath.matrix([[numbers.randint(-9999, 9999) for _ in range(columns)] for _ in range(_ROWS)])


def _evaluated(expr: Any, values: dict[Any, Any]) -> Any:
    """A term's matrix, or its number.

    Raises:
        ValueError: it has no value.
    """
    if expr.is_commutative:
        scalars = {symbol: values[symbol] for symbol in expr.free_symbols}
        return mpmath.mpmathify(expr.evalf(_DIGITS, subs=scalars))
    if expr.is_Symbol:
        return values[expr]
    if expr.is_Pow and expr.exp == TRANSPOSED:
        return _evaluated(expr.base, values).T
    if expr.is_Pow and expr.exp.is_Integer and abs(expr.exp) <= _MOST:
        return _evaluated(expr.base, values) ** int(expr.exp)
    if not (expr.is_Add or expr.is_Mul):
        raise ValueError(f"no value: {expr}")
    parts = [_evaluated(arg, values) for arg in expr.args]
    if expr.is_Mul:
        return functools.reduce(operator.mul, parts)
    # A number among matrices is that multiple of the identity.
    return functools.reduce(
        operator.add, (part if isinstance(part, mpmath.matrix) else mpmath.eye(_ROWS) * part for part in parts)
    )
