"""The verifier of mathematical answers, by math-verify and SymPy."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from decimal import Decimal
from typing import Any, ClassVar, cast

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, last_boxed, last_group
from roll.rewards.types import RuleVerifier, Sample, Verdict

MAX_SEARCHED_CHARS = 4000
"""Only this much of a response's end is searched for an expression that nothing marks as the answer: math-verify's
regular expressions take the square of it (0.8 s for this much on a bad text)."""

MAX_PARSED_CHARS = 500
"""Longer answers are compared as texts: the LaTeX parser takes 10 ms per character of a bad one."""


class MathConfig(AnswerConfig):
    """``args`` of ``math``."""

    strict_boxed: bool = Field(
        default=False,
        description="The answer must stand in `\\boxed{}`. Otherwise `<answer>` and `\\boxed{}` are looked for, then "
        "the last expression of the text. What stands before `</think>` is no answer.",
    )

    def problems(self) -> list[ConfigProblem]:
        found = super().problems()
        if self.strict_boxed and self.answer_pattern is not None:
            found.append(self.problem("strict_boxed", "false beside answer_pattern: one of the two", "answer_pattern"))
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
            marked = last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
        elif self.config.strict_boxed:
            marked = last_boxed(after_thoughts(response))
        else:
            said = after_thoughts(response)
            tagged = last_group(ANSWER_TAG, said)
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
