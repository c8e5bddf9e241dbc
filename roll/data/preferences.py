"""Datasets of preferences: pairs of a chosen and a rejected answer, or answers that are labelled good or bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch

from roll.configs.data import DataArguments
from roll.configs.preference import PairColumns
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
)
from roll.data.files.rows import DataError, Row
from roll.data.prompt_rows import (
    Message,
    RowError,
    check_encodable,
    finite,
    lookup,
    row_conversation,
    row_messages,
    short,
)
from roll.data.reading import Reading


@dataclass(frozen=True, slots=True)
class _Judged:
    """The answers of a row: the better one first, or one alone with its label."""

    answers: tuple[ReadConversation, ...]
    good: bool = True
    """Of an answer alone."""
    margin: float = 0.0
    """Of a pair: by how much the better one is better."""


def load_preferences(
    args: DataArguments,
    columns: PairColumns,
    *,
    label: str | None,
    encode: Encode,
    max_tokens: int,
    overflow: Literal["error", "truncate", "drop"] = "error",
    scoring: Scoring | None = None,
    seed: int = 0,
) -> Conversations:
    """Reads, filters, renders and checks a dataset; the last answers of its conversations are what is compared.

    Args:
        columns: those of a chosen and a rejected answer.
        label: column of the label of the one answer that a row then has; ``None``: rows are pairs.
        encode: messages to token ids, and those that the loss looks at.
        overflow: see ``load_conversations``; where one side of a pair goes, so does the other.
        scoring: what the questions must bring to have answers of the policy scored; ``None``: they are not.

    Returns:
        With ``preferred_B`` and, in pairs, ``pair_B``, and ``target_B`` where a column has margins; the better side
        stands before the other. One question per row of the dataset.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``dataset_cls`` cannot be imported.
    """
    reading = Reading(args, seed)
    rows = reading.drawn(_read(reading, columns, label, scoring))
    owners = {id(answer): index for index, row in enumerate(rows) for answer in row.answers}
    rendered = render(chain.from_iterable(row.answers for row in rows), encode, reading)
    fitting = fit(rendered, max_tokens, overflow, reading)
    reading.require(rows)
    sides = Counter(owners[id(answer)] for answer, _, _ in fitting)
    kept = [one for one in fitting if sides[owners[id(one[0])]] == (2 if label is None else 1)]
    noun = "pairs" if label is None else "answers"
    if not kept:
        raise DataError([f"no {noun}: all {len(rows):,} are longer than sequence_length = {max_tokens}"])
    row_B = torch.tensor([owners[id(answer)] for answer, _, _ in kept])
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
    reading: Reading, columns: PairColumns, label: str | None, scoring: Scoring | None
) -> tuple[Counter[str], bool]:
    """``Reading.checked`` of what ``load_preferences`` would read, but for the template and lengths."""
    return reading.checked(row.answers[0].question.tag for row in _read(reading, columns, label, scoring))


def _read(reading: Reading, columns: PairColumns, label: str | None, scoring: Scoring | None) -> Iterator[_Judged]:
    """The rows that the filter keeps."""
    args = reading.args
    own = [columns.chosen, columns.rejected, columns.margin or columns.chosen] if label is None else [label]

    def read(row: Row) -> _Judged:
        good, margin = True, 0.0
        if label is None:
            talks: tuple[tuple[Message, ...], ...] = row_pair(row.values, args, columns)
            margin = row_margin(row.values, columns.margin) if columns.margin else 0.0
        else:
            talks = (row_conversation(row.values, args),)
            good = row_label(row.values, label)
        question = row_question(row, args, talks[0][:-1], scoring, *own)
        sides = [""] if label is not None else [f": column {side!r}" for side in (columns.chosen, columns.rejected)]
        places = [f"{row.place}{side}" for side in sides]
        answers = (ReadConversation(talk, question, place) for talk, place in zip(talks, places, strict=True))
        return _Judged(tuple(answers), good, margin)

    return reading.each(read)


def row_pair(
    values: Mapping[str, Any], args: DataArguments, columns: PairColumns
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The conversations with the chosen and with the rejected answer at their ends.

    Raises:
        RowError: an answer is missing or no text, the two are the same, or reply to different questions.
    """
    if args.messages == columns.chosen:
        sides = [args.model_copy(update={"messages": column}) for column in (columns.chosen, columns.rejected)]
        chosen, rejected = (row_conversation(values, side) for side in sides)
        if chosen[:-1] != rejected[:-1]:
            raise RowError(
                f"columns {columns.chosen!r} and {columns.rejected!r}: the conversations differ before their last "
                "answers, expected two answers to one question"
            )
    else:
        question = row_messages(values, args)
        chosen, rejected = ((*question, _answer(values, each)) for each in (columns.chosen, columns.rejected))
    if chosen[-1]["content"] == rejected[-1]["content"]:
        raise RowError(f"columns {columns.chosen!r} and {columns.rejected!r}: the same answer, expected two")
    return chosen, rejected


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


def _answer(values: Mapping[str, Any], column: str) -> Message:
    """The assistant's message: a text, or a list with that message alone."""
    value = lookup(values, column)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        (entry,) = value
        if isinstance(entry, Mapping) and entry.get("role") == "assistant":
            value = entry.get("content")
    if not isinstance(value, str) or not value.strip():
        raise RowError(
            f"column {column!r}: {short(value)}, expected the text of an answer "
            f"(data_args.messages: {column} for whole conversations)"
        )
    check_encodable(value, f"column {column!r}")
    return {"role": "assistant", "content": value}
