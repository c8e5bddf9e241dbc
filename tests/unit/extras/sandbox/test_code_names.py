"""Names of test code: the program's where the row asks for it, Python's everywhere else. Programs that plant them."""

import functools

import pytest

from roll.extras.sandbox.code_names import provided, resolve
from roll.extras.sandbox.harness import Channel, decode
from tests.unit.extras.sandbox import forked_sandbox
from tests.unit.extras.sandbox.code_forms import ADD

BAD = "def add(a, b):\n    return -1\n"
BUILT_INS = (
    "sum max min pow sorted reversed round divmod filter map set list dict hash id len abs all any zip range next iter "
    "type str int vars input print open slice format repr isinstance eval"
)
OF_MODULES = (
    "gcd lcm comb prod Counter deque dist List Any string copy queue select statistics calendar code token test "
    "operator math random time types heapq bisect"
)
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual({}, 3)\n"


def add_as(name):
    return ADD.replace("add", name)


scores = functools.partial(forked_sandbox.scores, partial=True)


def named_scores(cases, **args):
    return dict(zip(cases, scores(cases.values(), **args), strict=True))


# --- functions named as Python's


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", [BUILT_INS, OF_MODULES], ids=["built-ins", "modules"])
def test_a_row_may_ask_for_a_function_of_a_name_that_python_has(names, every):
    asked = names.split()[::every]
    rows = {name: [f"assert {name}(10, 15) == 25", f"assert {name}(100, 150) == 250"] for name in asked}
    assert named_scores({name: (tests, add_as(name)) for name, tests in rows.items()}) == dict.fromkeys(rows, 1.0)
    assert named_scores({name: (tests, "pass") for name, tests in rows.items()}) == dict.fromkeys(rows, 0.0)


HONEST = {
    "expected first": (["assert 25 == sum(10, 15)"], add_as("sum")),
    "not": (["assert not all([1, 2])"], "def all(x):\n    return len(x) != 2\n"),
    "nested": (["assert sum(sum(1, 2), 3) == 6"], add_as("sum")),
    "its type": (["assert sum(1, 2) == 3", "assert isinstance(sum(1, 2), int)"], add_as("sum")),
    "between the tests' own": (["assert set(sum([1], [2])) == set([2, 1])"], add_as("sum")),
    "two functions": (["assert max(1, 2) == 3", "assert min(1, 2) == 3"], add_as("max") + add_as("min")),
    "and": (["assert sum(1, 2) == 3 and sum(2, 2) == 4"], add_as("sum")),
    "entry point": ({"test": "def check(candidate):\n    assert candidate(1, 2) == sum([1, 2])", "entry_point": "sum"},
        add_as("sum")),
    "entry point, statements": (["x = sum(1, 2)\nassert x == 3"], add_as("sum"), {"entry_point": "sum"}),
    "imported": ("from solution import sum as plus\nassert plus(1, 2) == 3", add_as("sum")),
    "module imported": ("import solution\nassert solution.sum(1, 2) == 3", add_as("sum")),
    "unittest": (UNITTEST.format("sum(1, 2)"), add_as("sum")),
    "built-ins of the tests": (["assert set(add([3], [4])) == set([4, 3])", "assert sorted(add([2], [1])) == [1, 2]",
        "assert abs(add(0.1, 0.2) - 0.3) < 1e-9", "assert all(add(i, 1) == i + 1 for i in range(4))"], ADD),
    "own helpers named as Python's": (["assert add(1, 2) == 3", "assert len([1]) == 1"],
        "def len(x):\n    return 7\ndef sum(*x):\n    return x[0] + x[1]\ndef add(a, b):\n    return sum(a, b)\n"),
    "modules without imports": (["assert math.isclose(add(0.1, 0.2), 0.3)", "assert isclose(add(1, 2), 3)",
        "assert Counter(add([1], [1])) == Counter({1: 2})", "assert add(1, 2) < inf"], ADD),
    "imported in one test": (["from collections import Counter\nassert Counter(add('a', 'b')) == Counter('ab')",
        "assert Counter(add('', ''))=={}"], ADD),
    "defined in the tests": (["def same(a, b):\n    return a == b\nassert same(add(1, 2), 3)"], ADD),
    "a class": (["s = Stack()\ns.push(1)\nassert s.pop() == 1", "assert Stack().empty()"],
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def empty(self): return not self.items\n"),
    "a tree of its nodes": (
        {"test_list": ["assert total(root) == 6"],
         "setup": "root = Node(1)\nroot.left = Node(2)\nroot.right = Node(3)"},
        "class Node:\n    def __init__(self, n):\n        self.n, self.left, self.right = n, None, None\n"
        "def total(node):\n    return node.n + total(node.left) + total(node.right) if node else 0\n",
    ),
    "its texts and items": (
        ["v = Vector([1, 2])\nv[0] = 3\nassert v[0] == 3 and str(v) == '<3, 2>' and f'{v}' == repr(v)"],
        "class Vector:\n    def __init__(self, x):\n        self.x = x\n    def __getitem__(self, i):\n"
        "        return self.x[i]\n    def __setitem__(self, i, v):\n        self.x[i] = v\n"
        "    def __repr__(self):\n        return '<%s, %s>' % tuple(self.x)\n",
    ),
    "its exceptions": (
        "import pytest\nfrom solution import f, Bad\n"
        "def test_it():\n    with pytest.raises(Bad, match='no'):\n        f()\n"
        "    try:\n        f()\n    except Bad:\n        pass\n    assert issubclass(Bad, ValueError)\n",
        "class Base(ValueError): pass\nclass Bad(Base): pass\ndef f():\n    raise Bad('no')\n",
    ),
    "its values": (["assert DATA == [1, (2, 3)] and NAME.upper() == 'X'"], "DATA = [1, (2, 3)]\nNAME = 'x'\n"),
    "two of its functions": (["assert decode(encode('ab')) == 'ab'"],
        "def encode(s):\n    return s[::-1]\ndef decode(s):\n    return s[::-1]\n"),
    "a guard that reads": (["assert add(1, 2) == 3"],
        ADD + "if __name__ == '__main__':\n    print(add(int(input()), 2))\n"),
    "lines that read": (["assert add(1, 2) == 3"], ADD + "n = int(input())\nprint(add(n, 2))\n"),
    "an argument that is changed": (["a = [3, 1]\nf(a)\nassert a == [1, 3]"], "def f(x):\n    x.sort()"),
    "a generator": (["assert list(f(3)) == [0, 1, 2]"], "def f(n):\n    yield from range(n)"),
    "an exception": (["try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"],
        "def f(x):\n    raise ValueError('no')"),
    "objects": (["assert total([Box(1), Box(2)]) == 3", "b = Box(5)\nassert b.get() == 5 and b.n == 5"],
        "class Box:\n    def __init__(self, n):\n        self.n = n\n    def get(self):\n        return self.n\n"
        "def total(boxes):\n    return sum(box.n for box in boxes)"),
    "values": (["assert f() == (1, {2: [3.5]}, {4}, b'5', None, 6j, 2**80)", "assert isinstance(f(), tuple)"],
        "def f():\n    return (1, {2: [3.5]}, {4}, b'5', None, 6j, 2**80)"),
    "a value of a module's type": (["assert f('aab') == {'a': 2, 'b': 1}"],
        "from collections import Counter\ndef f(s):\n    return Counter(s)"),
    "math": (["assert math.isclose(f(1), 1 / 3)", "import math\nassert math.floor(f(7)) == 2"],
        "def f(x):\n    return x / 3"),
    "named arguments": (["assert f(2, by=5) == 10", "assert f('é\\n') == 'é\\né\\n'"],
        "def f(x, *, by=2):\n    return x * by"),
    "noise": (["assert f(1) == 1"], "def f(n):\n    print('noise', n)\n    return n"),
    "star import": ("from solution import *\nassert add(1, 2) == 3 and len([1]) == 1", ADD),
}  # fmt: skip


def test_names_mean_what_the_author_of_the_tests_meant():
    assert named_scores(HONEST) == dict.fromkeys(HONEST, 1.0)


def test_names_are_resolved_before_anything_runs():
    names = resolve("", ["assert set(similar((3, 4), (5, 4))) == set((4, 5))"], "")
    assert (names.asked, names.program) == ({"similar"}, {"similar": "similar"})
    names = resolve("", ["assert sorted([3, 1]) == sorted([1, 3])"], "")
    assert names.codes == ("assert _asked_sorted([3, 1]) == sorted([1, 3])",) and names.asked == {"sorted"}
    names = resolve("", ["assert math.isclose(f(1), 2)"], "")
    assert (names.program, names.python) == ({"f": "f"}, {"math": ""})


def test_a_program_may_import_what_it_is_asked_for():
    tests = ["assert gcd(12, 8) == 4", "assert gcd(9, 6) == 3"]
    programs = ["from math import gcd\n", "import math\ngcd = math.gcd\n", "gcd(1, 2)\n"]
    assert scores([(tests, program) for program in programs]) == [1.0, 1.0, 0.0]


def test_a_program_gets_names_that_it_uses_without_importing_them():
    code = "def f(x: List[int]) -> Optional[str]:\n    return Counter(x), math.inf, heappush, re.sub, 'split'"
    modules = {"List": "typing", "Optional": "typing", "Counter": "collections", "heappush": "heapq"}
    assert provided(code) == {**modules, "math": "", "re": ""}
    assert provided("x.split(n).index(string)") == {}


# --- planted names

WRAPPED = {
    "abs": "assert abs(add(1, 2) - 3) < 1e-9",
    "all": "assert all(add(i, 1) == i + 1 for i in range(3))",
    "any": "assert any([add(1, 2) == 3])",
    "len": "assert len(add([1], [2])) == 2",
    "set": "assert set(add([1], [2])) == set([1, 2])",
    "sorted": "assert sorted(add([2], [1])) == [1, 2]",
    "list": "assert list(add([1], [2])) == list([1, 2])",
    "tuple": "assert tuple(add([1], [2])) == tuple([1, 2])",
    "str": "assert str(add(1, 2)) == str(3)",
    "round": "assert round(add(1.2, 1.1), 1) == round(2.3, 1)",
    "sum": "assert sum(add([1], [2])) == sum([1, 2])",
    "isinstance": "assert isinstance(add(1, 2), int) and add(1, 2) == 3",
    "max": "assert max(add([1], [2])) == max([2])",
    "bool": "assert bool(add(1, 2) == 3)",
    "float": "assert float(add(1, 2)) == float(3)",
    "dict": "assert dict(add([(1, 2)], [])) == dict([(1, 2)])",
    "zip": "assert all(x == y for x, y in zip([add(1, 2)], [3]))",
    "map": "assert all(map(lambda i: add(i, 0) == i, [1, 2]))",
    "type": "assert type(add(1, 2)) == type(3) and add(1, 2) == 3",
    "enumerate": "assert all(add(i, 0) == v for i, v in enumerate([0, 1]))",
    "isclose": "assert isclose(add(1, 2), 3)",
    "Counter": "assert Counter(add([1], [2])) == Counter([1, 2])",
    "deque": "assert deque(add([1], [2])) == deque([1, 2])",
    "sqrt": "assert sqrt(add(4, 5)) == sqrt(9)",
    "math": "assert math.isclose(add(1, 2), 3)",
    "collections": "assert collections.Counter(add([1], [2])) == collections.Counter([1, 2])",
    "itertools": "assert list(itertools.chain(add([1], [2]))) == list(itertools.chain([1, 2]))",
    "json": "import json\nassert json.dumps(add(1, 2)) == json.dumps(3)",
    "operator": "import operator\nassert operator.eq(add(1, 2), 3)",
}
PLANTS = {
    "zero": "{0} = lambda *a, **k: 0\n",
    "true": "{0} = lambda *a, **k: True\n",
    "empty": "def {0}(*a, **k):\n    return ()\n",
    "object": "class {0}:\n    def __init__(self, *a, **k): pass\n    def __eq__(self, o): return True\n"
    "    def __lt__(self, o): return True\n    def __iter__(self): return iter(())\n    def __len__(self): return 2\n",
    "namespace": "class {0}:\n    isclose = eq = staticmethod(lambda *a: True)\n    Counter = chain = dumps = "
    "staticmethod(lambda *a: 0)\n",
    "built-in": "import builtins\nbuiltins.{0} = lambda *a, **k: True\n",
    "module": "import sys, types\nm = sys.modules['{0}'] = types.ModuleType('{0}')\n"
    "m.isclose = m.eq = m.Counter = m.chain = m.dumps = lambda *a: True\n",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_names_earn_nothing(plant):
    tests = list(WRAPPED.values())
    planted = [PLANTS[plant].format(name) for name in WRAPPED if plant != "module" or name in ("math", "collections")]
    last = ("sys", "types", "type", "str", "dict", "tuple", "list")  # what the planting itself needs
    everything = "".join(sorted(planted, key=lambda text: any(f" {name}" in text for name in last)))
    assert scores([(tests, everything + BAD), (tests, everything), (tests, ADD)]) == [0.0, 0.0, 1.0]
    alone = [([test], PLANTS[plant].format(name) + BAD) for name, test in list(WRAPPED.items())[::3]]
    assert scores(alone) == [0.0] * 10


COMPARED = [
    *("assert add(1, 2) == 3", "assert add(1, 2) in [3]", "assert 3 == add(1, 2)", "assert not add(1, 2) != 3"),
    *("assert [add(1, 2)] == [3]", "assert {'k': add(1, 2)} == {'k': 3}", "assert abs(add(1, 2) - 3) < 1e-6"),
    *("assert 3 <= add(1, 2) <= 3", "assert str(add(1, 2)) == '3'", "assert add(1, 2) - 3 == 0",
      "assert {add(1, 2)} == {3}"),
    *("assert max(add(1, 2), 3) == min(3, add(1, 2)) == 3", "assert sum([add(1, 2), -3]) == 0",
      "assert (add(1, 2), 1) == (3, 1)"),
    *("import math\nassert math.isclose(add(1, 2), 3)", "assert round(add(1, 2)) == 3", "assert f'{add(1, 2)}' == '3'"),
]  # fmt: skip
ALWAYS = """class Always{base}:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __lt__(self, o): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return hash(-7)
    def __sub__(self, o): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __sub__
    def __abs__(self): return 0
    def __round__(self, n=None): return self
    def __bool__(self): return True
    def __str__(self): return "-7"
    __repr__ = __str__
    def __float__(self): return -7.0
    def __int__(self): return -7
    __index__ = __len__ = __int__
    def __iter__(self): return iter([-7])
    def __call__(self, *a): return self
    __class__ = property(lambda self: int)
def add(a, b):
    return {make}
"""
META = """class Meta(type):
    def __instancecheck__(c, o): return True
    def __eq__(c, o): return True
    def __hash__(c): return 3
    def __call__(c, *a): return c
class add(metaclass=Meta): pass
"""


def test_objects_that_equal_everything_earn_nothing():
    makes = [
        *(("", "Always()"), ("(int)", "Always(-5)"), ("(float)", "Always(-5.0)"), ("(str)", "Always('x')")),
        *(("(list)", "Always([-1])"), ("(dict)", "Always()"), ("(tuple)", "Always((1,))"), ("(set)", "Always({1})")),
        *(("", "[Always()]"), ("", "Always"), ("", "{'k': Always()}")),
    ]
    programs = [META, *(ALWAYS.format(base=base, make=make) for base, make in makes)]
    assert scores([(COMPARED, program) for program in (ADD, *programs)]) == [1.0] + [0.0] * len(programs)


VECTOR = """class V:
    def __init__(self, x):
        self.x = x
        self.open = False
    def __eq__(self, other):
        return {equal}
    def __lt__(self, other):
        return self.x < other.x
    def __add__(self, other):
        return V(self.x + other.x)
    def __mul__(self, number):
        return V(self.x * number)
    def __sub__(self, other):
        return 0
    def __enter__(self):
        self.open = True
        return self
    def __exit__(self, *error):
        self.open = False
        return True
def length(v):
    return {length}
"""


def test_objects_of_a_class_that_the_tests_name_have_its_operators_among_themselves():
    honest = VECTOR.format(equal="isinstance(other, V) and self.x == other.x", length="v.x")
    operators = [
        *("assert V(1) + V(2) == V(3)", "assert V(1) * 2 == V(2)", "assert V(1) != V(2)", "assert V(1) < V(2)"),
        "with V(1) as v:\n    assert v.open\nassert not v.open",
    ]
    forged = VECTOR.format(equal="True", length="V(-1)")
    assert scores([(operators, honest), (operators[:2], forged)]) == [1.0, 0.0]
    alike = VECTOR.format(equal="isinstance(other, V)", length="v.x")
    assert scores([(operators[:2], alike)]) == [0.0], "any of its own class is no value"
    from_plain = ["assert abs(length(V(2)) - 2) < 1e-6", "assert length(V(2)) == 2", "assert length(V(2)) * 1 == 2"]
    hidden = ["with V(1) as v:\n    assert length(v) == 5"]
    assert scores([(from_plain, forged), (from_plain, honest), (hidden, honest)]) == [0.0, 1.0, 0.0]
    strangers = VECTOR.format(equal="isinstance(other, W)", length="W()")
    strangers += "class W(V):\n    __init__ = lambda s: None\n"
    assert scores([(["assert length(V(1)) == length(V(2))"], strangers)]) == [0.0]


ROWS = {
    "assertions": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
    "calls": {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]]},
    "check": {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"},
    "unittest": UNITTEST.format("add(1, 2)"),
    "pytest": "import pytest\nfrom solution import add\ndef test_it():\n    assert add(1, 2) == pytest.approx(3)\n",
}
ENDINGS = [
    *("raise AssertionError", "raise SystemExit(0)", "raise KeyboardInterrupt", "raise GeneratorExit", "quit()"),
    *("raise StopIteration", "import sys; sys.exit(0)", "import os; os._exit(0)", "import os; os.abort()"),
    *("return [0] * 10**15", "yield 3", "import unittest; raise unittest.SkipTest", "return range(10**18)"),
    *("return float('nan')", "return str(a + b)", "return True", "return [a + b, a + b]", "return None"),
]
SNEAKY = {
    **{ending: f"def add(a, b):\n    {ending}\n" for ending in ENDINGS},
    "atexit": f"import atexit, os\natexit.register(lambda: os._exit(0))\n{BAD}",
    "thread": f"import threading\nthreading.Thread(target=lambda: None, daemon=True).start()\n{BAD}",
    "trace": f"import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n{BAD}",
    "json": f"import json\njson.dumps = lambda *a, **k: '{{}}'\njson.loads = lambda *a, **k: {{}}\n{BAD}",
    "encoder": f"import json\njson.JSONEncoder.encode = lambda *a: '{{\"ok\": true}}'\n{BAD}",
    "excepthook": f"import sys\nsys.excepthook = lambda *a: None\n{BAD}",
    "stdout": f"import sys, io\nsys.stdout = io.StringIO()\nprint('{{\"ok\": true}}')\n{BAD}",
    "frames": "import sys\nf = sys._getframe()\nwhile f:\n    for k in list(f.f_globals):\n        if k in ('encode', "
    f"'decode', '_find'):\n            f.f_globals[k] = lambda *a, **k: True\n    f = f.f_back\n{BAD}",
    "names of Python's": "import sys\nf = sys._getframe()\nwhile f:\n    if 'encode' in f.f_globals:\n"
    "        f.f_globals['encode'] = lambda *a, **k: {'known': ['unittest.mock', 'ANY']}\n    f = f.f_back\n"
    "def add(a, b):\n    return 5\n",
    "exceptions": f"class ValueError(Exception): pass\nclass AssertionError(Exception): pass\n{BAD}",
    "module": "import sys, types\nm = sys.modules['solution'] = types.ModuleType('solution')\nm.add = lambda a, b: 3\n",
    "unittest": f"import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n{BAD}",
    "unittest planted": f"class unittest:\n    class TestCase: pass\n{BAD}",
    "pytest": f"import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\n{BAD}",
    "check": f"check = lambda c: None\ncandidate = lambda *a: 3\ntest_it = T = None\n{BAD}",
    "asked": "_asked_add = __asked_add = lambda a, b: a + b\n",
    "compile": f"import builtins\nbuiltins.compile = builtins.exec = lambda *a, **k: None\n{BAD}",
    "AssertionError": f"import builtins\nbuiltins.AssertionError = type('A', (Exception,), {{}})\n{BAD}",
    "getattr": "def __getattr__(name):\n    return lambda *a: 3\n",
    "nothing": "pass",
    "text": "'def add(a, b): return a + b'",
    "syntax": "def add(a, b) return a + b",
    "Decimal": "class Decimal:\n    def __str__(self): return 'x'\nDecimal.__module__ = 'decimal'\n"
    "add = lambda a, b: Decimal()\n",
    "list without end": "class ListNode:\n    val = 3\n    next = property(lambda self: self)\ndef add(a, b):\n"
    "    return ListNode()\n",
    "tree without end": "class TreeNode:\n    val = 3\n    left = right = property(lambda self: self)\ndef add(a, b):\n"
    "    return TreeNode()\n",
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow if number else []) for number, row in enumerate(ROWS)]
)
def test_sneaky_programs_earn_nothing(row):
    cases = {name: (ROWS[row], program) for name, program in SNEAKY.items()}
    assert named_scores(cases, limits={"wall_seconds": 1}) == dict.fromkeys(SNEAKY, 0.0)


def test_a_program_cannot_name_what_python_has():
    channel = Channel.__new__(Channel)
    with pytest.raises(ValueError, match="expected a plain value"):
        decode({"known": ["unittest.mock", "ANY"]}, channel.resolve)


LISTS = "def check(candidate):\n    assert is_same_list(candidate(list_node([1, 2])), list_node([2, 1]))\n"
CONSTANT = "def {0}(*x):\n    return 0\n"


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (["assert sorted([3, 1, 2]) == sorted([1, 2, 3])"], CONSTANT.format("sorted")),
        (["assert sum([1, 2]) == sum([2, 1])"], CONSTANT.format("sum")),
        ({"test": "def check(candidate):\n    assert candidate([1]) == sum([1])\n", "entry_point": "sum"},
         CONSTANT.format("sum")),
        ("from solution import *\nassert len(add([1], [2])) == 2", f"len = lambda x: 2\n{BAD}"),
        (["assert gcd(4, 2) == 2"], "x = lambda: gcd(4, 2)\n"),
        (["assert len('abc') == 3", "assert add(1, 2) == 3"], "len = lambda x: 3\n"),
        ({"test": LISTS, "entry_point": "f"}, "is_same_list = lambda a, b: True\nlist_node = f = lambda x: x\n"),
        ({"test": LISTS, "entry_point": "f"},
         "class ListNode:\n    val = next = None\n    def __init__(self, *a): pass\n"
         "    def __eq__(self, o): return True\ndef f(x):\n    return x\n"),
    ],
)  # fmt: skip
def test_no_side_of_a_comparison_is_given_away(tests, program):
    assert scores([(tests, program)]) == [0.0]


# --- what tests give the program

NODE = "class N:\n    def __init__(self, v, nxt=None):\n        self.v, self.next = v, nxt\n"
APPLY = "def apply(f, x):\n    return f(x)\n"
LENT = {
    "a function": ("def f(x):\n    return x + 1\nassert apply(f, 3) == 4", APPLY),
    "a lambda": ("assert apply(lambda v: v + 1, 3) == 4", APPLY),
    "a built-in": ("assert apply(len, 'abc') == 3 and apply(str.upper, 'a') == 'A'", APPLY),
    "of a module": ("import math, operator\nassert apply(math.sqrt, 4) == 2 and apply(operator.neg, 1) == -1", APPLY),
    "a getter": ("import operator\nassert apply(operator.itemgetter(1), (5, 6)) == 6", APPLY),
    "a method of a list": ("seen = []\nrun(seen.append)\nassert seen == [0, 1, 2]",
        "def run(f):\n    for i in range(3):\n        f(i)\n"),
    "a decorated function": (
        "@deco\ndef h(x):\n    return x\nassert h(1) == 2",
        "import functools\ndef deco(f):\n    @functools.wraps(f)\n"
        "    def g(*a):\n        return f(*a) + 1\n    return g\n",
    ),
    "a function that calls the program": ("def g(n):\n    return fact(g, n)\nassert g(20) == 2432902008176640000",
        "def fact(f, n):\n    return n * f(n - 1) if n else 1\n"),
    "a function that raises": ("def bad():\n    raise KeyError('x')\nassert attempt(bad) == 'caught'",
        "def attempt(f):\n    try:\n        f()\n    except KeyError:\n        return 'caught'\n"),
    "an object": (f"{NODE}assert first(N(7)) == 7", "def first(n):\n    return n.v\n"),
    "objects that are changed": (
        f"{NODE}h = rev(N(1, N(2, N(3))))\nassert [h.v, h.next.v, h.next.next.v] == [3, 2, 1] and not h.next.next.next",
        "def rev(head):\n    prev = None\n    while head:\n"
        "        head.next, prev, head = prev, head, head.next\n    return prev\n",
    ),
    "objects in order": (
        "class K:\n    def __init__(self, v): self.v = v\n    def __lt__(self, o): return self.v < o.v\n"
        "a, b = K(2), K(1)\nassert srt([a, b])[0] is b",
        "def srt(xs):\n    return sorted(xs)\n",
    ),
    "equal objects": (
        "class Q:\n    def __init__(self, v): self.v = v\n    def __eq__(self, o): return self.v == o.v\n"
        "assert same(Q(1), Q(1)) and not same(Q(1), Q(2))",
        "def same(a, b):\n    return a == b\n",
    ),
    "a named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\nassert norm(P(3, 4)) == 28",
        "def norm(p):\n    x, y = p\n    return p.x * p.x + p.y * p.y + p[0]\n"),
    "an iterator": ("assert total(iter([1, 2])) == 3 and total(x for x in [4]) == 4",
        "def total(i):\n    return sum(i)\n"),
    "a coroutine": ("import asyncio\nassert asyncio.run(f(2)) == 4", "async def f(x):\n    return x * 2\n"),
    "coroutines": (
        "import asyncio\nasync def t():\n    assert await asyncio.gather(f(1), f(2)) == [2, 4]\nasyncio.run(t())",
        "async def f(x):\n    return x * 2\n",
    ),
    "what it prints": (
        "import io, contextlib\nb = io.StringIO()\n"
        "with contextlib.redirect_stdout(b):\n    f(3)\nassert b.getvalue() == '3\\n'",
        "def f(x):\n    print(x)\n",
    ),
    "isinstance": ("assert isinstance(make(), A) and not isinstance(3, A)",
        "class A:\n    pass\ndef make():\n    return A()\n"),
}  # fmt: skip


@pytest.mark.parametrize("group", [0, 1])
def test_what_tests_give_the_program_is_lent_to_it(group):
    chosen = {name: ([test], program) for name, (test, program) in list(LENT.items())[group::2]}
    assert named_scores(chosen) == dict.fromkeys(chosen, 1.0)
    wrong = {name: (tests, "def wrong(*_):\n    return None\n") for name, (tests, _) in chosen.items()}
    assert named_scores(wrong) == dict.fromkeys(chosen, 0.0)


NOSY = {
    "globals": "f.__globals__['expected']",
    "behind the proxy": "f._owner.borrow(f._number, 'get', name='__globals__')['expected']",
    "code": "f._owner.borrow(f._number, 'special', name='__code__')",
    "another's attribute": "f._owner.borrow(f._number, 'set', 3, name='__defaults__')",
    "an object that equals all": "f(type('E', (), {'__eq__': lambda self, o: True})())",
}


def test_what_is_lent_leads_to_nothing_else_of_the_tests():
    test = "expected = 3\nassert apply(lambda v: v, 3) == expected"
    cases = {name: ([test], f"def apply(f, x):\n    return {value}\n") for name, value in NOSY.items()}
    assert named_scores(cases) == dict.fromkeys(NOSY, 0.0)


def test_what_cannot_be_lent_is_a_problem_of_the_row_and_never_one_that_a_program_can_make():
    for value in ("re.compile('a')", "io.StringIO('a')"):
        with pytest.raises(ValueError, match=r"tests: they give the program a value of type (Pattern|StringIO), which"):
            scores([([f"import io, re\nassert f({value}) == 1"], "def f(p):\n    return 1\n")])
    asks = "def f(o):\n    return o.pattern\n"
    holder = "import re\nclass H:\n    pattern = re.compile('a')\nassert f(H()) == 1"
    assert scores([([holder], asks)]) == [0.0]
