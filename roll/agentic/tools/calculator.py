"""The calculator: arithmetic that a policy writes, by ``simpleeval``, which walks the syntax tree and runs no code."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from roll.agentic.tools.tool import ToolError

_FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "round": round,
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
    from simpleeval import SimpleEval

    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, expected at most {_MAX_CHARS}")
    try:
        value = SimpleEval(functions=_FUNCTIONS, names={"pi": math.pi, "e": math.e}).eval(expression)
    except Exception as error:  # it has many, and arithmetic adds its own
        raise ToolError(f"{expression!r} cannot be computed: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{expression!r} is no number")
    try:
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except ValueError as error:  # Python writes no integer of more than some thousand digits
        raise ToolError(f"the value of {expression!r} is too long to write") from error


calculator.instant = True  # type: ignore[attr-defined]
