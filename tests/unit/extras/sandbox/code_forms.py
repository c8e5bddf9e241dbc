"""Tests as public datasets of programming tasks have them, each with programs that pass and programs that do not."""

import base64
import json
import pickle
import zlib
from dataclasses import dataclass, field
from typing import Any

ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b\n"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
GUARDED = (
    "def main():\n    a, b = map(int, input().split())\n    print(a + b)\n\nif __name__ == '__main__':\n    main()\n"
)
PRODUCT = "a, b = map(int, input().split())\nprint(a * b)\n"
DRIVEN = f"{ADD}a, b = int(input()), int(input())\nprint(add(a, b))\n"
ADDS = ([ADD, METHOD, DRIVEN], [SUBTRACT, "pass", PROGRAM, "def other(a, b):\n    return a + b\n"])
PROGRAMS = ([PROGRAM, GUARDED], [PRODUCT, "pass", ADD])


@dataclass(frozen=True)
class Form:
    """One form of tests."""

    name: str
    tests: Any
    right: list[str]
    wrong: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)


def private(tests: list[dict[str, Any]]) -> str:
    """As LiveCodeBench packs them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def form(name: str, tests: Any, programs: tuple[list[str], list[str]], **more: Any) -> Form:
    return Form(name, tests, *programs, **more)


def one(name: str, tests: Any, right: str, *wrong: str, **more: Any) -> Form:
    return Form(name, tests, [right], list(wrong), **more)


def value(name: str, inputs: list[Any], outputs: list[Any], *returned: str, f: str = "f(n)", **more: Any) -> Form:
    """Calls of a function; what a right one returns, and what wrong ones do."""
    right, *wrong = (f"def {f}:\n    return {each}\n" for each in returned)
    return one(name, {"fn_name": f.partition("(")[0], "inputs": inputs, "outputs": outputs}, right, *wrong, **more)


LCB_CALLS = [
    {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}},
    {"input": "-1\n1", "output": "0", "testtype": "functional", "metadata": {"func_name": "add"}},
]
LCB_COLUMN = [{key: value for key, value in test.items() if key != "metadata"} for test in LCB_CALLS]
LCB_STDIN = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "4 -4", "output": "0", "testtype": "stdin"},
]
EURUS = {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [[3], [10]]}
IO = {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate([1], [2]) == [1, 2]\n"
LEETCODE = "def check(candidate):\n    assert candidate(a = 1, b = 2) == 3\n    assert candidate(a = 5, b = 5) == 10\n"
KODCODE = """
from solution import add

def test_small():
    assert add(1, 2) == 3

def test_zero():
    assert add(0, 0) == 0
"""
UNITTEST = """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self):
        self.one = 1
    def test_sum(self):
        self.assertEqual(add(self.one, 2), 3)
    def test_float(self):
        self.assertAlmostEqual(add(0.1, 0.2), 0.3)
if __name__ == "__main__":
    unittest.main()
"""
HALF = "def half(n):\n    if n % 2:\n        raise ValueError('odd number')\n    return n // 2\n"
HALF_TESTS = """
import pytest
from solution import half

@pytest.mark.parametrize("n, expected", [(2, 1), (4, 2), pytest.param(6, 3, id="six")])
def test_even(n, expected):
    assert half(n) == expected

@pytest.mark.parametrize("n", [1, 3])
def test_odd(n):
    with pytest.raises(ValueError, match="odd") as error:
        half(n)
    assert "odd" in str(error.value)

class TestMore:
    def setup_method(self):
        self.n = 8
    def test_near(self):
        assert half(self.n) == pytest.approx(4.0)
"""
REVERSE = """class Solution:
    def reverseList(self, head: Optional[ListNode]) -> Optional[ListNode]:
        last = None
        while head:
            head.next, last, head = last, head, head.next
        return last
"""
OWN_NODES = "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n\n"
SAME = REVERSE.replace("head.next, last, head = last, head, head.next", "return head")
INVERT = """class Solution:
    def invertTree(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root:
            root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
"""
LISTS = "def check(candidate):\n    assert is_same_list(candidate(head = list_node([1, 2, 3])), list_node([3, 2, 1]))\n"
TREES = """
def check(candidate):
    assert is_same_tree(candidate(tree_node([2, 1, 3, None, 4])), tree_node([2, 3, 1, None, None, 4]))
"""
MERGE = """class Solution:
    def mergeKLists(self, lists: List[Optional[ListNode]]) -> Optional[ListNode]:
        values = []
        for node in lists:
            while node:
                values.append(node.val)
                node = node.next
        head = None
        for value in sorted(values, reverse=True):
            head = ListNode(value, head)
        return head
"""
COUNT = "def count(words: List[str]) -> Dict[str, int]:\n    return dict(Counter(words))\n"
DEPTH = "def depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\n"

INFO = {"language": "python", "test_cases": [{"input": "1 2", "output": "3", "type": "stdin_stdout", "fn_name": None}]}
KEYS = (("input", "output"), ("stdin", "stdout"), ("stdin", "expected_stdout"), ("input", "expected_output"))

FORMS = [
    # --- programs
    *(form(f"{given} and {said}", [{given: "1 2\n", said: "3\n"}, {given: "5 -7", said: "-2"}], PROGRAMS)
      for given, said in KEYS),
    form("stdin and expected_stdout, as text", json.dumps([{"stdin": "1 2\n", "expected_stdout": "3\n"}]), PROGRAMS),
    form("inputs and outputs (APPS, TACO, Eurus)", IO, PROGRAMS),
    form("inputs and outputs as JSON (verl)", json.dumps(IO), PROGRAMS),
    form("JSON in JSON", json.dumps(json.dumps(IO)), PROGRAMS),
    form("as Python writes it (PrimeIntellect)", str(IO), PROGRAMS),
    form("no name of a function", {**IO, "fn_name": None}, PROGRAMS),
    form("an empty name of a function", {**IO, "fn_name": ""}, PROGRAMS),
    form("lists of lines", {"inputs": [["1 2"], ["4 5", ""]], "outputs": [["3"], ["9"]]}, PROGRAMS),
    form("columns of texts with lists", {"inputs": json.dumps(IO["inputs"]), "outputs": json.dumps(IO["outputs"])},
         PROGRAMS),
    form("input_output (APPS, AReaL)", {"input_output": json.dumps(IO)}, PROGRAMS),
    form("CodeContests", {"input": IO["inputs"], "output": IO["outputs"]}, PROGRAMS),
    form("CodeContests, whole row",
         {"public_tests": {"input": ["1 2"], "output": ["3"]}, "private_tests": {"input": ["4 4"], "output": ["8"]},
         "generated_tests": {"input": ["5 4"], "output": ["9"]}}, PROGRAMS),
    form("CodeContests with an empty part",
         {"public_tests": {"input": ["1 2"], "output": ["3"]}, "private_tests": {"input": [], "output": []}}, PROGRAMS),
    form("stdin_stdout (PrimeIntellect, DeepCoder)",
         [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n", "fn_name": None}], PROGRAMS),
    form("verification_info (open-r1)", INFO, PROGRAMS),
    form("verification_info inside", {"verification_info": json.dumps(INFO)}, PROGRAMS),
    form("unit_tests (NeMo Gym)", {"unit_tests": IO}, PROGRAMS),
    form("LiveCodeBench, stdin", json.dumps(LCB_STDIN), PROGRAMS),
    form("LiveCodeBench, stdin, private", private(LCB_STDIN), PROGRAMS),
    form("LiveCodeBench, stdin, with empty metadata", [{**test, "metadata": {}} for test in LCB_STDIN], PROGRAMS),
    form("stdin beats the name of another column", LCB_STDIN, PROGRAMS, extra={"entry_point": "add"}),
    form("list of texts with JSON", [json.dumps(test) for test in LCB_STDIN], PROGRAMS),
    one("Windows line ends", [{"input": "1 2\r\n", "output": "3\r\n"}], PROGRAM, PRODUCT),
    one("white space at the ends", [{"input": "3", "output": "1 \n2 \n3 \n\n"}],
        "for n in range(int(input())):\n    print(n + 1)\n", "for n in range(int(input())):\n    print(n)\n"),
    one("no input", [{"input": "", "output": "hello"}], "print('hello')", "print('hell')"),
    one("a large output", [{"input": "300000", "output": "12345\n" * 300000}], "print('12345\\n' * int(input()))",
        "print('12346\\n' * int(input()))", args={"limits": {"output_kb": 64}}),
    one("names without imports, in a program", [{"input": "1 2", "output": "3\n0.5"}],
        "a, b = map(int, sys.stdin.readline().split())\nprint(a + b)\nprint(math.sqrt(0.25))\n", PRODUCT),
    one("names without imports, from modules", [{"input": "aab", "output": "2"}],
        "words: List[str] = list(input())\nprint(Counter(words)['a'] + (0 if inf > 1 else 1))\n", PRODUCT),
    one("a program that exits", [{"input": "1 2", "output": "3"}],
        "import sys\nsys.setrecursionlimit(10**6)\nprint(sum(map(int, input().split())))\nsys.exit()\n", PRODUCT),
    # --- calls
    form("fn_name, plain outputs (APPS)", {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [3, 10]}, ADDS),
    form("fn_name, wrapped outputs (Eurus, APPS, TACO)", EURUS, ADDS),
    form("fn_name, as JSON", json.dumps(EURUS), ADDS),
    form("fn_name, one JSON value a line (PRIME)",
         {"fn_name": "add", "inputs": ["1\n2", "5\n5"], "outputs": ["3", "10"]}, ADDS),
    form("fn_name, lines, wrapped", {"fn_name": "add", "inputs": ["1\n2", "5\n5"], "outputs": ["[3]", "[10]"]}, ADDS),
    form("fn_name inside input_output", {"input_output": json.dumps(EURUS)}, ADDS),
    form("a single wrapped test", {"fn_name": "add", "inputs": [[1, 1]], "outputs": [[2]]}, ADDS),
    form("fn_name in each test", [{"fn_name": "add", "input": [1, 2], "output": 3}], ADDS),
    form("function_call (PrimeIntellect)",
         [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3},
         {"type": "function_call", "fn_name": "add", "input": [5, 5], "output": 10}], ADDS),
    form("function_call, wrapped",
         [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
         {"type": "function_call", "fn_name": "add", "input": [5, 5], "output": [10]}], ADDS),
    form("function_call in verification_info",
         {"verification_info": {"language": "python",
         "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}}, ADDS),
    form("LiveCodeBench, functional", LCB_CALLS, ADDS),
    form("LiveCodeBench, functional, private", private(LCB_CALLS), ADDS),
    form("LiveCodeBench, both kinds of tests",
         {"public_test_cases": json.dumps(LCB_CALLS), "private_test_cases": private(LCB_CALLS)}, ADDS),
    form("LiveCodeBench, metadata in its column", json.dumps(LCB_COLUMN), ADDS,
         extra={"metadata": json.dumps({"func_name": "add"})}),
    form("LiveCodeBench, metadata as text", [{**test, "metadata": '{"func_name": "add"}'} for test in LCB_COLUMN],
         ADDS),
    form("FUNCTIONAL", [{**test, "testtype": "FUNCTIONAL"} for test in LCB_CALLS], ADDS),
    form("func_name", [{"func_name": "add", "args": [1, 2], "expected": 3}], ADDS),
    form("named arguments", [{"fn_name": "add", "input": {"a": 1, "b": 2}, "output": 3}], ADDS),
    form("kwargs", [{"fn_name": "add", "args": [1], "kwargs": {"b": 2}, "expected_output": 3}], ADDS),
    form("a = 1, b = 2 (LeetCodeDataset)", [{"input": "a = 1, b = 2", "output": "3"}], ADDS,
         extra={"entry_point": "Solution().add"}),
    form("method named with its class", {"fn_name": "Solution.add", "inputs": [[1, 2]], "outputs": [3]}, ADDS),
    form("another class", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
         ([METHOD.replace("Solution", "Adder")], [METHOD.replace("+", "-")])),
    one("a name that Python has", {"fn_name": "sum", "inputs": [[10, 15]], "outputs": [25]},
        "def sum(a, b):\n    return a + b\n", "pass", "def sum(a, b):\n    return a\n"),
    one("a module's name", {"fn_name": "string", "inputs": [[1]], "outputs": ["1"]},
        "def string(n):\n    return str(n)\n", "import string", "def string(n):\n    return n\n"),
    value("lists of one item", [[1], [2]], [[1], [2]], "[n]", "[n + 1]", "n if n == 1 else [n]"),
    value("lists of several items are no choice", [[1], [2]], [[1, 2], [2, 3]], "[n, n + 1]", "n"),
    one("LiveCodeBench writes what is returned", [{**LCB_CALLS[0], "output": "[3]"}],
        "def add(a, b):\n    return [a + b]\n", ADD),
    value("None", [[1], [2]], [None, 3], "None if n == 1 else 3", "3"),
    value("None, true and text in lines", ['"a"', '"b"'], ["null", "true"], "None if n == 'a' else True", "n"),
    value("as Python writes values", ["(1, 2)", "'x'"], ["{1, 2}", "None"], "set(n) if n != 'x' else None", "list(n)"),
    value("text that is no JSON", ['"a"'], ["hello there"], "'hello there'", "'hello'"),
    value("tuples", [[1]], [[[1, [2, 3]]]], "(1, (2, 3))", "(1, (2, 4))"),
    value("keys that are numbers", [[{"1": 2, "3": 4}]], [{"2": 1, "4": 3}], "{n[1]: 1, n[3]: 3}", "{2: 3, 4: 1}"),
    value("floats", [[0.1, 0.2]], [0.3], "a + b", "0.3001", f="f(a, b)"),
    value("large integers", [[3]], [10**30], "10 ** (10 * n)", "10.0 ** (10 * n) + 1e20", "10**30 + 1"),
    value("true is not 1", [[3]], [True], "n > 2", "1"),
    value("no arguments", [[]], [7], "7", "8", f="f()"),
    one("annotations without imports",
        {"fn_name": "count", "inputs": [[["a", "b", "a"]]], "outputs": [{"a": 2, "b": 1}]}, COUNT,
        COUNT.replace("dict(Counter(words))", "{}")),
    one("lists of nodes", {"fn_name": "reverseList", "inputs": [[[1, 2, 3]], [[]]], "outputs": [[3, 2, 1], []]},
        REVERSE, SAME),
    one("lists of lists of nodes",
        {"fn_name": "mergeKLists", "inputs": [[[[1, 4], [2], []]]], "outputs": [[[1, 2, 4]]]}, MERGE,
        MERGE.replace("reverse=True", "reverse=False")),
    one("nodes of a class of its own", {"fn_name": "reverseList", "inputs": [[[1, 2, 3]]], "outputs": [[3, 2, 1]]},
        "from typing import Optional\n" + OWN_NODES + REVERSE, OWN_NODES + SAME),
    one("trees", {"fn_name": "invertTree", "inputs": [[[2, 1, 3, None, 4]]], "outputs": [[2, 3, 1, None, None, 4]]},
        INVERT, INVERT.replace("root.left, root.right =", "_ =")),
    one("deep recursion", {"fn_name": "depth", "inputs": [[5000]], "outputs": [5000]}, DEPTH,
        DEPTH.replace("1 +", "2 +")),
    value("a large value", [[200000], [200001]], ["ab" * 200000, "ab" * 200001], "'ab' * n", "'aa' * n",
          args={"limits": {"output_kb": 64}}),
    value("large arguments", [[list(range(50000))]], [50000], "len(n)", "3", args={"limits": {"output_kb": 64}}),
    # --- code
    form("assertions (MBPP)", ["assert add(1, 2) == 3", "assert add(5, 5) == 10"],
         ([ADD, DRIVEN], [SUBTRACT, "pass", "def add(*a):\n    raise AssertionError\n"])),
    form("assertions as JSON", json.dumps(["assert add(1, 2) == 3"]), ([ADD], [SUBTRACT, "pass"])),
    form("one text", "assert add(1, 2) == 3\nassert add(5, 5) == 10", ([ADD], [SUBTRACT, "pass"])),
    form("test_list and set-up (MBPP row)",
         {"test_list": ["assert add(one, 2) == 3"], "test_setup_code": "one = 1", "challenge_test_list": []},
         ([ADD], [SUBTRACT])),
    form("test_imports (MBPP sanitized)",
         {"test_list": ["assert math.floor(add(1, 2)) == 3"], "test_imports": ["import math"]}, ([ADD], [SUBTRACT])),
    form("assert_code (ROLL)", [{"assert_code": "assert add(1, 2) == 3"}, {"assert_code": "assert add(5, 5) == 10"}],
         ([ADD], [SUBTRACT])),
    form("assert_code with tests in functions (ROLL KodCode)",
         json.dumps([{"assert_code": "\n\ndef test_add():\n    assert add(1, 2) == 3"}]), ([ADD], [SUBTRACT, "pass"])),
    form("assert_case (verl)",
         {"inputs": ["", ""], "outputs": [None, None],
         "assert_case": ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]}, ([ADD], [SUBTRACT, "pass"])),
    form("typed assertions", [{"type": "assert", "test": "assert add(1, 2) == 3"}], ([ADD], [SUBTRACT])),
    form("functional (Code-R1)", json.dumps({"functional": f"{LEETCODE}\n\ncheck(Solution().add)"}),
         ([METHOD], [METHOD.replace("+", "-"), "pass"])),
    form("pytest (Code-R1)", json.dumps({"pytest": KODCODE}), ([ADD], [SUBTRACT, "pass"])),
    form("check and entry point (HumanEval)", {"test": CHECK, "entry_point": "add"}, ([ADD], [SUBTRACT, "pass"])),
    form("check, entry point in its column", CHECK, ([ADD], [SUBTRACT]), extra={"entry_point": "add"}),
    form("HumanEval with metadata",
         {"test": "\n\nMETADATA = {\n    'author': 'jt'\n}\n\n\n" + CHECK, "entry_point": "add"}, ([ADD], [SUBTRACT])),
    form("check that is called", {"test": f"{CHECK}\ncheck(add)"}, ([ADD], [SUBTRACT])),
    form("check in a function that is called", f"{CHECK}\ndef test_check():\n    check(add)\n\ntest_check()\n",
         ([ADD], [SUBTRACT])),
    form("candidate", ["assert candidate(1, 2) == 3"], ([ADD], [SUBTRACT]), extra={"entry_point": "add"}),
    form("LeetCodeDataset", {"test": LEETCODE, "entry_point": "Solution().add"},
         ([METHOD], [METHOD.replace("+", "-"), "pass"])),
    form("test_code and import_prefix (Skywork)",
         {"test_code": LEETCODE, "import_prefix": "import math\nfrom typing import *\n",
         "entry_point": "Solution().add"}, ([METHOD], [METHOD.replace("+", "-")])),
    form("KodCode", KODCODE, ([ADD], [SUBTRACT, "pass", PROGRAM])),
    form("unittest (BigCodeBench)", {"test": UNITTEST, "entry_point": "add"}, ([ADD], [SUBTRACT, "pass"])),
    one("pytest: parameters, exceptions, classes", HALF_TESTS, HALF, "def half(n):\n    return n // 2\n",
        HALF.replace("odd number", "no"), HALF.replace("n // 2", "2")),
    one("lists of LeetCode", {"test": LISTS, "entry_point": "Solution().reverseList"}, REVERSE, SAME,
        "def is_same_list(a, b):\n    return True\n\n" + SAME),
    one("trees of LeetCode", {"test": TREES, "entry_point": "Solution().invertTree"}, INVERT,
        INVERT.replace("root.left, root.right =", "_ ="), "def is_same_tree(a, b):\n    return True\n\n" + SAME),
    one("dates and decimals",
        ["import datetime", "from decimal import Decimal", "assert g() == Decimal('0.1')",
         "assert f(datetime.date(2020, 1, 31)) == datetime.date(2020, 2, 1)", "assert h() == datetime.timedelta(1, 2)"],
        "from datetime import timedelta\nfrom decimal import Decimal\ndef f(d):\n    return d + timedelta(days=1)\n"
        "def g():\n    return Decimal('0.1')\ndef h():\n    return timedelta(1, 2)\n", "def f(d):\n    return d\n"),
    one("fractions, ranges, deques",
        ["from fractions import Fraction", "from collections import deque", "assert f() == Fraction(1, 3)",
         "assert g() == range(3)", "assert h() == deque([1])"],
        "from fractions import Fraction\nfrom collections import deque\ndef f():\n    return Fraction(1, 3)\n"
        "def g():\n    return range(3)\ndef h():\n    return deque([1])\n", "def f():\n    return 1\n"),
]  # fmt: skip
