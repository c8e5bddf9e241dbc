"""Forty fixed mutations of the algorithms, data and rollouts: which ones do the unit tests notice?

    python scripts/mutations.py before.json                        # this checkout
    python scripts/mutations.py after.json --sources ../other      # another checkout's roll/ with the tests of this one
    python scripts/mutations.py --compare before.json after.json   # exits with 1 where more mutations survive

A mutation changes one operator, comparison or constant, negates one condition or drops one statement. The seed picks
them, so one source tree always has the same ones. Each runs alone, in a copy of the tree, against those test files of
its room that call the changed function, until the first failure. Test files that start Ray or agent programs, or that
end threads which hang, are left out: tracing their calls makes them hang too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"algorithms": 14, "data": 13, "rollout": 13}
SEED = 32
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
LEFT_OUT = ("ray_session", "AgentError", "PATIENCE_S", "EnvTimeoutError", "took longer")
"""What stands in the test files that are left out."""
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--hypothesis-profile=quick"]


class Mutation(NamedTuple):
    """One changed expression or statement: ``new`` replaces the bytes from ``start`` to ``end``."""

    file: str
    function: str
    line: int
    old: str
    new: str
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.old} -> {self.new}"


# Where a source can be changed


def mutations_of(file: str, source: bytes) -> Iterator[Mutation]:
    """Every mutation inside the functions of a file. Messages of errors and of the log stay as they are."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def mutation(node: Any, new: str, function: str) -> Mutation:
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        return Mutation(file, function, node.lineno, ast.unparse(node), new, start, end)

    def visit(node: ast.AST, name: str, in_function: bool) -> Iterator[Mutation]:
        if isinstance(node, ast.Raise | ast.Assert) or _is_log(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_function = not isinstance(node, ast.ClassDef)
            qualified = f"{name}.{node.name}" if name else node.name
            for statement in node.body:
                yield from visit(statement, f"{qualified}.<locals>" if is_function else qualified, is_function)
            return
        if in_function:
            function = name.removesuffix(".<locals>")
            yield from (mutation(node, new, function) for new in _replacements(node))
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "annotation", None):
                yield from visit(child, name, in_function)

    yield from visit(ast.parse(source), "", False)


def _replacements(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield ast.unparse(ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and not _is_text(left):
            yield f"({ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield f"({value} + 1)"
        case ast.Constant(value=float(value)):
            yield f"({value} + 0.5)"
        case ast.If(test=test) if isinstance(test, ast.Name | ast.Call | ast.Attribute):
            return  # its condition is an expression of its own
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "warnings."))


def chosen(sources: Path, room: str) -> list[Mutation]:
    """The room's mutations, at most one in a function."""
    candidates: list[Mutation] = []
    for path in sorted((sources / "roll" / room).rglob("*.py")):
        candidates += mutations_of(path.relative_to(sources).as_posix(), path.read_bytes())
    random.Random(f"{SEED} {room}").shuffle(candidates)
    one_each = {(mutation.file, mutation.function): mutation for mutation in reversed(candidates)}
    return sorted(list(one_each.values())[-ROOMS[room] :])


# Running tests in a copy of the tree


class Calls:
    """Plugin of pytest: by test file, the functions of a room that its tests call, and its seconds."""

    def __init__(self, tree: Path, room: str) -> None:
        self.prefix = f"{tree}/roll/{room}/"
        self.tree = f"{tree}/"
        self.calls: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.current: set[str] = set()
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self.prefix):
            self.current.add(f"{code.co_filename.removeprefix(self.tree)} {code.co_qualname}")

    def pytest_collectstart(self, collector: Any) -> None:
        self.current = self.calls[collector.nodeid.split("::")[0]]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = self.calls[nodeid.split("::")[0]]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def in_a_child(tree: Path, work: Any, limit: float) -> int:
    """Exit status of ``work()`` in a forked process, whose group is killed after ``limit`` seconds (-1)."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 70
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def calls_of_tests(tree: Path, room: str) -> dict[str, Any]:
    """Runs the room's unit tests once, without a mutation."""
    import pytest

    folder = tree / "tests" / "unit" / room
    files = [
        str(file.relative_to(tree))
        for file in sorted(folder.rglob("test_*.py"))
        if not any(word in file.read_text() for word in LEFT_OUT)
    ]
    record = tree / "calls.json"

    def work() -> int:
        calls = Calls(tree, room)
        arguments = [argument for argument in PYTEST if argument != "-x"]
        pytest.main([*files, *arguments], plugins=[calls])
        sys.settrace(None)
        callers = {file: sorted(functions) for file, functions in calls.calls.items() if file in files}
        record.write_text(json.dumps({"calls": callers, "seconds": calls.seconds, "failed": calls.failed}))
        return 0

    if in_a_child(tree, work, 3600) != 0:
        raise SystemExit(f"the unit tests of {room} did not end:\n{(tree / 'output.txt').read_text()[-2000:]}")
    return json.loads(record.read_text())


def outcome(tree: Path, mutation: Mutation, tests: dict[str, Any]) -> str:
    """``killed`` by a failing test, ``timeout`` (noticed too), ``survived`` or ``not called`` by any test."""
    import pytest

    called = f"{mutation.file} {mutation.function}"
    files = [file for file, functions in tests["calls"].items() if called in functions]
    files.sort(key=lambda file: tests["seconds"].get(file, 0.0))
    if not files:
        return "not called"
    left_out = [f"--deselect={test}" for test in tests["failed"]]
    target = tree / mutation.file
    source = target.read_bytes()
    target.write_bytes(source[: mutation.start] + mutation.new.encode() + source[mutation.end :])
    limit = 60 + 5 * sum(tests["seconds"].get(file, 0.0) for file in files)
    try:
        status = in_a_child(tree, lambda: pytest.main([*files, *left_out, *PYTEST]), limit)
    finally:
        target.write_bytes(source)
    return {0: "survived", -1: "timeout"}.get(status, "killed")


def copied(sources: Path, tests: Path, tree: Path) -> None:
    """A tree with ``roll/`` of one checkout and ``tests/`` of another; the rest is linked."""
    for entry in sources.iterdir():
        if entry.name not in ("roll", "tests") and not entry.name.startswith((".git", ".venv")):
            (tree / entry.name).symlink_to(entry)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(sources / "roll", tree / "roll", symlinks=True, ignore=ignored)
    shutil.copytree(tests / "tests", tree / "tests", ignore=ignored)


def measure(sources: Path, tests: Path, rooms: list[str]) -> dict[str, str]:
    """By mutation, its outcome."""
    os.nice(10)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        os.environ["PYTHONPATH"] = str(tree)
        copied(sources, tests, tree)
        import hypothesis
        import torch
        import transformers

        del hypothesis, transformers  # imported once for all forks
        torch.set_num_threads(1)
        for room in rooms:
            started = time.monotonic()
            calls = calls_of_tests(tree, room)
            print(
                f"{room}: {time.monotonic() - started:.0f} s without a mutation; failed: {calls['failed']}", flush=True
            )
            for mutation in chosen(tree, room):  # what was copied: the checkout may go on
                outcomes[mutation.name] = outcome(tree, mutation, calls)
                print(f"{outcomes[mutation.name]:10} {mutation.name}", flush=True)
    return outcomes


def survivors(outcomes: dict[str, str]) -> set[str]:
    return {name for name, result in outcomes.items() if result in ("survived", "not called")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--sources", type=Path, default=ROOT, help="checkout whose roll/ is changed")
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout whose tests/ are run")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (survivors(json.loads(path.read_text())) for path in arguments.compare)
        print(f"{len(before)} survived before, {len(after)} after")
        print("\n".join(f"no longer noticed: {name}" for name in sorted(after - before)))
        raise SystemExit(bool(after - before))
    outcomes = measure(arguments.sources.resolve(), arguments.tests.resolve(), arguments.rooms)
    print(f"{len(survivors(outcomes))} of {len(outcomes)} survived")
    if arguments.output:
        arguments.output.write_text(json.dumps(outcomes, indent=1) + "\n")


if __name__ == "__main__":
    main()
