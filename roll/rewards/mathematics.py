"""The verifier of mathematical answers: where the answer stands, and whether it is the reference answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, ClassVar

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, last_boxed, last_group
from roll.rewards.maths.units import MULTIPLIERS, is_unit
from roll.rewards.types import RuleVerifier, Sample, Verdict

MAX_SEARCHED_CHARS = 4000
"""Only this much of a response's end is searched for an expression that nothing marks as the answer."""


class MathConfig(AnswerConfig):
    """``args`` of ``math``."""

    strict_boxed: bool = Field(
        default=False,
        description="The answer must stand in `\\boxed{}`. Otherwise `<answer>` and `\\boxed{}` are looked for, then "
        "the last expression of the text. What stands before `</think>` is no answer.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.strict_boxed and self.answer_pattern is not None:
            yield self.problem("strict_boxed", "false beside answer_pattern: one of the two", "answer_pattern")


class MathVerifier(RuleVerifier):
    """Mathematical equality, of answers that are understood as a whole; others must be the same text.

    The answer is the content of the last ``<answer>``, or the last ``\\boxed{}`` (or several that only commas, "and" or
    "or" separate), or the last expression of the text. It is read by ``maths.reader`` and compared by
    ``maths.equality``: exactly, but for decimal numbers of six digits and more; sets without order; units where both
    sides have one.
    """

    config_class: ClassVar[type[Config]] = MathConfig
    config: MathConfig
    best = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # SymPy takes half a second that the first sample need not wait for.
        import roll.rewards.maths.equality  # noqa: F401

    def check(self, sample: Sample) -> Verdict:
        """Raises ``ValueError`` when the ground truth is no expression."""
        from roll.rewards.maths.equality import name_of, same
        from roll.rewards.maths.reader import read

        truth = _math_truth(sample.ground_truth).strip()
        if not truth:
            raise ValueError(f"ground_truth: seen {sample.ground_truth!r}, expected a mathematical expression")
        found = self.extract(sample.response)
        if found is None:
            return Verdict(score=0.0, correct=False)
        answer = read(found)
        correct = same(read(truth), answer)
        return Verdict(score=float(correct), correct=correct, answer=name_of(answer))

    def extract(self, response: str) -> str | None:
        """The text of the answer, ``None`` if there is none."""
        if self.config.answer_pattern is not None:
            marked = last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
        elif self.config.strict_boxed:
            marked = last_boxed(after_thoughts(response))
        else:
            said = after_thoughts(response)
            tagged = last_group(ANSWER_TAG, said)
            boxed = last_boxed(said if tagged is None else tagged)
            if boxed is not None:
                return boxed
            if tagged is None:
                return last_expression(said)
            marked = tagged
        return None if marked is None else _said_in(marked)


def _math_truth(truth: Any) -> str:
    if isinstance(truth, float) and math.isfinite(truth):
        # 1e-05 would be read as e - 5.
        return format(Decimal(repr(truth)), "f")
    if isinstance(truth, bool) or not isinstance(truth, str | int):
        raise ValueError(f"ground_truth: seen {truth!r}, expected a mathematical expression as text, or a number")
    text = str(truth)
    return last_boxed(text) or _said_in(text)


def _said_in(marked: str) -> str:
    """The expression in a sentence that is marked as the answer; where none says so, all of it is the answer."""
    if not _PROSE.search(_TEXT.sub("", marked)):
        return marked
    return _behind_cue(marked) or _last_marked(marked) or marked


# --- answers that nothing marks ---------------------------------------------------------------------------------------

_WORD = r"(?<![\\\w{])[^\W\d_]{2,}"
_PROSE = re.compile(rf"\$[^$]*[^\s$][^$]*\$|\\[(\[]|\\boxed|{_WORD}[,:]?\s+(?:{_WORD}|[-−(]?\d|\(?[A-J]\b)")
"""Two words, a word before a number, or LaTeX that is marked as such: the expression in it must be found."""
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{[^{}]*\}")
_QUALIFIED = re.compile(
    r"\b(?:at least|at most|than|not|no|between|about|approximately|around|over|under|up to|nearly)\b[^.\n]{0,40}$",
    re.IGNORECASE,
)
"""Words after which a number is not the answer."""
_CUE = re.compile(
    r"\banswer\b[\s*_]{0,5}(?:(?:is|are|should be|must be|would be|equals)\b|:|=)[\s*_:]{0,5}", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)(?![^$]{0,200}\$(?:\s|[.,]|$))|\n\s*\n")
_MATHS = re.compile(r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*")
_MATHY = re.compile(
    r"(?:[\d+\-−*/^=<>≤≥()\[\]{}|.,:;!%°$€£±×·÷√π∞∪∩′_&~]|\\[a-zA-Z]+|\\.|(?<![^\W\d_])[^\W\d_](?![^\W\d_])"
    r"|sqrt|sin|cos|tan|log|ln|exp|pi|infinity|frac)+"
)
_SUBSTANCE = re.compile(r"\d|\\(?!f?boxed\b|fbox\b)[a-zA-Z]|π|∞|√")


def last_expression(text: str) -> str | None:
    """The answer in prose: behind "the answer is", else in the last LaTeX, else the last run of mathematical signs."""
    tail = text[-MAX_SEARCHED_CHARS:].strip()
    return _behind_cue(tail) or _last_marked(tail) or _last_run(tail)


def _behind_cue(text: str) -> str | None:
    """The expression that a few words behind "the answer is" hold."""
    cues = list(_CUE.finditer(text))
    if not cues:
        return None
    rest = text[cues[-1].end() :]
    end = _SENTENCE_END.search(rest)
    said = (rest[: end.start()] if end else rest).strip().strip("*_").strip()
    marked = _last_marked(said)
    if marked is not None:
        return marked
    choice = re.match(r"(?:option|choice)?\s*(\(?[A-J]\)?)(?![\w'’])(?:[.:,]|$|\s+(?=because|since|as\b))", said)
    if choice:
        return choice[1]
    return _last_run(said) or (said if said and not _PROSE.search(said) else None)


def _last_marked(text: str) -> str | None:
    """The last ``$…$``, with those before it that a comma or a conjunction joins to it."""
    found: list[str] = []
    following: int | None = None
    for match in reversed(list(_MATHS.finditer(text))):
        if following is not None and not _BETWEEN.fullmatch(text[match.end() : following]):
            break
        content = next(group for group in match.groups() if group is not None).strip()
        if not content or re.search(rf"{_WORD}\s+{_WORD}", content):
            break
        found.append(content)
        following = match.start()
    return ", ".join(reversed(found)) or None


def _last_run(text: str) -> str | None:
    """The last words that are all signs, numbers, single letters; with a known unit behind them."""
    for line in reversed(text.splitlines()):
        words = [word.strip("*_`\"'“”") for word in line.split()]
        end = len(words)
        while end > 0:
            if not _is_mathy(words[end - 1]):
                end -= 1
                continue
            start = end - 1
            while start > 0 and (_is_mathy(words[start - 1]) or _joins(words, start - 1)):
                if words[start - 1][-1:] in ".;:!?" and not _joins(words, start - 1):
                    break
                start -= 1
            run = _with_unit(words, start, end)
            if _SUBSTANCE.search(run):
                return line if _QUALIFIED.search(" ".join(words[:start])) else run
            end = start
    return None


def _is_mathy(word: str) -> bool:
    return bool(_MATHY.fullmatch(word)) and word not in ("a", "A", "I", "-", ".", ",", ":", "–")


def _joins(words: list[str], index: int) -> bool:
    """``3 or 4``: a conjunction between two numbers."""
    return words[index] in ("and", "or") and index > 0 and _is_mathy(words[index - 1])


def _with_unit(words: list[str], start: int, end: int) -> str:
    run = words[start:end]
    for word in words[end : end + 2]:
        bare = word.rstrip(".,;:!?")
        if run[-1][-1:] in ".,;:!?" or not (is_unit(bare) or bare in MULTIPLIERS or bare in ("percent", "%")):
            break
        run.append(bare)
    text = " ".join(run)
    return text if text.endswith("!") and re.search(r"[\w)]!$", text) else text.rstrip(".,;:!?")
