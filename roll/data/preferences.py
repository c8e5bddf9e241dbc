"""Datasets of judged answers: pairs of a chosen and a rejected one, labels (good or bad), and scores of a reward model.

A classifier reads its score at the last token of the conversation as its template writes it. In a batch the score of a
position stands on the token behind it, so a row has one token more than the conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns, RewardColumns
from roll.data.conversations import (
    Conversations,
    Encode,
    Encoded,
    ReadConversation,
    Scoring,
    fit,
    render,
    report_of,
    row_question,
    to_batch,
    try_out,
)
from roll.data.files import DataError, Problems, Row, read_rows
from roll.data.pictures import Reach
from roll.data.prompt_rows import (
    Heard,
    Message,
    RowError,
    Talk,
    check_encodable,
    finite,
    lookup,
    row_answer,
    row_conversation,
    row_messages,
    row_tools,
    short,
)
from roll.data.questions import question_in
from roll.data.reading import Reading
from roll.data.renderer import items_of
from roll.data.row_pictures import with_items
from roll.data.template_check import LeftOut
from roll.data.tool_messages import Tool

if TYPE_CHECKING:
    from roll.data.renderer import ChatRenderer


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
    refused: Mapping[str, str] | None = None,
) -> Conversations:
    """Reads, filters, renders and checks a dataset; the last answers of its conversations are what is compared.

    Args:
        columns: those of a chosen and a rejected answer.
        label: column of the label of the one answer that a row then has; ``None``: rows are pairs.
        encode: conversation to token ids, and those that the loss looks at.
        left_out: finds what the template of ``encode`` leaves out; ``None``: nobody does.
        overflow: see ``load_conversations``; where one side of a pair goes, so does the other.
        scoring: what the questions must bring to have answers of the policy scored; ``None``: they are not.
        refused: see ``Reading``.

    Returns:
        With ``preferred_B`` and, in pairs, ``pair_B``, and ``target_B`` where a column has margins; the better side
        stands before the other. One question per row of the dataset.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``dataset_cls`` cannot be imported.
    """
    reading = Reading(args, seed, refused=refused or {})
    rows = reading.drawn(_read_judged(reading, columns, label, scoring))
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
    rows = list(_read_judged(reading, columns, label, scoring))
    if scoring is not None:
        scoring.check_questions(((row.place, row.answers[0].question) for row in rows), reading)
    try_out(chain.from_iterable(row.answers for row in rows), encode, reading, left_out)
    return reading.checked(row.answers[0].question.tag for row in rows)


def _read_judged(
    reading: Reading, columns: MarginColumns, label: str | None, scoring: Scoring | None
) -> Iterator[_Judged]:
    """The rows that the filter keeps."""
    args = reading.args
    own = [columns.chosen, columns.rejected, columns.margin or columns.chosen] if label is None else [label]

    def read(row: Row) -> _Judged:
        good, margin = True, 0.0
        if label is None:
            talks: tuple[Talk, ...] = row_pair(row.values, args, columns, reading.reach(row))
            margin = row_margin(row.values, columns.margin) if columns.margin else 0.0
        else:
            talks = (_compared(row_conversation(row.values, args, reading.reach(row))),)
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
    values: Mapping[str, Any], args: DataArguments, columns: MarginColumns, reach: Reach | None = None
) -> tuple[Talk, Talk]:
    """The conversations with the chosen and with the rejected answer at their ends.

    Args:
        reach: of the row's pictures; ``None``: none are read.

    Raises:
        RowError: an answer is missing or not understood, the two are the same, or reply to different questions.
    """
    sides = (columns.chosen, columns.rejected)
    if args.messages == columns.chosen:
        of_side = (args.model_copy(update={"messages": column}) for column in sides)
        found = [row_conversation(values, own, reach) for own in of_side]
        chosen, rejected = (_compared(talk) for talk in found)
    else:
        question, tools = row_messages(values, args, reach), row_tools(values, args)
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
    refused: Mapping[str, str] | None = None,
) -> Conversations:
    """Reads, filters, renders and checks a dataset of answers with scores, or of steps with labels.

    Args:
        columns: of the scores, or of the steps and their labels.
        overflow: a longer one is an error or left out.
        refused: see ``Reading``.

    Returns:
        With ``returns_T``, what the score of each end should be.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``dataset_cls`` cannot be imported.
    """
    reading = Reading(args, seed, refused=refused or {})
    rows = reading.drawn(_read_scored(reading, columns, in_steps))
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
    rows = list(_read_scored(reading, columns, in_steps))
    if renderer is not None:
        encode = _encode(renderer, {id(row.talk): row for row in rows}, blank=True)
        try_out((row.talk for row in rows), encode, reading, LeftOut(renderer, "whole"))
    return reading.checked(row.talk.question.tag for row in rows)


def _read_scored(reading: Reading, columns: RewardColumns, in_steps: bool) -> Iterator[_Scored]:
    """The rows that the filter keeps."""
    args = reading.args

    def read(row: Row) -> _Scored:
        if in_steps:
            steps, targets = row_steps(row.values, columns)
            answer: Message = {"role": "assistant", "content": "".join(steps)}
            asked = row_messages(row.values, args, reading.reach(row))
            talk = Talk((*asked, answer), (len(asked),), row_tools(row.values, args))
        else:
            talk, steps = row_conversation(row.values, args, reading.reach(row)), ()
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


def best_and_worst(args: DataArguments, seed: int) -> Iterator[dict[str, Any]]:
    """The best and the worst answer of each group whose scores differ, as rows with ``chosen`` and ``rejected``.

    A ``dataset_cls``. Equal scores go by the order in the file. Rows also have ``messages`` (what was asked),
    ``prompt`` (the same where it is one text), ``margin`` (the difference of the scores), ``tag`` and ``solution``.

    Args:
        args: ``file_name`` names the files.
        seed: nothing is drawn.

    Raises:
        DataError: files that cannot be read, lines that are no episodes, episodes of several turns, or no pair.
    """
    problems = Problems()
    groups: dict[tuple[str, int], list[tuple[float, str, dict[str, Any]]]] = {}
    for row in read_rows(args.file_names, problems):
        try:
            group, episode = _episode(row)
        except RowError as error:
            problems.add(row.place, str(error))
        else:
            groups.setdefault(group, []).append(episode)
    problems.raise_any()
    found = False
    for episodes in groups.values():
        best, worst = max(episodes, key=lambda one: one[0]), min(episodes, key=lambda one: one[0])
        if best[0] > worst[0] and best[1] != worst[1]:
            found = True
            yield best[2] | {"chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0]}
    if not found:
        seen = f"{sum(map(len, groups.values())):,} episodes of {len(groups):,} groups, none with two different scores"
        raise DataError([f"{', '.join(args.file_names)}: {seen}; the steps of a run are in its rollout_dump_dir"])


def _episode(row: Row) -> tuple[tuple[str, int], tuple[float, str, dict[str, Any]]]:
    """Group, score, answer and question of an episode.

    Raises:
        RowError: it is no episode of one turn.
    """
    values = row.values
    turns, info, group = (values.get(name) for name in ("turns", "info", "group_id"))
    if not (isinstance(turns, list) and isinstance(info, dict) and isinstance(group, int) and "score" in values):
        raise RowError("no episode of a run: expected group_id, score, info and turns")
    if len(turns) != 1:
        raise RowError(f"an episode of {len(turns)} turns, expected one answer to one prompt")
    try:
        asked, answer = question_in(info, turns[0]["observation"]), turns[0]["text"]
    except (KeyError, TypeError) as error:
        raise RowError(f"not an episode as a run writes it ({error!r})") from error
    question = {"messages": asked, "tag": values.get("tag"), "solution": info.get("ground_truth")}
    if len(asked) == 1:
        question["prompt"] = asked[0]["content"]
    file = row.name.rpartition(":")[0]
    return (file, group), (finite(values["score"], "score"), answer, question)
