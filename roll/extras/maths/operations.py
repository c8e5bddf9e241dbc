"""Operations of the signs and names of an answer: SymPy's functions, within bounds and without values that are none.

All raise ``NotUnderstoodError`` for operands that they have no value for, or whose value would be too long.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from roll.extras.maths.tokens import FUNCTIONS, INVERSE, TRIGONOMETRY, NotUnderstoodError
from roll.extras.maths.values import DEGREE, LOG_BASE

MAX_BITS = 4096
"""Longer powers and factorials are not computed: an answer must not cost more than it is worth."""

_MOST_CHOSEN = 1000
"""Binomial coefficients of larger numbers are not computed."""
_MAX_DEGREE = 20
"""Of a binomial coefficient as a polynomial."""
_MOST_COMPARED = 12
"""Terms of a maximum: SymPy compares each with each."""
_MAX_ROWS = 4
"""Of a determinant whose entries are not all rational."""
_STEEP = ("exp", "sinh", "cosh", "tanh")
_OF_MANY = ("max", "min", "gcd", "lcm")


def power(base: Any, exponent: Any) -> Any:
    if isinstance(base, sympy.MatrixBase):
        raise NotUnderstoodError("the power of a matrix")
    if base.is_number and exponent.is_number and base not in (0, 1, -1):
        bits = abs(float(exponent)) * max(1.0, abs(float(sympy.log(abs(base), 2)))) if exponent.is_real else 0
    else:
        bits = abs(exponent) if exponent.is_number and exponent.is_real else 0
    if bits > MAX_BITS:
        raise NotUnderstoodError(f"a power of more than {MAX_BITS} bits")
    value = base**exponent
    if value.has(sympy.zoo, sympy.nan) or base == exponent == 0:
        raise NotUnderstoodError(f"{base} to the power {exponent}")
    return value


def factorial(value: Any, double: bool = False) -> Any:
    """The factorial ``n!``, or ``n!!``, the product of every second number."""
    if value.is_number and not (value.is_Integer and 0 <= value <= 500):
        raise NotUnderstoodError(f"the factorial of {value}")
    return (sympy.factorial2 if double else sympy.factorial)(value)


def quotient(above: Any, below: Any) -> Any:
    if not below.is_commutative:
        raise NotUnderstoodError("a division by a matrix")
    if below == 0:
        raise NotUnderstoodError("a division by zero")
    return above / below


def binomial(above: Any, below: Any) -> Any:
    for number in (above, below):
        if number.is_number and not (number.is_Integer and abs(number) <= _MOST_CHOSEN):
            raise NotUnderstoodError(f"the binomial coefficient of {number}")
    if below.is_number and below > _MAX_DEGREE and not above.is_number:
        raise NotUnderstoodError(f"a polynomial of degree {below}")
    return sympy.binomial(above, below)


def determinant(matrix: Any) -> Any:
    if not matrix.is_square:
        raise NotUnderstoodError("the determinant of a matrix that is not square")
    if matrix.rows > _MAX_ROWS and not all(entry.is_Rational for entry in matrix.flat()):
        raise NotUnderstoodError(f"a determinant of more than {_MAX_ROWS} rows")
    # Bareiss' method, which is the default, simplifies at each step.
    return matrix.det() if matrix.rows > _MAX_ROWS else matrix.det(method="laplace")


def is_vector(expr: Any) -> bool:
    """Tells whether letters with an arrow, or bold ones, are in a term outside of lengths and scalar products."""
    if not any(symbol.name.startswith("vec ") for symbol in expr.free_symbols):
        return False
    scalars = {part: sympy.Dummy() for part in expr.atoms(sympy.Abs, AppliedUndef)}
    return any(symbol.name.startswith("vec ") for symbol in expr.xreplace(scalars).free_symbols)


def dot(one: Any, other: Any) -> Any:
    """The scalar product of two vectors. Other products of two are not understood: their order matters."""
    (first, left), (second, right) = one.as_coeff_Mul(), other.as_coeff_Mul()
    return first * second * sympy.Function("dot")(*sorted((left, right), key=str))


def root(radicand: Any, degree: Any) -> Any:
    """The real root where there is one: of an odd degree also of what is negative."""
    if degree == 0:
        raise NotUnderstoodError("a root of degree 0")
    if degree.is_Integer and degree % 2 == 1 and radicand.is_real and radicand.is_negative:
        return -((-radicand) ** (1 / degree))
    return radicand ** (1 / degree)


def apply(name: str, args: Sequence[Any], base: Any | None, exponent: Any | None) -> Any:
    r"""A named function's value, as ``\log_2 8`` or ``\sin^2 x``.

    Args:
        base: of a logarithm.
        exponent: between name and arguments: a power of the value, or with -1 the inverse function.
    """
    function = FUNCTIONS[name]
    if exponent == -1 and name in INVERSE:
        function, exponent, name = INVERSE[name], None, f"arc{name}"
    if name not in _OF_MANY and len(args) != 1:
        raise NotUnderstoodError(f"{name} of {len(args)} arguments")
    if name in ("max", "min") and len(args) > _MOST_COMPARED and not all(arg.is_Rational for arg in args):
        raise NotUnderstoodError(f"the {name} of more than {_MOST_COMPARED} terms")
    if name in _STEEP and args[0].is_number and not abs(float(sympy.re(args[0]))) <= MAX_BITS:
        raise NotUnderstoodError(f"{name} of a number beyond {MAX_BITS}")
    if name in TRIGONOMETRY:
        args = [arg.subs(DEGREE, sympy.pi / 180) for arg in args]
    if name == "log":
        value = sympy.log(args[0]) / (LOG_BASE if base is None else sympy.log(base))
    elif name in ("gcd", "lcm"):
        if not all(arg.is_Integer for arg in args):
            raise NotUnderstoodError(f"{name} of what is no integer")
        value = functools.reduce(function, args)
    else:
        value = function(*args)
    return value if exponent is None else value**exponent
