"""Exact match of words, and of expressions."""

from __future__ import annotations

import pytest

from roll.extras.worlds.single_turn import SCORERS, mathematical, same_words


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("The Eiffel Tower.", "eiffel tower", True),
        (r"He means \boxed{an Owl}", "owl", True),
        ("<answer>Paris</answer> or <answer>Rome</answer>", "Rome", True),
        ("<think>Rome</think>Paris", "Rome", False),
        ("Paris or Rome", "Rome", False),
        ("theatre", "atre", False),  # an article is a word of its own
        *((given, answer, False) for given, answer in (("", "Rome"), ("", "A"), ("the", "A"), ("...", "?"))),
        (r"\boxed{a}", "A", True),
        # signs of numbers and names stay
        *((given, answer, False) for given, answer in (("1.5", "15"), ("3,5", "35"), ("-5", "5"), ("1/2", "12"))),
        *((given, answer, False) for given, answer in (("10:30", "1030"), ("5%", "5"), ("C++", "C"), ("C#", "C"))),
        *((given, answer, True) for given, answer in (("18.", "18"), ("1,000", "1000"), ("$18", "18"))),
        *((given, answer, True) for given, answer in (("U.S.A.", "usa"), ("COVID-19", "covid19"))),
        ("it's the Paris!", "its paris", True),
    ],
)
def test_words(given: str, answer: str, same: bool) -> None:
    assert same_words(given, answer) == float(same)


def test_blank_references_are_errors_and_expressions_are_compared() -> None:
    with pytest.raises(ValueError, match="answer: got ' ', expected some words"):
        same_words("", " ")
    assert mathematical(r"\boxed{(x+1)^2}", "x^2 + 2x + 1") == 1.0
    assert mathematical("no number at all", "4") == 0.0
    with pytest.raises(ValueError, match="ground_truth"):
        mathematical("4", " ")


@pytest.mark.parametrize(
    ("given", "answer", "there"),
    [
        *[(text, "18", False) for text in ("180", "118", "1.18", "18.5", "-18", "1,18", "x18")],
        *[(text, "18", True) for text in ("18", "It is 18.", "$18", "x=18", "答案是18。", "(18)", "18, or so")],
        ("Parisian", "Paris", False),
        ("Paris!", "Paris", True),
        ("我住在北京市", "北京", True),
        ("in C++ too", "C++", True),
    ],
)
def test_an_answer_is_contained_as_a_whole(given, answer, there):
    assert SCORERS.get("contains")(given, answer) == float(there)
