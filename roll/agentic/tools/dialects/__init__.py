"""How model families write tool calls: a text to a turn, a turn to a text.

>>> turn = dialect("hermes").parse('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
>>> turn.calls[0].name, turn.calls[0].arguments
('add', {'a': 1, 'b': 2})
"""

from __future__ import annotations

from collections.abc import Callable

from roll.agentic.tools.dialects.base import BaseDialect, Dialect
from roll.utils.registry import Registry

__all__ = ["DIALECTS", "BaseDialect", "Dialect", "dialect"]

DIALECTS: Registry[Callable[[], Dialect]] = Registry("tool dialect")
DIALECTS.register("hermes", "roll.agentic.tools.dialects.hermes:HermesDialect")


def dialect(name: str) -> Dialect:
    """A dialect by its name, or a class of one's own by ``package.module:Class``.

    Raises:
        UnknownNameError: there is none.
    """
    return DIALECTS.get(name)()
