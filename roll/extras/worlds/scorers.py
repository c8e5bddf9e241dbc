"""Scores of an answer against a reference, for environments of one question (``single_turn``'s ``scorer``)."""

from __future__ import annotations

import re
import string

from roll.extras.maths.verifier import MathConfig, MathVerifier
from roll.rewards.answers import ANSWER_TAG, after_thoughts, last_boxed, last_group
from roll.rewards.types import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = re.compile(
    # A sign, a point or a stroke before a digit is a part of the number; so are those of C++ and C#.
    rf"((?<![a-z])[-+](?=\d)|[./:^,](?=\d)|(?<=\d)%|(?<=\w)[+#]+)|[{re.escape(string.punctuation)}]"
)


def mathematical(given: str, answer: str) -> float:
    """1.0 if the answer is mathematically the reference, else 0.0, as the verifier ``math`` finds and reads them.

    Raises:
        ValueError: the reference is no expression.
    """
    sample = Sample(prompt="", response=given, ground_truth=answer, data_source="")
    return MathVerifier(MathConfig()).check(sample).score


def same_words(given: str, answer: str) -> float:
    """1.0 if both are the same words, else 0.0: exact match of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).

    Case, punctuation, articles and spaces do not count, but for the signs of numbers: 1.5 is not 15. The answer stands
    in ``<answer>`` or ``\\boxed{}``, the last of them, or is the whole text after ``</think>``. A reference that is
    nothing else, such as "A", must be there itself.

    Raises:
        ValueError: the reference is blank.
    """
    if not answer.strip():
        raise ValueError(f"answer: seen {answer!r}, expected some words")
    said = after_thoughts(given)
    found = last_group(ANSWER_TAG, said) or last_boxed(said) or said
    words = _words(answer)
    return float(_words(found) == words if words else found.strip().lower() == answer.strip().lower())


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _PUNCTUATION.sub(r"\1", _THOUSANDS.sub("", text.lower()))).split()
