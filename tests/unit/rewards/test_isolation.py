"""Rule verifiers in child processes: timeouts, deaths, orphans, and a protocol that nothing disturbs."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.rewards import VERIFIERS, RewardError, RewardResult, Sample
from roll.rewards.isolation import MAX_ANSWER_CHARS, RulePool, rule_spec
from tests.support.echo import Echo
from tests.support.processes import gone, happens


def sample(response: str, **values: object) -> Sample:
    return Sample(prompt="?", response=response, ground_truth=5, data_source="tag", **values)


@contextlib.asynccontextmanager
async def pool_of(num_processes: int = 1, **args: object):
    """Its children are there and ready."""
    pool = RulePool([rule_spec(Echo, args)], num_processes)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_samples_and_verdicts_cross_unchanged_and_bounded():
    texts = ["", "\n\r\x00\x1b", "答案 😀", "\ud800", '"}\n{"', "x" * 3_000_000]
    async with pool_of() as pool:
        full = sample("hi", num_tokens=7, truncated=True, messages=({"role": "user", "content": "?"},))
        assert await pool.check(0, full, 10) == RewardResult(float(pool.pids[0]), True, "hi", {"tokens": 7.0})
        for text in texts:
            assert (await pool.check(0, sample(text), 10)).answer == text[:MAX_ANSWER_CHARS]
        noted = RewardResult(1.0, True, notes={"why": "x" * MAX_ANSWER_CHARS}, seeks_answer=False)
        assert await pool.check(0, sample("notes x"), 10) == noted


async def test_a_slow_expression_is_killed_and_the_others_go_on():
    async with pool_of(num_processes=2) as pool:
        before = set(pool.pids)
        begin = time.monotonic()
        bad = asyncio.create_task(pool.check(0, sample("hang"), 1.0))
        good = {(await pool.check(0, sample("hi"), 5)).score for _ in range(20)}
        assert not bad.done()
        with pytest.raises(RewardError, match="took longer than 1 s and was killed"):
            await bad
        assert 1.0 <= time.monotonic() - begin < 3.0
        await pool.start()  # the new child too
        both = await asyncio.gather(*(pool.check(0, sample("sleep 0.5"), 5) for _ in range(2)))
        after = set(pool.pids)
    assert len(good) == 1 and good <= before
    assert len(after) == 2 and {verdict.score for verdict in both} == after and len(after & before) == 1
    assert gone(*before)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("segfault", r"its process died \(SIGSEGV\)"),
        ("exit 3", r"its process died \(exit code 3\)"),
        ("exit 0", r"its process died \(exit code 0\)"),
        ("sys.exit", "SystemExit: 3"),
        ("raise me", "KeyError: 'me'"),
        ("mute", r"MuteError: \(its message cannot be read: ValueError\)"),
        ("number", "TypeError: check returned float, expected a RewardResult"),
        ("parts", "a reply of [0-9]+ bytes, expected at most"),
    ],
)
async def test_a_check_that_goes_wrong_is_an_error_and_the_next_one_works(response, message):
    async with pool_of() as pool:
        with pytest.raises(RewardError, match=message):
            await pool.check(0, sample(response), 10)
        with pytest.raises(TypeError, match="JSON"):  # the caller's own error
            await pool.check(0, sample("hi", extra_info={"x": object()}), 10)
        assert (await pool.check(0, sample("hi"), 10)).answer == "hi"


async def test_a_killed_child_is_replaced():
    async with pool_of() as pool, asyncio.timeout(60):
        [pid] = pool.pids
        os.kill(pid, signal.SIGKILL)
        try:
            await pool.check(0, sample("sleep 20"), 30)
        except RewardError as error:
            assert "SIGKILL" in str(error)  # it was not yet known to be dead
        assert (await pool.check(0, sample("hi"), 10)).score != pid


async def test_what_a_check_prints_and_reads_is_not_the_protocol(capfd):
    async with pool_of() as pool:
        for text in ("print", "hi"):
            assert (await pool.check(0, sample(text), 10)).answer == text
    assert "x" * 100_000 in capfd.readouterr().err


async def test_a_timeout_kills_what_the_check_started(tmp_path):
    async with pool_of() as pool:
        with pytest.raises(RewardError, match="took longer"):
            await pool.check(0, sample(f"fork {tmp_path}/pid"), 1.0)
    assert gone(int((tmp_path / "pid").read_text()))


async def test_waiting_for_a_free_child_does_not_count():
    async with pool_of() as pool:
        assert len(await asyncio.gather(*(pool.check(0, sample("sleep 0.4"), 1.0) for _ in range(4)))) == 4


async def test_a_cancelled_check_does_not_answer_the_next_sample():
    async with pool_of() as pool:
        task = asyncio.create_task(pool.check(0, sample("sleep 0.3"), 10))
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await pool.check(0, sample("hi"), 10)).answer == "hi"


async def test_closing_ends_the_children_and_the_checks():
    async with pool_of(num_processes=2) as pool:
        pids = pool.pids
        tasks = [asyncio.create_task(pool.check(0, sample("sleep 60"), 60)) for _ in range(4)]
        await asyncio.sleep(0.2)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    with pytest.raises(RewardError, match="closed"):
        await pool.check(0, sample("hi"), 1)
    assert all(isinstance(result, RewardError) for result in results)
    assert len(pids) == 2 and not pool.pids and gone(*pids)


@pytest.mark.parametrize("busy", [True, False])
def test_children_die_with_a_killed_parent(tmp_path, busy):
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.unit.rewards.test_isolation import Echo, RulePool, rule_spec, sample
async def main():
    pool = RulePool([rule_spec(Echo, {{}})], 1)
    await pool.start()
    print(pool.pids[0], flush=True)
    await pool.check(0, sample({f"child {tmp_path}/pid" if busy else "sleep 0"!r}), 60)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        if busy:
            assert happens((tmp_path / "pid").exists)
        os.kill(parent.pid, signal.SIGKILL)
    assert gone(pid)


async def test_a_verifier_that_cannot_be_built_or_imported_elsewhere_is_an_error_at_start():
    with pytest.raises(RewardError, match="could not be set up: ValueError: told to fail"):
        async with pool_of(fail=True):
            pytest.fail("it was set up")

    class Inner(Echo): ...

    with pytest.raises(ValueError, match=r"Inner, expected a class at the top of a module"):
        rule_spec(Inner, {})


CPU_SECONDS = 0.9
"""Below ``ANSWER_CPU_S``: the bounds on size end each of these."""
LINEAR_SECONDS = 4.0
"""Several times what a slow machine needs for a long answer; what is quadratic takes minutes."""


def rows(size: int, entry: str) -> str:
    return r"\\".join("&".join(entry.format(i * size + j) for j in range(size)) for i in range(size))


def nested(opening: str, inner: str, closing: str, times: int) -> str:
    return opening * times + inner + closing * times


TERMS = [
    *("1e99999999", "1e-99999999", "3.0e" + "9" * 300, "10^{100000000}", "2^{10^{10}}", "9^{9^{9^9}}", "9^9^9"),
    *("9^{9^{9^{9}}}", "9**9**9**9", nested("x^", "", "", 40)),
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
COUNTED = ("num_words", "num_sentences", "num_paragraphs", "num_bullets", "placeholders")
KINDS = [
    *({"kind": kind, "min": 1} for kind in COUNTED),
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


def check(name: str, response: str, truth: object, args: dict[str, object]) -> tuple[RewardResult, float]:
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


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_repeated_pieces_of_the_grammar_are_read_in_little_time(every):
    texts = [(piece * 500)[:470] + tail for piece in PIECES for tail in ("", "=!")][::every]
    seconds = {text: check("math", rf"\boxed{{{text}}}", "42", {})[1] for text in texts}
    assert [text for text in texts if seconds[text] > CPU_SECONDS] == []


@pytest.mark.parametrize("every", [len(RULES), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RULES)
def test_long_answers_are_read_in_linear_time(name, every):
    args, truth = RULES[name]
    responses = LONG[list(RULES).index(name) % every :: every]  # each is read by a rule
    seconds = {response: check(name, response, truth, args)[1] for response in responses}
    assert [response[:30] for response in responses if seconds[response] > LINEAR_SECONDS] == []
