"""The code verifier: formats of tests, comparison, and programs that want a score they did not earn."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.extras.sandbox.code_blocks import Asked
from roll.extras.sandbox.harness import decode, encode
from roll.extras.sandbox.pool import Sandbox
from roll.extras.sandbox.verifier import CodeConfig, CodeVerifier, extract_code, same_output, same_value
from roll.rewards import VERIFIERS, Sample
from roll.rewards.types import SandboxUnavailableError
from tests.support.examples import examples
from tests.support.lines import read_lines
from tests.unit.extras.sandbox.code_forms import ADD, CHECK, FORMS, PROGRAM, SUBTRACT

LIMITS = {"wall_seconds": 5, "cpu_seconds": 5, "memory_mb": 256, "output_kb": 64}
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.fixture(scope="module", autouse=True)
def isolation():
    try:
        Sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(f"nothing isolates programs here: {error}")


def score(code: str | None, tests: object, extra: dict | None = None, limits: dict | None = None, **args):
    response = "No idea." if code is None else f"Here it is:\n```python\n{code}\n```\nDone."
    sample = Sample("?", response, tests, "code", extra_info=extra or {})
    return asyncio.run(CodeVerifier(CodeConfig(limits=LIMITS | (limits or {}), **args)).score(sample))


# --- honest programs --------------------------------------------------------------------------------------------------

PROGRAM_TESTS = [{"input": "1 2\n", "output": "3\n"}, {"stdin": "5 -7", "stdout": "-2"}]
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]], ["ä", "b"]], "outputs": [3, [1, 2], "äb"]}
HUMAN_EVAL = {"test": CHECK, "entry_point": "add"}


@pytest.mark.parametrize(
    ("code", "tests"), [(PROGRAM, PROGRAM_TESTS), (ADD, CALLS), (ADD, ADD_TESTS), (ADD, HUMAN_EVAL)]
)
def test_right_programs_score_and_wrong_ones_do_not(code, tests):
    verdict = score(code, tests)
    assert (verdict.score, verdict.correct, verdict.answer) == (1.0, True, code.strip())
    assert verdict.parts == {"tests_passed": 1.0}
    for wrong in (code.replace("+", "-"), "def add(:", "raise ValueError"):
        verdict = score(wrong, tests)
        assert (verdict.score, verdict.correct) == (0.0, False) and verdict.answer is not None
    verdict = score(None, tests)
    assert (verdict.score, verdict.correct, verdict.answer) == (0.0, False, None)


def test_the_score_can_be_the_share_of_tests():
    tests = {"fn_name": "f", "inputs": [[n] for n in range(4)], "outputs": [0, 1, 2, 30]}
    for partial, share in ((True, 0.75), (False, 0.0)):
        verdict = score("def f(n):\n    return n", tests, partial=partial)
        assert (verdict.score, verdict.correct) == (share, False)


@pytest.mark.parametrize("ending", ["while True: pass", "os._exit(0)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_test_that_ends_the_program_costs_that_test_only(ending):
    code = f"import os, sys\ndef f(n):\n    if n == 1:\n        {ending}\n    return n"
    calls = {"fn_name": "f", "inputs": [[0], [1], [2], [3]], "outputs": [0, 1, 2, 3]}
    for tests in (calls, [f"assert f({n}) == {n}" for n in range(4)]):
        assert score(code, tests, limits={"wall_seconds": 2}, partial=True).score == 0.75


def test_tests_can_be_limited_and_in_another_column():
    assert score(ADD, None, {"cases": [*ADD_TESTS, "assert add(1, 1) == 3"]}, tests_key="cases", max_tests=2).correct


@pytest.mark.parametrize(
    "name",
    [
        *("LiveCodeBench, functional, private", "unittest (BigCodeBench)", "KodCode", "lists of nodes"),
        *("a large value", "a large output", "names without imports, in a program"),
    ],
)
def test_forms_of_public_datasets_in_the_sandbox(name):
    form = next(form for form in FORMS if form.name == name)
    assert score(form.right[0], form.tests, form.extra, **form.args).score == 1.0
    assert score(form.wrong[0], form.tests, form.extra, **form.args).score == 0.0


def test_an_open_block_counts_where_the_response_was_not_cut_off():
    verifier = CodeVerifier(CodeConfig(limits=LIMITS))
    for truncated, expected in ((False, 1.0), (True, 0.0)):
        sample = Sample("?", f"```python\n{ADD}", ADD_TESTS, "code", truncated=truncated)
        assert asyncio.run(verifier.score(sample)).score == expected


def test_total_time_is_bounded():
    tests = [{"input": str(n), "output": "1"} for n in range(50)]
    limits = {"wall_seconds": 0.5}
    assert score("import time\ntime.sleep(9)", tests, limits=limits, partial=True, total_timeout=1.2).score == 0.0


def test_columns_with_setup_and_entry_point_and_text_that_is_not_ascii():
    extra = {"test_setup_code": "offset = 10", "entry_point": "add"}
    assert score(ADD, ["assert add(1, 2) + offset == 13"], extra).correct
    assert score(ADD, CHECK, extra).correct
    assert score(ADD, ["assert add('é\\n', 'ß') == 'é\\nß'"]).correct


# --- dishonest programs -----------------------------------------------------------------------------------------------

HELPERS = """
import gc, json, os, sys, time
def write(text, first=3):
    for descriptor in range(first, 64):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
def token():
    frame = sys._getframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, dict) and "token" in value:
                return value["token"]
        frame = frame.f_back
"""
WRITTEN = """
def add(a, b):
    write(json.dumps({"value": a + b, "args": [], "token": token()}).encode() + b"\\n")
"""
FORGERIES = {
    # The answers to come, written before the questions: a load, then a value for whatever is asked.
    "written_at_load": """
write(b'{"names": {"add": 0}}\\n' + b'{"value": 3, "args": []}\\n{"value": [1, 2], "args": []}\\n' * 4)
time.sleep(100)
""",
    "written_in_the_call": """
def add(a, b):
    write(json.dumps({"value": a + b, "args": []}).encode() + b"\\n")
    time.sleep(100)
""",
    "written_in_the_call_with_its_token_and_gone": f"{WRITTEN}    os._exit(0)\n",
    "written_in_the_call_beside_what_it_returns": f"{WRITTEN}    return None\n",
    "exit": "sys.exit(0)",
    "patched_main": """
import __main__
for value in list(vars(__main__).values()):
    if isinstance(value, type):
        for key in ("say", "_run", "run"):
            if hasattr(value, key):
                setattr(value, key, lambda *a, **k: {"ok": True})
def add(a, b): return -1
""",
    "prints_a_verdict": """
print('{"load": null}\\n{"ok": true}\\n{"ok": true}', flush=True)
os._exit(0)
""",
    "writes_to_all_descriptors": """
write(b'{"load": null}\\n{"ok": true}\\n{"value": 3}\\n{"ok": true}\\n', first=0)
def add(a, b): return -1
""",
    "forges_answers": """
write(b'{"names": {"add": 0}}\\n' + b'{"value": {"ok": true}}\\n' * 9)
def add(a, b): return -1
""",
    **{f"sends_the_tester_signal_{n}": f"os.kill(os.getppid(), {n})\ndef add(a, b): return -1" for n in (9, 14, 19)},
    "kills_all": "def add(a, b): os.kill(-1, 9)",
    "looks_for_expected_values": """
def add(a, b):
    words = ["".join(("ass", "ert add")), "".join(("candi", "date(1"))]  # not to find itself
    seen = [sys.argv]
    frame = sys._getframe()
    while frame:
        seen += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for kept in seen + gc.get_objects():
        items = kept.values() if type(kept) is dict else kept if type(kept) in (list, tuple) else ()
        for item in list(items):
            if isinstance(item, str) and item not in words and any(word in item for word in words):
                return a + b
    return -1
""",
    "reads_the_plan": """
def add(a, b):
    text = b""
    for n in range(3):
        try:
            os.lseek(n, 0, 0)
            text += os.read(n, 10000)
        except OSError:
            pass
    for root in ("/proc/self/fd", f"/proc/{os.getppid()}/fd", "/dev/fd"):
        try:
            for name in os.listdir(root):
                text += open(f"{root}/{name}", "rb").read()
        except OSError:
            pass
    return a + b if text else -1
""",
    "clears_the_arguments": """
def add(a, b):
    if isinstance(a, list):
        a.clear()
    return []
""",
    "huge_value": "def add(a, b): return 'x' * 10**6",
    "deep_value": """
def add(a, b):
    x = []
    for _ in range(100000):
        x = [x]
    return x
""",
    "never_returns": "def add(a, b): time.sleep(1000)",
    "hangs_at_load": "time.sleep(1000)",
    "leaves_a_child": "if os.fork(): os._exit(0)\ndef add(a, b): return -1",
}
KINDS = {
    "assertions": [*ADD_TESTS, "assert math.isclose(add(1, 1), 2)"],
    "calls": {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]},
    "check": HUMAN_EVAL,
}


@pytest.mark.parametrize(
    ("forgery", "kind"),
    [
        pytest.param(forgery, kind, marks=pytest.mark.slow if (row + column) % len(KINDS) else [])
        for row, forgery in enumerate(FORGERIES)
        for column, kind in enumerate(KINDS)
    ],
)
def test_forgeries_score_nothing(forgery, kind):
    verdict = score(HELPERS + FORGERIES[forgery], KINDS[kind], limits={"wall_seconds": 0.5}, partial=True)
    assert (verdict.score, verdict.correct) == (0.0, False)


def test_programs_cannot_read_or_claim_the_expected_output():
    files = "import glob\nfor path in glob.glob('/tmp/**', recursive=True):\n    print(open(path).read())"
    endings = ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "print('3')\nimport os\nos._exit(1)")
    for code in (*endings, files, "import sys\nprint(sys.stdin.read())", "while True: print(3)"):
        assert score(code, PROGRAM_TESTS, partial=True).score == 0.0, code


# --- rows that cannot be tried; test_code_forms has those that are not understood -------------------------------------


def test_what_a_row_needs_and_is_not_there_is_an_error():
    missing = "which the programs' Python does not have"
    with pytest.raises(ValueError, match=rf"'no_such_module\.part', {missing}"):
        score(ADD, ["import no_such_module.part\nassert add(1, 2) == 3"])
    with pytest.raises(ValueError, match=rf"'numpy\.linalg', {missing}"):  # its stand-in lacks it
        score(ADD, ["import numpy as np\nassert np.linalg.norm(add(1, 2)) == 3"])
    with pytest.raises(ValueError, match=r"tests_key: got 'cases', expected one of the columns \['other'\]"):
        score(ADD, ADD_TESTS, {"other": 1}, tests_key="cases")


EVALPLUS = """import numpy as np

def is_floats(x):
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return isinstance(x, float) or isinstance(x, (list, tuple)) and all(isinstance(i, float) for i in x)

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp
"""


@pytest.mark.parametrize(
    ("program", "expected", "right"),
    [
        ("def f(x): return [x / 3, x]", [0.3333333, 1.0], True),
        ("def f(x): return [x / 3, x]", [0.3334, 1.0], False),
        ("def f(x): return [x / 3]", [0.3333333, 1.0], False),
        ("def f(x): return 5.0", float("inf"), False),
        ("def f(x): return None", 5.0, False),
    ],
)
def test_the_tests_of_evalplus_need_no_numpy(program, expected, right):
    calls = f"assertion(f(1.0), {expected!r}, 0)".replace("inf", "np.inf")
    check = f"def check(candidate):\n    assertion(candidate(1.0), {expected!r}, 0)".replace("inf", "np.inf")
    assert score(program, f"{EVALPLUS}\n{calls}\n").correct is right
    assert score(program, f"{EVALPLUS}\n{check}\n", {"entry_point": "f"}).correct is right


# --- where the program is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "where", "code"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", "fence", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "fence", "a\n"),
        ("```python\na\n```\n```python\nunfinished", "fence", "a\n"), ("```python\nunfinished", "fence", None),
        ("a", "fence", None), ("<answer>a</answer>", "answer", "a"),
        ("<answer>a</answer> or <answer>\n```python\nb\n```\n</answer>", "answer", "b\n"),
        ("<answer>a", "answer", None), ("a", "answer", None), (" a ", "whole", "a"), ("", "whole", None),
    ],
)  # fmt: skip
def test_where_the_program_is(response, where, code):
    assert extract_code(response, where) == code


# --- comparison -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected", "tolerance", "same"),
    [
        ("1 2\n3\n", "1 2\n3", 0, True), ("1 2 \r\n\n", "1 2", 0, True), ("1  2", "1 2", 0, False),
        ("1\n\n2", "1\n2", 0, False), ("", "", 0, True), ("1", "", 0, False), ("1.0", "1", 1e-9, True),
        ("0.33333", "0.333333", 1e-4, True), ("0.33333", "0.333333", 0, False), ("1000001", "1000000", 1e-5, True),
        ("nan", "1", 1.0, False), ("inf", "1e999", 1.0, False), ("1e999", "1", 1.0, False), ("1_0", "10", 1e-9, False),
        ("YES 1.0", "YES 1", 1e-9, True), ("1 1", "1", 1e-9, False),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_lines(given, expected, tolerance, same):
    assert same_output(given, expected, tolerance) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ((1, (2,)), [1, [2]], True), ({1: 2}, {"1": 2}, True), (True, 1, False), (1, True, False), (1, 1.0, True),
        ("1", 1, False), (None, None, True), ({1}, [1], False), ([1, 2], [1], False), (10**400, 1.0, False),
        ({"a": 1}, {"a": 1, "b": 2}, False), (0.1 + 0.2, 0.3, True), (10**12 + 1.0, 10**12, False),
        (0.333, 1 / 3, False), ({1, 2}, {2, 1}, True),
    ],
)  # fmt: skip
def test_values_are_compared_as_json(given, expected, same):
    assert same_value(given, expected) is same


def test_values_can_have_a_tolerance():
    assert same_value([0.1 + 0.2, {"a": 1e9 + 1}], [0.3, {"a": 1e9}], 1e-6)
    assert not same_value(10**400, 1.0, 1e-6) and not same_value(float("nan"), 1.0, 10.0)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=10,
)


@given(PLAIN)
@examples(25)
def test_plain_values_cross_processes_unchanged(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


# --- configuration ----------------------------------------------------------------------------------------------------


def test_it_is_registered_with_rules_between_its_keys():
    assert VERIFIERS.get("code") is CodeVerifier and CodeVerifier.config_class is CodeConfig
    assert not list(CodeConfig().problems())
    (problem,) = CodeConfig(total_timeout=1).problems()
    assert str(problem) == "total_timeout: got 1.0, expected at least limits.wall_seconds = 10.0"


REPLIES = read_lines(Path(__file__).with_name("code_replies.jsonl"))


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply["name"])
def test_the_program_of_a_reply_is_found(reply):
    asked = Asked(frozenset(reply["asked"]), reply["input"])
    found = extract_code(reply["response"], reply.get("where", "fence"), asked, finished=reply.get("finished", True))
    assert (found and found.strip()) == (reply["program"] and reply["program"].strip())


@pytest.mark.parametrize(
    "blocks",
    [
        [ADD, SUBTRACT],
        [ADD, ADD, SUBTRACT],
        [f"def plus(a, b):\n    return a + b\n\n{ADD}", f"{SUBTRACT}\nplus(1, 2)\n"],
        [ADD, f"class Solution:\n    {SUBTRACT.replace(chr(10), chr(10) + '    ')}\n"],
        [ADD, "add = max\n", SUBTRACT],
    ],
)
def test_of_several_candidates_the_last_counts(blocks):
    text = "\nor\n".join(f"```python\n{block}```" for block in blocks)
    assert "return a - b" in extract_code(text, "fence", Asked(frozenset({"add"}))).rpartition("def add")[2]
    bare = f"{ADD}\nIn any case:\n```python\n{SUBTRACT}```\nor else\n\n{ADD}"
    assert extract_code(bare, "fence", Asked(frozenset({"add"}))) == SUBTRACT


@pytest.mark.parametrize(
    "piece",
    [
        *("`", "~", "```\n", "```python\n", "~~~\n", '"""\n', "'''", "# ", "\\", ADD, " ", "\t\n", ">>> x\n", "- "),
        *("> ", "for in :", "import a, ", "a = ", "a[", "@a(", "</a>", "<answer>", "```a` ", "\r", "````\n```\n"),
        *('```python\n"""\n```\n', "```python\n  x\n```\n", "```python\nimport a\n```\n"),
        "```python\ndef f():\n  pass\n```\n",
    ],
    ids=repr,
)  # fmt: skip
def test_no_text_takes_long_to_read(piece):
    text = piece * (50_000 // len(piece))
    started = time.process_time()
    for asked in (Asked(frozenset({"add"})), Asked(input=True)):
        extract_code(f"{text}!", "fence", asked, finished=True)
    assert time.process_time() - started < 2
