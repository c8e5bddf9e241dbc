"""Final numbers as models write them behind ``####`` or in ``<answer>``, and what is another claim of a number."""

from __future__ import annotations

import pytest

from roll.extras.maths.final_numbers import FinalAnswerConfig, FinalAnswerVerifier
from roll.rewards.types import Sample

QUESTION = "Anna sells 9 clips per day and a puppy. How many clips (or cookies) does she sell in two days? 多少个苹果"

EIGHTEEN = [
    *("18", "18.", "18.0", "18.00", "+18", " 18 ", "**18**", "`18`", "_18_", "*18*", "$18", "$ 18", "\\$18", "€18"),
    *("18$", "18 $", "$18$"),
    *("18 dollars", "18 clips", "18 clips.", "18 cookies", "18 puppy", "18 days", "18 eggs", "18 apples"),
    *("18 people", "18 cm", "18cm", "18 m"),
    *("18 miles per hour", "18 clips per day", "18 km/h", "18%", "18 %", "18\\%", "18 percent", "18 square feet"),
    "18 cm²",
    *("18 years", "18 hours", "18 minutes", "18°", "18 kg", "18 USD", "18 children", "18 clips in total"),
    *("18 clips left", "18 pencils each"),
    *(r"\boxed{18}", r"$\boxed{18}$", r"\boxed{18} clips", r"\(18\)", r"\[18\]", r"\text{18}", r"18\text{ clips}"),
    *(r"\boxed{18\text{ clips}}", r"$18$ clips"),
    *("The answer is 18", "The answer is 18.", "the final answer is $18.", "Answer: 18", "x = 18", "= 18"),
    *("Total: $18", "So the answer is 18 clips."),
    *("018", "１８", "18 个苹果", "答案：18", "18 个", '"18"', "18,", "$18.00 ", "18\r"),
    *("18\tclips", "She sells 18 clips.", "9 * 2 = 18", "9 + 9 = $18", "18 (eighteen)", "18 years old", "18 am"),
    *("18 p.m.", "18 clips sold", "9+9=18 clips"),
]  # fmt: skip

OTHERS = [
    *("at least 18", "at most 18", "more than 18", "less than 18", "no more than 18", "about 18", "around 18"),
    *("approximately 18", "nearly 18"),
    *("not 18", "isn't 18", "up to 18", "over 18", "under 18", "between 17 and 18", "17 to 18", "17-18", "17–18"),
    *("17 - 18", "18-19", "18 to 19"),
    *("18 or 19", "19 or 18", "18, 19", "18 19", "18 and 19", "18/19", "18; 19", "17, 18", "18|19", "16 18"),
    *("18 (or 19)", "18 (19)"),
    *("<18", ">18", "≤18", "≥ 18", "~18", "≈18", "±18", "< 18", "≠18", "!18", "-18", "- 18", "−18", "(18", "18-"),
    *("--18", "+-18"),
    *("18 million", "18 thousand", "18 hundred", "18 dozen", "18k", "18K", "$18m", "$18 million", "18 billion"),
    *("18bn", "18 halves", "18 thirds"),
    *("18/2", "36/2", "18/1", "18 / 2", "18/0", "18*1", "9*2", "9+9", "18+0", "18^2", "18²/18", "18e0", "18e2"),
    *("1.8e1", "18x", "x18", "18th"),
    *("18 is wrong", "18?", "18 maybe", "maybe 18", "18 times two", "18 squared", "18 plus 1", "18 minus 1"),
    *("18 more", "18 less", "18 if not 19"),
    *("18:00", "6:18", "18.5", "18,5", "1,8", "18,000", "18.0.0", "1 8", "118", "181", "018.1", "0x18"),
    *("eighteen", "XVIII", "", "none", "clips", "18 万", "18千", "18多", "约18", "18 clips and 50 cents"),
    *("18 dollars and 5 cents", "$18 - $19"),
    *("18 is the number of clips, or 19", "18 of 20", "18 out of 20", "18 guesses", "all but 18", "18 not 19"),
    *("half of 18", "twice 18", "18 + i", "9 * 2 = 18 or 19", "She doesn't sell 18 clips.", "18 = 2 * 9 = 19"),
    *("18 thousandths", "18 millionths"),
]  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> FinalAnswerVerifier:
    return FinalAnswerVerifier(FinalAnswerConfig())


def scored(verifier: FinalAnswerVerifier, response: str, truth: object = "9 * 2 = 18\n#### 18") -> bool:
    return verifier.check(Sample(QUESTION, response, truth, "tag")).correct


@pytest.mark.parametrize("text", EIGHTEEN)
def test_a_number_is_read_as_models_write_it(verifier, text):
    assert scored(verifier, f"So 9 * 2 = 18.\n#### {text}") and scored(verifier, f"<answer>{text}</answer>", 18)


@pytest.mark.parametrize("text", OTHERS)
def test_what_says_something_else_of_a_number_is_another_answer(verifier, text):
    assert not scored(verifier, f"So 9 * 2 = 18.\n#### {text}") and not scored(verifier, f"<answer>{text}</answer>", 18)


def test_a_number_that_is_taken_back_is_no_answer(verifier):
    assert scored(verifier, "#### 18\nI hope that this helps.")
    assert not scored(verifier, "#### 18\nCorrection: 19")
    assert not scored(verifier, "#### 18\nWait, that's wrong.") and not scored(
        verifier, "#### 18\n\nThat is not right."
    )


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### -18", "-18"),
        ("#### −18", -18),
        ("#### - $18", "-18"),
        ("#### $1,234.50", "1234.5"),
        ("#### 1,000,000", 10**6),
        (r"#### 10\,000", "10,000"),
        ("#### 3/4", "0.75"),
        ("#### .5", "0.5"),
        ("#### 0.50", 0.5),
        ("#### 5 miles per hour", "5 miles per hour"),
        ("#### 5", "$5"),
    ],
)
def test_numbers_are_read_whole_and_exactly(verifier, response, truth):
    assert scored(verifier, response, truth)


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("She sells 18 clips.", "18"),
        ("It is $18.", "18"),
        ("The answer is 18 or 19", None),
        ("She sells at least 18 clips.", None),
        ("That makes 18 million", None),
        ("The answer is not 18.", None),
        ("It is < 18", None),
        ("It takes 17-18 days", None),
        ("It is 1e18", None),
        ("version 1.1.18", None),
        ("9 + 9 = 18", "18"),
        ("the answer is -18", "-18"),
        ("5 - 3 = 2, so 18", "18"),
        ("at 6:18", None),
    ],
)
def test_the_last_number_of_prose_counts_where_nothing_hedges_it(response, number):
    flexible = FinalAnswerVerifier(FinalAnswerConfig(method="flexible"))
    assert flexible.check(Sample(QUESTION, response, 18, "tag")).answer == number


@pytest.mark.parametrize(
    ("text", "is_18"),
    [
        (r"$9 \times 2 = 18$", True),
        ("9 x 2 = 18", True),
        ("$18/hour", True),
        ("The answer is $18 a day.", True),
        ("It takes 18 minutes.", True),
        ("Therefore, she needs 18 more stamps.", True),
        ("18 people attended the party.", True),
        ("18 miles per gallon", True),
        ("18 half-dozens", False),
        ("18 in base 8", False),
        ("2x = 18", False),
        ("Tom has 18 marbles more than Ann", False),
        ("18 marbles, but he lost one", False),
        ("if she sold all, 18", False),
    ],
)
def test_units_and_sentences_around_a_final_number(verifier, text, is_18):
    sample = Sample("", f"<answer>{text}</answer>", "18", "tag")
    assert verifier.check(sample).correct is is_18
