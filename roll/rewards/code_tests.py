"""The tests of a row of a dataset of programming tasks, in the formats of public datasets."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProgramTest:
    """Input of a program and the output that it should print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """Arguments of a function and the JSON value that it should return."""

    function: str
    args: list[Any]
    value: Any


@dataclass(frozen=True)
class CodeTest:
    """Code that raises where the program is wrong."""

    code: str


@dataclass(frozen=True)
class TestSuite:
    """The tests of a row, all of one kind."""

    __test__ = False  # for pytest

    tests: tuple[ProgramTest, ...] | tuple[CallTest, ...] | tuple[CodeTest, ...]
    setup: str = ""
    entry_point: str = ""


def parse_tests(tests: Any, *, setup: Any = None, entry_point: Any = None) -> TestSuite:
    """Reads the tests of a row in any of the formats that ``roll.rewards.code`` lists.

    Raises:
        ValueError: it is none of them, there is no test, or its code does not parse or asks nothing of the program.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = {"test": tests}
    setup, entry_point = _text(setup or "", "setup"), _text(entry_point or "", "entry_point")
    if isinstance(tests, Mapping):
        suite = _parse_mapping(tests, setup, entry_point)
    elif isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        suite = TestSuite(tuple(CodeTest(test) for test in tests), setup, entry_point)
    elif isinstance(tests, list) and tests:
        suite = TestSuite(tuple(_program_test(test) for test in tests))
    else:
        raise ValueError(f"tests: seen {_short(tests)}, expected a list of tests or an object with them")
    for code in (suite.setup, *(test.code for test in suite.tests if isinstance(test, CodeTest))):
        try:
            ast.parse(code)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"tests: seen code that does not parse ({error}): {_short(code)}") from None
    if all(isinstance(test, CodeTest) and _asks_nothing(test.code) for test in suite.tests):
        raise ValueError(
            f"tests: seen {_short(tests)}, which asks nothing of the program and passes for any; expected assertions, "
            "or a function check(candidate) with its entry_point"
        )
    return suite


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _asks_nothing(code: str) -> bool:
    """Tells whether code only defines, imports and sets constants; what ``__name__`` guards is not run."""
    run = [part for part in ast.parse(code).body if not isinstance(part, _DEFINITIONS) and not _is_guarded(part)]
    names = [node for part in run for node in ast.walk(part) if isinstance(node, ast.Name)]
    return not any(isinstance(name.ctx, ast.Load) for name in names)


def _is_guarded(part: ast.stmt) -> bool:
    guard = ast.walk(part.test) if isinstance(part, ast.If) else ()
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in guard)


def _parse_mapping(tests: Mapping[str, Any], setup: str, entry_point: str) -> TestSuite:
    if "test" in tests:
        code = _text(tests["test"], "test")
        entry_point = _text(tests.get("entry_point") or entry_point, "entry_point")
        if entry_point and re.search(r"^def check\(", code, re.MULTILINE):
            code += f"\n\ncheck({entry_point})\n"
        return TestSuite((CodeTest(code),), setup, entry_point)
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"tests: seen {_short(dict(tests))}, expected the keys inputs and outputs with lists of one length, at "
            "least 1, or the key test"
        )
    name = tests.get("fn_name")
    if name is None:
        return TestSuite(tuple(_program_test({"input": i, "output": o}) for i, o in zip(inputs, outputs, strict=True)))
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"tests.fn_name: seen {_short(name)}, expected the name of a function")
    for args in inputs:
        if not isinstance(args, list):
            raise ValueError(f"tests.inputs: seen {_short(args)}, expected the list of a call's arguments")
    return TestSuite(tuple(CallTest(name, args, value) for args, value in zip(inputs, outputs, strict=True)))


def _program_test(test: Any) -> ProgramTest:
    if not isinstance(test, Mapping):
        raise ValueError(f"tests: seen {_short(test)}, expected an object with input and output")
    texts = []
    for names in (("stdin", "input"), ("stdout", "output")):
        found = [test[name] for name in names if name in test]
        if len(found) != 1:
            raise ValueError(f"tests: seen the keys {sorted(map(str, test))}, expected one of {' and '.join(names)}")
        lines = found[0] if isinstance(found[0], list) else [found[0]]
        texts.append("\n".join(_text(line, f"tests.{names[1]}") for line in lines))
    return ProgramTest(*texts)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key}: seen {_short(value)}, expected text")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
