"""Messages to token ids, by the model's own chat template, without ever re-tokenising what was sampled.

Text in a message that spells a control token stays text. A picture is, in the ids, content below zero.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.columns import BoolArray, IntArray, Item
from roll.data.control_text import ControlText
from roll.data.pictures import Pictures, Video
from roll.data.templates import ChatTemplate, read_template
from roll.data.tool_messages import (
    REASONING,
    Message,
    Tool,
    calls_answered_by,
    calls_in_words,
    joined,
    reasoning_of,
    tidy,
    without_tools,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["ChatRenderer", "Message", "Tool", "items_of", "turn_ends"]

_SENTINEL = "\u241fassistant-turn\u241f"
_CACHE_SIZE = 20_000

_THINK, _THOUGHT = "<think>", "</think>"
_OPEN_REASONING = re.compile(rf"{_THINK}(\s*)\Z")
"""The end of a prompt behind which the assistant goes on with its reasoning."""
_CLOSED_REASONING = re.compile(rf"{_THOUGHT}(\s*)\Z")
"""The end of a prompt behind which it says its answer alone."""
_REASONING_AT_END = re.compile(rf"{_THINK}\s*({_THOUGHT}\s*)?\Z")

CHARS_PER_TOKEN = 64
"""Of a text with more characters for each token that it may have, more need not be tokenised: it is too long."""

_FULL_TEXT = 8
"""Characters for each token that a text may have, of more than hardly any that fits has: it is counted in pieces."""
_PIECE = 1 << 18
"""Characters of such a piece."""

_OPENING: Message = {"role": "user", "content": "-"}
_PROBE = "probe_of_tools"
_PROBE_RESULT: Message = {"role": "tool", "content": "-", "name": _PROBE, "tool_call_id": "call00000"}
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": _PROBE, "description": "-", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A turn of the assistant as texts, with stand-ins for control texts in them."""

    prompt: str
    """All that stands before it."""
    said: str
    mark: str
    """The control token at which it is over; empty where the template has none."""


class TooManyTokensError(ValueError):
    """A text has too many tokens, counted on its first pieces (``count``)."""

    def __init__(self, count: int) -> None:
        super().__init__(f"more than {count} tokens")
        self.count = count


class ChatRenderer:
    """Renders conversations with one tokenizer and one chat template.

    Messages are OpenAI's (``Message``). Text in them that spells a control token, as ``<|im_end|>`` does, is encoded
    letter by letter and never becomes that token (``ControlText``). A template that writes no tools is given them in
    the Hermes form (``without_tools``). What it writes for a picture becomes the picture's ids (``Pictures.content``).

    Args:
        pictures: the model's processor; ``None``: a conversation with pictures is refused.
        template: ``native`` for the tokenizer's own chat template, or a name (``roll.data.templates``), or a path to a
            Jinja file, or the Jinja text itself; with variables, a ``ChatTemplate``.

    Raises:
        ValueError: ``native`` was asked for and the tokenizer has no chat template, or there is no such template, or
            one of the variables is not in its text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | ChatTemplate = "native",
        pictures: Pictures | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = pictures
        chosen = ChatTemplate(template) if isinstance(template, str) else template
        self._variables = dict(chosen.variables)
        try:
            self._template = read_template(chosen.template)
        except ValueError as error:
            raise ValueError(f"data_args.{error}") from error
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "data_args.template is 'native', but the tokenizer has no chat template; give one or its path"
            )
        if unread := [name for name in self._variables if name not in self.source]:
            raise ValueError(f"data_args.chat_template_kwargs: the chat template does not use {', '.join(unread)}")
        self._cache: OrderedDict[tuple[str, ...], IntArray] = OrderedDict()
        self._control = ControlText(tokenizer)
        self._end: tuple[str, int] | None = None

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, most: int | None = None
    ) -> IntArray:
        """Token ids of a conversation that waits for the assistant, who is told of the tools, shape [prompt_len].

        Args:
            most: tokens that are of use: a text that has many more need not be tokenised to its end.

        Raises:
            TooManyTokensError: so it is.
        """
        ids = self._encode_cached("prompt", self.text(messages, tools, open_assistant=True), most)
        return self.with_pictures(ids, messages)[0]

    def prompts(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Tool] | None = None
    ) -> list[IntArray]:
        """``prompt`` of many conversations, tokenised together and not remembered."""
        texts = [self.text(messages, tools, open_assistant=True) for messages in conversations]
        rendered = self._encode_many([text for text in texts if not self._control.hides(text)])
        for index, text in enumerate(texts):
            if self._control.hides(text):  # it is encoded piece by piece
                rendered.insert(index, self._encode(text))
        shown = zip(rendered, conversations, strict=True)
        return [self.with_pictures(ids, messages)[0] for ids, messages in shown]

    def _encode_many(self, texts: list[str]) -> list[IntArray]:
        if not texts:
            return []
        first = self.tokenizer(texts[:1], add_special_tokens=False, verbose=False)["input_ids"]
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            rest = self.tokenizer(texts[1:], add_special_tokens=False, verbose=False)["input_ids"] if texts[1:] else []
        else:
            # Twice as fast as the tokenizer itself, whose call above has switched truncation and padding off.
            rest = [encoding.ids for encoding in core.encode_batch_fast(texts[1:], add_special_tokens=False)]
        return [np.asarray(ids, dtype=np.int64) for ids in [*first, *rest]]

    def continuation(
        self,
        messages: Sequence[Message],
        completion_ids: IntArray,
        tools: Sequence[Tool] | None = None,
        *,
        most: int | None = None,
    ) -> IntArray:
        """The ids that follow a sampled assistant turn: its closing, ``messages`` and the next assistant opening.

        ``completion_ids`` stay as sampled: append the result to ``prompt_ids + completion_ids``.

        Args:
            messages: what was said after the assistant turn (user or tool messages).
            completion_ids: the sampled ids; an end-of-turn token that was sampled is not written twice.
            most: as for ``prompt``.
        """
        tail = self.tail(messages, tools)
        ids = self._encode_cached("continuation", tail, most)
        space = len(self._encode(space)) if (space := (self._control.lead(tail) or ("",))[0]) else 0
        ids = ids[space + 1 :] if self._is_closed(ids[space:], completion_ids) else ids
        return self.with_pictures(ids, messages)[0]

    def conversation(
        self, messages: Sequence[Message], *, last_only: bool = False, tools: Sequence[Tool] | None = None
    ) -> tuple[IntArray, BoolArray]:
        """The one row of ``rows`` for all of the assistant's turns, or for its last.

        Raises:
            ValueError: one row cannot hold them all, or see ``rows``.
        """
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        made = self.rows(messages, spoken[-1:] if last_only else spoken, tools)
        if len(made) > 1:
            raise ValueError(f"the chat template rewrites earlier turns, so the answers make {len(made)} rows")
        return made[0]

    def rows(
        self, messages: Sequence[Message], learned: Sequence[int] | None = None, tools: Sequence[Tool] | None = None
    ) -> list[tuple[IntArray, BoolArray]]:
        """Rows to imitate: token ids, and True for those that the assistant says.

        A turn is learned behind the prompt that a policy would be given, in the words of the template, up to the token
        at which a generator stops: the template's own mark, else what the next turn begins with, else the end of the
        sequence. Turns share a row as long as the next prompt begins
        with all that the row holds; a template that rewrites earlier turns makes a row for each.

        Args:
            learned: indices of the assistant's messages that count as said; ``None``: all.
            tools: that the assistant is told of.

        Raises:
            ValueError: the template leaves out the assistant's words.
            TemplateError: it refuses the messages.
        """
        if learned is None:
            learned = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        made: list[list[tuple[IntArray, bool]]] = []
        ends: list[int] = []
        so_far, mark = "", ""
        for index in learned:
            turn = self.turn(messages[: index + 1], tools)
            goes_on = bool(made and mark) and turn.prompt.startswith(so_far)
            # A row goes on from the mark, which may eat white space behind it; it was said already.
            context = turn.prompt[len(so_far) - len(mark) :] if goes_on else turn.prompt
            context_ids, said_ids = self._encode_behind(context, turn.said + turn.mark)
            if not turn.mark:
                said_ids = np.append(said_ids, self._eos())
            if goes_on:
                made[-1] += [(context_ids[1:], False), (said_ids, True)]
                ends[-1] = index
            else:
                made.append([(context_ids, False), (said_ids, True)])
                ends.append(index)
            so_far, mark = turn.prompt + turn.said + turn.mark, turn.mark
        rows = []
        for row, end in zip(made, ends, strict=True):
            ids = np.concatenate([ids for ids, _ in row])
            mask = np.concatenate([np.full(len(ids), said, dtype=np.bool_) for ids, said in row])
            ids, repeats = self.with_pictures(ids, messages[: end + 1])
            rows.append((ids, mask if repeats is None else np.repeat(mask, repeats)))
        return rows

    def with_pictures(self, ids: IntArray, messages: Sequence[Message]) -> tuple[IntArray, IntArray | None]:
        """The ids of rendered messages, with those of pictures in place of marks, and how many each has become.

        ``None`` stands for one of each.

        Raises:
            TemplateError: the template has not written a mark for each, or the model takes no pictures.
        """
        shown = [one for message in messages for one in _shown(message)]
        if not shown:
            return ids, None
        from jinja2 import TemplateError

        if self.pictures is None:
            raise TemplateError(f"got {len(shown)} pictures, but the model takes none")
        marks = [self.pictures.mark_of(one) for one in shown]
        tokens = {mark: self._id_of(mark) for mark in marks}
        is_place = np.logical_or.reduce([ids == token for token in tokens.values()])  # quicker than isin for a few
        found = ids[is_place].tolist()
        if found != [tokens[mark] for mark in marks]:
            names = {self.pictures.mark: "pictures"}
            counts = (
                f"{mark} {found.count(token)} times for {marks.count(mark)} {names.get(mark, 'videos')}"
                for mark, token in tokens.items()
            )
            raise TemplateError(f"it writes {', '.join(counts)}")
        contents = [self.pictures.content(one) for one in shown]
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[is_place] = [len(content) for content in contents]
        spread = np.repeat(ids, repeats)
        spread[np.repeat(is_place, repeats)] = np.concatenate(contents)
        return spread, repeats

    def _encode_behind(self, context: str, said: str) -> tuple[IntArray, IntArray]:
        """Token ids of a context and of what is said behind it.

        They are those of the whole text, unless its tokens reach over the border: nobody samples such.
        """
        at = self._control.last_start(context)
        border, both = self._encode(context[at:]), self._encode(context[at:] + said)
        joined = both[: len(border)].tolist() == border.tolist()
        return self._encode(context), both[len(border) :] if joined else self._encode(said)

    def turn(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> RenderedTurn:
        """The last message, which is the assistant's, as the template writes it behind the prompt for it.

        Where a prompt opens reasoning that the template leaves out of the turn, as DeepSeek-R1's does, the turn says
        it as the policy would have: the reasoning, its end, the answer. Behind a prompt that has closed it, none is
        said.

        Raises:
            ValueError: the template leaves out the assistant's words.
            TemplateError: it refuses the messages.
        """
        *before, message = messages
        whole, prompt = self.text(messages, tools, open_assistant=False), None
        if any(each["role"] not in ("system", "developer") for each in before):
            prompt = self.text(before, tools, open_assistant=True)
        elif before and (tried := self._try(before, tools)) is not None and whole.startswith(tried):
            prompt = tried  # nobody has spoken yet: few templates have a prompt for that
        if prompt is not None and whole.startswith(prompt):
            start = len(prompt)
        else:
            start = self._words_start(whole, before, tools)
            prompt = whole[:start] if prompt is None else prompt
        said, mark = self._ended(whole[start:], calls=bool(message.get("tool_calls")))
        if opened := _OPEN_REASONING.search(prompt):
            said = self._reasoned(message, said, opened[1])
        elif (closed := _CLOSED_REASONING.search(prompt)) and said.lstrip().startswith(_THINK):
            said = said.partition(_THOUGHT)[2].removeprefix(closed[1])
        if not said.strip() and (message.get("content") or message.get("tool_calls")):
            raise ValueError("the chat template drops the whole answer, so there is nothing to train on")
        return RenderedTurn(prompt, said, mark)

    def _words_start(self, whole: str, before: Sequence[Message], tools: Sequence[Tool] | None) -> int:
        """Index in a conversation at which the turn behind ``before`` begins, found by other words in its place."""
        first, second = (
            self.text([*before, {"role": "assistant", "content": words}], tools, open_assistant=False)
            for words in (_SENTINEL, "-")
        )
        if first == second:
            raise ValueError("the chat template drops the assistant's text, so there is nothing to imitate")
        same = min(same_start(first, second), same_start(first, whole))
        opening = before_reasoning(self.opening)
        at = first.rfind(opening, 0, same) if opening else -1
        # What a template writes between the opening and the words, the assistant says, unless it is another's turn.
        start, mark = at + len(opening), str(self.tokenizer.convert_ids_to_tokens(self.turn_end()[1]))
        return start if at >= 0 and mark not in first[start:same] else same

    def _ended(self, said: str, *, calls: bool) -> tuple[str, str]:
        """A turn up to its mark, and the mark, which is empty where the end of the sequence has to do."""
        closing, _ = self.turn_end()
        if (found := self._mark(closing)) is not None:
            if said.endswith(closing):
                return said[: len(said) - len(closing)] + found[0], found[1]
            if (last := self._control.trail(said)) is not None:  # of a last turn, or of calls
                return last
        space, mark = self._next_turn["tool" if calls else "user"]
        return said.removesuffix(closing) + space, mark

    def _reasoned(self, message: Message, said: str, space: str) -> str:
        """What is said behind a prompt that has opened reasoning and goes on with ``space``."""
        if said.lstrip().startswith(_THINK):
            said = said.lstrip().removeprefix(_THINK).removeprefix(space)
        thought = self.within(reasoning_of(message).strip("\n"))
        written, closed, answer = said.partition(_THOUGHT)
        if closed and (written.strip() or not thought):  # the template says it all
            return said
        answer = answer if closed else said
        if not answer[:1].isspace():
            answer = space * 2 + answer
        return f"{thought}{space}{_THOUGHT}{answer}"

    def _mark(self, text: str) -> tuple[str, str] | None:
        """White space and the added token behind it that a text begins with."""
        if (found := self._control.lead(text)) is not None:
            return found
        bare = text.lstrip()
        first = next(iter(self._encode(bare).tolist()), -1)
        token = self.tokenizer.added_tokens_decoder.get(first)
        return (text[: len(text) - len(bare)], str(token.content)) if token and bare.startswith(token.content) else None

    @cached_property
    def _next_turn(self) -> dict[str, tuple[str, str]]:
        """What a user's message, or the result of a tool, begins with: white space and a control token, or nothing."""
        from jinja2 import TemplateError

        found = dict.fromkeys(("user", "tool"), ("", ""))
        for message in (_OPENING, _PROBE_RESULT):
            with suppress(TemplateError, TypeError, ValueError):
                found[message["role"]] = self._control.lead(self.tail([message])) or ("", "")
        return found

    @cached_property
    def opening(self) -> str:
        """Text that a prompt has beyond the conversation before it, or in place of its end, as Phi-3's has."""
        closed, opened = (self.text([_OPENING], open_assistant=opens) for opens in (False, True))
        return opened[self._control.token_start(opened, same_start(closed, opened)) :]

    def _id_of(self, token: str) -> int:
        index = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(index, int), "a list is asked for by a list"
        return index

    def _eos(self) -> int:
        if (index := self.tokenizer.eos_token_id) is None:
            raise ValueError("neither the chat template nor the tokenizer has a token that ends a turn")
        return int(index)

    def history(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> IntArray:
        """Token ids of a whole conversation, which waits for nobody, shape [tokens]."""
        ids = self._encode(self.text(messages, tools, open_assistant=False))
        return self.with_pictures(ids, messages)[0]

    def words(self, text: str, *, most: int | None = None) -> IntArray:
        """Token ids of a text alone, without special tokens; ``most`` as for ``prompt``."""
        return self._encode_cached("words", text, most)

    def check_length(self, text: str, most: int) -> None:
        """Counts the tokens of a long text's pieces, which are hardly more than those of the text.

        Raises:
            TooManyTokensError: they are half as many again as it may have.
        """
        if len(text) <= _FULL_TEXT * most:
            return
        core, count = getattr(self.tokenizer, "backend_tokenizer", None), 0
        shown = self._control.show(text)
        for start in range(0, len(shown), _PIECE):
            piece = shown[start : start + _PIECE]
            encoded = self.tokenizer.encode(piece) if core is None else core.encode_batch_fast([piece])[0]
            count += len(encoded)
            if 2 * count > 3 * most:
                raise TooManyTokensError(count)

    def decode(self, ids: IntArray) -> str:
        """Text without special tokens and the end of the turn.

        Reasoning that control tokens alone mark, as those of gpt-oss do, stands in ``<think>``.
        """
        tokens: list[int] = ids.tolist()
        if tokens and tokens[-1] in self.ends:  # which a tokenizer may not call special
            tokens.pop()
        for mark, words in self._reasoning_marks:
            tokens = _replaced(tokens, mark, words)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    @cached_property
    def _reasoning_marks(self) -> list[tuple[list[int], list[int]]]:
        """What the template writes around reasoning, and ``<think>`` or its end; none if that is no control token."""
        from jinja2 import TemplateError

        thought, said = f"{_SENTINEL}thought", f"{_SENTINEL}said"
        turn: Message = {"role": "assistant", "content": said, (self.reasoning_key or REASONING[0]): thought}
        text = ""
        with suppress(TemplateError, TypeError, ValueError):
            text = self._render([_OPENING, turn], None, open_assistant=False)
        before, found, behind = text.partition(thought)
        between, answered, _ = behind.partition(said)
        if not (found and answered and self._control.trail(between)) or self.opening not in before:
            return []
        before = before.rpartition(self.opening)[2]
        answer = between.rpartition(self.opening)[2]
        marks = {between: f"\n{_THOUGHT}\n\n", before: f"{_THINK}\n", answer: ""}
        return [(self._control.encode(mark), self._control.encode(words)) for mark, words in marks.items() if mark]

    def decode_raw(self, ids: IntArray, *, stopped: bool = False) -> str:
        """Text with special tokens, as parsers of tool calls need it, without one at the end that ends the turn.

        Args:
            stopped: the engine stopped at the last token, which the template may not know as an end.
        """
        ends = len(ids) > 0 and int(ids[-1]) in (self._control.ids if stopped else self.ends)
        return str(self.tokenizer.decode(ids[: len(ids) - ends].tolist(), skip_special_tokens=False))

    @cached_property
    def ends(self) -> frozenset[int]:
        """Control tokens that may be the last that is sampled of a turn.

        That is the end of the sequence, what closes a turn, and what begins the next where nothing closes one.
        """
        from jinja2 import TemplateError

        marks = [mark for _, mark in self._next_turn.values() if mark]
        ends = {self.tokenizer.eos_token_id, *map(self._id_of, marks)}
        with suppress(TemplateError, ValueError):
            ends.add(self.turn_end()[1])
        return frozenset(index for index in ends if index in self._control.ids)

    @cached_property
    def stops(self) -> frozenset[int]:
        """The ``ends`` at which an engine has to stop: a turn is over there, whether it calls tools or not.

        Harmony's ``<|end|>`` is none: it also stands between what is thought and what is said.
        """
        from jinja2 import TemplateError

        thought, said = f"{_SENTINEL}thought", f"{_SENTINEL}said"
        turn: Message = {"role": "assistant", "content": said, "reasoning_content": thought, "thinking": thought}
        within = ""
        with suppress(TemplateError, TypeError, ValueError):
            _, _, within = self.text([_OPENING, turn], open_assistant=False).partition(thought)
        inside = set(self._encode(within.partition(said)[0]).tolist())
        return frozenset(self.ends - inside | (self.ends & {self.tokenizer.eos_token_id}))

    @property
    def source(self) -> str:
        """The template's Jinja text."""
        return self.tokenizer.get_chat_template(self._template)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, open_assistant: bool) -> str:
        """The text of a conversation, with stand-ins for control texts in it (``ControlText.hide``)."""
        conversation: Sequence[Message] = messages
        if tools or not all(map(_is_plain, messages)):
            conversation, tools = self._with_tools(messages, tools)
        text = self._render(conversation, tools, open_assistant=open_assistant)
        return self.pictures.spaced(text) if self.pictures is not None and any(map(_shown, messages)) else text

    def between_tokens(self, text: str) -> list[str]:
        """The pieces of a text of ``text`` between control tokens."""
        return self._control.between(text)

    def with_variables(self, **variables: Any) -> ChatRenderer:
        """The same with more variables of the template."""
        template = ChatTemplate(self.source, {**self._variables, **variables})
        return ChatRenderer(self.tokenizer, template, self.pictures)

    def within(self, text: str) -> str:
        """A text as ``text`` has it within a message."""
        hidden: str = self._control.hide(text)
        return hidden

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, open_assistant: bool) -> str:
        from jinja2 import TemplateError

        shown = [_for_template(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                [self._control.hide(message) for message in shown],
                tools=self._control.hide(tools) if tools else None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=open_assistant,
                **self._variables,
            )
        except (TypeError, AttributeError, LookupError) as error:  # of the template's code: None + text, and the like
            parts = any(isinstance(message.get("content"), list) for message in shown)
            why = ", perhaps as a content with pictures is a list of parts" if parts else ""
            raise TemplateError(f"{type(error).__name__}: {error}{why}") from error
        return str(text)

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[Sequence[Message], Sequence[Tool] | None]:
        """Messages and tools in the form that the template takes."""
        calls = any(message.get("tool_calls") for message in messages)
        text_arguments = calls and self._joins_arguments
        reasoning = self.reasoning_key or REASONING[0]
        plain = tidy(messages, text_arguments=False, reasoning=reasoning, developer=self._knows_developer)
        if not (self.writes_tools if tools else not calls or self.writes_calls):
            return without_tools(plain, tools, takes_system=self.takes_system), None
        if calls and not self.writes_calls:
            return [calls_in_words(message) for message in plain], tools
        return tidy(plain, text_arguments=True) if text_arguments else plain, tools

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key under which the template reads an assistant's reasoning; ``None`` if it has no such key."""
        said: Message = {"role": "assistant", "content": "-"}
        found = (
            key for key in REASONING if _PROBE in (self._try([_OPENING, {**said, key: _PROBE}], opens=False) or "")
        )
        return next(found, None)

    @cached_property
    def _knows_developer(self) -> bool:
        return "developer" in self.source

    @cached_property
    def writes_tools(self) -> bool:
        """Tells whether the template tells the assistant of tools."""
        return _PROBE in (self._try([_OPENING], [_PROBE_TOOL]) or "")

    @cached_property
    def writes_calls(self) -> bool:
        """Tells whether the template writes the assistant's calls."""
        return any(_PROBE in (self._try(_probe_call(text)) or "") for text in (False, True))

    @cached_property
    def shows_results(self) -> bool:
        """Tells whether a picture in a tool's result is shown."""
        from jinja2 import TemplateError

        if self.pictures is None:
            return False
        *before, result = _probe_call(False)
        shown = {**result, "content": [{"type": "image", "image": None}]}
        try:
            return self.pictures.mark in self.text([*before, shown], [_PROBE_TOOL], open_assistant=True)
        except (TemplateError, TypeError):
            return False

    @cached_property
    def _joins_arguments(self) -> bool:
        """Tells whether the template takes the arguments of calls as JSON texts alone."""
        return self._try(_probe_call(False)) is None and self._try(_probe_call(True)) is not None

    @cached_property
    def takes_system(self) -> bool:
        """Tells whether the template takes a system message."""
        return self._try([{"role": "system", "content": "-"}, _OPENING]) is not None

    def _try(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, opens: bool = True
    ) -> str | None:
        """The rendered text, ``None`` if the template refuses."""
        from jinja2 import TemplateError

        try:
            return self._render(messages, tools, open_assistant=opens)
        except (TemplateError, TypeError):
            return None

    def tail(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """Text that the template writes behind an assistant's words when ``messages`` follow.

        Raises:
            ValueError: it drops those words.
            TemplateError: it refuses such messages.
        """
        from jinja2 import TemplateError

        # A template may look at earlier messages, so a full conversation is rendered around a placeholder answer.
        said: Message = {"role": "assistant", "content": _SENTINEL}
        try:
            text = self.text([_OPENING, said, *messages], tools, open_assistant=True)
        except TemplateError:
            calls = calls_answered_by(messages)
            if not calls:
                raise
            # It wants to see the calls that results answer. Behind their arguments a call and its turn are closed.
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            for call in (calls[-1], calls[0]):  # some write no more than the first of several
                call["function"]["arguments"] = {"-": _SENTINEL}
                text = self.text([_OPENING, said, *messages], tools, open_assistant=True)
                _, found, suffix = text.partition(_SENTINEL)
                if found:
                    break
            suffix = suffix[self._control.first(suffix) :]
        else:
            _, found, suffix = text.partition(_SENTINEL)
        if not found:
            raise ValueError(
                "the chat template drops the assistant's text, so a multi-turn history cannot be continued"
            )
        return suffix

    def _is_closed(self, ids: IntArray, completion_ids: IntArray) -> bool:
        """Tells whether the assistant itself said the token that ``ids`` begin with, or another that ends its turn."""
        if not len(ids) or not len(completion_ids):
            return False
        first, last = int(ids[0]), int(completion_ids[-1])
        if first == last:
            return True
        if first not in self._control.ids or last not in self._control.ids:
            return False
        # A last turn may be closed by a token of its own, as Harmony's is: none stands behind it.
        closing, end = self.turn_end()
        return bool(closing) and last == end

    def turn_end(self) -> tuple[str, int]:
        """Text that the template writes behind the assistant's words, and the id that ends the turn.

        That is the token which the template closes it with, else what the next turn begins with, else the end of the
        sequence.
        """
        if self._end is None:
            messages = [_OPENING, {"role": "assistant", "content": _SENTINEL}]
            _, found, closing = self.text(messages, open_assistant=False).partition(_SENTINEL)
            if not found:
                raise ValueError("the chat template drops the assistant's text, so there is nothing to imitate")
            _, mark = self._mark(closing) or self._next_turn["user"]
            end = self._id_of(mark) if mark else self._eos()
            self._end = closing, int(end)
        return self._end

    def _encode(self, text: str) -> IntArray:
        return np.asarray(self._control.encode(text), dtype=np.int64)

    def _encode_cached(self, kind: str, text: str, most: int | None = None) -> IntArray:
        """Encodes, remembering recent texts: group members and repeated states render the same prompt."""
        key = (kind, text)
        ids = self._cache.get(key)
        if ids is None:
            if most is not None:
                self.check_length(text, most)
            ids = self._encode(text)
            ids.flags.writeable = False
            self._cache[key] = ids
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return ids


def items_of(messages: Iterable[Message]) -> tuple[Item, ...]:
    """The pictures of a conversation and the pieces of its videos, each once, in their order."""
    shown = (one for message in messages for one in _shown(message))
    return tuple(dict.fromkeys(item for one in shown for item in (one.items if isinstance(one, Video) else (one,))))


def _shown(message: Message) -> list[Item | Video]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return []
    return [part[part["type"]] for part in content if part["type"] != "text"]


def _for_template(message: Message) -> Message:
    """A message whose parts say of a picture or video only that it is one."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = joined(*([part] if part["type"] == "text" else [{"type": part["type"]}] for part in content))
    return {**message, "content": parts}


def before_reasoning(prompt: str) -> str:
    """A prompt without the reasoning that it opens, or has closed, at its end."""
    return _REASONING_AT_END.sub("", prompt)


def same_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of what two texts or lists begin with together."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _replaced(ids: list[int], run: list[int], by: list[int]) -> list[int]:
    """Token ids with others in place of each run of some; the beginning of such a run at their end is left out."""
    made, copied = list[int](), 0
    for index in [index for index, each in enumerate(ids) if each == run[0]]:
        piece = ids[index : index + len(run)]
        if index < copied or piece != run[: len(piece)]:
            continue
        made += ids[copied:index]
        copied = index + len(piece)
        if piece == run:
            made += by
    return made + ids[copied:]


def _probe_call(text_arguments: bool) -> list[Message]:
    called: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {"a": 1}}}],
    }
    return list(tidy([_OPENING, called, _PROBE_RESULT], text_arguments=text_arguments))


def turn_ends(tokenizer: PreTrainedTokenizerBase, template: str | ChatTemplate) -> frozenset[int]:
    """Tokens at which an assistant's turn is over, in any of a run's templates; none where nobody talks."""
    ends: set[int] = set()
    of_tags = [] if isinstance(template, str) else template.of_tags().values()
    for each in (template, *of_tags):
        with suppress(ValueError):  # a model that nobody talks with has no template
            ends |= ChatRenderer(tokenizer, each).stops
    return frozenset(ends)


def _is_plain(message: Message) -> bool:
    """Tells whether a message is a role and a text, which need no care."""
    return (
        isinstance(message.get("content"), str)
        and message["role"] not in ("tool", "developer")
        and "tool_calls" not in message
        and message.keys().isdisjoint(REASONING)
    )
