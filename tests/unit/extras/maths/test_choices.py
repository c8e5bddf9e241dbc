"""Letters that a response chooses, as models write them, and what only looks like a choice."""

import pytest

from roll.extras.maths.choices import MultipleChoiceConfig, MultipleChoiceVerifier
from roll.extras.maths.final_numbers import FinalAnswerConfig, FinalAnswerVerifier
from roll.rewards.types import Sample

CHOICES = MultipleChoiceVerifier(MultipleChoiceConfig())
NUMBERS = FinalAnswerVerifier(FinalAnswerConfig())
QUESTION = """Which of these cities is the capital of France?
A) Not London
B) Paris
C) It is not possible to say, or none of A and B
D) Berlin
E. 5 cm"""

CHOSEN = [
    *("B", "b", "(b)", "(B)", "B.", "B)", "[B]", "**B**", "`B`", "$B$", '"B"', "{B}", "*B*", "_B_", "B:", "B!", "(B)."),
    *("**(B)**", "B. Paris", "B) Paris", "(B) Paris", "B: Paris", "**B. Paris**", "**B) Paris**", "B - Paris"),
    *("B — Paris", "(B) Paris.", r"\boxed{B}", r"\boxed{\text{B}}", r"$\boxed{\textbf{(B)}}$", r"\boxed{\mathrm{B}}"),
    *(r"\boxed{(B)}", r"Answer: $\boxed{\text{B}}$", r"\boxed{\text{(B) } 42}", r"\boxed{\textbf{(B)}\ 42}"),
    *(r"\boxed{B. Paris}", r"\boxed{\text{B. Paris}}", r"So $\boxed{B}$. And again: $\boxed{B}$", r"\fbox{B}"),
    *("<answer>B</answer>", "<answer>b</answer>", "<answer>(B)</answer>", "<answer> B. Paris </answer>"),
    *("<answer>Option B</answer>", "<answer>The answer is B.</answer>", r"<answer>\boxed{B}</answer>"),
    *("A or D? <answer>B) Paris</answer>", "<think>A? D? Answer: A</think>B"),
    *("<think>Answer: A</think><answer>(B)</answer>", "Answer: B", "answer: B", "ANSWER: B", "**Answer:** B"),
    *("**Answer: B**", "Answer: (B)", "Answer: **B**", "Answer:\n\nB", "Answer: b", "Answer:\n**B. Paris**"),
    *("Final Answer: B", "### Final answer\n\nB", "Correct answer: B", "Correct option: (B) Paris"),
    *("Answer - see below\nB", "The answer is B", "The answer is B.", "The answer is (B).", "The answer is **B**."),
    *("The answer is: B", "The answer is: option B", "The correct answer is B.", "The correct option is **B) Paris**."),
    *("the best answer is (B) Paris.", "The final answer is $B$.", "So the answer is B."),
    *("Therefore, the correct answer is (B).", "Thus, the answer is option B.", "Hence the answer is B. Paris"),
    *("The answer must be B.", "The answer should be B.", "The answer would be B.", "The answer is therefore B."),
    *("My answer is B.", "The right choice is B.", "The most appropriate answer is B."),
    *("The answer to this question is B.", "The correct answer choice is B.", "I choose B.", "I would choose (B)."),
    *("I'd go with option B.", "I'll pick B", "We select B.", "It is B.", "It's B.", "It must be (B).", "So (B)."),
    *("So B.", "Therefore, B.", "Thus (B).", "Hence, option B.", "Option B", "Option (B) Paris", "Choice B.", "=> B"),
    *("→ B", "- B", "The answer is B because Paris is the capital."),
    *("The answer is B, since A and D are not in France.", "B, because A is wrong.", "The answer is B, not A."),
    *("The answer is B, not A or D.", "The answer is B rather than C.", "Answer: B (not A)", "B is correct."),
    *("(B) is the correct answer.", "Option B is the best choice.", "B is the right answer because it is the capital."),
    *("Answer: A\nI was wrong above.\nAnswer: B", "A is wrong.\nSo (B).", "Let me think about A.\n\nThe answer is B."),
    *("Answer: B\n\nA is wrong", "The answer is B.\n\nExplanation: Paris is the capital of France, A and D are not."),
    *("The answer is (B) Paris. A city.", "答案是B", "答案：B", "正确答案是 B。", "选B", "故选：B"),
    *("The answer is B) Paris, the capital.", "Answer: B. Paris is the capital.", "Answer - B", "Only B is correct."),
    *("Therefore B is the answer.", "答案选B", "Answer: (B) none of these", "Let's go with B.", "Correct: B"),
    *("故本题选B。", "应选 B", "La respuesta correcta es B.", "Resposta correta: B", r"The answer is \(\text{B}\)."),
    *("Thus the correct statement is B.", "The answer is not A, so the answer is B.", "Die richtige Antwort ist B."),
    *("La réponse est B.", "Ответ: B"),
]  # fmt: skip

NO_CHOICE = [
    *("B" + " " * 5000 + "C", "Answer: B" + " " * 5000 + "or C", "Answer: B" + "\n" * 5000 + "No, C", "A or B"),
    *("A and B", "A, B", "A/B", "A B", "B & C", "A; B", "AB", "(A)(B)", "(A) (B)", "A|B", "A\tB", "BB", "B B"),
    *("Answer: A or B", "Answer: A, B", "Answer: B; A", "answer: B; A", "Answer: B, A", "Answer: B A", "Answer: B/A"),
    *("Answer: B and C", "Answer: B or maybe C", "Answer: B (or C)", "Answer: B. Or C.", "Answer: B? no, C"),
    *("Answer: B? C?", "Answer: B?", "Answer: B & C", "Answer: not B", "Answer: B is wrong", "Answer: B is incorrect"),
    *("Answer: B is not correct", "Answer: all but B", "Answer: B isn't it", "The answer is not B"),
    *("The answer is not (B).", "The answer isn't B.", "The answer is B or C.", "The answer is either A or B."),
    *("B? no, C", "The answer is B is wrong.", "The answer is B and C.", "The answer is neither A nor B."),
    *("The answer is anything but B.", "Is the answer B?", "The answer is B? No, C.", "The answer is B. No, C."),
    *("The answer is B. Wait, C.", "The answer is B. Actually it is C.", "B. No, C.", "The wrong answer is B."),
    *("An incorrect option: B", "I doubt that the answer is B.", "It can't be that the answer is B."),
    *("If the answer is B", "All but B", "All except (B)", "Everything but B.", "Not B", "not (B)", "It is not (B)."),
    *("It is definitely not (B)", "Never (B)", "Unlike (B)", "B is wrong", "B is wrong.", "(B) is wrong"),
    *("(B) looks wrong.", "B? maybe", "Maybe B", "Maybe (B)", "B or C?", "Either (B) or nothing"),
    *("I would eliminate (B).", "I ruled out (B)", "(B) is tempting but wrong", "Anything other than (B)"),
    *("(A) is wrong, (B)", "Both A and B", r"\boxed{A, C}", r"\boxed{A}, \boxed{B}", r"\boxed{A} \boxed{B}"),
    *(r"\boxed{A} and also $\boxed{B}$", r"\boxed{A} or \boxed{B}", r"\boxed{AB}", r"\boxed{\text{A or B}}"),
    *(r"\boxed{\text{not B}}", r"\boxed{B?}", r"\boxed{\text{B is wrong}}", r"\boxed{(A)(B)}", r"\boxed{}"),
    *("<answer>A and B</answer> Answer: C", "<answer>A</answer><answer>B</answer>", "<answer>B or C</answer>"),
    *("<answer>B; A</answer>", "<answer>not B</answer>", "<answer>B? no, C</answer>", "<answer>all but B</answer>"),
    *("<answer>B is wrong</answer>", "<answer>Paris</answer>", "<answer>B. Paris or D. Berlin</answer>"),
    *("<answer>B) Paris, C</answer>", "<answer>(B) and (C)</answer>", "<answer></answer>", "A dog", "Answer: A dog"),
    *("I think so", "Answer: Because", "K", "", "答案", "Answer:" + " " * 200_000 + "B", "Answer: Bravo", "B+", "C#"),
    *("A, B, C or D", "Options: A B C D", "Answer: ABCD", "Answer: A B C D E", "I am sure", "Answer: I am not sure"),
    *("Answer: A lot", "B1", "Answer: B (and A)", "Answer: B, possibly C", "Answer: B - but C could be"),
    *("Answer: B\nOr C", "A) London\nB) Paris", r"\boxed{B} is wrong", r"The answer is not \boxed{B}"),
    *("Die Antwort ist nicht B.", "Answer: B, unless it is C", "不是B", "A或B"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        *((response, "B") for response in CHOSEN),
        # The words of an option may say anything.
        ("The answer is A) Not London.", "A"), ("Answer: C. It is not possible to say, or none of A and B", "C"),
        ("<answer>C) It is not possible to say</answer>", "C"), ("Answer: E. 5 cm", "E"),
        ("The answer is A because it is.", "A"), ("Answer: A. No.\nAnswer: C", "C"), ("The answer is: option D", "D"),
        ("<think>Answer: A</think><answer>(J)</answer>", "J"),
    ],
)  # fmt: skip
def test_a_choice_is_read_as_models_write_it(response, letter):
    found = CHOICES.check(Sample(QUESTION, response, letter, "tag"))
    assert (found.answer, found.correct) == (letter, True)


@pytest.mark.parametrize("response", NO_CHOICE)
def test_several_letters_and_doubts_are_no_choice(response):
    found = CHOICES.check(Sample(QUESTION, response, "B", "tag"))
    assert (found.answer, found.correct) == (None, False)


SENTENCES = {
    "B": [
        "The correct answer is **B**.", "Therefore, option B is correct.",
        "So the best choice here would be (B), because mitochondria produce ATP.", "B. Mitochondria", "I'd go with B.",
        "My answer: B", "Answer: (B) Mitochondria", "Hence the answer is B, not A.",
        "A is wrong because ribosomes make proteins. C and D are wrong too. So the answer is B.",
        "Option A is incorrect. Option B is correct.", "After eliminating A, C and D, we are left with B.",
        "The only option that fits is B.", "This corresponds to option B.", "This matches choice (B).",
        "Thus, B is the right answer.", "答案选B。", "所以正确选项是 B。", "La respuesta correcta es la B.",
        "La bonne réponse est la B.", "Die richtige Antwort ist B.", "**Final answer: B**",
        "Looking at the options, B describes it best.",
        "Among the options, (B) is the one that satisfies all the conditions.",
    ],
    "C": [
        "Given all this, the statement that must be true is C.", "Therefore, the answer should be option C: 12 m/s.",
        "C is the correct answer because the reaction is exothermic.", "Choice C it is.", "So I will choose option C.",
        "The most likely diagnosis is **C. Appendicitis**.", "Only option C is consistent with the passage.",
        "This is exactly what option C states.", "Hence, statement C is true.", "Correct option: C",
        "The correct choice is therefore (C).", "→ C", "**C)** 12 m/s", "Option (C) is the right one.",
        "That makes C the correct answer.", "因此本题选C", "Donc la réponse est C.",
        "Por tanto, la opción correcta es la C.", "We conclude that (C) is true.",
    ],
    "not B": [
        "The answer is not B.", "B is tempting, but the answer is C.", "The answer is either B or C.", "B or C",
        "I would rule out B.", "Option B is incorrect.", "It can't be B.", "The answer could be B.",
        "If the question were about plants, the answer would be B.", "The answer is B? No, C.",
        "B describes ribosomes, which is wrong.", "Options A and B are both correct.",
        "All of the options except B are correct.", "The correct answer is C; B is a common mistake.",
        "We are left with B and C.", "Not A, so maybe B.", "Many students choose B.", "Answer: B or D", "Vitamin B",
        "I don't know, but I'd guess it's not B.", "The answer is C rather than B.", "B is false, hence A.",
    ],
    "not C": [
        "C seems plausible, but D is better.", "The answer is not among A, B or C.", "Neither B nor C is correct.",
        "C is the least likely.", "Option C can be eliminated.", "The temperature rises by 10 degrees C.",
        "The best answer is D, although C is close.", "At first I thought C, then I realised it is D.", "C or D?",
        "Both B and C are true.", "The incorrect statement would be C, hence we pick A.", "I am torn between C and D.",
        "Everything except C.", "Only C is false.", "Suppose the answer is C.", "Unless C holds, the answer is A.",
        "Line C is parallel to line D.", "The answer is C, I mean D.", "Wait, it's not C.",
        "C would be right if x were negative.",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("response", "letter"), [(response, letter) for letter, responses in SENTENCES.items() for response in responses]
)
def test_letters_in_sentences_are_a_choice_where_words_state_them(response, letter):
    chosen = CHOICES.extract(response)
    assert chosen == letter or (letter.startswith("not") and chosen != letter[-1])


SUM_QUESTION = (
    "Anna sells 9 clips per day and a puppy. How many clips (or cookies) does she sell in two days? 多少个苹果"
)

EIGHTEEN = [
    *("18", "18.", "18.0", "18.00", "+18", " 18 ", "**18**", "`18`", "_18_", "*18*", "$18", "$ 18", "\\$18", "€18"),
    *("18$", "18 $", "$18$", "18 dollars", "18 clips", "18 clips.", "18 cookies", "18 puppy", "18 days", "18 eggs"),
    *("18 apples", "18 people", "18 cm", "18cm", "18 m", "18 miles per hour", "18 clips per day", "18 km/h", "18%"),
    *("18 %", "18\\%", "18 percent", "18 square feet", "18 cm²", "18 years", "18 hours", "18 minutes", "18°", "18 kg"),
    *("18 USD", "18 children", "18 clips in total", "18 clips left", "18 pencils each", r"\boxed{18}", r"$\boxed{18}$"),
    *(r"\boxed{18} clips", r"\(18\)", r"\[18\]", r"\text{18}", r"18\text{ clips}", r"\boxed{18\text{ clips}}"),
    *(r"$18$ clips", "The answer is 18", "The answer is 18.", "the final answer is $18.", "Answer: 18", "x = 18"),
    *("= 18", "Total: $18", "So the answer is 18 clips.", "018", "１８", "18 个苹果", "答案：18", "18 个", '"18"'),
    *("18,", "$18.00 ", "18\r", "18\tclips", "She sells 18 clips.", "9 * 2 = 18", "9 + 9 = $18", "18 (eighteen)"),
    *("18 years old", "18 am", "18 p.m.", "18 clips sold", "9+9=18 clips", r"$9 \times 2 = 18$", "9 x 2 = 18"),
    *("$18/hour", "The answer is $18 a day.", "It takes 18 minutes.", "Therefore, she needs 18 more stamps."),
    *("18 people attended the party.", "18 miles per gallon"),
]  # fmt: skip

OTHERS = [
    *("at least 18", "at most 18", "more than 18", "less than 18", "no more than 18", "about 18", "around 18"),
    *("approximately 18", "nearly 18", "not 18", "isn't 18", "up to 18", "over 18", "under 18", "between 17 and 18"),
    *("17 to 18", "17-18", "17–18", "17 - 18", "18-19", "18 to 19", "18 or 19", "19 or 18", "18, 19", "18 19"),
    *("18 and 19", "18/19", "18; 19", "17, 18", "18|19", "16 18", "18 (or 19)", "18 (19)", "<18", ">18", "≤18", "≥ 18"),
    *("~18", "≈18", "±18", "< 18", "≠18", "!18", "-18", "- 18", "−18", "(18", "18-", "--18", "+-18", "18 million"),
    *("18 thousand", "18 hundred", "18 dozen", "18k", "18K", "$18m", "$18 million", "18 billion", "18bn", "18 halves"),
    *("18 thirds", "18/2", "36/2", "18/1", "18 / 2", "18/0", "18*1", "9*2", "9+9", "18+0", "18^2", "18²/18", "18e0"),
    *("18e2", "1.8e1", "18x", "x18", "18th", "18 is wrong", "18?", "18 maybe", "maybe 18", "18 times two"),
    *("18 squared", "18 plus 1", "18 minus 1", "18 more", "18 less", "18 if not 19", "18:00", "6:18", "18.5", "18,5"),
    *("1,8", "18,000", "18.0.0", "1 8", "118", "181", "018.1", "0x18", "eighteen", "XVIII", "", "none", "clips"),
    *("18 万", "18千", "18多", "约18", "18 clips and 50 cents", "18 dollars and 5 cents", "$18 - $19"),
    *("18 is the number of clips, or 19", "18 of 20", "18 out of 20", "18 guesses", "all but 18", "18 not 19"),
    *("half of 18", "twice 18", "18 + i", "9 * 2 = 18 or 19", "She doesn't sell 18 clips.", "18 = 2 * 9 = 19"),
    *("18 thousandths", "18 millionths", "18 half-dozens", "18 in base 8", "2x = 18"),
    *("Tom has 18 marbles more than Ann", "18 marbles, but he lost one", "if she sold all, 18"),
]  # fmt: skip


def scored(response: str, truth: object = "9 * 2 = 18\n#### 18", question: str = SUM_QUESTION) -> bool:
    return NUMBERS.check(Sample(question, response, truth, "tag")).correct


@pytest.mark.parametrize(("text", "is_18"), [*((text, True) for text in EIGHTEEN), *((text, False) for text in OTHERS)])
def test_a_number_is_read_as_models_write_it_and_what_says_something_else_of_it_is_another_answer(text, is_18):
    assert scored(f"So 9 * 2 = 18.\n#### {text}") is is_18
    assert scored(f"<answer>{text}</answer>", 18) is scored(f"<answer>{text}</answer>", "18", question="") is is_18


def test_a_number_that_is_taken_back_is_no_answer():
    assert scored("#### 18\nI hope that this helps.")
    for response in ("#### 18\nCorrection: 19", "#### 18\nWait, that's wrong.", "#### 18\n\nThat is not right."):
        assert not scored(response)


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### -18", "-18"), ("#### −18", -18), ("#### - $18", "-18"), ("#### $1,234.50", "1234.5"),
        ("#### 1,000,000", 10**6), (r"#### 10\,000", "10,000"), ("#### 3/4", "0.75"), ("#### .5", "0.5"),
        ("#### 0.50", 0.5), ("#### 5 miles per hour", "5 miles per hour"), ("#### 5", "$5"),
    ],
)  # fmt: skip
def test_numbers_are_read_whole_and_exactly(response, truth):
    assert scored(response, truth)


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("She sells 18 clips.", "18"), ("It is $18.", "18"), ("The answer is 18 or 19", None),
        ("She sells at least 18 clips.", None), ("That makes 18 million", None), ("The answer is not 18.", None),
        ("It is < 18", None), ("It takes 17-18 days", None), ("It is 1e18", None), ("version 1.1.18", None),
        ("9 + 9 = 18", "18"), ("the answer is -18", "-18"), ("5 - 3 = 2, so 18", "18"), ("at 6:18", None),
    ],
)  # fmt: skip
def test_the_last_number_of_prose_counts_where_nothing_hedges_it(response, number):
    flexible = FinalAnswerVerifier(FinalAnswerConfig(method="flexible"))
    assert flexible.check(Sample(SUM_QUESTION, response, 18, "tag")).answer == number
