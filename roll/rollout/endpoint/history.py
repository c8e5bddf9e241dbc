"""Memory of an episode's conversations at the endpoint, so that what was sampled is not rendered again.

Conversations are compared by meaning: words and calls, arguments as JSON values. A beginning of one is known by a hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.data.columns import IntArray
from roll.data.renderer import Message, Tool

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


@dataclass(frozen=True)
class Said:
    """An answer in its conversation."""

    ids: IntArray
    """Prompt and answer."""
    answer_ids: IntArray


@dataclass(frozen=True)
class Past:
    """Known part of a conversation that is to be answered."""

    known: int
    """Messages of it up to the last answer that was sampled so."""
    said: Said | None
    """That answer."""
    rewritten: str | None
    """Part that the program has changed: ``answer``, ``tools``, or the ``history`` before an answer."""
    key: bytes
    bare_key: bytes
    """Without tools."""


class History:
    """The conversations of one episode and the answers that they have had."""

    def __init__(self) -> None:
        self._said: dict[bytes, Said] = {}
        """By the conversation that an answer ends, tools included."""
        self._seen: set[bytes] = set()
        """Those conversations without their tools, the answers alone, and the conversations that were answered."""
        self._texts: dict[str, Said] = {}
        """By prompt and answer of plain completions."""

    def recall(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Past:
        """Finds the longest beginning that ends with an answer of the policy, and what has been changed after it."""
        keys = _chain(messages, tools)
        known = next((end for end in range(len(messages), 0, -1) if keys[end] in self._said), 0)
        bare = _chain(messages, ())[-1] if tools else keys[-1]
        return Past(known, self._said.get(keys[known]), self._rewritten(messages, keys, known), keys[-1], bare)

    def keep(self, past: Past, answer: Message, said: Said) -> None:
        """Remembers an answer of a conversation."""
        meaning = _meaning(answer)
        self._said[_next(past.key, meaning)] = said
        self._seen |= {past.key, _next(past.bare_key, meaning), meaning}

    def recall_text(self, text: str) -> tuple[Said | None, str]:
        """The longest prompt and answer with which a text begins, and the rest of the text."""
        longest = max((known for known in self._texts if text.startswith(known)), key=len, default=None)
        return (None, text) if longest is None else (self._texts[longest], text[len(longest) :])

    def keep_text(self, text: str, said: Said) -> None:
        """Remembers a prompt and its answer, both in the text."""
        self._texts[text] = said

    def _rewritten(self, messages: Sequence[Message], keys: Sequence[bytes], known: int) -> str | None:
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or known == answers[-1] + 1:
            return None
        if keys[answers[-1]] in self._seen:
            return "answer"
        if _chain(messages[: answers[-1] + 1], ())[-1] in self._seen:
            return "tools"
        ours = any(_meaning(messages[index]) in self._seen for index in answers[known:]) or known > 0
        return "history" if ours else None  # else they are examples of the program's own


def _chain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """A key of each beginning of a conversation, from none to all of the messages."""
    keys = [hashlib.blake2b(_json(tools), digest_size=16).digest()]
    for message in messages:
        keys.append(_next(keys[-1], _meaning(message)))
    return keys


def _next(key: bytes, meaning: bytes) -> bytes:
    return hashlib.blake2b(key + meaning, digest_size=16).digest()


def _meaning(message: Message) -> bytes:
    """Meaning of a message, without ids, reasoning, and white space around the assistant's words."""
    role, content = message["role"], message.get("content") or ""
    calls = [
        [call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return _json([role, content.strip() if role == "assistant" else content, calls])


_MAX_PARSED = 100_000
"""Characters of a call's arguments."""


def _arguments(arguments: str | Mapping[str, Any]) -> Any:
    """The value of arguments, in which 1 and 1.0 are one number; long ones are compared as they are written."""
    if isinstance(arguments, str) and len(arguments) > _MAX_PARSED:
        return arguments
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _json(value: Any) -> bytes:
    return _encode(value).encode("utf-8", "surrogatepass")
