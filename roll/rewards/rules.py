"""Verifiers by rule: final numbers, multiple choice, format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem, pattern_problems
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, last_boxed, last_group
from roll.rewards.types import RuleVerifier, Sample, Verdict

MAX_NUMBER_CHARS = 1000
"""Longer numbers are no answers; Python refuses to convert more than 4300 digits."""


class FinalAnswerConfig(AnswerConfig):
    """``args`` of ``gsm8k``."""

    method: Literal["strict", "flexible"] = Field(
        default="strict",
        description="`strict`: the number stands in `<answer>` or behind `####`. `flexible`: else the last number of "
        "the text counts.",
    )


_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9a-zA-Z)])-)?\$?"
    r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:\s?/\s?(?P<denominator>[0-9]+)(?![0-9.,/]))?"
)


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly: ``-1,234.50``, ``$72.``, ``3/4``.

    >>> last_number("She pays $1,234.50.")
    Fraction(2469, 2)
    """
    match = None
    for match in _NUMBER.finditer(text.replace("−", "-").replace("\\$", "$")):  # noqa: B007
        pass
    if match is None or len(match[0]) > MAX_NUMBER_CHARS:
        return None
    value = Fraction(match["number"].replace(",", ""))
    denominator = int(match["denominator"] or 1)
    if denominator == 0:
        return None
    return (-value if match["sign"] else value) / denominator


def number_text(value: Fraction) -> str:
    """A number in one spelling: ``72``, ``0.5``, ``1/3``."""
    denominator = value.denominator
    for factor in (2, 5):
        while denominator % factor == 0:
            denominator //= factor
    if value.denominator == 1 or denominator != 1:
        return str(value)
    digits = value.denominator.bit_length()
    scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
    return ("-" if value < 0 else "") + f"{scaled[:-digits]}.{scaled[-digits:].rstrip('0')}"


class FinalAnswerVerifier(RuleVerifier):
    """GSM8K's final number: the last one in ``<answer>``, or on the line behind the last ``####``.

    The ground truth is a number or a whole solution that ends in ``#### 72``. Numbers are compared exactly.
    """

    config_class: ClassVar[type[Config]] = FinalAnswerConfig
    config: FinalAnswerConfig
    best = 1.0

    def check(self, sample: Sample) -> Verdict:
        """Raises ``ValueError`` when the ground truth holds no number."""
        expected = _number_truth(sample.ground_truth)
        region = self.region(sample.response)
        found = None if region is None else last_number(region)
        if found is None:
            return Verdict(score=0.0, correct=False)
        correct = found == expected
        return Verdict(score=float(correct), correct=correct, answer=number_text(found))

    def region(self, response: str) -> str | None:
        """The part of the response in which the last number is the answer."""
        if self.config.answer_pattern is not None:
            return last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
        said = after_thoughts(response)
        marked = last_group(ANSWER_TAG, said)
        if marked is None:
            marked = _behind_hashes(said)
        return said if marked is None and self.config.method == "flexible" else marked


def _number_truth(truth: Any) -> Fraction:
    number = None
    if isinstance(truth, str):
        marked = _behind_hashes(truth)
        number = last_number(truth if marked is None else marked)
    elif isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth):
        number = Fraction(repr(truth))
    if number is None:
        raise ValueError(f"ground_truth: seen {truth!r}, expected a number, or a solution that ends in '#### 72'")
    return number


def _behind_hashes(text: str) -> str | None:
    """The first line behind the last ``####``."""
    _, mark, rest = text.rpartition("####")
    return rest.lstrip().partition("\n")[0] if mark else None


class MultipleChoiceConfig(AnswerConfig):
    """``args`` of ``multiple_choice``."""

    num_choices: int = Field(default=10, ge=2, le=26, description="Choices are the letters from A; 10 is A to J.")


class MultipleChoiceVerifier(RuleVerifier):
    """A letter: in ``<answer>``, in ``\\boxed{}``, behind "answer:" or "answer is", or as all that the last line says.

    The first of these marks that occurs decides, by its last occurrence. Two letters there ("A or B") are no answer.
    """

    config_class: ClassVar[type[Config]] = MultipleChoiceConfig
    config: MultipleChoiceConfig
    best = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        last = chr(ord("A") + self.config.num_choices - 1)
        letter = f"[A-{last}]"
        # Bounded repetitions: a policy that writes thousands of blanks must not cost the square of them.
        wrap = r"[\s*_`$(\[{\"'.:]{0,10}(?:\\(?:text|mathrm|mathbf|textbf)\s?\{)?[\s*_`(\[{]{0,10}"
        self._whole = re.compile(rf"{wrap}({letter})[\s*_`$)\]}}\"'.,:;!]*", re.IGNORECASE)
        self._labelled = re.compile(rf"{wrap}({letter})[\s*_`]{{0,10}}[)\]}}.:][*_`]{{0,10}}\s.*", re.DOTALL)
        # A and I are words too, so what follows a bare one must not make it one.
        bare = rf"(?!I[^\S\n]+[^\W\d_]|A[^\S\n]+(?!(?:because|since|as|and|or)\b)[^\W\d_]){letter}"
        self._phrase = re.compile(
            rf"(?i:\banswer\b|\boption\b|\bchoice\b)[\s*_]{{0,10}}(?i:is|:|=)[\s*_:]{{0,10}}(?i:option\s+|choice\s+)?"
            rf"{wrap}({bare})(?!\w|['’]\w)(?=(?P<rest>[^\n]{{0,40}}))"
        )
        self._second = re.compile(rf"[\s*_)\]}}$\"']*(?:,|/|&|\band\b|\bor\b)[\s*_(\[{{]*{letter}(?!\w)")
        self._parenthesised = re.compile(rf"\(({letter})\)")

    def check(self, sample: Sample) -> Verdict:
        """Raises ``ValueError`` when the ground truth is no letter."""
        truth = sample.ground_truth
        expected = self.letter(truth) if isinstance(truth, str) else None
        if expected is None:
            raise ValueError(f"ground_truth: seen {truth!r}, expected the letter of one of {self.config.num_choices}")
        answer = self.extract(sample.response)
        return Verdict(score=float(answer == expected), correct=answer == expected, answer=answer)

    def extract(self, response: str) -> str | None:
        """The chosen letter, upper case; ``None`` if there is none or more than one."""
        if self.config.answer_pattern is not None:
            marked = last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
            return None if marked is None else self.letter(marked)
        said = after_thoughts(response)
        for marked in (last_group(ANSWER_TAG, said), last_boxed(said)):
            if marked is not None:
                return self.letter(last_boxed(marked) or marked)
        phrases = list(self._phrase.finditer(said))
        if phrases:
            return None if self._second.match(phrases[-1]["rest"]) else str(phrases[-1][1])
        lines = said.strip().splitlines()
        return self.letter(lines[-1]) if lines else None

    def letter(self, text: str) -> str | None:
        """The letter that a short text is or starts with: ``b``, ``(B)``, ``B. Paris``, ``\\text{B}``."""
        if whole := self._whole.fullmatch(text):
            return str(whole[1]).upper()
        labelled = self._labelled.fullmatch(text)
        distinct = set(self._parenthesised.findall(text))
        if labelled and distinct <= {labelled[1]}:
            return str(labelled[1])
        phrases = list(self._phrase.finditer(text))
        if phrases and not self._second.match(phrases[-1]["rest"]):
            return str(phrases[-1][1])
        return str(distinct.pop()) if len(distinct) == 1 else None


class FormatConfig(Config):
    """``args`` of ``format``."""

    pattern: str | None = Field(
        default=None,
        description="Regular expression that the whole response must match (`.` matches line breaks too). null: "
        "`<think>…</think>`, then `<answer>…</answer>`, each exactly once, with nothing around them.",
    )
    score: float = Field(default=1.0, allow_inf_nan=False, description="Score of a response that matches.")
    penalty: float = Field(default=0.0, le=0, allow_inf_nan=False, description="Score of one that does not.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from pattern_problems("pattern", self.pattern, groups=0)


_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""The format of DeepSeek-R1-Zero (Guo et al. 2025, https://arxiv.org/abs/2501.12948)."""


class FormatVerifier(RuleVerifier):
    """Tells whether the whole response has a form."""

    config_class: ClassVar[type[Config]] = FormatConfig
    config: FormatConfig

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, FormatConfig)
        return max(config.score, config.penalty)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = re.compile(self.config.pattern or THINK_ANSWER, re.DOTALL)

    def check(self, sample: Sample) -> Verdict:
        matches = self._pattern.fullmatch(sample.response) is not None
        score = self.config.score if matches else self.config.penalty
        return Verdict(score=score, correct=matches, seeks_answer=False)


class LengthConfig(Config):
    """``args`` of ``length``."""

    min_tokens: int = Field(ge=0, description="Answers of at most so many tokens get the whole penalty.")
    max_tokens: int = Field(ge=1, description="Answers of so many tokens or more get none.")
    penalty: float = Field(
        default=-0.5, allow_inf_nan=False, description="Score of the shortest; that of the longest is 0."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.max_tokens <= self.min_tokens:
            yield self.problem("max_tokens", f"more than min_tokens = {self.min_tokens}", "min_tokens")


class LengthVerifier(RuleVerifier):
    """Lowers the score of short answers: ``penalty`` up to ``min_tokens``, from there in a straight line to 0.

    With a positive ``penalty`` short answers gain. Lengths are sampled tokens.
    """

    config_class: ClassVar[type[Config]] = LengthConfig
    config: LengthConfig

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, LengthConfig)
        return max(config.penalty, 0.0)

    def check(self, sample: Sample) -> Verdict:
        low, high = self.config.min_tokens, self.config.max_tokens
        missing = min(max(high - sample.num_tokens, 0) / (high - low), 1.0)
        return Verdict(score=self.config.penalty * missing, correct=missing == 0, seeks_answer=False)
