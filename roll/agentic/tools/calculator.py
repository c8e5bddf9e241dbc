"""The calculator: arithmetic that a policy writes, by ``simpleeval``, which walks the syntax tree and runs no code."""

from __future__ import annotations

import ast
import math
from typing import Annotated, Any

from pydantic import Field

from roll.agentic.tools.tool import ToolError

_MAX_BITS = 1 << 15
"""Of a product or power of integers: more digits than Python writes, few enough to be there at once."""
_MAX_PLACES = 400
_TEXTS = (ast.Attribute, ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue)
"""Syntax that a number has no use for; a text can be made as long as there is memory."""


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > _MAX_BITS:
        raise OverflowError("the power is too large")
    return base**exponent


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int) and one.bit_length() + other.bit_length() > _MAX_BITS:
        raise OverflowError("the product is too large")
    return one * other


def _round(number: Any, ndigits: int | None = None) -> Any:
    if ndigits is not None and abs(ndigits) > _MAX_PLACES:
        raise OverflowError(f"the number of places is above {_MAX_PLACES}")
    return round(number, ndigits)


def _constant(node: ast.Constant) -> int | float:
    if not isinstance(node.value, int | float):
        raise TypeError(f"{node.value!r:.40} is not a number")
    return node.value


_FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "log": math.log,
    "exp": math.exp,
    "gcd": math.gcd,
}
_MAX_CHARS = 200


def calculator(
    expression: Annotated[str, Field(description="For example 12*(3+4), 7//2, 2**10 or sqrt(2).")],
) -> str:
    """Computes an arithmetic expression."""
    from simpleeval import DEFAULT_OPERATORS, SimpleEval

    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, expected at most {_MAX_CHARS}")
    operators = {**DEFAULT_OPERATORS, ast.Pow: _power, ast.Mult: _product}
    evaluator = SimpleEval(operators, _FUNCTIONS, {"pi": math.pi, "e": math.e})
    evaluator.nodes = {kind: read for kind, read in evaluator.nodes.items() if kind not in _TEXTS}
    evaluator.nodes[ast.Constant] = _constant
    try:
        value = evaluator.eval(expression)
    except Exception as error:  # it has many, and arithmetic adds its own
        raise ToolError(f"{expression!r} cannot be computed: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{expression!r} is not a number")
    try:
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except ValueError as error:  # Python writes no integer of more than some thousand digits
        raise ToolError(f"the value of {expression!r} is too long to write") from error


calculator.instant = True  # type: ignore[attr-defined]
