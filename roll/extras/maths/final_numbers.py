"""Verifier of final numbers, such as those of GSM8K: marked, behind ####, or the last one of the text."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.extras.maths.prose import ALTERNATIVES, BOUNDS, NEGATIONS, corrected, denied, last_expression
from roll.extras.maths.units import canonical_unit
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, last_group
from roll.rewards.types import ANSWER_CPU_S, RewardResult, RuleVerifier, Sample

MAX_NUMBER_CHARS = 1000
"""Longer numbers are no answers; Python refuses to convert more than 4300 digits."""
MAX_UNIT_WORDS = 6
"""Behind a number."""


class FinalAnswerConfig(AnswerConfig):
    """``args`` of ``gsm8k``."""

    method: Literal["strict", "flexible"] = Field(
        default="strict",
        description="`strict`: the number is in `<answer>` or after `####`. `flexible`: else the last number of the "
        "text counts.",
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
    said = _amount(plain, question) or _amount(last_expression(plain) or "", question)
    if said is None:
        return None
    if re.search(_CURRENCY, said["amount"]) and re.match(r"\s*[mM]\b", said["unit"]):  # millions
        return None
    return _value(_NUMBER.fullmatch(said["amount"]))


def _amount(text: str, question: str) -> re.Match[str] | None:
    """A number and its unit, if the text is nothing else."""
    said = _WHOLE.fullmatch(text)
    return said if said and _names_unit(said["unit"], question) else None


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

    def check(self, sample: Sample) -> RewardResult:
        """Raises ``ValueError`` when the ground truth holds no number."""
        expected = _number_truth(sample)
        region, is_prose = self.region(sample.response)
        found = None if region is None else last_number(region) if is_prose else whole_number(region, sample.prompt)
        if found is None:
            return RewardResult(score=0.0, correct=False)
        correct = found == expected
        return RewardResult(score=float(correct), correct=correct, answer=number_text(found))

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
        raise ValueError(f"ground_truth: got {truth!r:.200}, expected a number, or a solution that ends in '#### 72'")
    return number


def _behind_hashes(text: str) -> str | None:
    """The first line behind the last ``####``, if nothing behind it takes it back."""
    _, mark, rest = text.rpartition("####")
    line, _, behind = rest.lstrip().partition("\n")
    taken_back = behind.strip() and (denied("", behind.lstrip()) or corrected(behind))
    return None if not mark or taken_back else line
