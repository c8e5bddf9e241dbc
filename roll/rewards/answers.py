"""Places of the answer in a response: behind the thoughts, in ``<answer>``, in ``\\boxed{}``, by a pattern."""

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
    """Text after the last ``</think>``; the whole text if there is none. An answer in the thoughts is none."""
    return response.rpartition("</think>")[2]


class AnswerConfig(Config):
    """Keys of the verifiers that look for an answer in the response."""

    answer_pattern: str | None = Field(
        default=None,
        description="Regular expression (`.` matches line breaks too) whose first group is the answer; its last match "
        "counts, and nowhere else is looked. null: the usual marks.",
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
    contents: list[str] = []
    following = len(text)
    for start, begin, end in reversed(_boxes(text)):
        if contents and not _BETWEEN_BOXES.fullmatch(text[end + 1 : following]):
            break
        contents.append(text[begin:end].strip())
        following = start
    return ",".join(reversed(contents)) or None


def all_boxed(text: str) -> list[str]:
    """The contents of all closed boxes that are in no other."""
    outer: list[tuple[int, int, int]] = []
    for box in _boxes(text):  # inner ones close first
        while outer and outer[-1][0] > box[0]:
            outer.pop()
        outer.append(box)
    return [text[begin:end].strip() for _, begin, end in outer]


_BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|and|or|,\s*and|,\s*or)[\s$]*(?:[a-z]\s*=\s*)?")


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Start, begin and end of the content of every closed ``\\boxed{}``, in the order in which they close."""
    found = []
    open_braces: list[tuple[int, int] | None] = []
    for match in re.finditer(r"\\(?:f?boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if match[0] == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                found.append((*box, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append(None if match[0] == "{" else (match.start(), match.end()))
    return found


def check_plain(value: Any) -> None:
    """Raises ``ValueError`` for what no answer can be like: a number that is none, or half a character."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"ground_truth: seen {value!r}, expected a finite number")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"ground_truth: seen {value[:80]!r}, in which character {error.start + 1} is half of a surrogate pair"
            ) from None
    if isinstance(value, list | Mapping):
        for entry in value if isinstance(value, list) else value.values():
            check_plain(entry)
