"""Finds the answer in a response: after the reasoning, in ``<answer>``, in ``\\boxed{}``, by a pattern."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem, pattern_problems

ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def after_thoughts(response: str) -> str:
    """Text after the last ``</think>``; the whole text if there is none. An answer in the thoughts is none.

    Thoughts that do not end hold no answer either: what stands before an open ``<think>`` is left.
    """
    return response.rpartition("</think>")[2].partition("<think>")[0]


def is_cut_off(said: str) -> bool:
    """Tells whether a text ends within an ``<answer>`` or a ``\\boxed{}``: what was marked before it is no answer."""
    return said.rfind("<answer>") > said.rfind("</answer>") or _boxes(said)[1]


class AnswerConfig(Config):
    """Keys of the verifiers that look for an answer in the response."""

    answer_pattern: str | None = Field(
        default=None,
        description="Regular expression (`.` matches line breaks too) whose first group is the answer; its last match "
        "counts, and nothing else is searched. null: the usual marks.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from pattern_problems("answer_pattern", self.answer_pattern)


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """Capture of the last match, stripped; ``None`` without a match or when it is blank."""
    last = None
    for match in pattern.finditer(text):
        last = match[1]
    return (last or "").strip() or None


def last_boxed(text: str) -> str | None:
    """The content of the last closed ``\\boxed{}``; several that belong together are joined by commas.

    >>> last_boxed(r"\\boxed{0}, no: $x = \\boxed{\\frac{1}{2}}$ or $\\boxed{3}$")
    '\\\\frac{1}{2},3'
    """
    box = last_box(text)
    return None if box is None else box[1]


def last_box(text: str) -> tuple[str, str, str] | None:
    """The text before the last box (or the several that belong together), its content, the text behind it."""
    contents: list[str] = []
    following = len(text)
    behind = ""
    for start, begin, end in reversed(_boxes(text)[0]):
        if contents and (end > following or not _BETWEEN_BOXES.fullmatch(text[end + 1 : following])):
            break
        behind = behind if contents else text[end + 1 :]
        content = text[begin:end].strip()
        if content not in contents:
            contents.append(content)
        following = start
    content = ",".join(reversed(contents))
    return (text[:following], content, behind) if content else None


def all_boxed(text: str) -> list[str]:
    """The contents of all closed boxes that are in no other."""
    outer: list[tuple[int, int, int]] = []
    for box in _boxes(text)[0]:  # inner ones close first
        while outer and outer[-1][0] > box[0]:
            outer.pop()
        outer.append(box)
    return [text[begin:end].strip() for _, begin, end in outer]


_BETWEEN_BOXES = re.compile(
    r"[\s$]*(?:(?:[,;/&(]|\\q?quad|\\text\s*\{\s*(?:and|or),?\s*\}|,?\s*\b(?:and|or|even|also|maybe|perhaps|possibly|else)\b)[\s$]*)"
    r"{0,5}(?:[a-z]\s*=\s*)?"
)


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], bool]:
    """Start, begin and end of the content of every closed ``\\boxed{}`` in order of their ends; whether one is open."""
    found = []
    open_braces: list[tuple[int, int] | None] = []
    for match in re.finditer(r"\\(?:f?boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if match[0] == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                found.append((*box, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append(None if match[0] == "{" else (match.start(), match.end()))
    return found, any(open_braces)


def check_plain(value: Any) -> None:
    """Raises ``ValueError`` for what no answer can be like: a number that is none, or half a character."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"ground_truth: got {value!r}, expected a finite number")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"ground_truth: got {value[:80]!r}, in which character {error.start + 1} is a lone surrogate"
            ) from None
    if isinstance(value, list | Mapping):
        for entry in value if isinstance(value, list) else value.values():
            check_plain(entry)
