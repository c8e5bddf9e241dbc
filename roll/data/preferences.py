"""Datasets of preferences: pairs of a chosen and a rejected answer, or answers that are labelled good or bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns
from roll.data.conversations import (
    Conversations,
    Encode,
    ReadConversation,
    Scoring,
    fit,
    render,
    report_of,
    row_question,
    to_batch,
    try_out,
)
from roll.data.files import DataError, Row
from roll.data.left_out import LeftOut
from roll.data.prompt_rows import (
    Heard,
    Message,
    RowError,
    Talk,
    finite,
    lookup,
    row_answer,
    row_conversation,
    row_messages,
    row_tools,
    short,
)
from roll.data.reading import Reading
from roll.data.tool_messages import Tool


@dataclass(frozen=True, slots=True)
class _Judged:
    """The answers of a row: the better one first, or one alone with its label."""

    place: str
    answers: tuple[ReadConversation, ...]
    good: bool = True
    """Of an answer alone."""
    margin: float = 0.0
    """Of a pair: by how much the better one is better."""


def load_preferences(
    args: DataArguments,
    columns: MarginColumns,
    *,
    label: str | None,
    encode: Encode,
    left_out: LeftOut | None = None,
    max_tokens: int,
    overflow: Literal["error", "truncate", "drop"] = "error",
    scoring: Scoring | None = None,
    seed: int = 0,
    no_pictures: str = "",
) -> Conversations:
    """Reads, filters, renders and checks a dataset; the last answers of its conversations are what is compared.

    Args:
        columns: those of a chosen and a rejected answer.
        label: column of the label of the one answer that a row then has; ``None``: rows are pairs.
        encode: conversation to token ids, and those that the loss looks at.
        left_out: finds what the template of ``encode`` leaves out; ``None``: nobody does.
        overflow: see ``load_conversations``; where one side of a pair goes, so does the other.
        scoring: what the questions must bring to have answers of the policy scored; ``None``: they are not.
        no_pictures: see ``load_prompts``.

    Returns:
        With ``preferred_B`` and, in pairs, ``pair_B``, and ``target_B`` where a column has margins; the better side
        stands before the other. One question per row of the dataset.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``dataset_cls`` cannot be imported.
    """
    reading = Reading(args, seed, no_pictures=no_pictures)
    rows = reading.drawn(_read(reading, columns, label, scoring))
    if scoring is not None:
        scoring.check_questions(((row.place, row.answers[0].question) for row in rows), reading)
    owners = {id(answer): index for index, row in enumerate(rows) for answer in row.answers}
    rendered = render(chain.from_iterable(row.answers for row in rows), encode, reading, left_out)
    fitting = fit(rendered, max_tokens, overflow, reading)
    reading.require(rows)
    sides = Counter(owners[id(one.sample)] for one in fitting)
    kept = [one for one in fitting if sides[owners[id(one.sample)]] == (2 if label is None else 1)]
    noun = "pairs" if label is None else "answers"
    if not kept:
        raise DataError([f"no {noun}: all {len(rows):,} are longer than sequence_length = {max_tokens}"])
    row_B = torch.tensor([owners[id(one.sample)] for one in kept])
    batch = to_batch(kept)
    if label is None:
        better_B = torch.arange(len(kept)) % 2 == 0
        batch = batch.replace(pair_B=torch.unique(row_B, return_inverse=True)[1], preferred_B=better_B)
        if columns.margin is not None:
            batch = batch.replace(target_B=torch.tensor([rows[index].margin for index in row_B.tolist()]))
    else:
        batch = batch.replace(preferred_B=torch.tensor([rows[index].good for index in row_B.tolist()]))
    questions = tuple(rows[index].answers[0].question for index in dict.fromkeys(row_B.tolist()))
    report = report_of(batch, reading, overflow, max_tokens, noun=noun, purpose="compare")
    return Conversations(batch, questions, report)


def check_preferences(
    reading: Reading,
    columns: MarginColumns,
    label: str | None,
    scoring: Scoring | None,
    encode: Encode | None = None,
    left_out: LeftOut | None = None,
) -> tuple[Counter[str], bool]:
    """``Reading.checked`` of what ``load_preferences`` would read, but for lengths; see ``check_conversations``."""
    rows = list(_read(reading, columns, label, scoring))
    if scoring is not None:
        scoring.check_questions(((row.place, row.answers[0].question) for row in rows), reading)
    try_out(chain.from_iterable(row.answers for row in rows), encode, reading, left_out)
    return reading.checked(row.answers[0].question.tag for row in rows)


def _read(reading: Reading, columns: MarginColumns, label: str | None, scoring: Scoring | None) -> Iterator[_Judged]:
    """The rows that the filter keeps."""
    args = reading.args
    own = [columns.chosen, columns.rejected, columns.margin or columns.chosen] if label is None else [label]

    def read(row: Row) -> _Judged:
        good, margin = True, 0.0
        if label is None:
            talks: tuple[Talk, ...] = row_pair(row.values, args, columns, reading.folder(row))
            margin = row_margin(row.values, columns.margin) if columns.margin else 0.0
        else:
            talks = (_compared(row_conversation(row.values, args, reading.folder(row))),)
            good = row_label(row.values, label)
        reading.allow(talks[0].messages)
        question = row_question(row, args, talks[0], scoring, *own)
        sides = [""] if label is not None else [f": column {side!r}" for side in (columns.chosen, columns.rejected)]
        answers = (ReadConversation.of(talk, question, row, side) for talk, side in zip(talks, sides, strict=True))
        if scoring is None:  # which sees every column
            reading.leaves(row, *own)
        return _Judged(row.place, tuple(answers), good, margin)

    return reading.each(read)


def row_pair(
    values: Mapping[str, Any], args: DataArguments, columns: MarginColumns, folder: Path | None = None
) -> tuple[Talk, Talk]:
    """The conversations with the chosen and with the rejected answer at their ends.

    Args:
        folder: of the row's pictures; ``None``: none are read.

    Raises:
        RowError: an answer is missing or not understood, the two are the same, or reply to different questions.
    """
    sides = (columns.chosen, columns.rejected)
    if args.messages == columns.chosen:
        of_side = (args.model_copy(update={"messages": column}) for column in sides)
        found = [row_conversation(values, own, folder) for own in of_side]
        chosen, rejected = (_compared(talk) for talk in found)
    else:
        question, tools = row_messages(values, args, folder), row_tools(values, args)
        chosen, rejected = (_answered(question, row_answer(values, column), tools) for column in sides)
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise RowError(
            f"columns {columns.chosen!r} and {columns.rejected!r}: the conversations differ before their last "
            "answers, expected two answers to one question"
        )
    if chosen.messages[-1] == rejected.messages[-1]:
        raise RowError(f"columns {columns.chosen!r} and {columns.rejected!r}: the same answer, expected two")
    return chosen, rejected


def _answered(question: Sequence[Message], answer: Sequence[Heard], tools: Sequence[Tool] | None) -> Talk:
    """The question and an answer to it, which may begin with the question again."""
    said = tuple(heard.message for heard in answer)
    for asked in (tuple(question), tuple(question[1:])):  # with the system's message, or without
        if asked and said[: len(asked)] == asked:
            said = said[len(asked) :]
    return Talk((*question, *said), (len(question) + len(said) - 1,), None if tools is None else tuple(tools))


def _compared(talk: Talk) -> Talk:
    """The conversation, of which the last answer alone is compared."""
    return replace(talk, learned=(len(talk.messages) - 1,))


def row_label(values: Mapping[str, Any], column: str) -> bool:
    """Tells whether the row's answer is good.

    Raises:
        RowError: the label is neither true nor false, 1 nor 0.
    """
    label = lookup(values, column)
    if isinstance(label, str):  # a CSV file has nothing else
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.lower(), label)
    if label not in (True, False):
        raise RowError(f"column {column!r}: {short(label)}, expected true or false")
    return bool(label)


def row_margin(values: Mapping[str, Any], column: str) -> float:
    """By how much the row's better answer is better.

    Raises:
        RowError: it is no finite number, or below 0.
    """
    margin = finite(lookup(values, column), column)
    if margin < 0:
        raise RowError(f"column {column!r}: {margin:g}, expected 0 or more: the chosen answer is the better one")
    return margin
