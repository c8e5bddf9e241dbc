"""Exact match of words, and of expressions."""

from __future__ import annotations

import pytest

from roll.rewards.scorers import mathematical, same_words


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("The Eiffel Tower.", "eiffel tower", True),
        (r"He means \boxed{an Owl}", "owl", True),
        ("<answer>Paris</answer> or <answer>Rome</answer>", "Rome", True),
        ("<think>Rome</think>Paris", "Rome", False),
        ("Paris or Rome", "Rome", False),
        ("theatre", "atre", False),  # an article is a word of its own
        ("", "Rome", False),
        ("", "A", False),
        ("the", "A", False),
        (r"\boxed{a}", "A", True),
        ("...", "?", False),
    ],
)
def test_words(given: str, answer: str, same: bool) -> None:
    assert same_words(given, answer) == float(same)


def test_a_blank_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="answer: seen ' ', expected some words"):
        same_words("", " ")


def test_expressions() -> None:
    assert mathematical(r"\boxed{(x+1)^2}", "x^2 + 2x + 1") == 1.0
    assert mathematical("no number at all", "4") == 0.0
    with pytest.raises(ValueError, match="ground_truth"):
        mathematical("4", " ")
