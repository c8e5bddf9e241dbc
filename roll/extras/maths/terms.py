"""Equality of numbers and terms: exact, to as many decimals as were written, or by values at points."""

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
from roll.extras.maths.values import PERCENT, Term

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
_MOST_FACTORS = 64
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
    if expr.is_Pow and expr.exp.is_Integer and abs(expr.exp) <= _MOST_FACTORS:
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


MIN_DECIMALS = 6
"""A decimal number with fewer is exact: 0.33 is not 1/3. Numbers of which one has as many are compared to its decimals,
and six significant digits."""
MAX_DECIMALS = 12
"""Of floats the last decimals are noise."""
_PRECISION = 40
_FEW = 35
"""Digits to which terms are compared at all points, and beyond those within which two different ones differ."""
_PER_DIGIT = 4
"""Digits within which they differ, for each digit of their numbers, written out."""
_MOST = 40_000
"""Terms that need more digits are equal only if they are the same."""
_POINTS = tuple(
    tuple(sympy.Rational(real) + sympy.Rational(imaginary) * sympy.I for real, imaginary in numbers)
    for numbers in (
        (("1.2345", "0"), ("0.7182", "0"), ("2.4142", "0"), ("0.5772", "0"), ("1.9021", "0")),
        (("-0.8346", "0"), ("1.4513", "0"), ("-1.7724", "0"), ("0.2614", "0"), ("-2.2361", "0")),
        (("0.4142", "0.9159"), ("-0.7391", "0.3029"), ("1.1319", "-0.6181")),
    )
)
"""Values for the symbols, negative and complex ones too: the square root of x² is not x."""
_BROKEN = (
    sympy.Abs, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling, sympy.sign, sympy.log,
    sympy.functions.elementary.trigonometric.InverseTrigonometricFunction,
)  # fmt: skip
"""Functions with corners, jumps or branches: two terms of them may agree here and differ there."""
_SIZES = ("1.371", "-12.93", "151.7", "-0.2713", "-1603.9")
_NEAR = sympy.Rational(1, 10**50)
_MOST_NUMBERS = 8
_STEEP = (sympy.exp, sympy.functions.elementary.hyperbolic.HyperbolicFunction)
_HIGHEST = 10**60
"""Exponent of a term that is evaluated."""
_PRODUCTS = (sympy.factorial, sympy.factorial2, sympy.gamma, sympy.binomial)
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
    if not (one.is_commutative and other.is_commutative):
        in_order = same_in_order(one, other)
        return _same_expr(without_order(one), without_order(other)) if in_order is None else in_order
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
        return _same_number(one, other, {}, _FEW) is True and _same_number(one, other, {}) is True
    stand_ins = {symbol: sympy.Dummy() for symbol in symbols}
    one, other = one.xreplace(stand_ins), other.xreplace(stand_ins)
    points = [
        # No two symbols have the same value.
        {
            symbol: number + sympy.Rational(index, 7)
            for index, (symbol, number) in enumerate(zip(stand_ins.values(), itertools.cycle(numbers), strict=False))
        }
        for numbers in _POINTS
    ]
    if one.has(sympy.floor, sympy.ceiling) or other.has(sympy.floor, sympy.ceiling):
        points = [values for values in points if all(value.is_real for value in values.values())]
    wide = _wide_points(one, other, list(stand_ins.values()))
    if wide is None:
        return False
    agreed = []
    for values in [*points, *wide]:
        agrees = _same_number(one, other, values, _FEW)
        if agrees is False:
            return False
        agreed += [values] if agrees else []
    # Where signs and branches matter was seen; what is tiny beside the rest shows anywhere.
    return len(agreed) >= _ENOUGH and all(_same_number(one, other, values) for values in agreed[:_ENOUGH])


def _wide_points(one: Any, other: Any, symbols: list[Any]) -> list[dict[Any, Any]] | None:
    """Values where terms with corners, jumps and branches may differ: far out and near zero, beside the numbers that
    they have, on both sides of the jumps. ``None``: the jumps are not known.
    """
    broken = {part for expr in (one, other) for part in expr.atoms(*_BROKEN) if part.free_symbols}
    roots = [part for expr in (one, other) for part in expr.atoms(sympy.Pow) if part.base.free_symbols]
    if not broken and all(root.exp.is_Integer for root in roots):
        return []
    if any(root.exp.free_symbols for root in roots):
        return []  # a power of a large number is too large
    numbers = {abs(n) for expr in (one, other) for n in expr.atoms(sympy.Rational) if n != 0}
    sizes = sorted({sympy.Integer(1), *(max(n, 1 / n) for n in numbers)})[-_MOST_NUMBERS:]
    scale = min(sympy.prod(sizes), sympy.Integer(10) ** 40)
    points = []
    for factor in (sympy.Integer(1), scale, 1 / scale):
        for turn in range(len(_SIZES)):
            turned = itertools.cycle(_SIZES[turn:] + _SIZES[:turn])
            points.append({s: factor * sympy.Rational(size) for s, size in zip(symbols, turned, strict=False)})
        points += [{s: sign * abs(value) for s, value in points[-1].items()} for sign in (1, -1)]
    first = points[0]
    for number in sorted(numbers)[-_MOST_NUMBERS:]:
        shifts = (number + sympy.Rational(3, 8), number - sympy.Rational(3, 8), -number - sympy.Rational(3, 8))
        points += [first | {symbol: shift} for symbol in symbols for shift in shifts]
    jumps = _jumps(broken, first)
    return None if jumps is None else points + jumps


def _jumps(broken: set[Any], at: dict[Any, Any]) -> list[dict[Any, Any]] | None:
    """Points on both sides of the jumps of ``floor`` and ``ceiling``, where these are of linear terms."""
    stepped = [part.args[0] for part in broken if isinstance(part, sympy.floor | sympy.ceiling)]
    points = []
    for arg in stepped:
        for symbol in sorted(arg.free_symbols, key=str):
            slope = sympy.diff(arg, symbol)
            if not (slope.is_Rational and slope != 0):
                return None
            start = arg.xreplace(at | {symbol: sympy.Integer(0)})
            for step in (-2, 0, 1, 3):
                edge = (step - start) / slope
                points += [at | {symbol: edge + side} for side in (_NEAR, sympy.Integer(0), -_NEAR)]
    return points


def _same_number(one: Any, other: Any, values: dict[Any, Any], digits: int | None = None) -> bool | None:
    """Tells whether two numbers are equal to ``digits``; ``None``: no value.

    Without ``digits`` they are as many as tell two terms of their length apart. (That such terms are equal or differ
    within a multiple of their digits is what the uniformity conjecture says of elementary numbers; the known
    counterexamples stay within the multiple here.)
    """
    try:
        if _is_tower(other, values):
            return None if _is_tower(one, values) else False
        if _is_tower(one, values):
            return None
        if digits is None:
            digits = int(_FEW + _PER_DIGIT * (digits_of(one, values) + digits_of(other, values)))
        if digits > _MOST:
            return False
        left, right = (_complex_parts(expr, values, digits + 5) for expr in (one, other))
    except (ArithmeticError, TypeError, ValueError):
        return None
    size = max(sympy.Integer(1), *(abs(part) for part in (*left, *right)))
    tiny = size * sympy.Float(10, 15) ** -digits
    return all(abs(a - b) <= tiny for a, b in zip(left, right, strict=True))


def _is_tower(expr: Any, values: dict[Any, Any]) -> bool:
    """Tells whether an exponent in a term is too large for the term to be evaluated, at whatever precision."""
    for part in sympy.postorder_traversal(expr):  # so that what is evaluated here has been looked at before
        if part.is_Pow or isinstance(part, (*_STEEP, *_PRODUCTS)):
            for arg in part.args[part.is_Pow :]:
                number = sympy.S.Zero if arg.is_Rational else arg.evalf(15, subs=values)
                if any(size.is_Float and abs(size) > _HIGHEST for size in number.as_real_imag()):
                    return True
    return False


def digits_of(expr: Any, values: dict[Any, Any]) -> float:
    """Digits of a term's numbers, with powers written out as products: what bounds how near it can come to another."""
    if expr.is_Rational:
        return 1 + (expr.p.bit_length() + expr.q.bit_length()) * 0.302
    if not expr.args:
        return 1
    parts = [digits_of(arg, values) for arg in expr.args]
    if not (expr.is_Pow or isinstance(expr, _STEEP)):
        return 1 + sum(parts)
    size = abs(complex(expr.args[-1].evalf(15, subs=values)))
    return parts[0] * max(1.0, size) + parts[-1]


def _complex_parts(expr: Any, values: dict[Any, Any], digits: int) -> tuple[Any, Any]:
    """Real and imaginary part as floats of so many digits.

    Raises:
        ValueError: it has no value.
    """
    if expr.has(sympy.floor, sympy.ceiling):
        expr = expr.xreplace(values)
    value = expr.evalf(digits, subs=values, maxn=2 * digits + 400)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        raise ValueError("no number")
    if not (real.is_finite and imaginary.is_finite):
        raise ValueError("no finite number")
    return real, imaginary
