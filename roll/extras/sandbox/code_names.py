"""Which names in test code belong to the program, and which to Python.

A policy may define ``len`` or ``isclose`` so that every assertion holds. So a name that Python has (a built-in, a
module, what ``math``, ``collections`` and ``typing`` export) means Python's in test code, whatever the program defines,
with one exception: rows that ask for a function of such a name (``assert sum(10, 15) == 6``). There it means the
program's where the assertion calls it, and Python's on the other side of the comparison.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

PROGRAM_MODULES = frozenset({"solution", "main", "submission", "answer", "your_module", "your_solution"})
"""Modules under which test code imports the program."""
LEETCODE_HELPERS = frozenset({"ListNode", "TreeNode", "list_node", "tree_node", "is_same_list", "is_same_tree"})
"""What test code of LeetCode's problems has from elsewhere; the sandbox has them (``roll.extras.sandbox.harness``)."""
_STAND_INS = ("pytest", "numpy")
"""Modules that the sandbox has parts of."""
_ALIAS = "_asked_"
_BUILTINS = frozenset(vars(builtins))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_STARRED = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
"""Modules whose names the graders of APPS, TACO, PRIME and LiveCodeBench import before each program."""
_CHEAP = frozenset({"string", "collections", "heapq", "bisect", "math", "itertools", "functools", "typing"})
_IN_TESTS = frozenset({"collections", "math", "typing"})
_USED = re.compile(r"(?<![\w.])([A-Za-z_]\w*)([ \t]*[(\[.])?")


@functools.cache
def _exported() -> dict[str, str]:
    """Names that Python's modules export, with the module; the names of the modules themselves, with nothing."""
    names: dict[str, str] = {}
    for module in _STARRED:
        content = importlib.import_module(module)
        public = getattr(content, "__all__", None) or [name for name in vars(content) if not name.startswith("_")]
        names |= dict.fromkeys(public, module)
    names |= dict.fromkeys(_STARRED, "")
    return {name: module for name, module in names.items() if name not in _BUILTINS}


def provided(source: str) -> dict[str, str]:
    """Names that a program uses and may do without importing, with their modules (nothing: it is one itself).

    They are found by their spelling; what the program defines itself comes over them.
    """
    exported = _exported()
    found = {name: call for name, call in _USED.findall(source) if name in exported}
    found |= {name: call for name, call in _USED.findall(source) if name in exported and call}
    return {name: exported[name] for name, call in found.items() if call or exported[name] in _CHEAP} | {
        name: "harness" for name in ("ListNode", "TreeNode") if re.search(rf"\b{name}\b", source)
    }


@dataclass(frozen=True)
class Names:
    """Test code, and what its names mean."""

    setup: str
    codes: tuple[str, ...]
    """The tests: names of the program that Python has too are spelled otherwise. What asks nothing of the program is a
    part of the test before it, or of ``setup``."""
    asked: frozenset[str]
    """The functions and classes of the program that they need."""
    program: dict[str, str]
    """The program's names, by their spelling in the test code."""
    python: dict[str, str]
    """Python's that test code does not import, with their modules (nothing: it is one itself)."""
    imports: tuple[str, ...]
    """Modules that it imports; of those with a stand-in the names that it uses, such as ``pytest.raises``."""


def resolve(setup: str, codes: Sequence[str], entry_point: str) -> Names:
    """Tells the program's names from Python's.

    Args:
        entry_point: an expression that the tests are about, such as ``add`` or ``Solution().add``; may be empty.

    Raises:
        ValueError: it is no expression, no code asks anything of the program, or a test needs a fixture.
    """
    trees = [ast.parse(code) for code in (setup, *codes)]
    entry = _entry(entry_point)
    root = next((node.id for node in ast.walk(entry) if isinstance(node, ast.Name)), "") if entry else ""
    uses = _Uses(trees)
    own = {name for name in uses.free - {"candidate"} if not _is_pythons(name, uses)} | ({root} - {""})
    explicit = own | uses.from_program
    asked = {name for name in own if _is_pythons(name, uses)} if explicit else _asked_built_ins(trees, uses.free)
    if entry is not None:
        _spell(entry, {id(node) for node in ast.walk(entry)}, asked)
    tests: list[str] = []
    before = [setup]
    for code, tree in zip(codes, trees[1:], strict=True):
        _check_fixtures(tree)
        text, counts = _test(code, tree, entry, asked)
        counts |= bool(_loads(tree) & own or _from_program(tree)) and runs_something(tree)
        if counts:
            tests.append(text)
        elif tests:
            tests[-1] += f"\n{text}"
        else:
            before.append(text)
    if not tests:
        raise ValueError("never uses the program, so any program passes")
    python = {name for name in uses.loaded - own - asked - _BUILTINS if _is_pythons(name, uses)}
    return Names(
        setup="\n".join(before).strip("\n"),
        codes=tuple(tests),
        asked=frozenset(explicit | asked),
        program={name: name for name in own - asked} | {_ALIAS + name: name for name in asked},
        python={name: _home(name) for name in python},
        imports=tuple(sorted(uses.modules)),
    )


def _test(code: str, tree: ast.Module, entry: ast.expr | None, asked: set[str]) -> tuple[str, bool]:
    """A test with the entry point in its place, and whether that, or a name that Python has too, is asked for."""
    if entry is not None:
        if any(isinstance(part, ast.FunctionDef) and part.name == "check" for part in tree.body):
            called = {name for part in tree.body if isinstance(part, ast.Expr) for name in _loads(part)}
            return (code, False) if "check" in called else (f"{code}\n\ncheck({ast.unparse(entry)})\n", True)
        if "candidate" in _Uses([tree]).free:
            return f"candidate = {ast.unparse(entry)}\n{code}", True
    theirs, others = _sides_of(tree, asked)
    if entry is not None:  # outside of comparisons, too
        theirs |= {id(node) for node in ast.walk(tree)} - others
    renamed = _spell(tree, theirs, asked)
    return (ast.unparse(tree) if renamed else code), renamed and runs_something(tree)


def _home(name: str) -> str:
    """The module of a name that Python has; nothing for a module."""
    if name in LEETCODE_HELPERS:
        return "harness"
    return "" if name in sys.stdlib_module_names else _exported()[name]


class _Uses(ast.NodeVisitor):
    """Names that code reads and does not bind; what it imports."""

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self.loaded: set[str] = set()
        self.bound: set[str] = set()
        self.not_as_module: set[str] = set()
        self.modules: set[str] = set()
        self.from_program: set[str] = set()
        self._stand_ins = {"pytest": "pytest"}
        for tree in trees:
            self.visit(tree)
        self.free = self.loaded - self.bound

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.loaded.add(node.id)
            self.not_as_module.add(node.id)
        else:
            self.bound.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and isinstance(node.value.ctx, ast.Load):
            self.loaded.add(node.value.id)
            if node.value.id in self._stand_ins:
                self.modules.add(f"{self._stand_ins[node.value.id]}.{node.attr}")
            elif node.value.id in PROGRAM_MODULES:
                self.from_program.add(node.attr)
        else:
            self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.bound.add(node.arg)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.bound.add(node.name or "")
        self.generic_visit(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.bound.add((alias.asname or alias.name).partition(".")[0])
            if alias.name in _STAND_INS:
                self._stand_ins[alias.asname or alias.name] = alias.name
            if alias.name not in PROGRAM_MODULES:
                self.modules.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        if node.module in PROGRAM_MODULES:
            self.from_program |= {alias.name for alias in node.names if alias.name != "*"}
        else:
            self.modules.add(node.module)
            self.modules |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in _STAND_INS}
        for alias in node.names:
            if alias.name != "*":
                self.bound.add(alias.asname or alias.name)
            elif node.module in _STARRED:
                self.bound |= {name for name, module in _exported().items() if module == node.module}


def _is_pythons(name: str, uses: _Uses) -> bool:
    """Tells whether a free name is one that Python has: a module is one only where its attributes are read."""
    if name in _BUILTINS or name in LEETCODE_HELPERS or _exported().get(name) in _IN_TESTS:
        return True
    return name in sys.stdlib_module_names and name not in uses.not_as_module


def _entry(entry_point: str) -> ast.expr | None:
    if not entry_point:
        return None
    try:
        return ast.parse(entry_point.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"entry_point: got {entry_point!r}, expected the name of a function") from None


def _loads(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _from_program(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if PROGRAM_MODULES & set(names):
            return True
    return False


def runs_something(tree: ast.Module) -> bool:
    """Tells whether code does more than define, import and set constants; what ``__name__`` guards is not run."""
    if test_functions(tree):
        return True
    run = [part for part in tree.body if not isinstance(part, _DEFINITIONS) and not _is_guarded(part)]
    return any(_loads(part) for part in run)


def test_functions(tree: ast.Module) -> list[str]:
    """Functions that pytest would run, and classes with tests."""
    found = [part.name for part in tree.body if isinstance(part, ast.FunctionDef) and _is_test(part)]
    classes = [part for part in tree.body if isinstance(part, ast.ClassDef)]
    return found + [part.name for part in classes if any(_is_test(item) for item in part.body)]


def _is_test(item: ast.stmt) -> bool:
    return isinstance(item, ast.FunctionDef) and item.name.startswith("test")


def _check_fixtures(tree: ast.Module) -> None:
    for part in tree.body:
        if isinstance(part, ast.FunctionDef) and part.name.startswith("test") and not part.decorator_list:
            needed = [arg.arg for arg in part.args.args[: len(part.args.args) - len(part.args.defaults)]]
            called = any(isinstance(node, ast.Name) and node.id == part.name for node in ast.walk(tree))
            if needed and not called:
                raise ValueError(f"{part.name} needs {', '.join(needed)}: fixtures are not supported")


def _is_guarded(part: ast.stmt) -> bool:
    guard = ast.walk(part.test) if isinstance(part, ast.If) else ()
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in guard)


# --- functions that are named as Python's


def _comparisons(tree: ast.AST) -> Iterator[list[ast.expr]]:
    """The sides of each comparison that an assertion (also one of unittest) makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from _parts(node.test)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[:6] == "assert":
            yield node.args


def _parts(test: ast.expr) -> Iterator[list[ast.expr]]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _parts(test.operand)
    else:
        yield [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]


def _called(side: ast.expr, names: set[str]) -> list[str]:
    """Names among these that are called, the outermost first."""
    found: list[str] = []
    waiting = deque[ast.AST]([side])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            found.append(node.func.id)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _asked_side(sides: Sequence[ast.expr], names: set[str]) -> tuple[ast.expr, list[str]] | None:
    """The first side of a comparison that calls one of these names, and which it calls."""
    return next(((side, called) for side in sides if (called := _called(side, names))), None)


def _asked_built_ins(trees: Sequence[ast.Module], names: set[str]) -> set[str]:
    """What the assertions call where they call nothing that Python lacks: the outermost call that they share, else the
    outermost of each. A name that the other side of a comparison calls too, as ``set``, is the tests' own if there is
    another."""
    asked = []
    for sides in (sides for tree in trees for sides in _comparisons(tree)):
        if (found := _asked_side(sides, names)) is not None:
            others = {name for side in sides if side is not found[0] for name in _called(side, names)}
            asked.append([name for name in found[1] if name not in others] or found[1])
    shared = set(asked[0]).intersection(*asked) if asked else set()
    return {next(name for name in asked[0] if name in shared)} if shared else {called[0] for called in asked}


def _sides_of(tree: ast.AST, names: set[str]) -> tuple[set[int], set[int]]:
    """The nodes on the sides of comparisons that call one of these names first, and those on the other sides."""
    theirs: set[int] = set()
    others: set[int] = set()
    for sides in _comparisons(tree):
        if (found := _asked_side(sides, names)) is not None:
            for side in sides:
                (theirs if side is found[0] else others).update(id(child) for child in ast.walk(side))
    return theirs, others


def _spell(tree: ast.AST, places: set[int], names: set[str]) -> bool:
    """Spells these names otherwise at these nodes; tells whether there were any."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) in places and node.id in names]
    for node in found:
        node.id = _ALIAS + node.id
    return bool(found)
