"""Datasets of conversations: files to token ids, with a mask of the assistant's messages."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jinja2 import TemplateError

from roll.configs.data import DataArguments
from roll.configs.resuming import Rows
from roll.data.batch import Batch
from roll.data.columns import BoolArray, IntArray, Item
from roll.data.files import DataError, Row
from roll.data.identity import items_along
from roll.data.prompt_rows import (
    Message,
    Talk,
    lookup,
    other_columns,
    row_conversation,
    row_id,
    row_tag,
    used_columns,
)
from roll.data.prompts import Prompt, RowCheck
from roll.data.reading import Reading
from roll.data.renderer import items_of
from roll.data.row_pictures import ItemSpool, with_items
from roll.data.template_check import LeftOut

if TYPE_CHECKING:
    from roll.data.renderer import ChatRenderer, Tool

logger = logging.getLogger(__name__)

_DECODERS = 8
"""Most threads that decode pictures."""

UNSCORED = "conversation"
"""Tag of what no reward domain scores."""


@dataclass(frozen=True)
class ConversationReport:
    """Counts of rows by outcome. ``str`` of it is one line for the log."""

    rows: int
    """Rows read."""
    filtered: int
    """Rows that ``dataset_filter`` left out."""
    overlong: int
    """Conversations of more than ``limit`` tokens."""
    overflow: str
    """Treatment of those: ``sample_overflow``."""
    limit: int
    silent: int
    """Conversations whose cut lost all that the assistant says; they are left out."""
    longest: int
    """Tokens of the longest as it was read."""
    samples: int
    tokens: int
    """Of all samples."""
    said: int
    """Those of them that are learnt from."""
    conversations: int
    """Conversations of the samples: several samples are of one whose earlier turns the template rewrites."""
    notes: tuple[str, ...] = ()
    """What is left out or not read, by file; a line each."""
    noun: str = "conversations"
    purpose: str = "imitate"
    identity: Rows | None = None
    """Tells the dataset from others."""

    def __str__(self) -> str:
        words = [f"{self.rows:,} rows read", f"{self.filtered:,} removed by the filter"]
        words.append(f"longest {self.longest:,} tokens")
        done = "" if not self.overlong else " dropped" if self.overflow == "drop" else " cut"
        words.append(f"{self.overlong:,} over {self.limit:,} tokens{done}")
        if self.silent:
            words.append(f"{self.silent:,} of them without an answer then, left out")
        samples = f"{self.samples:,} {self.noun}"
        if self.conversations < self.samples:
            words.append("the chat template rewrites earlier turns, so an answer after one is a separate sample")
            samples = f"{self.conversations:,} {self.noun} as {self.samples:,} samples"
        return f"{samples}, {self.said:,} of {self.tokens:,} tokens to {self.purpose}: {', '.join(words)}"


@dataclass(frozen=True, eq=False)
class Conversations:
    """Conversations in the order of the files."""

    batch: Batch
    """The loss mask is 1 on what is learnt from."""
    questions: tuple[Prompt, ...]
    """Questions that the conversations' last answers reply to."""
    report: ConversationReport

    @property
    def has_pictures(self) -> bool:
        return self.batch.items_I is not None


@dataclass(frozen=True)
class Scoring:
    """Tags and columns for scoring responses to the questions."""

    tags: Collection[str]
    """Domains of the rewards."""
    solution: str
    """Column of the reference answer."""
    check: RowCheck | None = None
    """Finds questions whose answers no verifier can score."""

    def check_questions(self, questions: Iterable[tuple[str, Prompt]], reading: Reading) -> None:
        """Adds what is wrong with the questions that can be asked, each with its place, to the problems."""
        asked = (one for one in questions if one[1].messages and one[1].messages[-1]["role"] != "assistant")
        for place, reason in self.check(asked) if self.check is not None else ():
            reading.problems.add(place, reason)


def load_conversations(
    args: DataArguments,
    *,
    renderer: ChatRenderer,
    max_tokens: int,
    overflow: Literal["error", "truncate", "drop"] = "error",
    last_only: bool = False,
    whole: bool = False,
    scoring: Scoring | None = None,
    seed: int = 0,
    tools: Sequence[Tool] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Conversations:
    """Reads, filters, renders and checks a dataset.

    Args:
        overflow: a longer one is an error, loses its end or is left out.
        last_only: only the last answer is learnt.
        whole: all is learnt, prompts too.
        scoring: what the questions must bring to have their answers scored; ``None``: they are not.
        refused: see ``Reading``.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``dataset_cls`` cannot be imported.
    """
    reading = Reading(args, seed, refused=refused or {})
    samples = reading.drawn(_read(reading, scoring))
    if scoring is not None:
        scoring.check_questions(((sample.place, sample.question) for sample in samples), reading)
    encode = encode_talk(renderer, last_only=last_only, whole=whole, tools=tools)
    kept = fit(render(samples, encode, reading, LeftOut(renderer)), max_tokens, overflow, reading)
    reading.require(samples)
    if not kept:
        raise DataError([f"no conversations: all {len(samples):,} are longer than sequence_length = {max_tokens}"])
    batch, conversations = to_batch(kept), {id(row.sample): row.sample.question for row in kept}
    report = report_of(batch, reading, overflow, max_tokens, conversations=len(conversations))
    return Conversations(batch, tuple(conversations.values()), report)


def encode_talk(
    renderer: ChatRenderer,
    *,
    last_only: bool = False,
    whole: bool = False,
    tools: Sequence[Tool] | None = None,
    blank: bool = False,
) -> Encode:
    """The rows of a conversation's turns that are learned; see ``load_conversations``.

    Args:
        blank: pictures are only checked and measured, see ``with_items``.
    """

    def encode(sample: ReadConversation) -> list[Encoded]:
        learned = [index for index in sample.learned if not last_only or index == len(sample.messages) - 1]
        if not learned:
            raise ValueError("nothing to train on: the row excludes its last answer, and train_on: last all others")
        messages = with_items(sample.messages, renderer.pictures, blank=blank)
        rows, items = renderer.rows(messages, learned, sample.tools or tools), items_of(messages)
        return [Encoded(ids, said | whole, items) for ids, said in rows]

    return encode


def check_conversations(
    reading: Reading, scoring: Scoring | None, encode: Encode | None = None, left_out: LeftOut | None = None
) -> tuple[Counter[str], bool]:
    """``Reading.checked`` of what ``load_conversations`` would read, but for lengths.

    Without ``encode`` and ``left_out`` it is checked without the chat template, too.
    """
    samples = list(_read(reading, scoring))
    if scoring is not None:
        scoring.check_questions(((sample.place, sample.question) for sample in samples), reading)
    try_out(samples, encode, reading, left_out)
    return reading.checked(sample.question.tag for sample in samples)


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation as it was read, and where."""

    messages: tuple[Message, ...]
    question: Prompt
    place: str
    file: str
    learned: tuple[int, ...]
    """Indices of the messages that are learned; of a comparison or a score the last."""
    tools: tuple[Tool, ...] | None = None

    @classmethod
    def of(cls, talk: Talk, question: Prompt, row: Row, side: str = "") -> ReadConversation:
        """A row's conversation, one ``side`` of a comparison."""
        return cls(talk.messages, question, f"{row.place}{side}", row.file, talk.learned, talk.tools)


class Encoded(NamedTuple):
    """A sample of a conversation."""

    ids: IntArray
    mask: BoolArray
    """True for the tokens that are learnt from."""
    items: tuple[Item, ...] = ()
    """The conversation's pictures."""


class Rendered(NamedTuple):
    """The same with the conversation."""

    sample: ReadConversation
    ids: IntArray
    mask: BoolArray
    items: tuple[Item, ...]
    """The sample's own pictures, each once."""


Encode: TypeAlias = Callable[[ReadConversation], Sequence[Encoded]]
"""The samples of a conversation, mostly one. It may be called in any thread.

Raises ``ValueError`` or jinja2's ``TemplateError`` where the template refuses it, or a picture cannot be used.
"""


def _read(reading: Reading, scoring: Scoring | None) -> Iterator[ReadConversation]:
    """The rows that the filter keeps, as conversations."""

    def read(row: Row) -> ReadConversation:
        talk = row_conversation(row.values, reading.args, reading.reach(row))
        reading.allow(talk.messages)
        if talk.silent:
            reading.note(row.file, "empty assistant messages, which are not trained on", row.place)
        if scoring is None:  # which sees every column
            reading.leaves(row)
        return ReadConversation.of(talk, row_question(row, reading.args, talk, scoring), row)

    return reading.each(read)


def row_question(row: Row, args: DataArguments, talk: Talk, scoring: Scoring | None, *read: str) -> Prompt:
    """Returns the question of a row, with all that a verifier of the answer wants to know.

    Args:
        scoring: see ``load_conversations``.
        read: further columns that have a place of their own.

    Raises:
        RowError: the row has no tag of a reward domain, or no solution.
    """
    name, messages = row_id(row.values, args, row.name), talk.messages[:-1]
    if scoring is None:
        return Prompt(name, UNSCORED, messages, tools=talk.tools)
    return Prompt(
        name,
        row_tag(row.values, args, scoring.tags),
        messages,
        ground_truth=lookup(row.values, scoring.solution),
        extra_info=other_columns(row.values, (*used_columns(args), *read)),
        tools=talk.tools,
    )


def to_batch(rendered: Sequence[Rendered]) -> Batch:
    """The conversations end to end."""
    return Batch(
        lengths_B=torch.tensor([len(row.ids) for row in rendered], dtype=torch.int64),
        tokens_T=torch.from_numpy(np.concatenate([row.ids for row in rendered])),
        loss_mask_T=torch.from_numpy(np.concatenate([row.mask for row in rendered])),
        items_I=tuple(row.items for row in rendered) if any(row.items for row in rendered) else None,
    )


def report_of(
    batch: Batch, reading: Reading, overflow: str, max_tokens: int, *, conversations: int | None = None, **words: str
) -> ConversationReport:
    """Account of what was read, which is also logged; ``words``: the report's ``noun`` and ``purpose``."""
    counts, samples = reading.counts, len(batch.samples)
    report = ConversationReport(
        rows=counts["rows"],
        filtered=counts["filtered"],
        overlong=counts["overlong"],
        overflow=overflow,
        limit=max_tokens,
        silent=counts["silent"],
        longest=counts["longest"],
        samples=samples,
        tokens=batch.num_tokens,
        said=int(batch.loss_mask_T.sum()),
        identity=reading.identity(samples),
        conversations=samples if conversations is None else conversations,
        notes=reading.noted(),
        **words,
    )
    logger.info("%s", report)
    return report


def render(
    samples: Iterable[ReadConversation], encode: Encode, reading: Reading, left_out: LeftOut | None
) -> Iterator[Rendered]:
    """Token ids of conversations; what a template refuses is a problem, what it leaves out a note."""
    for sample, encoded in _ahead(samples, encode):
        try:
            rows = encoded()
        except TemplateError as error:
            reading.problems.add(sample.place, f"the chat template cannot render the messages: {error}")
        except ValueError as error:
            reading.problems.add(sample.place, str(error))
        else:
            if left_out is not None:
                for what in left_out.of(sample.messages, sample.learned, sample.tools):
                    reading.note(sample.file, what, sample.place)
            for row in rows:
                row.mask[0] = False  # nothing predicts it
                items = [item for _, item in items_along(row.ids, row.items)] if row.items else ()
                yield Rendered(sample, row.ids, row.mask, tuple(dict.fromkeys(items)))


def _ahead(
    samples: Iterable[ReadConversation], encode: Encode
) -> Iterator[tuple[ReadConversation, Callable[[], Sequence[Encoded]]]]:
    """Conversations with what encodes them; those with pictures are encoded by threads, some ahead."""
    num_threads = min(_DECODERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[tuple[ReadConversation, Callable[[], Sequence[Encoded]]]] = deque()
        for sample in samples:
            shows = any(isinstance(message["content"], list) for message in sample.messages)
            waiting.append((sample, pool.submit(encode, sample).result if shows else partial(encode, sample)))
            if not shows or len(waiting) > 2 * num_threads:
                yield waiting.popleft()
        yield from waiting


def try_out(
    samples: Iterable[ReadConversation], encode: Encode | None, reading: Reading, left_out: LeftOut | None
) -> None:
    """``render`` for what it finds alone."""
    if encode is not None:
        for _ in render(samples, encode, reading, left_out):
            pass


def fit(rendered: Iterable[Rendered], max_tokens: int, overflow: str, reading: Reading) -> list[Rendered]:
    """Those of at most ``max_tokens``; ``longest``, ``overlong`` and ``silent`` are counted.

    One with pictures is not cut. Their bytes lie on disk (``ItemSpool``).
    """
    kept, counts, spool = [], reading.counts, ItemSpool()
    for sample, ids, mask, items in rendered:
        counts["longest"] = max(counts["longest"], len(ids))
        if len(ids) > max_tokens:
            counts["overlong"] += 1
            if overflow == "error" or (items and overflow == "truncate"):
                expected = f"expected at most sequence_length = {max_tokens} (see sample_overflow)"
                uncut = "" if overflow == "error" else ", as a conversation with pictures is not cut"
                reading.problems.add(sample.place, f"{len(ids):,} tokens, {expected}{uncut}")
            if items or overflow != "truncate":
                continue
        if mask[:max_tokens].any():
            kept.append(Rendered(sample, ids[:max_tokens], mask[:max_tokens], tuple(map(spool.keep, items))))
        else:
            counts["silent"] += 1
    return kept
