"""Notation of tool calls by model family: parses texts into turns and writes them; chooses the notation of a run.

>>> turn = dialect("hermes").parse('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
>>> turn.calls[0].name, turn.calls[0].arguments
('add', {'a': 1, 'b': 2})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.agentic.tools.dialects.base import BaseDialect
from roll.configs.tools import AUTO_DIALECT
from roll.data.renderer import ChatRenderer
from roll.data.template_check import check_renderer
from roll.utils.registry import Registry

__all__ = ["DIALECTS", "BaseDialect", "dialect", "parsers"]

DIALECTS: Registry[Callable[[], BaseDialect]] = Registry("tool dialect")
DIALECTS.register("hermes", "roll.agentic.tools.dialects.json_calls:HermesDialect")
DIALECTS.register("qwen3_coder", "roll.agentic.tools.dialects.tagged:Qwen3CoderDialect")
DIALECTS.register("llama3_json", "roll.agentic.tools.dialects.json_calls:LlamaJsonDialect")
DIALECTS.register("llama_pythonic", "roll.agentic.tools.dialects.pythonic:PythonicDialect")
DIALECTS.register("mistral", "roll.agentic.tools.dialects.json_calls:MistralDialect")
DIALECTS.register("harmony", "roll.agentic.tools.dialects.harmony:HarmonyDialect")
DIALECTS.register("deepseek", "roll.agentic.tools.dialects.json_calls:DeepSeekDialect")
DIALECTS.register("nemotron", "roll.agentic.tools.dialects.json_calls:NemotronDialect")
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


def dialect_for(name: str, renderer: ChatRenderer, default: str | None = None) -> BaseDialect:
    """A dialect by its name; for ``auto`` that in which the chat template writes calls (some 50 ms).

    Args:
        name: ``auto``, the name of a dialect, or ``package.module:Class``.
        default: the dialect's name where the template speaks none that is known.

    Raises:
        UnknownNameError: there is none of that name.
        ValueError: the template speaks none that is known, and there is no default.
    """
    if name != AUTO_DIALECT:
        return dialect(name)
    report = check_renderer(renderer, parsers())
    spoken = report.dialect or default
    if spoken is None:
        known = ", ".join(DIALECTS.names())
        raise ValueError(f"tools.dialect: got auto, expected one of {known}: {report.why_no_dialect}")
    return dialect(spoken)
