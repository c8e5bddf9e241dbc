"""Messages with parts, tool calls and results, in the form of chat templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""As in OpenAI's API: ``role`` and ``content`` (a text, ``None`` beside calls, or parts); an assistant's ``tool_calls``
and ``reasoning_content``; a tool's ``tool_call_id`` and ``name``. A part is ``{"type": "text", "text": …}``,
``{"type": "image", "image": …}`` with an ``Item`` where it is rendered, or ``{"type": "video", "video": …}`` with a
``Video``."""
Content: TypeAlias = str | Sequence[Mapping[str, Any]]
Tool: TypeAlias = Mapping[str, Any]
"""An OpenAI function dict: ``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``."""

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESULT_START, RESULT_END = "<tool_response>", "</tool_response>"


PICTURE = "<image>"
"""What stands for a picture in a text for people and verifiers, and in the texts of datasets."""
MARKS = {"image": PICTURE, "video": "<video>"}
"""The same by the types of parts that are no text."""


def text_of(content: Content | None) -> str:
    """The words of a content, with ``<image>`` for a picture and ``<video>`` for a video."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] if part["type"] == "text" else MARKS[part["type"]] for part in content)


def in_words(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Messages with ``text_of`` for their contents."""
    return tuple(
        {**message, "content": text_of(message["content"])} if isinstance(message["content"], list) else message
        for message in messages
    )


def joined(*contents: Content) -> str | list[Mapping[str, Any]]:
    """One content of several: a text, unless there is a picture in it."""
    parts: list[Mapping[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and parts[-1]["type"] == part["type"] == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
    if any(part["type"] != "text" for part in parts):
        return [part for part in parts if part.get("text") != ""]
    return "".join(part["text"] for part in parts)


REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that an assistant's reasoning goes by."""


def identity_of(index: int) -> str:
    """Id of a call that has none: nine letters and digits, as Mistral's templates want it."""
    return f"call{index:05d}"


def reasoning_of(message: Message) -> str:
    """What an assistant's message says it thought, under one of its names or in its words; else empty."""
    beside = next((message[key] for key in REASONING if message.get(key)), None)
    if beside is not None:
        return str(beside)
    inside, closed, _ = text_of(message.get("content")).partition("</think>")
    return inside.partition("<think>")[2] or inside if closed else ""


def tidy(
    messages: Sequence[Message],
    *,
    text_arguments: bool = False,
    reasoning: str = REASONING[0],
    developer: bool = True,
) -> list[dict[str, Any]]:
    """Messages in the one form that all templates with tools take.

    No content is an empty text, no calls are no key, arguments are an object (a JSON text with ``text_arguments``, for
    templates that join texts), and a result without an id answers the call in its place. Reasoning has the name
    ``reasoning``; without ``developer`` such a message is the system's.
    """
    tidied: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        tidied.append(fresh := dict(message))
        if fresh.get("content") is None:
            fresh["content"] = ""
        calls = fresh.pop("tool_calls", None) or ()
        if calls:
            fresh["tool_calls"] = [_tidy_call(call, index, text_arguments) for index, call in enumerate(calls)]
            waiting = [call["id"] for call in fresh["tool_calls"]]
        if fresh["role"] == "developer" and not developer:
            fresh["role"] = "system"
        if thought := next((fresh[key] for key in REASONING if fresh.get(key)), None):
            for key in REASONING:
                fresh.pop(key, None)
            # gpt-oss' template, which calls it so, refuses it beside calls with words.
            if not (reasoning == "thinking" and calls and fresh["content"]):
                fresh[reasoning] = thought
        if fresh["role"] == "tool":
            answered = fresh.setdefault("tool_call_id", waiting[0] if waiting else identity_of(0))
            waiting = [each for each in waiting if each != answered]
    return tidied


def _tidy_call(call: Mapping[str, Any], index: int, text_arguments: bool) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not text_arguments:
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is written as it is
            arguments = json.loads(arguments)
    elif not isinstance(arguments, str) and text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or identity_of(index),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def calls_answered_by(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Calls without arguments that the results at the beginning of ``messages`` answer."""
    calls = []
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            break
        function: dict[str, Any] = {"name": message.get("name") or "tool", "arguments": {}}
        identity = message.get("tool_call_id") or identity_of(index)
        calls.append({"id": identity, "type": "function", "function": function})
    return calls


def hermes_call(name: str, arguments: object) -> str:
    """A call in the Hermes form."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{CALL_START}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}\n{CALL_END}'


def calls_in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    """A tidied message whose calls, if it has any, stand in its words in the Hermes form."""
    fresh = dict(message)
    if calls := fresh.pop("tool_calls", None):
        written = [hermes_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        fresh["content"] = "\n".join([text_of(fresh["content"])] * bool(fresh["content"]) + written)
    return fresh


def without_tools(
    messages: Sequence[Message], tools: Sequence[Tool] | None, *, takes_system: bool
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools, in the Hermes form.

    Schemas stand in the system message (before the first message's words where the template takes none), calls in the
    assistant's words, results in a user message, which also takes in what a user says right behind them.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        fresh = {key: value for key, value in calls_in_words(message).items() if key != "tool_call_id"}
        if message["role"] == "tool":
            result = joined(f"{RESULT_START}\n", message["content"], f"\n{RESULT_END}")
            fresh = {"role": "user", "content": result, "_joins": True}
        if plain and plain[-1].get("_joins") and fresh["role"] == "user":
            plain[-1] = {**fresh, "content": joined(plain[-1]["content"], "\n", fresh["content"])}
        else:
            plain.append(fresh)
    for message in plain:
        message.pop("_joins", None)
    if tools:
        told = describe(tools)
        if plain and (plain[0]["role"] == "system" or not takes_system):
            first = plain[0]["content"]
            words = (first, told) if plain[0]["role"] == "system" else (told, first)
            plain[0] = {**plain[0], "content": joined(words[0], "\n\n", words[1]) if first else told}
        else:
            plain.insert(0, {"role": "system", "content": told})
    return plain


def describe(tools: Sequence[Tool]) -> str:
    """Words of a system message that tell of tools in the Hermes form."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{CALL_START}{CALL_END} XML tags:\n"
        f'{CALL_START}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
    )
