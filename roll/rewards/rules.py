"""Verifiers by rule: mathematics, final numbers, multiple choice, format, and a user's own function."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from roll.configs.base import Config
from roll.rewards.types import RewardError, RuleVerifier, Sample, Verdict
from roll.utils.registry import UnknownNameError, import_path

MAX_SEARCHED_CHARS = 4000
"""Only this much of a response's end is searched for an expression that nothing marks as the answer: math-verify's
regular expressions take the square of it (0.8 s for this much on a bad text)."""

MAX_PARSED_CHARS = 500
"""Longer answers are compared as texts: the LaTeX parser takes 10 ms per character of a bad one."""

MAX_NUMBER_CHARS = 1000
"""Longer numbers are no answers; Python refuses to convert more than 4300 digits."""

_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def pattern_problems(pattern: str | None, key: str, groups: int = 1) -> list[str]:
    """Why a regular expression cannot be used; ``groups`` is how many it must have."""
    if pattern is None:
        return []
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        return [f"{key}: seen {json.dumps(pattern)}, expected a regular expression ({error})"]
    if found < groups:
        return [f"{key}: seen {json.dumps(pattern)}, expected a group around the answer, as in <answer>(.*?)</answer>"]
    return []


def after_thoughts(response: str) -> str:
    """What follows the last ``</think>``; the whole text if there is none. An answer in the thoughts is none."""
    return response.rpartition("</think>")[2]


class AnswerConfig(Config):
    """Keys of the verifiers that look for an answer in the response."""

    answer_pattern: str | None = Field(
        default=None,
        description="Regular expression (`.` matches line breaks too) whose first group is the answer; its last match "
        "counts, and nowhere else is looked. null: the usual marks.",
    )

    def problems(self) -> list[str]:
        return pattern_problems(self.answer_pattern, "answer_pattern")


class MathConfig(AnswerConfig):
    """``args`` of ``math``."""

    strict_boxed: bool = Field(
        default=False,
        description="The answer must stand in `\\boxed{}`. Otherwise `<answer>` and `\\boxed{}` are looked for, then "
        "the last expression of the text. What stands before `</think>` is no answer.",
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.strict_boxed and self.answer_pattern is not None:
            found.append("strict_boxed: seen true beside answer_pattern, expected one of the two")
        return found


class MathVerifier(RuleVerifier):
    """Mathematical equality, by `math-verify <https://github.com/huggingface/Math-Verify>`_ and SymPy.

    The answer is the content of the last ``<answer>``, or the last ``\\boxed{}`` (or several that only commas, "and" or
    "or" separate), or the last expression of the text. Equality is math-verify's: exact for numbers and terms, six
    decimals where one side is a decimal fraction that SymPy holds as a float, sets without order.
    """

    config_class: ClassVar[type[Config]] = MathConfig
    config: MathConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # It warns in every process that its timeouts, which need signals, are off; ours are outside.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        import math_verify  # noqa: F401  # half a second that the first sample need not wait for

    def check(self, sample: Sample) -> Verdict:
        """Raises ``ValueError`` when the ground truth is no expression."""
        gold = parse_math(_math_truth(sample.ground_truth))
        if not gold:
            raise ValueError(f"ground_truth: seen {sample.ground_truth!r}, expected a mathematical expression")
        parsed = self.extract(sample.response)
        if not parsed:
            return Verdict(score=0.0, correct=False)
        from math_verify import verify

        correct = bool(verify(gold, parsed, timeout_seconds=None))
        return Verdict(score=float(correct), correct=correct, answer=canonical_math(parsed[0]))

    def extract(self, response: str) -> list[Any]:
        """The answer as ``parse_math`` reads it; empty if there is none."""
        if self.config.answer_pattern is not None:
            marked = _last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
        elif self.config.strict_boxed:
            marked = last_boxed(after_thoughts(response))
        else:
            said = after_thoughts(response)
            tagged = _last_group(_ANSWER_TAG, said)
            marked = last_boxed(said if tagged is None else tagged) or tagged
            if marked is None:
                return _last_expression(said)
        return [] if marked is None else parse_math(marked)


def _math_truth(truth: Any) -> str:
    if isinstance(truth, float) and math.isfinite(truth):
        # 1e-05 would be read as e - 5.
        return format(Decimal(repr(truth)), "f")
    if isinstance(truth, bool) or not isinstance(truth, str | int):
        raise ValueError(f"ground_truth: seen {truth!r}, expected a mathematical expression as text, or a number")
    text = str(truth)
    return last_boxed(text) or text


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


_BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|and|or|,\s*and|,\s*or)[\s$]*(?:[a-z]\s*=\s*)?")


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Start, begin and end of the content of every closed ``\\boxed{}``, in the order in which they close."""
    found = []
    open_braces: list[tuple[int, int] | None] = []
    for match in re.finditer(r"\\f?boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if match[0] == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                found.append((*box, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append(None if match[0] == "{" else (match.start(), match.end()))
    return found


def parse_math(text: str) -> list[Any]:
    """What math-verify reads: an expression (if it understands it) and the text behind it; empty if it sees none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = text.strip()
    if len(text) > MAX_PARSED_CHARS:
        return [text]
    # 1 1/2 would be read as 1.
    text = re.sub(r"(?<![\d/.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", text)
    if _PROSE.search(text) and (found := parse(text, parsing_timeout=None)):
        return cast(list[Any], found)
    found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    if all(isinstance(item, str) for item in found):
        plain = parse(text.replace("\\%", "%"), [ExprExtractionConfig()], parsing_timeout=None)
        return plain or found
    return cast(list[Any], found)


_PROSE = re.compile(r"\$|\\[(\[]|\\boxed|(?<![\\\w{])[^\W\d_]{2,}\s+[^\W\d_]{2,}")
"""Two words, or LaTeX that is marked as such: math-verify must find the expression in it."""


def _last_expression(response: str) -> list[Any]:
    """The last expression of a text in which nothing marks the answer."""
    from math_verify import parse

    tail = response[-MAX_SEARCHED_CHARS:].strip()
    if len(tail) <= MAX_PARSED_CHARS and not _PROSE.search(tail):
        return parse_math(tail)
    return cast(list[Any], parse(tail, parsing_timeout=None))


def canonical_math(expression: Any) -> str:
    """One text for equal answers: 1/2, 0.5 and x = 1/2 give ``1/2``."""
    import sympy

    if isinstance(expression, str):
        return " ".join(expression.split())
    value = expression
    if isinstance(value, sympy.Eq) and (value.lhs.is_Symbol or not value.free_symbols):
        value = value.rhs
    # SymPy raises anything; the unevaluated expression is a good enough name of the answer.
    with contextlib.suppress(Exception):
        simple = sympy.nsimplify(value.doit(), rational=True)
        # All true relations would get one name.
        value = value if simple in (sympy.true, sympy.false) else simple
    try:
        return str(value)
    except ValueError:  # an integer with more digits than Python converts
        return f"number {hash(value)}"


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
            return _last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
        said = after_thoughts(response)
        marked = _last_group(_ANSWER_TAG, said)
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


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """What the last match captured, stripped; ``None`` without a match or when it is blank."""
    last = None
    for match in pattern.finditer(text):
        last = match[1]
    return (last or "").strip() or None


class MultipleChoiceConfig(AnswerConfig):
    """``args`` of ``multiple_choice``."""

    num_choices: int = Field(default=10, ge=2, le=26, description="Choices are the letters from A; 10 is A to J.")


class MultipleChoiceVerifier(RuleVerifier):
    """A letter: in ``<answer>``, in ``\\boxed{}``, behind "answer:" or "answer is", or as all that the last line says.

    The first of these marks that occurs decides, by its last occurrence. Two letters there ("A or B") are no answer.
    """

    config_class: ClassVar[type[Config]] = MultipleChoiceConfig
    config: MultipleChoiceConfig

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
            marked = _last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
            return None if marked is None else self.letter(marked)
        said = after_thoughts(response)
        for marked in (_last_group(_ANSWER_TAG, said), last_boxed(said)):
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

    def problems(self) -> list[str]:
        return pattern_problems(self.pattern, "pattern", groups=0)


_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""The format of DeepSeek-R1-Zero (Guo et al. 2025, https://arxiv.org/abs/2501.12948)."""


class FormatVerifier(RuleVerifier):
    """Whether the whole response has a form."""

    config_class: ClassVar[type[Config]] = FormatConfig
    config: FormatConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = re.compile(self.config.pattern or THINK_ANSWER, re.DOTALL)

    def check(self, sample: Sample) -> Verdict:
        matches = self._pattern.fullmatch(sample.response) is not None
        return Verdict(score=self.config.score if matches else self.config.penalty, correct=matches)


class CustomConfig(Config):
    """``args`` of ``custom``."""

    path: str = Field(
        min_length=1,
        description="package.module:function or folder/file.py:function, called as `compute_score(data_source=…, "
        "solution_str=…, ground_truth=…, extra_info=…)`. Returns a number, or a mapping with `score`, optionally "
        "`correct` (or `acc`) and `answer` (or `pred`), and further numbers, which become metrics.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments.")
    success_score: float = Field(
        default=1.0, description="The lowest score that counts as solved, unless the function says `correct`."
    )

    def problems(self) -> list[str]:
        try:
            function = import_path(self.path, "function")
        except (UnknownNameError, ImportError, SyntaxError) as error:
            expected = "package.module:function or folder/file.py:function that can be imported"
            return [f"path: seen {self.path}, expected {expected} ({error})"]
        if not callable(function) or inspect.iscoroutinefunction(function):
            return [f"path: seen {self.path}, which is {_kind(function)}, expected a plain function"]
        try:
            inspect.signature(function).bind(**_ARGUMENTS, **self.kwargs)
        except TypeError as error:
            known = ", ".join([*_ARGUMENTS, *self.kwargs])
            return [f"path: seen {self.path} ({error}), expected a function of {known}"]
        except ValueError:  # built-in functions have no signature to look at
            return []
        return []


_ARGUMENTS: dict[str, Any] = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))


def _kind(value: object) -> str:
    return "a coroutine function" if inspect.iscoroutinefunction(value) else type(value).__name__


class CustomVerifier(RuleVerifier):
    """A user's function. ``extra_info`` is the row's other columns."""

    config_class: ClassVar[type[Config]] = CustomConfig
    config: CustomConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._function = cast(Callable[..., Any], import_path(self.config.path, "function"))

    def check(self, sample: Sample) -> Verdict:
        """Raises ``RewardError`` when the function returns no finite number."""
        result = self._function(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=dict(sample.extra_info),
            **self.config.kwargs,
        )
        if not isinstance(result, Mapping):
            score = self._number(result, "a result")
            return Verdict(score=score, correct=score >= self.config.success_score)
        if "score" not in result:
            raise RewardError(f"{self.config.path} returned the keys {', '.join(map(str, result))}, expected score")
        rest = dict(result)
        score = self._number(rest.pop("score"), "score")
        correct = _pop_first(rest, ("correct", "acc"))
        answer = _pop_first(rest, ("answer", "pred"))
        return Verdict(
            score=score,
            correct=score >= self.config.success_score if correct is None else bool(correct),
            answer=None if answer is None else str(answer),
            parts={str(name): self._number(value, str(name)) for name, value in rest.items()},
        )

    def _number(self, value: Any, what: str) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            shown = repr(value)[:100]
            raise RewardError(f"{self.config.path} returned {shown} as {what}, expected a finite number")
        return float(value)


def _pop_first(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Takes all ``names`` out; the first that is not null."""
    found = [values.pop(name, None) for name in names]
    return next((value for value in found if value is not None), None)
