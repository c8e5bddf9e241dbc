"""Verifiers by rule: final numbers, multiple choice, format."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem, pattern_problems
from roll.extras.maths.choices import ChoiceReader
from roll.extras.maths.marks import denied
from roll.extras.maths.prose import corrected, last_expression
from roll.extras.maths.units import canonical_unit
from roll.extras.maths.words import ALTERNATIVES, BOUNDS, NEGATIONS
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, all_boxed, last_box, last_boxed, last_group
from roll.rewards.types import ANSWER_CPU_S, RuleVerifier, Sample, Verdict

MAX_NUMBER_CHARS = 1000
"""Longer numbers are no answers; Python refuses to convert more than 4300 digits."""
MAX_UNIT_WORDS = 6
"""Behind a number."""


class FinalAnswerConfig(AnswerConfig):
    """``args`` of ``gsm8k``."""

    method: Literal["strict", "flexible"] = Field(
        default="strict",
        description="`strict`: the number stands in `<answer>` or behind `####`. `flexible`: else the last number of "
        "the text counts.",
    )


_SPELLINGS = str.maketrans("０１２３４５６７８９．，－＋＄％／−–\u00a0\u202f", "0123456789.,-+$%/--  ")
_CURRENCY = r"[$€£¥]"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s?{_CURRENCY}?\s?(?P<number>{_DIGITS})(?:\s?/\s?(?P<denominator>[0-9]+))?")
_WHOLE = re.compile(
    # The answer is / x = …
    r"(?:(?:so|thus|therefore|hence)[,\s]\s*)?(?:(?:(?:the|a|my)\s+)?(?:(?:final|correct|total)\s+)?"
    r"(?:answer|result|total|sum|value|number|[a-z]|it)\s*(?:is|equals|=|:)\s*(?:equal to\s+)?"
    r"|答案\s*(?:是|为|:|：)\s*|[=:]\s*)?"
    rf"(?P<amount>[+-]?\s?{_CURRENCY}?\s?(?:{_DIGITS})(?:\s?/\s?[0-9]+)?)(?P<unit>[^0-9]*[²³]?)",
    re.IGNORECASE,
)
_CALCULATION = re.compile(
    r"^(?:[-+*/×÷=().,\s\d$]|\\(?:times|cdot|div)\b|\sx\s)*\d(?:[-+*/×÷=().,\s\d$]|\\(?:times|cdot|div)\b|\sx\s)*="
)
_MARKS = re.compile(
    r"\\boxed|\\(?:text|mathrm|mathbf|textbf|mbox)\b|\\[()\[\]!,;:]|(?<!\\)[{}*`_\"“”]|\\(?=[$%])|\$(?!\s?[0-9.])"
)
"""What changes the looks of a number alone."""
_UNIT_WORD = re.compile(r"[^\W\d_²³]+(?:['’-][^\W\d_²³]+)*|[%°²³]|\$")
_QUANTITY = re.compile(
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w*teen|\w*ty|hundred|thousand|million|billion"
    r"|trillion|dozen|half|halve|third|fourth|fifth|sixth|tenth|hundredth|thousandth|\w*illionth|quarter|score|twice|k|bn|mn|mm|th|st|nd|rd|time|plus|minus"
    r"|squared|cubed|factorial|and|or|to|is|are|was|be|not|no|never|wrong|right|more|less|fewer|than|over|under|least"
    r"|most|about|around|approximately|roughly|nearly|almost|up|guess|mod|e|x|if|but|if|maybe|other|else|too|off|out)"
    r"(?:s|es)?|[百千万萬亿億兆半多余左右约]+.*",
    re.IGNORECASE,
)
"""Words behind a number that make another number or another claim of it."""
_COMMON_UNIT_WORDS = (
    "people children men women feet percent square cubic sq m h g l s each per a an of the in total left remaining away"
    " am pm p"
)
_AROUND_UNITS = frozenset(_COMMON_UNIT_WORDS.split())
_HEDGED = re.compile(
    rf"(?:{BOUNDS}|{NEGATIONS}|{ALTERNATIVES}|\b(?:to|and|but)\b|[<>≤≥±≠×*/^+-]\s?)"
    r"\s*(?:be|is|equal to)?\s*[$€£¥]?\s*$",
    re.IGNORECASE,
)
"""Words before a number in prose that make another claim of it."""


def whole_number(text: str, question: str = "") -> Fraction | None:
    """The number that a text is, exactly; ``None`` where anything else is said: a range, a bound, a power of ten.

    Args:
        question: its words, as those of known units, may stand behind the number.

    >>> whole_number("$1,234.50 per week", "How much is it per week?")
    Fraction(2469, 2)
    >>> whole_number("18 or 19") is None
    True
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    plain = re.sub(r"(?<=[0-9])(?:\\[,!]|\{,\})+(?=[0-9]{3})", ",", text.translate(_SPELLINGS))
    plain = " ".join(_MARKS.sub(" ", plain.strip().rstrip(".!")).split()).rstrip(" .,;")
    plain = _CALCULATION.sub("", plain).strip()
    forms = (_WHOLE.fullmatch(plain), _WHOLE.fullmatch(last_expression(plain) or ""))
    said = next((form for form in forms if form and _names_unit(form["unit"], question)), None)
    if said is None:
        return None
    if re.search(_CURRENCY, said["amount"]) and re.match(r"\s*[mM]\b", said["unit"]):  # millions
        return None
    return _value(_NUMBER.fullmatch(said["amount"]))


def _value(number: re.Match[str] | None) -> Fraction | None:
    """A number as it is written; a division that was not carried out is none."""
    if number is None:
        return None
    value, denominator = Fraction(number["number"].replace(",", "")), int(number["denominator"] or 1)
    if number["denominator"] and (denominator < 2 or value % denominator == 0):
        return None
    return (-value if number["sign"] == "-" else value) / denominator


def _names_unit(text: str, question: str) -> bool:
    """Tells whether the words behind a number are a unit: a known one, the question's, or a plural."""
    text = re.sub(
        r"^\s*(?:%|percent\b|[ap]\.?\s?m\b\.?|(?:per|an?|each|every)\b|/)",
        "",
        text.replace("²", "^2").replace("³", "^3"),
    )
    if not text.strip(" ."):
        return True
    words = _UNIT_WORD.findall(text)
    if len(words) > MAX_UNIT_WORDS or any(map(_QUANTITY.fullmatch, re.split(r"[-\s]", " ".join(words)))):
        return False
    asked = {word.casefold() for word in _UNIT_WORD.findall(question)}
    plurals = {
        word for word in words if len(word) > 3 and word.islower() and word.endswith("s") and not word.endswith("ss")
    }
    return canonical_unit(text, known=asked | plurals | _AROUND_UNITS) is not None


def last_number(text: str) -> Fraction | None:
    """The last number of a text in prose; ``None`` where it is hedged (``18 or 19``) or a part of something else.

    >>> last_number("She pays $1,234.50.")
    Fraction(2469, 2)
    """
    plain = text.translate(_SPELLINGS).replace("\\$", "$")
    number = None
    for number in _NUMBER.finditer(plain):  # noqa: B007
        pass
    if number is None or len(number[0]) > MAX_NUMBER_CHARS:
        return None
    start, end = number.end() - len(number[0].lstrip()), number.end()
    before, behind = plain[max(0, start - 40) : start], plain[end : end + 40]
    # A sign between two numbers is a minus or a range.
    attached = re.match(r"[0-9A-Za-z]|[,/:^]\s?[0-9]|\.[0-9]", behind) or re.search(
        r"[0-9)]\s?$|[A-Za-z]$" if number["sign"] else r"[0-9][.,/:^]?$|[0-9],\s$|[A-Za-z_]$", before
    )
    following = _UNIT_WORD.match(behind.lstrip(" "))
    if attached or _HEDGED.search(before.rpartition("\n")[2]) or (following and _QUANTITY.fullmatch(following[0])):
        return None
    return _value(number)


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
    """GSM8K's final number: all that ``<answer>`` says, or the line behind the last ``####``.

    The ground truth is a number or a whole solution that ends in ``#### 72``. Numbers are compared exactly.
    """

    config_class: ClassVar[type[Config]] = FinalAnswerConfig
    config: FinalAnswerConfig
    cpu_seconds = ANSWER_CPU_S
    best = 1.0

    def check(self, sample: Sample) -> Verdict:
        """Raises ``ValueError`` when the ground truth holds no number."""
        expected = _number_truth(sample)
        region, is_prose = self.region(sample.response)
        found = None if region is None else last_number(region) if is_prose else whole_number(region, sample.prompt)
        if found is None:
            return Verdict(score=0.0, correct=False)
        correct = found == expected
        return Verdict(score=float(correct), correct=correct, answer=number_text(found))

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        _number_truth(sample)

    def region(self, response: str) -> tuple[str | None, bool]:
        """The part of the response that is the answer, and whether it is prose, in which the last number counts."""
        if self.config.answer_pattern is not None:
            return last_group(re.compile(self.config.answer_pattern, re.DOTALL), response), False
        said = after_thoughts(response)
        marked = last_group(ANSWER_TAG, said)
        if marked is None:
            marked = _behind_hashes(said)
        return (said, True) if marked is None and self.config.method == "flexible" else (marked, False)


def _number_truth(sample: Sample) -> Fraction:
    truth, number = sample.ground_truth, None
    if isinstance(truth, str):
        marked = _behind_hashes(truth)
        number = whole_number(truth if marked is None else marked, sample.prompt)
    elif isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth):
        number = Fraction(repr(truth))
    if number is None:
        raise ValueError(f"ground_truth: seen {truth!r:.200}, expected a number, or a solution that ends in '#### 72'")
    return number


def _behind_hashes(text: str) -> str | None:
    """The first line behind the last ``####``, if nothing behind it takes it back."""
    _, mark, rest = text.rpartition("####")
    line, _, behind = rest.lstrip().partition("\n")
    return None if not mark or denied("", behind.lstrip()) or corrected(behind) else line


class MultipleChoiceConfig(AnswerConfig):
    """``args`` of ``multiple_choice``."""

    num_choices: int = Field(default=10, ge=2, le=26, description="Choices are the letters from A; 10 is A to J.")


class MultipleChoiceVerifier(RuleVerifier):
    """A letter: in ``<answer>``, in ``\\boxed{}``, behind "answer:" or "answer is", or as all that the last line says.

    The first of these marks that occurs decides. What it says is understood as a whole or is no answer: neither "A or
    B" nor "B? No, C", nor two boxes with different letters.
    """

    config_class: ClassVar[type[Config]] = MultipleChoiceConfig
    config: MultipleChoiceConfig
    cpu_seconds = ANSWER_CPU_S
    best = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._reader = _choices(self.config.num_choices)

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        assert isinstance(config, MultipleChoiceConfig)
        truth = sample.ground_truth
        if not isinstance(truth, str) or _choices(config.num_choices).whole(truth, sample.prompt) is None:
            raise ValueError(f"ground_truth: seen {truth!r}, expected the letter of one of {config.num_choices}")

    def check(self, sample: Sample) -> Verdict:
        """Raises ``ValueError`` when the ground truth is no letter."""
        self.check_row(self.config, sample)
        expected = self._reader.whole(sample.ground_truth, sample.prompt)
        answer = self.extract(sample.response, sample.prompt)
        return Verdict(score=float(answer == expected), correct=answer == expected, answer=answer)

    def extract(self, response: str, prompt: str = "") -> str | None:
        """The chosen letter, upper case; ``None`` if there is none or more than one.

        Args:
            prompt: the question, for the words of its options.
        """
        if self.config.answer_pattern is not None:
            marked = last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
            return None if marked is None else self._reader.whole(marked, prompt)
        said = after_thoughts(response)
        box = last_box(said)
        if box is not None and denied(box[0], box[2]):
            return None
        for found in ([match[1] for match in ANSWER_TAG.finditer(said)], all_boxed(said)):
            letters = {self._reader.whole(last_boxed(marked) or marked, prompt) for marked in found}
            if found:
                return letters.pop() if len(letters) == 1 else None
        return self._reader.in_prose(said, prompt)


@functools.cache
def _choices(number: int) -> ChoiceReader:
    return ChoiceReader(chr(ord("A") + number - 1))


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
    cpu_seconds = ANSWER_CPU_S

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, FormatConfig)
        return max(config.score, config.penalty)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = re.compile(self.config.pattern or THINK_ANSWER, re.DOTALL)

    @classmethod
    def wrong(cls, config: Config) -> Verdict:
        assert isinstance(config, FormatConfig)
        return Verdict(config.penalty, correct=False, seeks_answer=False)

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
    cpu_seconds = ANSWER_CPU_S

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, LengthConfig)
        return max(config.penalty, 0.0)

    def check(self, sample: Sample) -> Verdict:
        low, high = self.config.min_tokens, self.config.max_tokens
        missing = min(max(high - sample.num_tokens, 0) / (high - low), 1.0)
        return Verdict(score=self.config.penalty * missing, correct=missing == 0, seeks_answer=False)
