"""The program in a response: its blocks of code as models write them, and which of them is the answer.

A CommonMark parser does not find them: a block whose fence is closed behind its last line of code, or that is opened
behind ``<answer>`` or at the end of a sentence, or whose docstring has a fence of its own, is none to it.

One program is tried, never several, so an answer gains nothing by offering more than one:

- of a function or class that the tests call, the *last* block that defines it, whether it is right or not;
- of a program that reads its input, the last block that does so, else the last one that is marked as Python;
- the definitions that this block uses and lacks come from the blocks before it, and lines that go on with an indented
  block from those behind it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from roll.rewards.answers import after_thoughts


@dataclass(frozen=True)
class Asked:
    """What the tests need of the program."""

    names: frozenset[str] = frozenset()
    """Functions and classes that they call; none for a program."""
    input: bool = False
    """It is a program with input."""


@dataclass(frozen=True)
class Block:
    """A block of code in a text."""

    language: str
    """In small letters; empty where it does not say."""
    code: str
    closed: bool = True
    session: bool = False
    """It was an interactive session, whose prompts and outputs are left out."""


def extract_code(
    response: str,
    where: Literal["fence", "answer", "whole"],
    asked: Asked | None = None,
    *,
    finished: bool = False,
) -> str | None:
    """The program in a response, ``None`` where there is none.

    Args:
        finished: the response was not cut off by its length limit: a block that is open at its end is whole.
    """
    text = after_thoughts(response).replace("\r\n", "\n").replace("\r", "\n")
    if "</think>" not in response and response.lstrip().startswith("<think>"):
        return None
    if where == "whole":
        return text.strip() or None
    if where == "answer":
        _, opening, rest = text.rpartition("<answer>")
        text, closing, _ = rest.partition("</answer>")
        if not opening or not closing:
            return None
    asked = asked or Asked()
    fenced, around = _fenced_blocks(text)
    program = _program([block for block in fenced if _is_python(block) and (block.closed or finished)], asked)
    if program is None or (asked.names and not _defined(program) & asked.names):
        bare = [block for block in _bare_blocks(around, asked) if block.closed or finished]
        program = _program(bare, asked) or program
    return program or (text.strip() or None if where == "answer" and not fenced else None)


# --- fences

_BEFORE = re.compile(r"(?:[ \t]|>|[-*+•][ \t]|\d+[.)][ \t]|</?\w+>)*")
_LANGUAGE = re.compile(r"[{\s]*\.?([\w+#.-]*)")
_ONE_LINE = re.compile(r"[ \t]*```(?:(?:python|py)\d?[ \t]+)?([^`\n]+)```[ \t]*")
_WORD = re.compile(r"[a-zA-Z][\w+#]*")
_MARKDOWN = ("markdown", "md")
_NO_LANGUAGE = ("text", "txt", "plaintext", "plain", "code")
_TAG = re.compile(r"\s*</\w+>\s*")


@dataclass(frozen=True)
class _Opening:
    """A line that opens a block."""

    before: str
    run: str
    info: str

    @property
    def language(self) -> str:
        match = _LANGUAGE.match(self.info)
        return (match[1] if match else "").lower()


def _fenced_blocks(text: str, inside: bool = False) -> tuple[list[Block], str]:
    """The fenced blocks, and the text around them; of a block of Markdown those inside, unless it is ``inside`` one."""
    lines = text.split("\n")
    blocks: list[Block] = []
    around: list[str] = []
    at, strict = 0, True
    while at < len(lines):
        line = lines[at]
        at += 1
        if single := _ONE_LINE.fullmatch(line):
            blocks.append(Block("", single[1].strip() + "\n"))
        elif (opening := _opening(line)) is None:
            around.append(line)
        else:
            end = _closing(lines, at, opening, strict)
            strict &= end.sure  # a text whose quotes or fences do not match is read to its end once only
            body = [*lines[at : end.line], *end.rest]
            block = _block(body, opening, end.closed)
            within = _fenced_blocks(block.code, inside=True)[0] if block.language in _MARKDOWN and not inside else []
            blocks += within or [block]
            at = end.after
            around.append("")
    return blocks, "\n".join(around)


def _opening(line: str) -> _Opening | None:
    """Behind a sentence the fence that opens a block must say its language, or stand behind a colon."""
    at = min((place for place in (line.find("```"), line.find("~~~")) if place >= 0), default=-1)
    if at < 0:
        return None
    before, rest = line[:at], line[at:].lstrip(line[at])
    opening = _Opening(before, line[at : len(line) - len(rest)], rest.strip())
    if "`" in before or "`" in rest:
        return None
    after_text = opening.run[0] == "`" and (
        _WORD.fullmatch(opening.info) or (not opening.info and before.rstrip()[-1:] in (":", ">"))
    )
    return opening if after_text or _BEFORE.fullmatch(before) else None


def _block(body: Sequence[str], opening: _Opening, closed: bool) -> Block:
    quoted = ">" in opening.before and "<" not in opening.before
    if quoted:
        body = [re.sub(rf"^(?:[ \t]*> ?){{0,{opening.before.count('>')}}}", "", line) for line in body]
    around = len(opening.before) if not quoted and not opening.before.strip(" *-+•.)0123456789") else 0
    room = min([around, *(len(line) - len(line.lstrip(" ")) for line in body if line.strip())])
    code = "\n".join(line[room:] for line in body)
    session = code.lstrip().startswith(">>>")
    if session:
        prompts = re.finditer(r"^[ \t]*(?:>>>|\.\.\.)(?: (.*))?$", code, re.MULTILINE)
        code = "\n".join(prompt[1] or "" for prompt in prompts)
    return Block(opening.language, code + "\n", closed, session)


@dataclass(frozen=True)
class _End:
    """Where a block ends."""

    line: int
    """The first that is not its code as a whole."""
    after: int
    """The first behind the block."""
    rest: tuple[str, ...] = ()
    """Code before the closing fence in the same line."""
    closed: bool = True
    sure: bool = True


def _closing(lines: Sequence[str], start: int, opening: _Opening, strict: bool) -> _End:
    """The end of a block: its first closing fence.

    Where ``strict``, a fence in a string of several lines (a docstring), and one shorter than the opening, closes
    nothing, unless nothing else does.
    """
    doubtful: _End | None = None
    quote, tracks = "", strict and _is_python_name(opening.language)
    for at in range(start, len(lines)):
        end, run = _end_at(lines[at], at, opening.run[0])
        if end is not None:
            in_string, in_comment = _quote_after("".join(end.rest), quote) if tracks else ("", False)
            if not strict or (len(run) >= len(opening.run) and not in_string and not in_comment):
                return end
            doubtful = doubtful or end
        if tracks:
            quote = _quote_after(lines[at], quote)[0]
    tag = next((at for at in range(start, len(lines)) if doubtful is None and _TAG.fullmatch(lines[at])), None)
    last = doubtful or (_End(tag, tag) if tag is not None else _End(len(lines), len(lines), closed=False))
    return _End(last.line, last.after, last.rest, last.closed, sure=False)


def _end_at(line: str, at: int, mark: str) -> tuple[_End | None, str]:
    """The end of a block in this line, if there is one, and its fence."""
    bare = line.lstrip(" \t>")
    behind = bare.lstrip(mark)
    run = bare[: len(bare) - len(behind)]
    if len(run) >= 3:
        if mark in behind:
            return None, run
        again = re.fullmatch(r"[a-z][a-z0-9+#]*", behind.strip())  # the next block opens, and this one never closed
        return _End(at, at if again else at + 1), run
    code = re.sub(r"</\w+>$", "", line.rstrip()).rstrip()
    before = code.rstrip(mark)
    run = code[len(before) :]
    return (_End(at, at + 1, (before.rstrip(),)) if len(run) >= 3 else None), run


_STRINGS = re.compile(r"""\"\"\"|'''|#|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?""")


def _quote_after(line: str, quote: str) -> tuple[str, bool]:
    """The quotes of the string of several lines that is open behind a line, and whether the line ends in a comment."""
    at = 0
    while True:
        if quote:
            end = re.compile(rf"(?:\\.|(?!{quote}).)*{quote}").match(line, at)
            if end is None:
                return quote, False
            at, quote = end.end(), ""
        found = _STRINGS.search(line, at)
        if found is None or found[0] == "#":
            return "", found is not None
        at = found.end()
        quote = found[0] if found[0] in ('"""', "'''") else ""


# --- code without fences

_STARTS = re.compile(
    r"from\s+[\w.]+\s+import\s.+|import\s+[\w.]+(?:\s*,\s*[\w.]+|\s+as\s+\w+)*\s*(?:#.*)?"
    r"|(?:async\s+)?def\s+\w+\s*\(.*|class\s+\w+\s*(?:\(.*\))?:.*|@\w[\w.]*(?:\(.*\))?"
    r"|[A-Za-z_][\w, .\[\]]*[-+*/|&]{0,2}=[^=].*|[A-Za-z_][\w.]*\(.*"
    r"|(?:async\s+)?for\s.+\sin\s.+:.*|(?:while|if|with)\s.+:\s*(?:#.*)?|try:"
)
_GOES_ON = re.compile(r"#.*|[\])}].*|(?:else|finally|except|elif)\b.*:.*|\"\"\".*|'''.*|(?:raise|assert|del|pass)\b.*")
_TAGS = re.compile(r"^[ \t]*(?:</?\w[^<>]*>|<\|\w+\|>)+|(?:</\w+>)+\s*$")
_LONG = 2000
"""Characters of a line that is no code in prose."""


def _bare_blocks(text: str, asked: Asked) -> list[Block]:
    """Stretches of a text that are lines of Python, for a response that has no fences around its program."""
    blocks: list[Block] = []
    lines: list[str] = []
    quote, indent = "", ""
    for line in text.split("\n"):
        line = line if quote or len(line) > _LONG else _TAGS.sub("", line)
        inside = line.removeprefix(indent)
        if lines and (quote or not line.strip() or (line.startswith(indent) and inside[:1] in (" ", "\t"))):
            lines.append(line)
        elif len(line) < _LONG and _STARTS.fullmatch(inside if lines else line.strip()):
            indent = indent if lines else line[: len(line) - len(line.lstrip())]
            lines.append(line)
        elif lines and len(line) < _LONG and _GOES_ON.fullmatch(inside):
            lines.append(line)
        else:
            blocks += _bare(lines)
            lines, indent = [], ""
        quote = _quote_after(line, quote)[0] if lines else ""
    blocks += [Block(block.language, block.code, closed=False) for block in _bare(lines)]
    if asked.names:
        return blocks if any(_defined(block.code) & asked.names for block in blocks) else []
    return blocks if any(_READS.search(block.code) or _WRITES.search(block.code) for block in blocks) else []


def _bare(lines: Sequence[str]) -> list[Block]:
    return [Block("", textwrap.dedent("\n".join(lines)).rstrip() + "\n")] if lines else []


# --- choice

_DEFINITION = re.compile(r"^([ \t]*)(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_STUB = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)[^\n]*:\s*(?:\.\.\.|pass)[ \t]*(?:#[^\n]*)?$", re.MULTILINE)
_ASSIGNED = re.compile(r"^(\w+)[ \t]*(?::[^=\n]+)?=[^=]", re.MULTILINE)
_IMPORTED = re.compile(r"^(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+([^#\n]+)", re.MULTILINE)
_READS = re.compile(r"\binput[ \t]*\(|\bstdin\b|\bopen\([ \t]*0\b|\bfileinput\b|\bos\.read\(")
_WRITES = re.compile(r"\bprint[ \t]*\(|\bstdout\b")
_DOES = re.compile(r"^(?!def\b|class\b|async\b|import\b|from\b)[A-Za-z_]", re.MULTILINE)
_USED = re.compile(r"(?<![\w.])([A-Za-z_]\w*)([ \t]*[(\[.])?")


def _is_python_name(word: str) -> bool:
    """``tool_code`` is Gemini's name of Python."""
    return not word or word.endswith(".py") or re.fullmatch(r"i?py(?:thon)?[\d.]*|tool_code", word) is not None


def _is_python(block: Block) -> bool:
    unnamed = block.language in _NO_LANGUAGE and (_DEFINITION.search(block.code) or _READS.search(block.code))
    return bool(block.code.strip()) and (block.session or bool(unnamed) or _is_python_name(block.language))


class _Names:
    """Names in a piece of code, by patterns: what a policy wrote is not parsed here."""

    def __init__(self, code: str) -> None:
        self.defined = _defined(code)
        """Functions, methods and classes."""
        self.offered = {name for indent, name in _DEFINITION.findall(code) if not indent}
        """Functions and classes that other code can use."""
        self.constants = {name for name in _ASSIGNED.findall(code) if name.isupper() and len(name) > 1}
        parts = [part for found in _IMPORTED.findall(code) for part in found.strip("() \t").split(",")]
        self.imported = {part.split(" as ")[-1].strip().partition(".")[0] for part in parts} - {""}
        used = _USED.findall(code)
        self.called = {name for name, call in used if call}
        self.used = {name for name, _ in used}

    def lacks(self, other: _Names, asked: frozenset[str]) -> bool:
        """Tells whether this code needs what the other has."""
        functions = other.offered - self.defined - self.imported
        others = (other.imported - self.defined - self.imported) | (other.constants - self.constants)
        return bool(functions & (self.called | asked) or others & self.used)

    def add(self, other: _Names) -> None:
        for name, names in vars(other).items():
            getattr(self, name).update(names)


def _defined(code: str) -> set[str]:
    return {name for _, name in _DEFINITION.findall(code)}


def _program(blocks: Sequence[Block], asked: Asked) -> str | None:
    chosen = _choice(blocks, asked)
    if chosen is None:
        return None
    first, end = chosen, chosen + 1
    while first > 0 and _continues(blocks[first].code):
        first -= 1
    while end < len(blocks) and _continues(blocks[end].code):
        end += 1
    parts = [block.code for block in blocks[first:end]]
    if not asked.names and not any(_DOES.search(part) for part in parts):  # a later block may call what they define
        names = _Names("".join(parts))
        parts += [block.code for block in blocks[end:] if _DOES.search(block.code) and names.offered & _called(block)][
            :1
        ]
    names = _Names("".join(parts))
    for block in reversed(blocks[:first]):
        others = _Names(block.code)
        if names.lacks(others, asked.names):
            parts.insert(0, block.code)
            names.add(others)
    code = "".join(parts)
    return textwrap.dedent(code) if len(parts) == 1 else code


def _called(block: Block) -> set[str]:
    return _Names(block.code).called


def _choice(blocks: Sequence[Block], asked: Asked) -> int | None:
    """The number of the block that is the answer."""

    def last(wanted: Iterable[object]) -> int | None:
        return max((number for number, is_wanted in enumerate(wanted) if is_wanted), default=None)

    found = None
    if asked.names:
        found = last(asked.names & (_defined(block.code) - set(_STUB.findall(block.code))) for block in blocks)
        found = last(asked.names & set(_ASSIGNED.findall(block.code)) for block in blocks) if found is None else found
    elif asked.input:
        found = last(_READS.search(block.code) for block in blocks)
    for ways in ((block.language and not block.session for block in blocks), (not block.session for block in blocks)):
        found = last(ways) if found is None else found
    return found


def _continues(code: str) -> bool:
    """Tells whether a block goes on in the middle of the one before it: its first line is indented, and opens nothing
    that could stand alone."""
    first = next((line for line in code.split("\n") if line.strip()), "")
    alone = re.match(r"(?:async\s+)?(?:def\s+\w+\s*\((?!\s*self\b)|class\s|import\s|from\s)", first.strip())
    return first[:1] in (" ", "\t") and alone is None
