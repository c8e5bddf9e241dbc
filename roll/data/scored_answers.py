"""Datasets of a reward model: conversations as ``rewards`` renders them, and the positions of their scores.

A classifier reads its score at the last token of the conversation as its template writes it. In a batch the score of a
position stands on the token behind it, so a row has one token more than the conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from roll.configs.data import DataArguments
from roll.configs.reward_training import RewardColumns
from roll.data.conversations import (
    Conversations,
    Encode,
    Encoded,
    ReadConversation,
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
    Message,
    RowError,
    Talk,
    check_encodable,
    finite,
    lookup,
    row_conversation,
    row_messages,
    row_tools,
    short,
)
from roll.data.reading import Reading
from roll.data.renderer import items_of
from roll.data.row_pictures import with_items
from roll.data.tool_messages import Tool

if TYPE_CHECKING:
    from roll.data.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class _Scored:
    """An answer and what its ends are worth."""

    talk: ReadConversation
    targets: tuple[float, ...]
    steps: tuple[str, ...]


def encode_whole(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Encoded:
    """Token ids of a conversation, whose score stands on one more token at the end."""
    ids = renderer.history(messages, tools)
    return Encoded(np.append(ids, ids[-1]), np.arange(len(ids) + 1) == len(ids), items_of(messages))


def encode_whole_talk(renderer: ChatRenderer, *, blank: bool = False) -> Encode:
    """``encode_whole`` of the sides of a pair; for ``blank`` see ``with_items``."""

    def encode(talk: ReadConversation) -> list[Encoded]:
        return [encode_whole(renderer, with_items(talk.messages, renderer.pictures, blank=blank), talk.tools)]

    return encode


def encode_steps(
    renderer: ChatRenderer, messages: Sequence[Message], steps: Sequence[str], tools: Sequence[Tool] | None = None
) -> Encoded:
    """The same with a score at the end of each step; that of the last is the conversation's.

    Raises:
        ValueError: the template changes the answer, or its steps cut the text of a control token.
    """
    whole = renderer.text(messages, tools, open_assistant=False)
    head = renderer.text(messages[:-1], tools, open_assistant=True)
    said = [renderer.within(step) for step in steps]
    answer = "".join(said)
    if not whole.startswith(head + answer):
        raise ValueError(
            "the chat template rewrites the answer, or a control token is cut in two, expected the steps unchanged"
        )
    texts = [head, *said, whole[len(head) + len(answer) :]]
    pieces = [renderer.words(text) for text in texts]
    pieces[0], _ = renderer.with_pictures(pieces[0], messages)
    ids = np.concatenate([*pieces, pieces[-1][-1:] if len(pieces[-1]) else pieces[-2][-1:]])
    ends = np.cumsum([len(piece) for piece in pieces])[1:-1]  # of the steps
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[ends[:-1]] = True
    mask[-1] = True
    return Encoded(ids, mask, items_of(messages))


def load_scored(
    args: DataArguments,
    columns: RewardColumns,
    *,
    in_steps: bool,
    renderer: ChatRenderer,
    max_tokens: int,
    overflow: Literal["error", "drop"] = "error",
    seed: int = 0,
    no_pictures: str = "",
) -> Conversations:
    """Reads, filters, renders and checks a dataset of answers with scores, or of steps with labels.

    Args:
        columns: of the scores, or of the steps and their labels.
        overflow: a longer one is an error or left out.
        no_pictures: see ``load_prompts``.

    Returns:
        With ``returns_T``, what the score of each end should be.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``dataset_cls`` cannot be imported.
    """
    reading = Reading(args, seed, no_pictures=no_pictures)
    rows = reading.drawn(_read(reading, columns, in_steps))
    scored = {id(row.talk): row for row in rows}

    encode = _encode(renderer, scored)
    talks = (row.talk for row in rows)
    kept = fit(render(talks, encode, reading, LeftOut(renderer, "whole")), max_tokens, overflow, reading)
    reading.require(rows)
    if not kept:
        raise DataError([f"no answers: all {len(rows):,} are longer than sequence_length = {max_tokens}"])
    batch = to_batch(kept)
    returns_T = torch.zeros(batch.num_tokens)
    returns_T[batch.loss_mask_T] = torch.tensor([target for one in kept for target in scored[id(one.sample)].targets])
    questions = tuple(one.sample.question for one in kept)
    report = report_of(batch, reading, overflow, max_tokens, noun="answers", purpose="score")
    return Conversations(batch.replace(returns_T=returns_T), questions, report)


def _encode(renderer: ChatRenderer, scored: Mapping[int, _Scored], *, blank: bool = False) -> Encode:
    def encode(talk: ReadConversation) -> list[Encoded]:
        messages = with_items(talk.messages, renderer.pictures, blank=blank)
        if steps := scored[id(talk)].steps:
            return [encode_steps(renderer, messages, steps, talk.tools)]
        return [encode_whole(renderer, messages, talk.tools)]

    return encode


def check_scored(
    reading: Reading, columns: RewardColumns, in_steps: bool, renderer: ChatRenderer | None = None
) -> tuple[Counter[str], bool]:
    """``Reading.checked`` of what ``load_scored`` would read, but for lengths; see ``check_conversations``."""
    rows = list(_read(reading, columns, in_steps))
    if renderer is not None:
        encode = _encode(renderer, {id(row.talk): row for row in rows}, blank=True)
        try_out((row.talk for row in rows), encode, reading, LeftOut(renderer, "whole"))
    return reading.checked(row.talk.question.tag for row in rows)


def _read(reading: Reading, columns: RewardColumns, in_steps: bool) -> Iterator[_Scored]:
    """The rows that the filter keeps."""
    args = reading.args

    def read(row: Row) -> _Scored:
        if in_steps:
            steps, targets = row_steps(row.values, columns)
            answer: Message = {"role": "assistant", "content": "".join(steps)}
            asked = row_messages(row.values, args, reading.folder(row))
            talk = Talk((*asked, answer), (len(asked),), row_tools(row.values, args))
        else:
            talk, steps = row_conversation(row.values, args, reading.folder(row)), ()
            targets = (finite(lookup(row.values, columns.score), columns.score),)
        reading.allow(talk.messages)
        reading.leaves(row, *((columns.steps, columns.step_labels) if in_steps else (columns.score,)))
        return _Scored(ReadConversation.of(talk, row_question(row, args, talk, None), row), targets, steps)

    return reading.each(read)


def row_steps(values: Mapping[str, Any], columns: RewardColumns) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The steps of a row's answer and how right each is.

    Raises:
        RowError: there are none, one is no text that can be encoded, or the labels are not as many numbers from 0 to 1.
    """
    steps, labels = lookup(values, columns.steps), lookup(values, columns.step_labels)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise RowError(f"column {columns.steps!r}: {short(steps)}, expected a list of texts")
    check_encodable("".join(steps), f"column {columns.steps!r}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise RowError(
            f"column {columns.step_labels!r}: {short(labels)}, expected a list of {len(steps)}, one per step"
        )
    if not all(isinstance(label, int | float) and 0 <= label <= 1 for label in labels):
        raise RowError(f"column {columns.step_labels!r}: {short(labels)}, expected true, false or numbers from 0 to 1")
    return tuple(steps), tuple(map(float, labels))
