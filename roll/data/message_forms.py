"""Messages and tools as datasets write them, in the one form of ``roll.data.tool_messages``.

Understood are OpenAI's messages, old and new, ShareGPT's ``from`` and ``value``, and the marks by which OpenAI, axolotl
and ms-swift say which of the assistant's messages are learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.data.tool_messages import REASONING, Message, Tool, identity_of

ROLES: Mapping[str, str] = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call", "function-call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("function", "observation", "ipython", "function_response", "function-response", "tool_response"), "tool"
    ),
}
"""The role that each name stands for."""
_CALLERS = ("function_call", "function-call", "tool_call")
"""Roles whose words are a call."""
LEARNED = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it is learned."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of the parts of a content that are words, and where these stand."""
_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "reasoning"}
_READ = {"role", "from", "content", "value", "tool_calls", "function_call", *LEARNED, *REASONING}


class RowError(ValueError):
    """Reason why a row cannot be used; the caller knows where it stands."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message, and whether the row says that it is learned; ``None``: it does not say."""

    message: Message
    learned: bool | None = None


def read_messages(value: Any, column: str) -> tuple[Heard, ...]:
    """The messages of a conversation: a list, or its JSON text, which is all that a CSV file can hold.

    Raises:
        RowError: it is none, or a message is not understood.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {column!r}: text that is no JSON list of messages ({error})") from error
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r}: {short(value)}, expected a list of messages")
    return tuple(_message(entry, f"{column}[{index}]") for index, entry in enumerate(value))


def _message(entry: Any, place: str) -> Heard:
    if not isinstance(entry, Mapping):
        raise RowError(f"{place}: {short(entry)}, expected an object with role and content")
    # Parquet gives every message the keys of all; those a message does not have are null.
    given = {key: value for key, value in entry.items() if value is not None}
    named = next((key for key in ("role", "from") if key in given), None)
    if named is None:
        raise RowError(f"{place}: no role, seen {', '.join(map(repr, entry)) or 'nothing'}")
    called = given[named].lower() if isinstance(given[named], str) else ""
    role = ROLES.get(called)
    if role is None:
        expected = f"one of {', '.join(list(ROLES)[:5])}, or a name that stands for one: {', '.join(list(ROLES)[5:])}"
        raise RowError(f"{place}.{named}: {short(given[named])}, expected {expected}")
    message: dict[str, Any] = {"role": role}
    words, thought = _content(given, place)
    calls = _calls(given, place)
    if called in _CALLERS:
        words, calls = "", [_call(_parsed(words, place), place)]
    thought = _reasoning(given, thought, place)
    if role != "assistant" and (calls or thought):
        key = "a call" if calls else "reasoning"
        raise RowError(f"{place}: {key} of the {role}, expected it of the assistant alone")
    if words is None:
        if not calls and not thought:
            raise RowError(f"{place}: no content, seen {', '.join(map(repr, entry))}; expected text")
        words = ""
    message["content"] = words
    message |= {key: value for key, value in given.items() if key not in _READ}
    if thought:
        message[REASONING[0]] = thought
    if calls:
        message["tool_calls"] = calls
    _check_names(message, place)
    return Heard(message, _learned(given, role, place))


def _check_names(message: dict[str, Any], place: str) -> None:
    """Makes ``tool_call_id`` and ``name`` texts, and sees that the other texts can be encoded."""
    if isinstance(message.get("tool_call_id"), int):
        message["tool_call_id"] = str(message["tool_call_id"])
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise RowError(f"{place}.{key}: {short(message[key])}, expected text")
    for key, value in message.items():
        if isinstance(value, str):
            check_encodable(value, f"{place}.{key}")


def _content(given: Mapping[str, Any], place: str) -> tuple[str | None, str]:
    """What a message says, ``None`` if it has no content, and what its parts think."""
    key = next((key for key in ("content", "value") if key in given), None)
    if key is None:
        return None, ""
    value, place = given[key], f"{place}.{key}"
    if isinstance(value, str):
        return value, ""
    if not isinstance(value, list):
        raise RowError(f"{place}: {short(value)}, expected text, or a list of parts with text (JSON as a text)")
    words: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            words.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RowError(f"{place}[{index}]: {short(part)}, expected an object with type and text")
        kind = part.get("type") or ("text" if "text" in part else None)
        found = _THOUGHT_PARTS if kind in _THOUGHT_PARTS else _TEXT_PARTS
        if kind not in found:
            raise RowError(
                f"{place}[{index}]: a part of type {short(kind)}, expected text alone: no pictures, sound or files can "
                "be learned; calls go into tool_calls, results into messages of the role tool"
            )
        text = part.get(found[kind], part.get("text"))
        if not isinstance(text, str):
            raise RowError(f"{place}[{index}].{found[kind]}: {short(text)}, expected text")
        (thoughts if kind in _THOUGHT_PARTS else words).append(text)
    return "".join(words), "".join(thoughts)


def _reasoning(given: Mapping[str, Any], thought: str, place: str) -> str:
    found = {key: given[key] for key in REASONING if given.get(key) not in (None, "")}
    for key, value in found.items():
        if not isinstance(value, str):
            raise RowError(f"{place}.{key}: {short(value)}, expected text")
        check_encodable(value, f"{place}.{key}")
    values = {*found.values(), *filter(None, [thought])}
    if len(values) > 1:
        raise RowError(f"{place}: different reasoning in {' and '.join(found) or 'its parts'}, expected one")
    return next(iter(values), "")


def _learned(given: Mapping[str, Any], role: str, place: str) -> bool | None:
    marks = {key: given[key] for key in LEARNED if key in given}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RowError(f"{place}.{key}: {short(value)}, expected 0 or 1, false or true (parts are not weighted)")
        if value and role != "assistant":
            raise RowError(f"{place}.{key}: {short(value)} of the {role}, expected it of the assistant alone")
    values = {bool(value) for value in marks.values()}
    if len(values) > 1:
        raise RowError(f"{place}: {' and '.join(marks)} differ, expected one of them")
    return next(iter(values), None)


def _calls(given: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """The calls of a message in OpenAI's form, arguments as objects."""
    calls, old = given.get("tool_calls") or [], given.get("function_call") or None
    if isinstance(calls, str):
        calls = _parsed(calls, f"{place}.tool_calls")
    if calls and old:
        raise RowError(f"{place}: tool_calls and function_call, expected one of them")
    if not isinstance(calls, list):
        raise RowError(f"{place}.tool_calls: {short(calls)}, expected a list of calls")
    if old:
        return [_call(old, f"{place}.function_call")]
    return [_call(call, f"{place}.tool_calls[{index}]", index) for index, call in enumerate(calls)]


def _call(call: Any, place: str, index: int = 0) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RowError(f"{place}: {short(call)}, expected an object with function: {{name, arguments}}")
    given = {key: value for key, value in call.items() if value is not None}
    function = given.get("function", {key: value for key, value in given.items() if key not in _ABOUT_CALL})
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{place}: {short(call)}, expected function: {{name, arguments}} with the name of a tool")
    unknown = [key for key, value in function.items() if key not in ("name", "arguments") and value is not None]
    if unknown:
        raise RowError(f"{place}: unknown key {unknown[0]!r} of a call, expected name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}.arguments") if arguments.strip() else {}
    if not isinstance(arguments, Mapping | None):
        raise RowError(f"{place}.arguments: {short(arguments)}, expected an object, or its JSON text")
    identity = given.get("id")
    return {
        "id": identity_of(index) if identity in (None, "") else str(identity),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments or {})},
    }


_ABOUT_CALL = ("id", "type", "index")


def read_tools(value: Any, column: str) -> tuple[Tool, ...] | None:
    """The tools that the assistant is told of, in OpenAI's form; ``None`` if there are none.

    Raises:
        RowError: it is no list of functions, or their JSON text.
    """
    if isinstance(value, str) and value.strip():
        value = _parsed(value, f"column {column!r}")
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(f"column {column!r}: {short(value)}, expected a list of tools (data_args.tools: null: not read)")
    return tuple(_tool(tool, f"{column}[{index}]") for index, tool in enumerate(value))


def _tool(tool: Any, place: str) -> Tool:
    if isinstance(tool, str):
        tool = _parsed(tool, place)
    function = tool.get("function") or tool if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(
            f"{place}: {short(tool)}, expected {{type: function, function: {{name, description, parameters}}}} "
            "(data_args.tools: null: the column is not read)"
        )
    schema = {key: value for key, value in function.items() if value is not None and key != "type"}
    if isinstance(schema.get("parameters"), str):
        schema["parameters"] = _parsed(schema["parameters"], f"{place}.parameters") if schema["parameters"] else {}
    if not isinstance(schema.get("parameters", {}), Mapping):
        raise RowError(f"{place}.parameters: {short(schema['parameters'])}, expected a JSON schema")
    return {"type": "function", "function": schema}


def _parsed(text: Any, place: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{place}: {short(text)} is no JSON ({error})") from error


def check_encodable(text: str, place: str) -> None:
    """Raises ``RowError`` for a text that no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{place}: half of a surrogate pair at character {error.start + 1}, expected text") from error


def short(value: Any) -> str:
    """A value in a message, in JSON's word where it is none."""
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
