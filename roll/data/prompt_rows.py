"""Turns a row of a dataset into messages and tools in one form, and checks every rule that a row can break.

Understood are OpenAI's messages, old and new, ShareGPT's ``from`` and ``value``, and the marks by which OpenAI, axolotl
and ms-swift say which of the assistant's messages are learned.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll.configs.data import DataArguments, DatasetFilterConfig
from roll.data.files import Unreadable
from roll.data.pictures import PictureError, Reach
from roll.data.row_pictures import (
    PARTS,
    REFUSED,
    VIDEO_PARTS,
    column_sources,
    picture_part,
    video_part,
    with_column,
)
from roll.data.tool_messages import (
    MARKS,
    REASONING,
    Content,
    Message,
    Tool,
    identity_of,
    joined,
    reasoning_of,
    text_of,
)

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
    """Reason why a row cannot be used; the caller knows its place."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message, and whether the row says that it is trained on; ``None``: it does not say."""

    message: Message
    learned: bool | None = None


def read_messages(value: Any, column: str, reach: Reach | None = None) -> tuple[Heard, ...]:
    """The messages of a conversation: a list, or its JSON text, which is all that a CSV file can hold.

    Args:
        reach: of pictures; ``None``: none are read.

    Raises:
        RowError: it is none, or a message is not understood.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {column!r}: text that is not a JSON list of messages ({error})") from error
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r}: {short(value)}, expected a list of messages")
    return tuple(_message(entry, f"{column}[{index}]", reach) for index, entry in enumerate(value))


def _message(entry: Any, place: str, reach: Reach | None) -> Heard:
    if not isinstance(entry, Mapping):
        raise RowError(f"{place}: {short(entry)}, expected an object with role and content")
    # Parquet gives every message the keys of all; those a message does not have are null.
    given = {key: value for key, value in entry.items() if value is not None}
    named = next((key for key in ("role", "from") if key in given), None)
    if named is None:
        raise RowError(f"{place}: no role, got {', '.join(map(repr, entry)) or 'nothing'}")
    called = given[named].lower() if isinstance(given[named], str) else ""
    role = ROLES.get(called)
    if role is None:
        expected = f"one of {', '.join(list(ROLES)[:5])}, or an alias: {', '.join(list(ROLES)[5:])}"
        raise RowError(f"{place}.{named}: {short(given[named])}, expected {expected}")
    message: dict[str, Any] = {"role": role}
    words, thought = _content(given, place, reach if role != "assistant" else None)
    calls = _calls(given, place)
    if called in _CALLERS:
        words, calls = "", [_call(_parsed(words, place), place)]
    thought = _reasoning(given, thought, place)
    if role != "assistant" and (calls or thought):
        key = "a call" if calls else "reasoning"
        raise RowError(f"{place}: {key} of the {role}, expected only of the assistant")
    if words is None:
        if not calls and not thought:
            raise RowError(f"{place}: no content, got {', '.join(map(repr, entry))}; expected text")
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
    if not isinstance(message["content"], str):
        check_encodable(text_of(message["content"]), f"{place}.content")


def _content(given: Mapping[str, Any], place: str, reach: Reach | None) -> tuple[Content | None, str]:
    """What a message says, ``None`` if it has no content, and what its parts think."""
    key = next((key for key in ("content", "value") if key in given), None)
    if key is None:
        return None, ""
    value, place = given[key], f"{place}.{key}"
    if isinstance(value, str):
        return value, ""
    if not isinstance(value, list):
        raise RowError(f"{place}: {short(value)}, expected text, or a list of parts with text (JSON as a text)")
    shown: list[Content] = []
    thoughts: list[str] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            shown.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RowError(f"{place}[{index}]: {short(part)}, expected an object with type and text")
        kind = part.get("type") or ("text" if "text" in part else None)
        if reach is not None and (kind in PARTS or (kind in VIDEO_PARTS and reach.video_folder is not None)):
            shown.append([_picture(part, f"{place}[{index}]", reach)])
            continue
        found = _THOUGHT_PARTS if kind in _THOUGHT_PARTS else _TEXT_PARTS
        if kind not in found:
            others = "" if reach is None else " and pictures" if reach.video_folder is None else ", pictures and videos"
            raise RowError(
                f"{place}[{index}]: a part of type {short(kind)}, expected only text{others}: "
                f"{REFUSED.get(str(kind), _NOT_HERE)}"
            )
        text = part.get(found[kind], part.get("text"))
        if not isinstance(text, str):
            raise RowError(f"{place}[{index}].{found[kind]}: {short(text)}, expected text")
        (thoughts if kind in _THOUGHT_PARTS else shown).append(text)
    return joined(*shown), "".join(thoughts)


def _picture(part: Mapping[str, Any], place: str, reach: Reach) -> Mapping[str, Any]:
    try:
        return (video_part if part["type"] in VIDEO_PARTS else picture_part)(part, place, reach)
    except PictureError as error:
        raise RowError(str(error)) from error


_NOT_HERE = (
    "pictures, sound and files are not supported here; calls go into tool_calls, results into messages of the role tool"
)


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
            raise RowError(f"{place}.{key}: {short(value)} of the {role}, expected only of the assistant")
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
        raise RowError(f"{place}: {short(text)} is not JSON ({error})") from error


def check_encodable(text: str, place: str) -> None:
    """Raises ``RowError`` for a text that no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{place}: a lone surrogate at character {error.start + 1}, expected text") from error


def short(value: Any) -> str:
    """A value in a message, in JSON's word where it is none."""
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


__all__ = ["Heard", "Message", "RowError", "check_encodable", "short"]

_ABSENT = object()
_MOST = float(np.finfo(np.float32).max)


def lookup(values: Mapping[str, Any], column: str) -> Any:
    """The value at ``column``: a column of that name, else a dotted path into nested objects.

    Raises:
        RowError: there is none.
    """
    value = _find(values, column)
    if value is _ABSENT:
        near = difflib.get_close_matches(column, values, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RowError(f"no column {column!r}, the row has {', '.join(map(repr, values)) or 'none'}{hint}")
    if isinstance(value, Unreadable):
        raise RowError(f"column {column!r}: {value.reason}")
    return value


def _shown(values: Mapping[str, Any], column: str, reach: Reach | None) -> Any:
    """``lookup`` of a column that may hold the bytes of pictures."""
    value = _find(values, column)
    holds = reach is not None and isinstance(value, Unreadable) and value.value is not None
    return value.value if holds else lookup(values, column)


def _find(values: Mapping[str, Any], column: str) -> Any:
    if column in values:
        return values[column]
    node: Any = values
    for part in column.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def passes(values: Mapping[str, Any], rules: DatasetFilterConfig) -> bool:
    """Tells whether the dataset's filter keeps a row.

    Raises:
        RowError: a column that the filter reads is missing or, for the difficulty, no number.
    """
    if rules.source is not None:
        wanted = [rules.source] if isinstance(rules.source, str) else rules.source
        if lookup(values, rules.source_column) not in wanted:
            return False
    if rules.min_difficulty is None and rules.max_difficulty is None:
        return True
    difficulty = number(lookup(values, rules.difficulty_column), rules.difficulty_column)
    above = rules.min_difficulty is None or difficulty >= rules.min_difficulty
    return above and (rules.max_difficulty is None or difficulty <= rules.max_difficulty)


def number(value: Any, column: str) -> float:
    """A column's value as a finite or infinite number.

    Raises:
        RowError: it is none.
    """
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf if value > 0 else -math.inf
    if number != number:
        raise RowError(f"column {column!r}: {short(value)}, expected a number")
    return number


def finite(value: Any, column: str) -> float:
    """A column's value as a number that a loss can take.

    Raises:
        RowError: it is none, or beyond what single precision holds.
    """
    found = number(value, column)
    if not abs(found) <= _MOST:
        raise RowError(f"column {column!r}: {found}, expected a finite number (in single precision)")
    return found


def row_id(values: Mapping[str, Any], args: DataArguments, name: str) -> str:
    """The row's id, ``name`` where it has none: null, empty, or nothing that names a row.

    Raises:
        RowError: the column is missing, and not the default one.
    """
    if args.id is None or (args.id == _DEFAULT_ID and _find(values, args.id) is _ABSENT):
        return name
    value = lookup(values, args.id)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a whole number beside nulls is one, to pandas
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "" else name


_DEFAULT_ID = DataArguments.model_fields["id"].default


def row_tag(values: Mapping[str, Any], args: DataArguments, allowed: Collection[str] | None) -> str:
    """The row's domain, else ``default_tag``.

    Raises:
        RowError: there is neither, or it is not among the ``allowed``.
    """
    value = _find(values, args.tag)
    if value is _ABSENT or value is None:
        if args.default_tag is None:
            found = "is null" if value is None else "is missing"
            raise RowError(f"column {args.tag!r} {found}; expected it, or data_args.default_tag")
        tag = args.default_tag
    else:
        tag = _label(value, args.tag)
    if allowed is not None and tag not in allowed:
        near = difflib.get_close_matches(tag, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RowError(f"tag {tag!r}, expected one of {', '.join(sorted(allowed))}{hint}")
    return tag


def _label(value: Any, column: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise RowError(f"column {column!r}: {short(value)}, expected text or a whole number")
    return value


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation to learn from."""

    messages: tuple[Message, ...]
    """The last is the assistant's."""
    learned: tuple[int, ...]
    """Indices of the messages that are learned."""
    tools: tuple[Tool, ...] | None = None
    """That the assistant is told of."""
    silent: int = 0
    """Messages of the assistant that say nothing, and are not learned."""


def picture_reach(args: DataArguments, file: str) -> Reach:
    """Where the pictures of a file's rows may lie."""
    folder = Path(file).parent if args.dataset_cls is None else Path()
    if args.image_folder is not None:
        folder = Path(args.image_folder).expanduser()
    named = args.image_urls
    hosts = (() if named else None) if isinstance(named, bool) else tuple(named)
    videos = None
    if args.video is not None:
        videos = folder if args.video_folder is None else Path(args.video_folder).expanduser()
    return Reach(folder, args.image_outside_folder, hosts, videos)


def row_messages(values: Mapping[str, Any], args: DataArguments, reach: Reach | None = None) -> tuple[Message, ...]:
    """The conversation that the policy answers; its pictures are ``Source``s.

    Args:
        reach: of the row's pictures; ``None``: none are read.

    Raises:
        RowError: it is no list of messages with known roles and text, the last one is not the user's, or a picture
            cannot be used.
    """
    column, heard = _asked(values, args, reach)
    _check_last(heard, column, "user")
    return _with_pictures((*_system(heard, values, args), *(one.message for one in heard)), values, args, reach)


def _with_pictures(
    messages: tuple[Message, ...], values: Mapping[str, Any], args: DataArguments, reach: Reach | None
) -> tuple[Message, ...]:
    """Messages with the pictures and videos of the row's columns."""
    if reach is None:
        return messages
    for kind, column in {"image": args.image, "video": args.video}.items():
        if column is None:
            continue
        value = None
        if column != DEFAULT_COLUMNS[kind] or _has(values, column):
            value = _shown(values, column, reach)
        elif _has(values, kind) and any(MARKS[kind] in text_of(message["content"]) for message in messages):
            raise RowError(
                f"{MARKS[kind]} in its words and a column {kind!r}, but no column {column!r}: "
                f"data_args.{kind}: {kind} reads it, data_args.{kind}: null none"
            )
        try:
            messages = with_column(messages, column_sources(value, column, reach, kind), column, kind)
        except PictureError as error:
            raise RowError(f"{error} (data_args.{kind}: null: the column is not read)") from error
    return messages


DEFAULT_COLUMNS = {kind: DataArguments.model_fields[kind].default for kind in MARKS}
"""Columns of pictures and videos, where the row may lack them."""


def row_conversation(values: Mapping[str, Any], args: DataArguments, reach: Reach | None = None) -> Talk:
    """The conversation that the policy imitates: ``messages``, or a question or conversation and ``response``.

    Of the assistant's messages all are learned whose row does not say otherwise; where the answer has a column of its
    own, that is the answer alone.

    Raises:
        RowError: a message is not understood, the last one is not the assistant's, or none is learned.
    """
    column, heard = _asked(values, args, reach)
    context: tuple[Heard, ...] = ()
    if args.messages is None or (heard[-1].message["role"] != "assistant" and _has(values, args.response)):
        assert args.response is not None
        _check_last(heard, column, "user")
        context, heard, column = heard, row_answer(values, args.response), args.response
    _check_last(heard, column, "assistant")
    system = _system(context or heard, values, args)
    spoken = [index for index, one in enumerate(heard) if one.message["role"] == "assistant"]
    saying = [index for index in spoken if not is_silent(heard[index].message)]
    learned = [len(system) + len(context) + index for index in saying if heard[index].learned is not False]
    if not learned:
        raise RowError(
            f"column {column!r}: nothing to train on: {' or '.join(LEARNED)} excludes all assistant messages"
        )
    messages = (*system, *(one.message for one in (*context, *heard)))
    messages = _with_pictures(messages, values, args, reach)
    return Talk(messages, tuple(learned), row_tools(values, args), len(spoken) - len(saying))


def row_answer(values: Mapping[str, Any], column: str) -> tuple[Heard, ...]:
    """An answer in a column of its own: a text, the assistant's message, or a list of messages that ends with one.

    Raises:
        RowError: it is none of these.
    """
    answer = lookup(values, column)
    if isinstance(answer, Mapping | list):
        heard = read_messages([answer] if isinstance(answer, Mapping) else answer, column)
        _check_last(heard, column, "assistant")
        return heard
    if not isinstance(answer, str) or not answer.strip():
        raise RowError(f"column {column!r}: {short(answer)}, expected the text of an answer, or its messages")
    check_encodable(answer, f"column {column!r}")
    return (Heard({"role": "assistant", "content": answer}),)


def row_tools(values: Mapping[str, Any], args: DataArguments) -> tuple[Tool, ...] | None:
    """The tools that a row tells the assistant of; only the default column may be missing.

    Raises:
        RowError: they are no functions, or their column is missing.
    """
    if args.tools is None:
        return None
    if args.tools == _DEFAULT_TOOLS and not _has(values, args.tools):
        return _functions(values)
    return read_tools(lookup(values, args.tools), args.tools)


def _functions(values: Mapping[str, Any]) -> tuple[Tool, ...] | None:
    """The tools in OpenAI's older column, unless it is somebody else's."""
    with suppress(RowError):
        return read_tools(values.get(_FUNCTIONS), _FUNCTIONS)
    return None


_DEFAULT_TOOLS = DataArguments.model_fields["tools"].default
_FUNCTIONS = "functions"


def is_silent(message: Message) -> bool:
    """Tells whether a message says nothing at all."""
    return not (text_of(message["content"]).strip() or message.get("tool_calls") or reasoning_of(message))


def _asked(values: Mapping[str, Any], args: DataArguments, reach: Reach | None) -> tuple[str, tuple[Heard, ...]]:
    """The column of what comes before an answer, or of the whole conversation, and its messages."""
    if args.messages is not None:
        return args.messages, read_messages(_shown(values, args.messages, reach), args.messages, reach)
    assert args.prompt is not None
    value = _shown(values, args.prompt, reach)
    if isinstance(value, list) and args.query is None:
        return args.prompt, read_messages(value, args.prompt, reach)
    question = _text(value, args.prompt)
    if args.query is not None and (query := _optional_text(values, args.query)):
        question = f"{question}\n{query}"
    return args.prompt, (Heard({"role": "user", "content": question}),)


def _check_last(heard: Sequence[Heard], column: str, last: str) -> None:
    """A question may also end with a tool's result where an answer follows."""
    final, place = heard[-1].message, f"{column}[{len(heard) - 1}]"
    if final["role"] != last:
        answer = "; or data_args.response, the column of the answer" if last == "assistant" else ""
        raise RowError(f"{place}: the last message is the {final['role']}'s, expected the {last}'s{answer}")
    if is_silent(final):
        raise RowError(f"{place}.content: empty, expected {'a question' if last == 'user' else 'an answer'}")


def _has(values: Mapping[str, Any], column: str | None) -> bool:
    return column is not None and _find(values, column) not in (_ABSENT, None)


def _system(heard: Sequence[Heard], values: Mapping[str, Any], args: DataArguments) -> tuple[Message, ...]:
    """The row's own system message, else ``system_prompt``; none where the conversation begins with one.

    Raises:
        RowError: the row has a system message of its own beside a conversation that begins with one.
    """
    own = None if args.system is None else _optional_text(values, args.system)
    if heard[0].message["role"] in ("system", "developer"):
        if own:
            column = args.messages or args.prompt
            raise RowError(f"column {args.system!r}: a system message, but column {column!r} begins with one")
        return ()
    system = own or args.system_prompt
    return () if system is None else ({"role": "system", "content": system},)


def _optional_text(values: Mapping[str, Any], column: str) -> str:
    """A column's text, empty where it says nothing."""
    value = lookup(values, column)
    return "" if value is None or (isinstance(value, str) and not value.strip()) else _text(value, column)


def _text(value: Any, column: str) -> str:
    if isinstance(value, list):
        raise RowError(f"column {column!r}: a list, expected text; for a list of messages set messages: {column}")
    if not isinstance(value, str):
        raise RowError(f"column {column!r}: {short(value)}, expected text")
    if not value.strip():
        raise RowError(f"column {column!r}: empty, expected a question")
    check_encodable(value, f"column {column!r}")
    return value


def row_response(values: Mapping[str, Any], args: DataArguments) -> Any:
    """The reference answer; ``None`` where ``data_args.response`` is null."""
    if args.response is None:
        return None
    try:
        return lookup(values, args.response)
    except RowError as error:
        raise RowError(f"{error} (data_args.response: null if there is no reference answer)") from error


def other_columns(values: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """The columns that are not ``used`` themselves; the entries of a column ``extra_info`` stand beside them.

    So a reward function finds ``extra_info["index"]`` where datasets for verl nest it.
    """
    others = {
        column: value for column, value in values.items() if column not in used and not isinstance(value, Unreadable)
    }
    nested = others.get("extra_info")
    if isinstance(nested, Mapping):
        del others["extra_info"]
        others |= nested
    return others


def used_columns(args: DataArguments) -> Sequence[str]:
    """The columns that have a place of their own in a prompt."""
    shown = (args.image, args.video)
    columns = (args.prompt, args.query, args.messages, *shown, args.system, args.response, args.id, args.tag)
    return [column for column in columns if column is not None]


def unread_columns(values: Mapping[str, Any], args: DataArguments, read: Collection[str]) -> list[str]:
    """Columns of a row that neither the keys of ``args`` nor ``read`` name."""
    rules = args.dataset_filter
    named = {*used_columns(args), *read, args.tools, _DEFAULT_TOOLS, rules.source_column, rules.difficulty_column}
    if args.tools == _DEFAULT_TOOLS and not _has(values, args.tools) and _functions(values):
        named.add(_FUNCTIONS)
    return [column for column in values if column not in named and not any(_below(column, each) for each in named)]


def _below(column: str, path: str | None) -> bool:
    return path is not None and path.startswith(f"{column}.")
