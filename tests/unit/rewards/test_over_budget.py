"""Answers that are dear: bounds on their size keep them cheap, and a bound on CPU time ends what those miss."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from roll.configs.rewards import RewardConfig
from roll.rewards import VERIFIERS
from roll.rewards.scorer import DomainScorer
from roll.rewards.types import RewardError, RuleVerifier, Sample, Verdict

CPU_SECONDS = 0.9
"""Below ``ANSWER_CPU_S``: the bounds on size end each of these."""


def rows(size: int, entry: str) -> str:
    return r"\\".join("&".join(entry.format(i * size + j) for j in range(size)) for i in range(size))


def nested(opening: str, inner: str, closing: str, times: int) -> str:
    return opening * times + inner + closing * times


TERMS = [
    *("1e99999999", "1e-99999999", "3.0e" + "9" * 300, "10^{100000000}", "2^{10^{10}}", "9^{9^{9^9}}", "9^9^9"),
    *(r"\binom{x}{100000000}", r"\binom{n}{10000}", r"\binom{-1000}{100000}", r"\binom{99^x}{99}"),
    *(r"\binom{1/2}{10^6}", "100000000!", "((((3!)!)!)!)!", "500!^{500!}", "x^{500!}", "((x!)!)!"),
    *(r"\sqrt[500!]{500!}", r"\sqrt[100000]{2}", r"e^{e^{e^{e^{e}}}}", r"\exp(\exp(\exp(\exp(5))))"),
    *(r"\tan(\exp(\exp(10)))", r"\lfloor e^{e^{10}} \rfloor", "10^{10^{10^{10^{x}}}}"),
    *("e^{x+e^{x+e^{x+e^{x+e^{x}}}}}", "x^{100+x^{100+x^{100+x}}}", r"\lfloor 99^{99^{x}}\rfloor"),
    *(r"\cosh(99\cosh(99\cosh(99x)))", nested(r"\ln(", "x", ")", 60), nested(r"\ln(-", "x", ")", 12)),
    *(nested(r"\tan(", "1", ")", 20), nested(r"\sqrt[3]{2+", "1", "}", 30), nested(r"\sqrt{i+", "1", "}", 15)),
    *(nested("(", "1", ")", 240), nested("{", "1", "}", 200), nested("|", "x", "|", 200), "-" * 400 + "1"),
    *(nested(r"\frac{1}{1+", "x", "}", 30), nested(r"\log_{x}(", "y", ")", 30), nested(r"\sin(", "i", ")", 10)),
    *("(x+1)^{100000}", "(a+b+c+d+e+f)^8(g+h+j+k+l+m)^8", "((x+1)^{60}+(y+1)^{60})^{60}", "x^{1000000}"),
    *(r"y=\frac{x^{4000}-1}{x^{3999}-1}", "y=(x+1)^{300}", "(1+x)^{8}" * 20, r"(1+\sqrt{2})^{4000}"),
    *("(3+4i)^{1700}", "(A+B)^{-1}" * 40, "((A+B)^{60}A^{-1})^{60}B^T", "(((A+B)^{30}C)^{30}A^{-1})^{30}B^T"),
    *(r"A \times B" * 40, r"\begin{vmatrix}" + rows(10, r"\sqrt{{{0}}}") + r"\end{vmatrix}"),
    *(r"\begin{vmatrix}" + "x&" * 200 + r"x\end{vmatrix}",),
    *(r"\begin{vmatrix}" + rows(5, "x_{{{0}}}") + r"\end{vmatrix}",),
    *(r"\begin{pmatrix}" + rows(11, "x") + r"\end{pmatrix}",),
    *(r"\max(a,b,c,d,f,g,h,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z)", r"\max(" + "x," * 200 + "y)", r"\gcd(500!,499!)"),
    *("1," * 240 + "1", "<".join("x" * 100), r"\pm" * 100 + "1", r"\pm 1 " * 60, "0." + "3" * 490),
    *("Z" * 400 + "_{36}", r"\{" + ",".join(rf"\sqrt{{{i}}}" for i in range(2, 50)) + r"\}"),
    *(r"\mathbb{R}\backslash" * 30 + r"\{1\}", "9" * 240 + "^{" + "7" * 240 + "}", "2^{1/1000000007}"),
    *(r"\sqrt{" + "9" * 400 + "}", r"\lfloor\pi^{1000}\rfloor", "$" * 490, "\\" * 490, r"\frac" * 90),
    *(r"\text{" * 80, "1 2/3 " * 80, "x_{" * 100 + "1" + "}" * 100, "f(" * 100 + "x"),
]
LONG = [
    *("(" * 300_000, "{" * 300_000, r"\boxed{" * 60_000, r"\boxed{1}," * 30_000, "<answer>" * 60_000),
    *("$x$" * 100_000, "<answer>1</answer>" * 30_000, "the answer is " * 30_000, "answer is" + " " * 300_000 + "5"),
    *("answer: 5; " * 30_000, "\n" * 500_000 + "5", "5 " * 200_000, "1 and " * 100_000, "</think>" * 60_000 + "B"),
    *("x" * 1_000_000, "#### " * 100_000, "#### " + "1" * 300_000, "#### " + "1," * 100_000),
    *("#### 1" + " a" * 100_000, "#### " + "-" * 200_000 + "1", "(B) " * 100_000, "Answer: B " + "or " * 100_000),
    *("Answer: " + "*" * 300_000 + "B", "Answer: B" + ")" * 300_000, "B" + " " * 300_000 + "C", "\\text{" * 60_000),
    *("Answer: B because " + "a " * 200_000, "so " * 100_000 + "B", "the " * 100_000 + "answer is B"),
    *("[" * 200_000, "{" * 200_000, '{"a":' * 60_000, "- " * 200_000, "<<" + "a" * 200_000, "[" + "a" * 200_000),
    *("a." * 200_000, ". " * 200_000, "```json\n" + "{" * 100_000, "\n \n" * 100_000, "\u2212" * 200_000),
    *("<think>" + "<think" * 60_000, "#" * 300_000, "'" * 300_000, "word-" * 100_000, "a'" * 150_000),
    *("<think>" + "a" * 300_000 + "</think><answer>", "answer is is is " * 30_000, "9" * 300_000),
]
KINDS = [
    *(
        {"kind": kind, "min": 1}
        for kind in ("num_words", "num_sentences", "num_paragraphs", "num_bullets", "placeholders")
    ),
    *({"kind": kind} for kind in ("json", "title", "no_commas", "lowercase", "sections")),
    {"kind": "keywords_include", "keywords": ["a a a b"]},
]
RULES = {
    "math": ({}, "42"),
    "gsm8k": ({"method": "flexible"}, "42"),
    "multiple_choice": ({}, "B"),
    "format": ({}, None),
    "instruction": ({"constraints": KINDS}, None),
}


def check(name: str, response: str, truth: object, args: dict[str, object]) -> tuple[Verdict, float]:
    cls = VERIFIERS.get(name)
    verifier = cls(cls.config_class(**args))
    started = time.process_time()
    verdict = verifier.check(Sample("a", response, truth, "tag"))
    return verdict, time.process_time() - started


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term[:40])
def test_a_dear_term_is_bounded_by_its_size(term):
    for truth in ("42", r"x^2+\sqrt{3}", "y=2x+1"):
        verdict, seconds = check("math", rf"\boxed{{{term}}}", truth, {})
        assert not verdict.correct and seconds < CPU_SECONDS


PIECES = [
    *(r"\angle ", r"\text{a} ", r"\text{a and }", "_{1}", "_1", "a_{b}", "a, ", "a b ", "{a}", "'", "|"),
    *(r"\cap ", "x=", "1,"),
    *("1e1 ", r"\pm ", "12 cm ", "per ", r"\frac{d", r"^\circ ", r"\% ", r"\$", r"\,", "{,}", " 000"),
    *(r"\quad ", "and ", "or "),
    *("not ", r"\approx ", "at least ", "if ", r"\begin{cases}1&x\\", r"\\", "0.(3)", "1_2", r"\vec a"),
    *(r"\hat{i}", r"\over "),
    *(r"\boxed{", r"\left(", "个 ", "１", "²", "½", "√", "A) ", "A^T", "dy/dx", r"\sin^2 ", "x<", r"\{"),
    *("]0,1[", r"\cup ", "!"),
]


def test_repeated_pieces_of_the_grammar_are_read_in_little_time():
    slow = {}
    for piece in PIECES:
        for tail in ("", "=!"):
            _, seconds = check("math", rf"\boxed{{{(piece * 500)[:470]}{tail}}}", "42", {})
            if seconds > CPU_SECONDS:
                slow[piece] = seconds
    assert not slow


@pytest.mark.parametrize("name", RULES)
def test_long_answers_are_read_in_linear_time(name):
    args, truth = RULES[name]
    slow = {}
    for response in LONG:
        _, seconds = check(name, response, truth, args)
        if seconds > CPU_SECONDS:
            slow[response[:30]] = seconds
    assert not slow


def scored(verifiers: list[dict[str, object]], *samples: Sample, **keys: object) -> list[Verdict | RewardError]:
    async def run() -> list[Verdict | RewardError]:
        config = RewardConfig(tag_included=["tag"], verifiers=verifiers, timeout=10, retries=0, **keys)
        scorer = DomainScorer("d", config)
        await scorer.start()
        found: list[Verdict | RewardError] = []
        try:
            for sample in samples:
                try:
                    found.append(await scorer.score(sample))
                except RewardError as error:
                    found.append(error)
        finally:
            await scorer.close()
        assert scorer.take_retries() == 0
        return found

    return asyncio.run(run())


def test_what_takes_too_much_cpu_time_is_a_wrong_answer_with_its_reason():
    """The pattern is the user's, the text on which it backtracks without end is the policy's."""
    pattern = {"name": "format", "args": {"pattern": "(a|a)*b", "penalty": -1.0}, "weight": 0.5}
    dear, right = scored([pattern, {"name": "math"}], *(Sample("?", text, "5", "tag") for text in ("a" * 60, "aab")))
    assert isinstance(dear, Verdict) and dear.over_budget == "format: took more than 1 s of CPU time"
    assert (dear.score, dear.correct) == (-0.5, False), "as a response that does not match"
    assert isinstance(right, Verdict) and right.score == 0.5 and not right.over_budget


def test_a_reference_that_costs_too_much_is_no_fault_of_the_answer():
    own = {"name": f"{__name__}:Echoing"}
    dear, reference = scored([own], *(Sample("?", text, truth, "tag") for text, truth in (("dear", ""), ("", "dear"))))
    assert isinstance(dear, Verdict) and not dear.correct and "CPU time" in dear.over_budget
    assert isinstance(reference, RewardError) and "the reference answer costs too much" in str(reference)


class Echoing(RuleVerifier):
    """Is slow where it is told to."""

    cpu_seconds = 0.2

    def try_row(self, sample: Sample) -> None:
        while sample.ground_truth == "dear":
            pass

    def check(self, sample: Sample) -> Verdict:
        self.try_row(sample)
        while sample.response == "dear":
            with contextlib.suppress(Exception):
                sum(range(1000))
        return Verdict(1.0, correct=True)
