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
from roll.extras.maths.prose import corrected, denied, is_part, last_expression, said_in
from roll.rewards.answers import (
    ANSWER_TAG,
    AnswerConfig,
    after_thoughts,
    check_plain,
    is_cut_off,
    last_box,
    last_boxed,
    last_group,
)
from roll.rewards.types import ANSWER_CPU_S, RewardResult, RuleVerifier, Sample

_PLAIN_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")


class MathConfig(AnswerConfig):
    """``args`` of ``math``."""

    strict_boxed: bool = Field(
        default=False,
        description="The answer must be in `\\boxed{}`. Otherwise `<answer>` and `\\boxed{}` are searched, then the "
        "last expression of the text. Text before `</think>` is never an answer.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.strict_boxed and self.answer_pattern is not None:
            yield self.problem("strict_boxed", "false with answer_pattern: one of the two", "answer_pattern")


class MathVerifier(RuleVerifier):
    """Mathematical equality, of answers that are understood as a whole; others must be the same text.

    The answer is the content of the last ``<answer>``, or the last ``\\boxed{}`` (or several that only commas, "and" or
    "or" separate), or the last expression of the text. It is read by ``maths.reader`` and compared by
    ``maths.equality``: exactly, but for decimal numbers of six digits and more; sets without order; units where both
    sides have one.
    """

    config_class: ClassVar[type[Config]] = MathConfig
    config: MathConfig
    cpu_seconds = ANSWER_CPU_S
    best = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # SymPy takes half a second that the first sample need not wait for.
        import roll.extras.maths.equality  # noqa: F401

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        check_plain(sample.ground_truth)
        _math_truth(sample.ground_truth)

    @classmethod
    def tries_row(cls, config: Config, sample: Sample) -> bool:
        return not _PLAIN_NUMBER.fullmatch(str(sample.ground_truth))

    def try_row(self, sample: Sample) -> None:
        """Raises ``ValueError`` for a reference that is not accepted as the answer, wherever it is written."""
        from roll.extras.maths.equality import same
        from roll.extras.maths.reader import readings, same_text

        truth = _math_truth(sample.ground_truth)
        written = [truth]
        if self.config.answer_pattern is None:
            written = [f"\\boxed{{{truth}}}", f"<answer>{truth}</answer>"][: 1 if self.config.strict_boxed else 2]
            written = [found for found in map(self.extract, written) if found is not None]
        references = readings(truth, None)
        pairs = ((gold, answer) for text in written for gold in references for answer in readings(text, None))
        if not (any(same_text(truth, text) for text in written) or any(same(gold, answer) for gold, answer in pairs)):
            raise ValueError(f"ground_truth: got {truth[:80]!r}, which as an answer does not equal itself")

    def check(self, sample: Sample) -> RewardResult:
        """Raises ``ValueError`` when the ground truth is no expression."""
        from roll.extras.maths.equality import name_of, same
        from roll.extras.maths.reader import readings, same_text
        from roll.extras.maths.values import Quantity

        truth = _math_truth(sample.ground_truth)
        references = readings(truth, None)
        measured = any(isinstance(value, Quantity) for value in references)
        found = self.extract(sample.response, sample.truncated, with_nouns=measured)
        if found is None:
            return RewardResult(score=0.0, correct=False)
        # Words of the question and of the reference are known to be what is counted.
        known = frozenset(re.findall(r"[^\W\d_]{2,}", f"{sample.prompt} {truth}".lower()))
        answers = readings(found, known)
        pairs = ((gold, answer) for gold in references for answer in answers)
        match = next((answer for gold, answer in pairs if same(gold, answer)), None)
        correct = match is not None or same_text(truth, found)
        return RewardResult(score=float(correct), correct=correct, answer=name_of(match or answers[0]))

    def extract(self, response: str, truncated: bool = False, with_nouns: bool = False) -> str | None:
        """The text of the answer, ``None`` if there is none.

        Args:
            truncated: the length limit ended the response: its last expression may be half of one.
            with_nouns: words behind a number that nothing marks may be a unit, and are a part of it.
        """
        if self.config.answer_pattern is not None:
            marked = last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
            return None if marked is None else said_in(marked)
        said = after_thoughts(response)
        if is_cut_off(said):
            return None
        tagged = None if self.config.strict_boxed else last_group(ANSWER_TAG, said)
        place = said if tagged is None else tagged
        box = last_box(place)
        if box is not None:
            before, content, behind = box
            # Words that deny the answer are one with it.
            taken_back = place if denied(before, behind) or is_part(before, behind) else None
            return corrected(behind) or taken_back or said_in(content)
        if tagged is not None:
            return said_in(tagged)
        return None if self.config.strict_boxed or truncated else last_expression(said, with_nouns)


def _math_truth(truth: Any) -> str:
    if isinstance(truth, float) and math.isfinite(truth):
        # 1e-05 would be read as e - 5.
        return format(Decimal(repr(truth)), "f")
    if isinstance(truth, bool) or not isinstance(truth, str | int):
        raise ValueError(f"ground_truth: got {truth!r}, expected a mathematical expression as text, or a number")
    text = str(truth)
    found = (last_boxed(text) or said_in(text)).strip()
    if not found:
        raise ValueError(f"ground_truth: got {truth!r}, expected a mathematical expression")
    return found
