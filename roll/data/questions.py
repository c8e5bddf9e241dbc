"""Rows of files that hold questions, and rows that hold responses to them too."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.data import DataArguments
from roll.data.files import Problems, Row, read_rows
from roll.data.identity import conversation_digest
from roll.data.pictures import Reach, Source
from roll.data.prompt_rows import (
    Message,
    RowError,
    check_encodable,
    finite,
    lookup,
    picture_reach,
    row_messages,
    row_tools,
)
from roll.data.row_pictures import PARTS, sources_in
from roll.data.tool_messages import PICTURE, Tool, in_words, text_of

PROMPTS = ("messages", "prompt")
"""Columns that a question is looked for in."""
ANSWERS = "answers"
"""Column that answers are written to, and looked for in."""

CONVERSATION = "conversation"
"""Entry of an episode's info: the messages of a question that is more than one, as JSON."""
_IMAGES = DataArguments(video=None)


@dataclass(frozen=True)
class Question:
    """A question."""

    messages: tuple[Message, ...]
    """The conversation to go on with; the last is the user's. Its pictures are ``Source``s."""
    tools: tuple[Tool, ...] | None
    """Functions that the row tells of."""
    is_text: bool
    """The row holds a text and no conversation: ``messages`` has it as its last."""

    @property
    def text(self) -> str:
        """The last message."""
        return text_of(self.messages[-1]["content"])

    @property
    def has_pictures(self) -> bool:
        """Tells whether there are pictures in the messages."""
        return bool(sources_in(self.messages))


def read_questions(
    files: Sequence[str],
    column: str | None,
    problems: Problems,
    *,
    system: str | None = None,
    without: str = ANSWERS,
    images: DataArguments = _IMAGES,
) -> Iterator[tuple[Row, Question]]:
    """The questions of files, in order; what is wrong goes to ``problems``.

    Args:
        files: see ``read_rows``.
        column: of the question, a text or a list of messages; ``None``: the first of ``PROMPTS`` that there is.
        system: message of the system, for the rows that have none.
        without: a column that the rows must not have, as it will be written.
        images: where pictures may be; their column is ``images``.
    """
    for row in read_rows(files, problems):
        try:
            if without in row.values:
                raise RowError(f"column {without!r} exists already; expected an unused name: --answer-key NAME")
            yield row, question_of(row.values, column, system, picture_reach(images, row.file))
        except RowError as error:
            problems.add(row.place, str(error))


def question_of(
    values: Mapping[str, Any], column: str | None, system: str | None = None, reach: Reach | None = None
) -> Question:
    """The question of a row.

    Args:
        reach: of its pictures; ``None``: none are read.

    Raises:
        RowError: there is none, or it is no text and no list of messages that ends with the user's.
    """
    if column is None:
        column = next((name for name in PROMPTS if name in values), None)
        if column is None:
            names = ", ".join(map(repr, values)) or "none"
            raise RowError(f"no column {' or '.join(map(repr, PROMPTS))}, the row has {names}; name it: --prompt-key")
    talks = column == PROMPTS[0] or isinstance(lookup(values, column), list)
    args = _columns(column, talks, system)
    return Question(row_messages(values, args, reach), row_tools(values, args), is_text=not talks)


def question_in(info: Mapping[str, Any], observation: str) -> list[Message]:
    """The messages of the question of an episode that a run has written.

    Raises:
        RowError: they are no JSON.
    """
    if CONVERSATION not in info:
        return [{"role": "user", "content": observation}]
    try:
        messages: list[Message] = json.loads(info[CONVERSATION])
    except (TypeError, ValueError) as error:
        raise RowError(f"info.{CONVERSATION}: {info[CONVERSATION]!r:.60}, expected JSON ({error})") from error
    return messages


@functools.cache
def _columns(column: str, talks: bool, system: str | None) -> DataArguments:
    keys: dict[str, Any] = {"messages" if talks else "prompt": column}
    return DataArguments(**keys, system_prompt=system)


_PICTURES = DataArguments.model_fields["image"].default


def _in_words(values: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    """A row with ``<image>`` for its pictures, which are not looked at: they may lie elsewhere."""
    said = values.get(column)
    if isinstance(said, list):
        return {**values, column: [_message_in_words(message) for message in said]}
    shown = values.get(_PICTURES) or ()
    marks = PICTURE * (len(shown) if isinstance(shown, list) else 1)
    return {**values, column: f"{marks}{said}"} if shown and isinstance(said, str) and PICTURE not in said else values


def _message_in_words(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    mark = {"type": "text", "text": PICTURE}
    parts = [mark if isinstance(part, Mapping) and part.get("type") in PARTS else part for part in content]
    return {**message, "content": parts}


TURNS = "turns"
"""Column of the episodes that a run writes."""


@dataclass(frozen=True)
class Answer:
    """Text of one response, with what is known about its sampling."""

    text: str
    num_tokens: int = 0
    """Sampled tokens; 0 where that is not known."""
    truncated: bool = False
    """It was cut off by a limit of length."""


@dataclass(frozen=True)
class ResponseRow:
    """A question with its answers."""

    row: Row
    prompt: str
    """Text of the last message before the answers; empty where the row has no question."""
    messages: tuple[Message, ...]
    answers: tuple[Answer | None, ...]
    """``None``: the row says that there is none, as generating it failed."""
    truth: Any
    tag: str | None
    extra: Mapping[str, Any]
    """The other columns."""
    group: str
    """Equal for answers to the same question."""
    has_pictures: bool = False
    pictures: tuple[Source, ...] = ()
    """Those of ``messages``, if they were asked for."""


@dataclass(frozen=True)
class AnswerColumns:
    """Columns of a row's parts. ``None``: the usual ones."""

    answers: str | None = None
    prompt: str | None = None
    truth: str | None = "solution"
    """``None``: there is no reference answer."""
    tag: str = "tag"


def read_responses(
    files: Sequence[str],
    columns: AnswerColumns,
    problems: Problems,
    *,
    without: str,
    shows: bool = False,
    images: DataArguments = _IMAGES,
) -> Iterator[ResponseRow]:
    """The answers in files, in order; what is wrong goes to ``problems``.

    Args:
        files: see ``read_rows``: what ``roll generate`` writes, a run's episodes, or any rows with a column of answers.
        without: a column that the rows must not have, as it will be written.
        shows: rows bring their pictures, which must be there.
        images: as for ``read_questions``.
    """
    for row in read_rows(files, problems):
        try:
            if without in row.values:
                raise RowError(f"column {without!r} exists already; expected an unused name: --score-key NAME")
            if columns.answers is None and isinstance(row.values.get(TURNS), list):
                yield _episode(row, columns, shows=shows)
            else:
                yield _answered(row, columns, picture_reach(images, row.file) if shows else None)
        except RowError as error:
            problems.add(row.place, str(error))


def _answered(row: Row, columns: AnswerColumns, reach: Reach | None) -> ResponseRow:
    values = row.values
    column = columns.answers or ANSWERS
    try:
        said = lookup(values, column)
    except RowError as error:
        raise RowError(f"{error}; name the answers' column: --answer-key") from error
    question, asked = None, columns.prompt or next((name for name in PROMPTS if name in values), None)
    told = values if asked is None else _in_words(values, asked)
    if asked is not None:
        question = question_of(told if reach is None else values, asked, reach=reach)
    messages = () if question is None else question.messages
    pictures = tuple(sources_in(messages))
    messages = in_words(messages)
    same, own = _group(values, asked, messages), values.get("id")
    used = {column, columns.truth, columns.tag, columns.prompt, _PICTURES, *PROMPTS}
    return ResponseRow(
        row,
        prompt="" if question is None else question.text,
        messages=messages,
        answers=_answers(said, column),
        truth=_truth(values, columns.truth),
        tag=_tag(values.get(columns.tag)),
        extra={name: value for name, value in values.items() if name not in used},
        group=same or row.name if own is None else f"{own} {same}",
        has_pictures=bool(pictures or values.get(_PICTURES)) or (asked is not None and told[asked] != values[asked]),
        pictures=pictures,
    )


def _group(values: Mapping[str, Any], asked: str | None, messages: Sequence[Message]) -> str:
    """Equal for equal questions, with equal pictures where they have some."""
    shows = values.get(_PICTURES) or any(PICTURE in text_of(message["content"]) for message in messages)
    shown = [{"role": "", "content": repr((values.get(_PICTURES), values.get(asked or "")))}] * bool(shows)
    return conversation_digest([*messages, *shown]) if messages else ""


def _answers(said: Any, column: str) -> tuple[Answer | None, ...]:
    """The answers in a cell: a text, or a list of texts, or of objects with ``text`` or ``error``."""
    found = tuple(_answer(each, column) for each in (said if isinstance(said, list) else [said]))
    if not found:
        raise RowError(f"column {column!r}: no response in it")
    return found


def _answer(said: Any, column: str) -> Answer | None:
    told = said if isinstance(said, Mapping) else {"text": said}
    text = told.get("text")
    if text is None and told.get("error"):
        return None
    if not isinstance(text, str):
        raise RowError(f"column {column!r}: {str(said)[:60]!r}, expected a text, or a list of texts or answers")
    check_encodable(text, f"column {column!r}")
    num_tokens = int(finite(told.get("num_tokens") or 0, f"{column}.num_tokens"))
    return Answer(text, num_tokens, told.get("finish_reason") == "length")


def _truth(values: Mapping[str, Any], column: str | None) -> Any:
    if column is None:
        return None
    try:
        return lookup(values, column)
    except RowError as error:
        raise RowError(
            f"{error}; --truth-key names the reference answers, --no-truth says that there are none"
        ) from error


def _tag(value: Any) -> str | None:
    return None if value is None else str(value)


def _episode(row: Row, columns: AnswerColumns, *, shows: bool) -> ResponseRow:
    """An episode that a run has written: its last turn is the answer, what went before is the conversation."""
    values = row.values
    turns, info = values[TURNS], values.get("info")
    info = info if isinstance(info, Mapping) else {}
    try:
        said = [(turn["observation"], turn["text"]) for turn in turns]
        last, text = said[-1]
    except (KeyError, TypeError, IndexError) as error:
        raise RowError(f"column {TURNS!r}: not the turns of an episode, as a run writes them ({error!r})") from error
    messages = question_in(info, said[0][0])
    for index, (observation, words) in enumerate(said):
        messages += [{"role": "user", "content": observation}] if index else []
        messages.append({"role": "assistant", "content": words})
    if shows and any(PICTURE in text_of(message["content"]) for message in messages):
        raise RowError(f"{PICTURE} in an episode, which has no pictures: score rows of prompts with their answers")
    end = turns[-1]
    answer = {
        "text": text,
        "num_tokens": end.get("completion_tokens"),
        "finish_reason": end.get("finish_reason"),
    }
    tag = _tag(values.get("tag"))
    return ResponseRow(
        row,
        prompt=last,
        messages=tuple(messages[:-1]),
        answers=_answers(answer, TURNS),
        truth=info.get("ground_truth") if columns.truth is not None else None,
        tag=tag,
        extra=info,
        group=f"{Path(row.name).name.rpartition(':')[0]}/{tag}/{values.get('group_id', row.name)}",
    )
