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
DIALECTS.register("qwen3_coder", "roll.agentic.tools.dialects.tagged:Qwen3CoderDialect")
DIALECTS.register("llama3_json", "roll.agentic.tools.dialects.llama:LlamaJsonDialect")
DIALECTS.register("llama_pythonic", "roll.agentic.tools.dialects.pythonic:PythonicDialect")
DIALECTS.register("mistral", "roll.agentic.tools.dialects.mistral:MistralDialect")
DIALECTS.register("harmony", "roll.agentic.tools.dialects.harmony:HarmonyDialect")
DIALECTS.register("deepseek", "roll.agentic.tools.dialects.deepseek:DeepSeekDialect")
DIALECTS.register("glm", "roll.agentic.tools.dialects.tagged:GlmDialect")


def dialect(name: str) -> Dialect:
    """A dialect by its name, or a class of one's own by ``package.module:Class``.

    Raises:
        UnknownNameError: there is none.
    """
    return DIALECTS.get(name)()
