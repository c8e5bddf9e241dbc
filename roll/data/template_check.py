"""Checks a chat template: whether a conversation only grows at its end, what is dropped, how tools are called.

``check_template`` tries a template by itself; ``LeftOut`` finds what it drops of a dataset's conversations, which is
reported before a run trains without them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jinja2 import TemplateError

from roll.data.renderer import ChatRenderer, before_reasoning, same_start
from roll.data.tool_messages import REASONING, Message, Tool, reasoning_of, text_of
from roll.utils.foreign import Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Parser: TypeAlias = Callable[[str], Sequence[tuple[str, Mapping[str, Any]]]]
"""Names and arguments of the calls in what an assistant said, none where a dialect sees none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of a template.

    Attributes:
        level: ``problem`` for what costs tokens or words, ``note`` for what one should know.
        name: for tables and tests.
        text: what it does, and what follows from that.
    """

    level: Literal["problem", "note"]
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Properties of a template, as far as they are known.

    Attributes:
        append_only: kinds of turns to whether all that stood before them stays as it was.
        dialect: in which calls are written; ``None`` if no known one reads them.
        native_tools: whether the template tells of tools itself, else they are written in the Hermes form.
        opening: what it writes before the assistant speaks.
        ending: the token that ends a turn.
        findings: problems first.
    """

    append_only: Mapping[str, bool]
    dialect: str | None
    native_tools: bool
    opening: str
    ending: str
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that are more than notes."""
        return tuple(finding for finding in self.findings if finding.level == "problem")

    @property
    def why_no_dialect(self) -> str:
        """Reason against a dialect, where none is known."""
        return next((each.text for each in self.findings if each.name in ("refuses-calls", "unknown-dialect")), "")

    def page(self) -> str:
        """The report as lines for a terminal."""
        kinds = ", ".join(f"{kind} {'yes' if kept else 'NO'}" for kind, kept in self.append_only.items())
        told = "by the template" if self.native_tools else "in the Hermes form, as the template has none"
        rows = [
            ("append-only", kinds),
            ("tool dialect", f"{self.dialect or 'unknown'}; tools are described {told}"),
            ("opens a turn with", repr(self.opening)),
            ("ends a turn with", repr(self.ending)),
        ]
        lines = [f"{name + ':':<19}{value}" for name, value in rows]
        return "\n".join([*lines, "", *(f"{each.level:<8} {each.name}: {each.text}" for each in self.findings)]) + "\n"


def check_template(
    tokenizer: PreTrainedTokenizerBase, template: str = "native", parsers: Mapping[str, Parser] | None = None
) -> TemplateReport:
    """Renders short conversations and compares them.

    Args:
        parsers: of the tool dialects that may be spoken, by name, the likeliest first.

    Raises:
        ValueError: there is no such template, or it cannot render a question and its answer.
    """
    return check_renderer(ChatRenderer(tokenizer, template), parsers)


def check_renderer(renderer: ChatRenderer, parsers: Mapping[str, Parser] | None = None) -> TemplateReport:
    """``check_template`` of a renderer's tokenizer and template."""
    return _Check(renderer, parsers or {}).report()


_WORDS, _THOUGHT, _RULES = "left then right", "walls are near", "play to win"
DATE = "strftime_now"
"""The function by which a template writes the date."""
_LONG = 24
"""Letters from which text around messages is more than names of roles."""
_TOOL_NAME = "look_up"
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
_WORD = "northward"
_ARGUMENTS = {"word": _WORD, "times": 2}


def _user(text: str = "where to?") -> Message:
    return {"role": "user", "content": text}


def _says(text: str = _WORDS) -> Message:
    return {"role": "assistant", "content": text}


def _calls(number: int = 1, content: str = "", **more: str) -> Message:
    function = {"name": _TOOL_NAME, "arguments": _ARGUMENTS}
    calls = [{"id": f"call0000{index}", "type": "function", "function": function} for index in range(number)]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def _results(number: int = 1) -> list[Message]:
    return [
        {"role": "tool", "content": f"page {index}", "name": _TOOL_NAME, "tool_call_id": f"call0000{index}"}
        for index in range(number)
    ]


class _Check:
    def __init__(self, renderer: ChatRenderer, parsers: Mapping[str, Parser]) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer
        self._parsers = parsers
        rules: list[Message] = [{"role": "system", "content": _RULES}]
        self._start = [*(rules if renderer.takes_system else []), _user()]

    def report(self) -> TemplateReport:
        try:
            opening = self._renderer.opening
            self._render([*self._start, _says()])
        except Exception as error:  # whatever a template's code raises
            raise ValueError(f"the chat template cannot render a question and its answer: {_first(error)}") from error
        ending, ends = self._ending()
        append_only, grown = self._growth()
        dialect, spoken = self._dialect()
        found = [*ends, *grown, *spoken, *self._losses(), *self._around(opening)]
        found.sort(key=lambda finding: finding.level != "problem")
        return TemplateReport(append_only, dialect, self._renderer.writes_tools, opening, ending, tuple(found))

    def _render(self, messages: Sequence[Message], tools: bool = False, *, opens: bool = False) -> str:
        return self._renderer.text(messages, [_TOOL] if tools else None, open_assistant=opens)

    def _try(self, messages: Sequence[Message], tools: bool = False, *, opens: bool = False) -> str | Exception:
        with Fault() as fault:  # whatever a template's code raises
            return self._render(messages, tools, opens=opens)
        assert fault.error is not None, "else it has returned"
        return fault.error

    def _ending(self) -> tuple[str, list[Finding]]:
        """The token that ends a turn."""
        try:
            closing, index = self._renderer.turn_end()
        except ValueError as error:
            return "", [Finding("problem", "no-turn-end", f"{error}")]
        text = str(self._tokenizer.convert_ids_to_tokens(index))
        if not closing:
            next_turn = self._renderer.stops - {self._tokenizer.eos_token_id}
            then = self._control_names(next_turn)
            said = f"only the next turn ends a turn: {then}, at which an engine must stop"
            if not next_turn:
                said = f"nothing closes a turn; samples end with {text}, which a history lacks"
            return text, [Finding("note", "turn-not-closed", said)]
        others = self._renderer.stops - {index}
        if self._tokenizer.eos_token_id != index:
            said = f"a turn ends with {text}, and the tokenizer's end token is {self._tokenizer.eos_token}"
            return text, [Finding("note", "turn-end-is-not-eos", f"{said}: an engine must stop at both")]
        if others:
            said = f"a turn may also end with {self._control_names(others)}, at which an engine must stop"
            return text, [Finding("note", "several-turn-ends", said)]
        return text, []

    def _control_names(self, ids: frozenset[int]) -> str:
        return ", ".join(sorted(str(self._tokenizer.convert_ids_to_tokens(index)) for index in ids))

    def _growth(self) -> tuple[dict[str, bool], list[Finding]]:
        """Tells whether what stood before a turn stays when it is followed, for kinds of turns."""
        start, tool_start = self._start, [*self._start, _calls(), *_results()]
        twice = [*start, _says(), _user("and then?")]
        kinds: dict[str, tuple[bool, list[tuple[list[Message], Message, list[Message]]]]] = {
            "answers": (False, [(start, _says(), [_user("and then?")]), (twice, _says(), [_user("and now?")])]),
            "tool calls": (True, [(start, _calls(), _results()), (tool_start, _calls(), _results())]),
            "answers after tools": (True, [(tool_start, _says(), [_user("and then?")])]),
        }
        append_only: dict[str, bool] = {}
        findings: list[Finding] = []
        for kind, (tools, cases) in kinds.items():
            differences = [self._difference(before, said, after, tools) for before, said, after in cases]
            append_only[kind] = not any(differences)
            if first := next(filter(None, differences), None):
                text = f"{kind}: {first}; a conversation that is rendered again becomes a separate row"
                findings.append(Finding("problem", "rewrites-history", text))
        return append_only, findings

    def _difference(self, before: list[Message], said: Message, after: list[Message], tools: bool) -> str:
        """Tells how the text before a turn changes, or that what follows does not continue a sample; else empty."""
        prompt, whole = self._try(before, tools, opens=True), self._try([*before, said, *after], tools, opens=True)
        for text in (prompt, whole):
            if isinstance(text, Exception):
                return f"the template refuses ({_first(text)})"
        assert isinstance(prompt, str) and isinstance(whole, str), "else it was refused"
        if not whole.startswith(prompt):
            same = same_start(prompt, whole)
            return f"{_cut(prompt, same)} in the prompt becomes {_cut(whole, same)} in the history"
        with Fault() as fault:  # whatever a template's code raises
            tail = self._renderer.tail(after, [_TOOL] if tools else None)
        if fault.error is not None:
            return f"it cannot be continued ({_first(fault.error)})"
        if not whole.endswith(tail):
            ends = same_start(whole[::-1], tail[::-1])
            return f"{_cut(tail, len(tail) - ends - 12)} continues a sample, the history has {whole[-ends - 12 :]!r}"
        return ""

    def _dialect(self) -> tuple[str | None, list[Finding]]:
        """The dialect of the calls that the template writes."""
        findings: list[Finding] = []
        if not self._renderer.writes_tools:
            text = "the template has no tools: they are described and called in the Hermes form"
            own = self._spoken(tools=False)
            if isinstance(own, str) and own != self._spoken(tools=True):
                text += f", but a history of calls without tools is written in the dialect {own}"
            findings.append(Finding("note", "no-tools", text))
        elif not self._renderer.writes_calls:
            text = "the template describes tools but writes no calls: these are written as text in the Hermes form"
            findings.append(Finding("note", "no-calls", text))
        spoken = self._spoken(tools=True)
        if isinstance(spoken, Finding):
            return None, [*findings, spoken]
        return spoken, findings

    def _spoken(self, *, tools: bool) -> str | Finding:
        """The dialect that reads a call as the template writes it, or why there is none."""
        start = self._start
        prompt, whole = self._try(start, tools, opens=True), self._try([*start, _calls()], tools)
        for text in (prompt, whole):
            if isinstance(text, Exception):
                return Finding("problem", "refuses-calls", f"the template refuses calls ({_first(text)})")
        assert isinstance(prompt, str) and isinstance(whole, str), "else it was refused"
        for name, parse in self._parsers.items():
            if any(list(parse(said)) == [(_TOOL_NAME, _ARGUMENTS)] for said in self._said(prompt, whole)):
                return name
        text = f"no known dialect reads a call as the template writes it: {whole[same_start(prompt, whole) :]!r:.200}"
        return Finding("problem", "unknown-dialect", text)

    def _said(self, prompt: str, whole: str) -> Iterator[str]:
        """Yields what an assistant may have said: the history beyond the prompt, white space at its end or not.

        Reasoning that the prompt opens is no part of it: its tag may begin as that of a call does.
        """
        texts = (before_reasoning(prompt), whole)
        before, ids = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        said = np.asarray(ids[same_start(before, ids) :], dtype=np.int64)
        yield from (self._renderer.decode_raw(said[: max(len(said) - spaces, 0)]) for spaces in range(3))

    def _losses(self) -> Iterator[Finding]:
        """Finds what the template leaves out of a history."""
        start, more = self._start, [_user("and then?")]
        if not self._renderer.takes_system:
            yield Finding("note", "refuses-system", "the template takes no system message")
        elif self._lacks(_RULES, [*start, _says(), *more]) or self._lacks(_RULES, [*start, _calls(), *_results()]):
            yield Finding("problem", "drops-system", "the system message is dropped after the assistant's first turn")
        inside = f"<think>\n{_THOUGHT}\n</think>\n\n{_WORDS}"
        key = self._renderer.reasoning_key
        if self._lacks(_THOUGHT, [*start, _says(inside), *more]) or (
            key is not None and self._lacks(_THOUGHT, [*start, {**_says(), key: _THOUGHT}, *more])
        ):
            text = "the reasoning of earlier turns is dropped: sampled tokens keep it, a rendered history does not"
            yield Finding("problem", "drops-reasoning", text)
        if self._lacks(_WORDS, [*start, _calls(content=_WORDS), *_results()]):
            yield Finding("problem", "drops-words-before-calls", "text before a call is dropped")
        elif self._lacks(_THOUGHT, [*start, _calls(content=inside), *_results()]):
            text = "the reasoning before a call is dropped once its result follows"
            yield Finding("problem", "drops-reasoning-before-calls", text)
        yield from self._parallel()
        padded = f"  {_WORDS} \n\n"
        if self._lacks(padded, [*start, _says(padded), *more]):
            yield Finding("note", "trims-words", "white space around the assistant's text is dropped from a history")

    def _lacks(self, words: str, messages: list[Message]) -> bool:
        """Tells whether words of the messages are not in their text; not so if the template refuses them."""
        tools = any("tool_calls" in message for message in messages)
        rendered = self._try(messages, tools, opens=True)
        return isinstance(rendered, str) and words not in rendered

    def _parallel(self) -> Iterator[Finding]:
        """Checks whether two calls may stand in one turn."""
        one, two = (self._try([*self._start, _calls(n), *_results(n)], True, opens=True) for n in (1, 2))
        if isinstance(two, Exception):
            yield Finding("problem", "one-call-a-turn", f"two calls in one turn are refused ({_first(two)})")
        elif isinstance(one, str) and two.count(_WORD) <= one.count(_WORD):
            yield Finding("problem", "one-call-a-turn", "one of two calls in a turn is dropped")

    def _around(self, opening: str) -> Iterator[Finding]:
        """Checks what the template writes beside messages."""
        whole = self._render([*self._start, _says(), _user("and then?")], opens=True)
        yield from self._first_token(whole)
        if added := self._default_system():
            yield Finding("note", "adds-system", f"the template adds its own text: {added!r:.100}")
        if date := date_in_prompts(self._renderer):
            yield Finding("note", "writes-date", date)
        if "<think>" in opening:
            text = "closed and empty" if "</think>" in opening else "open: a sample begins with reasoning"
            yield Finding("note", "opens-reasoning", f"the prompt ends with reasoning, {text}")
        last = self._render([*self._start, _says()])
        if "<think>" in last.replace(opening, "") and "<think>" not in opening:
            yield Finding("note", "adds-reasoning", "an answer without reasoning gets an empty one")

    def _first_token(self, whole: str) -> Iterator[Finding]:
        """Compares what a conversation begins with and what the tokenizer begins a text with.

        A template may write that token more often, at the beginning of each turn for one.
        """
        bos, index = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        if bos is None:
            return
        ids = self._tokenizer.encode(whole, add_special_tokens=False)
        if ids[:2] == [index, index]:
            yield Finding("problem", "double-bos", f"a conversation begins with {bos} twice")
        elif ids[:1] != [index] and self._tokenizer("a")["input_ids"][:1] == [index]:
            text = f"a conversation begins without {bos}, which the tokenizer writes before a text"
            yield Finding("note", "no-bos", text)

    def _default_system(self) -> str:
        """The longest text before the user's words that is nobody's, without a system message; mostly empty."""
        head, found, _ = self._render([_user("wherever")]).partition("wherever")
        pieces = self._renderer.between_tokens(head) if found else []
        added = max((piece.strip().removeprefix("system").strip() for piece in pieces), key=len, default="")
        return added if len(added) >= _LONG else ""


def date_in_prompts(renderer: ChatRenderer) -> str:
    """Says that prompts contain the date and what fixes it; empty if another day makes no difference."""
    if DATE not in renderer.source:
        return ""
    later = renderer.with_variables(**{DATE: lambda form: "some other day"})
    rules: list[Message] = [{"role": "system", "content": _RULES}] if renderer.takes_system else []
    what, remedy = "prompts", "a copy of the template with a fixed date (data_args.template)"
    if "date_string" in renderer.source:
        remedy = "data_args.chat_template_kwargs.date_string"
    if not _differ(renderer, later, [*rules, _user()]):
        what, remedy = "prompts without a system message", "a system message of your own"
        if not _differ(renderer, later, [_user()]):
            return ""
    return f"{what} contain the date, so they change from day to day, in a resumed run too; expected {remedy}"


def _differ(first: ChatRenderer, second: ChatRenderer, messages: Sequence[Message]) -> bool:
    return first.text(messages, open_assistant=True) != second.text(messages, open_assistant=True)


def _cut(text: str, at: int) -> str:
    """A text around a place."""
    return repr(text[max(0, at - 8) : max(0, at) + 32])


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


Use: TypeAlias = Literal["learned", "whole", "prompt"]
"""What becomes of a conversation: its turns are learned, it is read whole, or it waits for an answer."""

_ROLE_KEYS = {"role", "content", "tool_calls", *REASONING}
_OF_RESULTS = {"name", "tool_call_id"}
_STAND_IN_TOOL: Tool = {"type": "function", "function": {"name": "look_up", "description": "-", "parameters": {}}}
_Part: TypeAlias = tuple[int, str, str]
"""Index of a message, the name of a part of it, and the word that stands for it."""


class LeftOut:
    """Finds what a chat template drops.

    A template decides by the shape of a conversation: by roles, and by what a message has. So one with words that stand
    for its parts is rendered for each shape, and the words that do not come out are those parts.
    """

    def __init__(self, renderer: ChatRenderer, use: Use = "learned") -> None:
        self._renderer, self._use = renderer, use
        self._found: dict[Hashable, tuple[str, ...]] = {}

    def of(self, messages: Sequence[Message], learned: Sequence[int], tools: Sequence[Tool] | None) -> tuple[str, ...]:
        """What is left out, in words; each once, and nothing of what a template refuses."""
        shape = (tuple(map(_shape, messages)), tuple(learned), bool(tools))
        if shape not in self._found:
            self._found[shape] = tuple(dict.fromkeys(self._look(messages, learned, bool(tools))))
        return self._found[shape]

    def _look(self, messages: Sequence[Message], learned: Sequence[int], tools: bool) -> Iterator[str]:
        for message in messages:
            for key, is_text in sorted(_shape(message).keys):
                if not is_text and key not in self._renderer.source:
                    yield f"the chat template ignores {key!r} of a message"
        reads = self._renderer.reasoning_key
        if reads and "</think>" not in self._renderer.source and any(_shape(message).inside for message in messages):
            what = "<think>…</think> as words of an answer"
            yield f"the chat template writes {what}, expected under the key {reads!r}"
        stand_ins, parts = _stand_ins(messages)
        told = [_STAND_IN_TOOL] if tools else None
        with suppress(TemplateError, ValueError, TypeError):
            if self._use != "learned":
                text = self._renderer.text(stand_ins, told, open_assistant=self._use == "prompt")
                yield from _missing(parts, text, -1)
                return
            for index in learned:
                turn = self._renderer.turn(stand_ins[: index + 1], told)
                yield from _missing([part for part in parts if part[0] < index], turn.prompt, index)
                yield from _missing([part for part in parts if part[0] == index], turn.said, index)


def _missing(parts: Sequence[_Part], text: str, learned: int) -> Iterator[str]:
    for index, name, word in parts:
        if word not in text:
            where = "answers that are trained on" if index == learned else "messages before an answer"
            yield f"the chat template drops {name} of {where}"


class _Shape(NamedTuple):
    role: str
    words: bool
    inside: bool
    """Reasoning stands in the words."""
    beside: bool
    """Reasoning has a key of its own."""
    calls: int
    keys: frozenset[tuple[str, bool]]
    """All others, and whether they hold a text."""


def _shape(message: Message) -> _Shape:
    words, inside = text_of(message["content"]), False
    if message["role"] == "assistant" and "</think>" in words:
        inside, words = True, words.rpartition("</think>")[2]
    beside = not inside and bool(reasoning_of(message))
    calls = len(message.get("tool_calls") or ())
    known = _ROLE_KEYS | _OF_RESULTS if message["role"] == "tool" else _ROLE_KEYS
    others = frozenset((key, isinstance(message[key], str)) for key in message.keys() - known)
    return _Shape(message["role"], bool(words.strip()), inside, beside, calls, others)


def _stand_ins(messages: Sequence[Message]) -> tuple[list[Message], list[_Part]]:
    """A conversation of the same shape, and its parts."""
    made: list[Message] = []
    parts: list[_Part] = []
    for index, message in enumerate(messages):
        role, words, inside, beside, calls, others = _shape(message)

        def stands(name: str, mark: str, index: int = index) -> str:
            parts.append((index, name, word := f"zq{index}{mark}qz"))
            return word

        content = stands("the system message" if role == "system" else f"text of the {role}", "w") if words else ""
        fresh: dict[str, Any] = {"role": role, "content": content}
        for number, (key, is_text) in enumerate(sorted(others)):
            fresh[key] = stands(repr(key), f"k{number}") if is_text else message[key]
        if inside:
            fresh["content"] = f"<think>\n{stands('<think>…</think>', 'r')}\n</think>\n\n{content}"
        if beside:
            fresh[REASONING[0]] = stands(REASONING[0], "r")
        if calls:
            names = [stands("tool calls", f"c{number}") for number in range(calls)]
            fresh["tool_calls"] = [
                {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
                for number, name in enumerate(names)
            ]
        made.append(fresh)
    return made, parts
