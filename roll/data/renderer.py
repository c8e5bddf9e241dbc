"""Messages to token ids, by the model's own chat template, without ever re-tokenising what was sampled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from roll.data.arrays import BoolArray, IntArray
from roll.data.templates import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, str]

_TOO_CLEVER = "so no prompt for it can be told from the answer; train_on: last, or another data_args.template, may do"
_SENTINEL = "\u241fassistant-turn\u241f"
_CACHE_SIZE = 20_000


class ChatRenderer:
    """Renders conversations with one tokenizer and one chat template.

    Args:
        tokenizer: any Hugging Face tokenizer.
        template: ``native`` for the tokenizer's own chat template, or a name (``roll.data.templates``), or a path to a
            Jinja file, or the Jinja text itself.

    Raises:
        ValueError: ``native`` was asked for and the tokenizer has no chat template, or there is no such template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "native") -> None:
        self.tokenizer = tokenizer
        try:
            self._template = read_template(template)
        except ValueError as error:
            raise ValueError(f"data_args.{error}") from error
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "data_args.template is 'native', but the tokenizer has no chat template; give one or its path"
            )
        self._cache: OrderedDict[tuple[str, ...], IntArray] = OrderedDict()
        self._end: tuple[str, int] | None = None

    def prompt(self, messages: Sequence[Message]) -> IntArray:
        """Token ids of a conversation that waits for the assistant, shape [prompt_len]."""
        return self._encode_cached("prompt", self._text(messages, open_assistant=True))

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        """``prompt`` of many conversations, tokenised together and not remembered."""
        if not conversations:
            return []
        texts = [self._text(messages, open_assistant=True) for messages in conversations]
        first = self.tokenizer(texts[:1], add_special_tokens=False, verbose=False)["input_ids"]
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            rest = self.tokenizer(texts[1:], add_special_tokens=False, verbose=False)["input_ids"] if texts[1:] else []
        else:
            # Twice as fast as the tokenizer itself, whose call above has switched truncation and padding off.
            rest = [encoding.ids for encoding in core.encode_batch_fast(texts[1:], add_special_tokens=False)]
        return [np.asarray(ids, dtype=np.int64) for ids in [*first, *rest]]

    def continuation(self, messages: Sequence[Message], completion_ids: IntArray) -> IntArray:
        """The ids that follow a sampled assistant turn: its closing, ``messages`` and the next assistant opening.

        ``completion_ids`` stay as sampled: append the result to ``prompt_ids + completion_ids``.

        Args:
            messages: what was said after the assistant turn (user or tool messages).
            completion_ids: the sampled ids; an end-of-turn token that was sampled is not written twice.
        """
        # A template may look at earlier messages, so a full conversation is rendered around a placeholder answer.
        history = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SENTINEL}, *messages]
        text = self._text(history, open_assistant=True)
        _, found, suffix = text.partition(_SENTINEL)
        if not found:
            raise ValueError(
                "the chat template drops the assistant's words, so a multi-turn history cannot be continued"
            )
        ids = self._encode_cached("continuation", suffix)
        already_closed = len(ids) > 0 and len(completion_ids) > 0 and ids[0] == completion_ids[-1]
        return ids[1:] if already_closed else ids

    def conversation(self, messages: Sequence[Message], *, last_only: bool = False) -> tuple[IntArray, BoolArray]:
        """A conversation to imitate: its token ids, and True for those that the assistant says.

        They are what a policy would have been given and would have sampled: the words of each turn are tokenised apart
        from what stands before them and end with the token that ends the turn. What the template writes behind the
        last of them is left out.

        Args:
            messages: the last is the assistant's.
            last_only: only the last turn counts as said.

        Raises:
            ValueError: the template rewrites an earlier turn once another follows, or the assistant's words.
        """
        whole, (closing, end) = self._text(messages, open_assistant=False), self._turn_end()
        ids: list[IntArray] = []
        mask: list[BoolArray] = []
        done = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or (last_only and index < len(messages) - 1):
                continue
            head = self._text(messages[:index], open_assistant=True)
            turn = self._text(messages[: index + 1], open_assistant=False)
            if not (whole.startswith(turn) and turn.startswith(head) and turn.endswith(closing)):
                raise ValueError(f"the chat template writes message {index} differently as part of more, {_TOO_CLEVER}")
            context = self._encode(whole[done : len(head)])
            done = len(turn) - len(closing)
            if ids and len(context) and context[0] == end:  # the end of the turn before, which was said
                context = context[1:]
            said = np.append(self._encode(whole[len(head) : done]), end)
            ids += [context, said]
            mask += [np.zeros(len(context), dtype=bool), np.ones(len(said), dtype=bool)]
        return np.concatenate(ids), np.concatenate(mask)

    def words(self, text: str) -> IntArray:
        """Token ids of a text alone, without special tokens."""
        return self._encode_cached("words", text)

    def decode(self, ids: IntArray) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _text(self, messages: Sequence[Message], *, open_assistant: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=open_assistant,
            )
        )

    def _turn_end(self) -> tuple[str, int]:
        """Text that the template writes behind the assistant's words, and the id that ends the turn.

        That is the token which the template closes it with, or the end of the sequence where it has none.
        """
        if self._end is None:
            messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SENTINEL}]
            _, found, closing = self._text(messages, open_assistant=False).partition(_SENTINEL)
            if not found:
                raise ValueError("the chat template drops the assistant's words, so there is nothing to imitate")
            first = next(iter(self._encode(closing).tolist()), None)
            end = first if first in self.tokenizer.added_tokens_decoder else self.tokenizer.eos_token_id
            if end is None:
                raise ValueError("neither the chat template nor the tokenizer has a token that ends a turn")
            self._end = closing, int(end)
        return self._end

    def _encode(self, text: str) -> IntArray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def _encode_cached(self, kind: str, text: str) -> IntArray:
        """Encodes, remembering recent texts: group members and repeated states render the same prompt."""
        key = (kind, text)
        ids = self._cache.get(key)
        if ids is None:
            ids = self._encode(text)
            ids.flags.writeable = False
            self._cache[key] = ids
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return ids
