"""Parts of conversations that a chat template drops: reported before a run trains without them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from jinja2 import TemplateError

from roll.data.tool_messages import REASONING, Message, Tool, reasoning_of, text_of

if TYPE_CHECKING:
    from roll.data.renderer import ChatRenderer

Use: TypeAlias = Literal["learned", "whole", "prompt"]
"""What becomes of a conversation: its turns are learned, it is read whole, or it waits for an answer."""

_ROLE_KEYS = {"role", "content", "tool_calls", *REASONING}
_OF_RESULTS = {"name", "tool_call_id"}
_TOOL: Tool = {"type": "function", "function": {"name": "look_up", "description": "-", "parameters": {}}}
_Part: TypeAlias = tuple[int, str, str]
"""Index of a message, the name of a part of it, and the word that stands for it."""


class LeftOut:
    """Finds what a chat template drops.

    A template decides by the shape of a conversation: by roles, and by what a message has. So one with words that stand
    for its parts is rendered for each shape, and the words that do not come out are those parts.
    """

    def __init__(self, renderer: ChatRenderer, use: Use = "learned") -> None:
        self._renderer, self._use = renderer, use
        self._found: dict[Hashable, tuple[str, ...]] = {}

    def of(self, messages: Sequence[Message], learned: Sequence[int], tools: Sequence[Tool] | None) -> tuple[str, ...]:
        """What is left out, in words; each once, and nothing of what a template refuses."""
        shape = (tuple(map(_shape, messages)), tuple(learned), bool(tools))
        if shape not in self._found:
            self._found[shape] = tuple(dict.fromkeys(self._look(messages, learned, bool(tools))))
        return self._found[shape]

    def _look(self, messages: Sequence[Message], learned: Sequence[int], tools: bool) -> Iterator[str]:
        for message in messages:
            for key, is_text in sorted(_shape(message).keys):
                if not is_text and key not in self._renderer.source:
                    yield f"the chat template ignores {key!r} of a message"
        reads = self._renderer.reasoning_key
        if reads and "</think>" not in self._renderer.source and any(_shape(message).inside for message in messages):
            what = "<think>…</think> as words of an answer"
            yield f"the chat template writes {what}, expected under the key {reads!r}"
        stand_ins, parts = _stand_ins(messages)
        told = [_TOOL] if tools else None
        with suppress(TemplateError, ValueError, TypeError):
            if self._use != "learned":
                text = self._renderer.text(stand_ins, told, open_assistant=self._use == "prompt")
                yield from _missing(parts, text, -1)
                return
            for index in learned:
                turn = self._renderer.turn(stand_ins[: index + 1], told)
                yield from _missing([part for part in parts if part[0] < index], turn.prompt, index)
                yield from _missing([part for part in parts if part[0] == index], turn.said, index)


def _missing(parts: Sequence[_Part], text: str, learned: int) -> Iterator[str]:
    for index, name, word in parts:
        if word not in text:
            where = "answers that are trained on" if index == learned else "messages before an answer"
            yield f"the chat template drops {name} of {where}"


class _Shape(NamedTuple):
    role: str
    words: bool
    inside: bool
    """Reasoning stands in the words."""
    beside: bool
    """Reasoning has a key of its own."""
    calls: int
    keys: frozenset[tuple[str, bool]]
    """All others, and whether they hold a text."""


def _shape(message: Message) -> _Shape:
    words, inside = text_of(message["content"]), False
    if message["role"] == "assistant" and "</think>" in words:
        inside, words = True, words.rpartition("</think>")[2]
    beside = not inside and bool(reasoning_of(message))
    calls = len(message.get("tool_calls") or ())
    known = _ROLE_KEYS | _OF_RESULTS if message["role"] == "tool" else _ROLE_KEYS
    others = frozenset((key, isinstance(message[key], str)) for key in message.keys() - known)
    return _Shape(message["role"], bool(words.strip()), inside, beside, calls, others)


def _stand_ins(messages: Sequence[Message]) -> tuple[list[Message], list[_Part]]:
    """A conversation of the same shape, and its parts."""
    made: list[Message] = []
    parts: list[_Part] = []
    for index, message in enumerate(messages):
        role, words, inside, beside, calls, others = _shape(message)

        def stands(name: str, mark: str, index: int = index) -> str:
            parts.append((index, name, word := f"zq{index}{mark}qz"))
            return word

        content = stands("the system message" if role == "system" else f"text of the {role}", "w") if words else ""
        fresh: dict[str, Any] = {"role": role, "content": content}
        for number, (key, is_text) in enumerate(sorted(others)):
            fresh[key] = stands(repr(key), f"k{number}") if is_text else message[key]
        if inside:
            fresh["content"] = f"<think>\n{stands('<think>…</think>', 'r')}\n</think>\n\n{content}"
        if beside:
            fresh[REASONING[0]] = stands(REASONING[0], "r")
        if calls:
            names = [stands("tool calls", f"c{number}") for number in range(calls)]
            fresh["tool_calls"] = [
                {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
                for number, name in enumerate(names)
            ]
        made.append(fresh)
    return made, parts
