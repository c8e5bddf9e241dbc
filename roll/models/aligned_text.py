"""A policy's rows in the tokens of another tokenizer, and which tokens cover the same text.

A row is cut where the policy begins and ends to sample, and at control tokens. Those become the other's own where it
has one of the same text or for the same end (the beginning of a text, the end of a turn); others it reads as letters.
What is between them is text, which the other tokenizer cuts as it would anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.algorithms.distillation import NO_CHUNK, WITHIN, common_chunks
from roll.data.batch import Batch
from roll.data.control_text import ControlText
from roll.data.renderer import turn_ends
from roll.data.templates import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"
"""In place of bytes that are no character."""


@dataclass
class _Row:
    """A row under way: the other tokenizer's tokens and their chunks, and the chunks of the policy's."""

    ids: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    own_chunks: list[int] = field(default_factory=list)
    count: int = 0
    """Chunks so far."""

    def add(self, ids: Sequence[int], chunks: Sequence[int], own_chunks: Sequence[int]) -> None:
        """Adds a stretch whose chunks are numbered from 0."""
        self.ids += ids
        self.chunks += [chunk + self.count if chunk != NO_CHUNK else chunk for chunk in chunks]
        self.own_chunks += [chunk + self.count if chunk != NO_CHUNK else chunk for chunk in own_chunks]
        self.count += 1 + max(chunks, default=NO_CHUNK)

    def cut(self, length: int) -> None:
        """Leaves out what is beyond a length, and every chunk with a token there or in front of all others."""
        gone = {NO_CHUNK, *self.chunks[:1], *self.chunks[length:]}
        self.ids, self.chunks = self.ids[:length], self.chunks[:length]
        self.chunks, self.own_chunks = (
            [NO_CHUNK if chunk in gone else chunk for chunk in chunks] for chunks in (self.chunks, self.own_chunks)
        )


class Retokenizer:
    """Writes rows of a policy in the tokens of another model, their reader.

    Args:
        template: the policy's chat template, as ``ChatRenderer`` takes it.
        max_length: tokens of a row that the reader takes.

    Raises:
        ValueError: one of them is not a fast tokenizer, which alone tells where its tokens stand.
    """

    def __init__(
        self,
        policy: PreTrainedTokenizerBase,
        reader: PreTrainedTokenizerBase,
        template: str | ChatTemplate = "native",
        max_length: int = 2**31,
    ) -> None:
        for name, tokenizer in (("policy", policy), ("teacher", reader)):
            if not getattr(tokenizer, "is_fast", False):
                kind = type(tokenizer).__name__
                raise ValueError(f"align_tokenizers: the {name}'s tokenizer is a {kind}, expected a fast one")
        self._policy = policy
        self._control, self._reader = ControlText(policy), ControlText(reader)
        self._max_length = max_length
        self._same = _same_meaning(policy, reader, template)
        (self._start,) = reader("")["input_ids"][:1] or [None]
        if self._start != reader.bos_token_id:
            self._start = None

    def batch(self, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
        """The rows as the reader takes them, its tokens of chunks marked as loss tokens.

        Returns:
            The reader's batch; the chunks of its tokens; those of the policy's, all int64 with ``NO_CHUNK``.
        """
        ids_rows = batch.tokens_T.split(batch.lengths_B.tolist())
        mask_rows = batch.loss_mask_T.split(batch.lengths_B.tolist())
        rows = [self._row(ids.tolist(), mask.tolist()) for ids, mask in zip(ids_rows, mask_rows, strict=True)]
        chunk_S = torch.tensor([chunk for row in rows for chunk in row.chunks], dtype=torch.int64)
        theirs = Batch(
            torch.tensor([len(row.ids) for row in rows], dtype=torch.int64),
            torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64),
            chunk_S != NO_CHUNK,
        )
        return theirs, chunk_S, torch.tensor([c for row in rows for c in row.own_chunks], dtype=torch.int64)

    def _row(self, ids: Sequence[int], mask: Sequence[bool]) -> _Row:
        row = _Row()
        for sampled, stretch, text, ends in self._stretches(ids, mask):
            if ends is None and stretch[0] in self._same:
                written, places = [self._same[stretch[0]]], [len(text)]
            else:
                written, spans = self._reader.spans(text)
                places = _ends(spans)
            own, theirs = common_chunks([len(text)] if ends is None else ends, places)
            if not sampled:
                own, theirs = [NO_CHUNK] * len(own), [NO_CHUNK] * len(theirs)
            row.add(written, theirs, own)
        if self._start is not None and row.ids[:1] != [self._start]:
            row.ids.insert(0, self._start)
            row.chunks.insert(0, NO_CHUNK)
        if not row.ids:  # nothing of it is text
            row.ids, row.chunks = [0], [NO_CHUNK]
        row.cut(self._max_length)
        return row

    def _stretches(
        self, ids: Sequence[int], mask: Sequence[bool]
    ) -> Iterator[tuple[bool, list[int], str, list[int] | None]]:
        """A row's stretches: whether sampled, tokens, text, and where in it each ends; ``None`` of a control token.

        Bytes that are no characters are a stretch that counts as not sampled: their text is not what was sampled.
        """
        from tokenizers.decoders import DecodeStream

        core, stream = self._policy.backend_tokenizer, DecodeStream(skip_special_tokens=False)
        stretch: list[int] = []
        ends: list[int] = []
        text = ""
        for index, (token, sampled) in enumerate(zip(ids, mask, strict=True)):
            piece = stream.step(core, token)
            if token in self._control.ids:
                yield sampled, [token], piece or "", None
            else:
                stretch.append(token)
                ends.append(WITHIN if piece is None else len(text) + len(piece))
                if piece is not None and _BROKEN in piece:
                    whole = 1 + max((at for at, end in enumerate(ends[:-1]) if end != WITHIN), default=-1)
                    yield sampled, stretch[:whole], text, ends[:whole]
                    yield False, stretch[whole:], piece, [WITHIN] * (len(stretch) - whole)
                    stretch, ends, text, piece = [], [], "", None
                text += piece or ""
            following = ids[index + 1 : index + 2]
            closes = not following or following[0] in self._control.ids or mask[index + 1] != sampled
            if closes and stretch:
                yield sampled, stretch, text, ends
                stretch, ends, text = [], [], ""


def _ends(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Ends of tokens; parts of one character, which all have its span, end within it, but for the last."""
    starts = [start for start, _ in spans[1:]]
    return [end if index == len(starts) or starts[index] >= end else WITHIN for index, (_, end) in enumerate(spans)]


def _same_meaning(
    policy: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase, template: str | ChatTemplate
) -> dict[int, int]:
    """The reader's control token in place of each of the policy's, where it has one."""
    own, theirs = ControlText(policy), ControlText(reader)
    vocabulary = {index: token for token, index in policy.get_vocab().items()}
    known = {token: index for token, index in reader.get_vocab().items() if index in theirs.ids}
    ends = sorted(_turn_ends(reader, "native"), key=lambda index: index != reader.eos_token_id)
    same = dict.fromkeys(_turn_ends(policy, template), ends[0]) if ends else {}
    if policy.bos_token_id is not None and reader.bos_token_id is not None:
        same[policy.bos_token_id] = reader.bos_token_id
    return same | {index: known[vocabulary[index]] for index in own.ids if vocabulary.get(index) in known}


def _turn_ends(tokenizer: PreTrainedTokenizerBase, template: str | ChatTemplate) -> set[int]:
    """Control tokens at which a turn or a text is over."""
    end = tokenizer.eos_token_id
    return {*turn_ends(tokenizer, template), *([] if end is None else [end])}
