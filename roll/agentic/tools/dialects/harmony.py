"""gpt-oss: messages on channels, a call is one with a recipient."""

from __future__ import annotations

import re

from roll.agentic.tools.dialects.base import BaseDialect, Call, Found, ReadTurn, Schemas, read_json, to_json
from roll.agentic.tools.tool import AssistantTurn, CallError

_START, _ROLE, _CHANNEL, _CONSTRAIN, _SAID = "<|start|>", "assistant", "<|channel|>", "<|constrain|>", "<|message|>"
_STOP = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


class HarmonyDialect(BaseDialect):
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>``.

    The channel ``analysis`` is reasoning, all else that is said to nobody is words.
    """

    name = "harmony"
    example = '<|channel|>commentary to=functions.<name> <|constrain|>json<|message|>{"<key>": "<value>"}<|call|>'

    def read_turn(self, text: str, schemas: Schemas) -> ReadTurn:
        thoughts: list[str] = []
        words: list[str] = []
        found: list[Found] = []
        position = 0
        while position < len(text):
            start = position
            position, header, body = _next_message(text, position)
            role = header.removeprefix(_START).lstrip()
            recipient = _RECIPIENT.search(header.replace(_CHANNEL, " ").replace(_CONSTRAIN, " "))
            if header.startswith(_START) and not role.startswith(_ROLE):
                found.append(CallError(text[start:position], f"expected {_ROLE} to speak, got {role[:20]!r}"))
            elif recipient:
                found.append(_read_call(text[start:position], recipient[1].removeprefix("functions."), body))
            elif header.partition(_CHANNEL)[2].split()[:1] == ["analysis"]:
                thoughts.append(body.strip())
            else:
                words.append(body.strip())
        return ReadTurn("\n".join(filter(None, words)), found, "\n".join(filter(None, thoughts)) or None)

    def write_turn(self, turn: AssistantTurn) -> str:
        messages = [] if turn.reasoning is None else [f"{_CHANNEL}analysis{_SAID}{turn.reasoning}<|end|>"]
        if turn.content:
            channel, end = ("commentary", "<|end|>") if turn.calls else ("final", "")
            messages.append(f"{_CHANNEL}{channel}{_SAID}{turn.content}{end}")
        for call in turn.calls:
            arguments = to_json(dict(call.arguments)).replace("<|", "\\u003c|")
            to = f"{_CHANNEL}commentary to=functions.{call.name} {_CONSTRAIN}json"
            messages.append(f"{to}{_SAID}{arguments}<|call|>")
        return f"{_START}{_ROLE}".join(messages)


def _next_message(text: str, position: int) -> tuple[int, str, str]:
    """End of the next message, its header, and its body without the token that ends it.

    Words without a header are a message of words.
    """
    said = text.find(_SAID, position)
    stopped = _STOP.search(text, position)
    if said < 0 or (stopped and stopped.start() < said):
        return (stopped.end(), "", text[position : stopped.start()]) if stopped else (len(text), "", text[position:])
    body = said + len(_SAID)
    stopped = _STOP.search(text, body)
    end, behind = (stopped.start(), stopped.end()) if stopped else (len(text), len(text))
    return behind, text[position:said], text[body:end]


def _read_call(text: str, name: str, body: str) -> Found:
    try:
        value, end = read_json(body)
    except ValueError as error:
        return CallError(text, str(error))
    if body[end:].strip():
        return CallError(text, f"expected nothing after the arguments, got {body[end:].strip()[:20]!r}")
    return Call(text, name, value)
