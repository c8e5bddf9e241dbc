"""One row of a dataset to the parts of a prompt; every rule that a row can break."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from roll.configs.data import DataArguments, DatasetFilterConfig

ROLES = ("system", "user", "assistant", "tool")

Message: TypeAlias = Mapping[str, str]
"""``role`` and ``content``."""

_ABSENT = object()
_MOST = float(np.finfo(np.float32).max)


class RowError(ValueError):
    """Reason why a row is no prompt; the caller knows where it stands."""


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
    return value


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
    """The row's id, else ``name``. Only the default column may be missing."""
    if args.id is None or (args.id == _DEFAULT_ID and _find(values, args.id) is _ABSENT):
        return name
    return _label(lookup(values, args.id), args.id)


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


def row_messages(values: Mapping[str, Any], args: DataArguments) -> tuple[Message, ...]:
    """The conversation that the policy answers.

    Raises:
        RowError: it is no list of messages with known roles and text, or the last one is not the user's.
    """
    if args.messages is not None:
        messages = _conversation(lookup(values, args.messages), args.messages, last="user")
    else:
        messages = (_question(values, args),)
    return _with_system_message(messages, values, args)


def row_conversation(values: Mapping[str, Any], args: DataArguments) -> tuple[Message, ...]:
    """The conversation that the policy imitates: ``messages``, or ``prompt`` and ``response``.

    Raises:
        RowError: it is no list of messages with known roles and text, or the last one is not the assistant's.
    """
    if args.messages is not None:
        messages = _conversation(lookup(values, args.messages), args.messages, last="assistant")
        if all(message["role"] in ("system", "assistant") for message in messages):
            raise RowError(
                f"column {args.messages!r}: only the assistant speaks, expected a question before the answer"
            )
    else:
        assert args.response is not None
        answer = lookup(values, args.response)
        if not isinstance(answer, str) or not answer.strip():
            raise RowError(f"column {args.response!r}: {short(answer)}, expected the text of an answer")
        check_encodable(answer, f"column {args.response!r}")
        messages = (_question(values, args), {"role": "assistant", "content": answer})
    return _with_system_message(messages, values, args)


def _question(values: Mapping[str, Any], args: DataArguments) -> Message:
    assert args.prompt is not None
    question = _text(lookup(values, args.prompt), args.prompt)
    if args.query is not None and (query := _optional_text(values, args.query)):
        question = f"{question}\n{query}"
    return {"role": "user", "content": question}


def _with_system_message(
    messages: tuple[Message, ...], values: Mapping[str, Any], args: DataArguments
) -> tuple[Message, ...]:
    """The conversation behind the row's own system message, else ``system_prompt``, if it does not begin with one.

    Raises:
        RowError: the row has a system message of its own beside a conversation that begins with one.
    """
    own = None if args.system is None else _optional_text(values, args.system)
    if messages[0]["role"] == "system":
        if own:
            raise RowError(f"column {args.system!r}: a system message, but column {args.messages!r} begins with one")
        return messages
    system = own or args.system_prompt
    return messages if system is None else ({"role": "system", "content": system}, *messages)


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


def _conversation(value: Any, column: str, last: str) -> tuple[Message, ...]:
    if isinstance(value, str):  # a CSV file can hold it only so
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {column!r}: text that is no JSON list of messages ({error})") from error
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r}: {short(value)}, expected a list of messages")
    messages = tuple(_message(entry, f"{column}[{index}]") for index, entry in enumerate(value))
    final, place = messages[-1], f"{column}[{len(messages) - 1}]"
    if final["role"] != last:
        raise RowError(f"{place}: the last message is of the {final['role']}, expected the {last}")
    if not final["content"].strip():
        raise RowError(f"{place}.content: empty, expected {'a question' if last == 'user' else 'an answer'}")
    return messages


def _message(entry: Any, place: str) -> Message:
    """``role`` and ``content``; further keys stay where they are text, for templates that read them."""
    if not isinstance(entry, Mapping):
        raise RowError(f"{place}: {short(entry)}, expected an object with role and content")
    for key in ("role", "content"):
        if key not in entry:
            raise RowError(f"{place}: no {key}, seen {', '.join(map(repr, entry)) or 'nothing'}")
    if entry["role"] not in ROLES:
        raise RowError(f"{place}.role: {short(entry['role'])}, expected one of {', '.join(ROLES)}")
    # Parquet gives every message the keys of all; those a message does not have are null.
    message = {key: text for key, text in entry.items() if text is not None or key == "content"}
    for key, text in message.items():
        if not isinstance(text, str):
            raise RowError(f"{place}.{key}: {short(text)}, expected text")
        check_encodable(text, f"{place}.{key}")
    return message


def check_encodable(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{place}: half of a surrogate pair at character {error.start + 1}, expected text") from error


def row_response(values: Mapping[str, Any], args: DataArguments) -> Any:
    """The reference answer; ``None`` where ``data_args.response`` is null."""
    if args.response is None:
        return None
    try:
        return lookup(values, args.response)
    except RowError as error:
        raise RowError(f"{error} (data_args.response: null where there is no reference answer)") from error


def other_columns(values: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """The columns that are not ``used`` themselves; the entries of a column ``extra_info`` stand beside them.

    So a reward function finds ``extra_info["index"]`` where datasets for verl nest it.
    """
    others = {column: value for column, value in values.items() if column not in used}
    nested = others.get("extra_info")
    if isinstance(nested, Mapping):
        del others["extra_info"]
        others |= nested
    return others


def used_columns(args: DataArguments) -> Sequence[str]:
    """The columns that have a place of their own in a prompt."""
    columns = (args.prompt, args.query, args.messages, args.system, args.response, args.id, args.tag)
    return [column for column in columns if column is not None]


def short(value: Any) -> str:
    """A value in a message, in JSON's word where it is none."""
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
