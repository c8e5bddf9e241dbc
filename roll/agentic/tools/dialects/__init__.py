"""Notation of tool calls by model family: a text to a turn, a turn to a text.

>>> turn = dialect("hermes").parse('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
>>> turn.calls[0].name, turn.calls[0].arguments
('add', {'a': 1, 'b': 2})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.agentic.tools.dialects.base import BaseDialect
from roll.utils.registry import Registry

__all__ = ["DIALECTS", "BaseDialect", "dialect", "parsers"]

DIALECTS: Registry[Callable[[], BaseDialect]] = Registry("tool dialect")
DIALECTS.register("hermes", "roll.agentic.tools.dialects.hermes:HermesDialect")
DIALECTS.register("qwen3_coder", "roll.agentic.tools.dialects.tagged:Qwen3CoderDialect")
DIALECTS.register("llama3_json", "roll.agentic.tools.dialects.hermes:LlamaJsonDialect")
DIALECTS.register("llama_pythonic", "roll.agentic.tools.dialects.pythonic:PythonicDialect")
DIALECTS.register("mistral", "roll.agentic.tools.dialects.hermes:MistralDialect")
DIALECTS.register("harmony", "roll.agentic.tools.dialects.harmony:HarmonyDialect")
DIALECTS.register("deepseek", "roll.agentic.tools.dialects.hermes:DeepSeekDialect")
DIALECTS.register("glm", "roll.agentic.tools.dialects.tagged:GlmDialect")


def dialect(name: str) -> BaseDialect:
    """A dialect by its name, or a class of one's own by ``package.module:Class``.

    Raises:
        UnknownNameError: there is none.
    """
    return DIALECTS.get(name)()


def parsers() -> dict[str, Callable[[str], Sequence[tuple[str, Mapping[str, Any]]]]]:
    """For each dialect what names and arguments of calls it reads in a text; for ``roll.data.template_check``."""
    return {name: _reader(dialect(name)) for name in DIALECTS.names()}


def _reader(speaks: BaseDialect) -> Callable[[str], Sequence[tuple[str, Mapping[str, Any]]]]:
    return lambda text: [(call.name, call.arguments) for call in speaks.parse(text).calls]
