"""A tool of one's own, in ten lines: its signature is what the policy is told, a ``ToolError`` is what it reads.

``roll train rlvr_tools tools.use.calculator.tool=examples/custom_tool.py:multiply`` takes it in place of the
calculator. See ``docs/agents.md``.
"""

from roll.agentic.tools.tool import ToolError


def multiply(expression: str) -> int:
    """Multiplies two whole numbers, written 12*34."""
    x, _, y = expression.partition("*")
    if not (x.strip().isdecimal() and y.strip().isdecimal()):
        raise ToolError(f"seen {expression!r}, expected two whole numbers with a * between them")
    return int(x) * int(y)
