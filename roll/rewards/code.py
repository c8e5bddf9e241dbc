"""Programs against test cases, run in the sandbox.

The tests of a row, from ``data_args.response`` or another column, are one of

- programs: ``[{"input": "1 2", "output": "3"}, …]`` (or ``stdin``, ``stdout``), or ``{"inputs": …, "outputs": …}``;
- calls: ``{"fn_name": "add", "inputs": [[1, 2], …], "outputs": [3, …]}``; ``add`` may be a method of ``Solution``;
- assertions: ``["assert add(1, 2) == 3", …]`` (MBPP), with the set-up code in another column;
- a test function: ``{"test": "def check(candidate): …", "entry_point": "add"}`` (HumanEval);

or a text with the JSON of one of these. Outputs that a program prints, and values that a function returns, are compared
outside the sandbox, so nothing in it knows them. Assertions run inside, in a process beside the program's
(``roll.rewards.sandbox.inner``), which only plain values reach: neither ``os._exit(0)``, nor patched built-ins, nor an
``__eq__`` that always agrees passes a test.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.rewards.sandbox.inner import decode
from roll.rewards.sandbox.pool import Sandbox, SandboxLimits
from roll.rewards.types import Sample, Verdict, Verifier

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LOAD_SECONDS = 2.0  # beside the tests' own time: reading them


class CodeConfig(Config):
    """Keys of ``args`` for ``name: code``."""

    extract: Literal["fence", "answer", "whole"] = Field(
        default="fence",
        description="Where the program is: the last fenced block that is Python's or nobody's, the last "
        "`<answer>…</answer>` (fenced or not), or the whole response. What stands before `</think>` never counts.",
    )
    tests_key: str | None = Field(default=None, description="Column of the tests. null: the row's reference answer.")
    setup_key: str = Field(default="test_setup_code", description="Column of the code before assertions, if any.")
    entry_point_key: str = Field(
        default="entry_point", description="Column of the function that a test function is called with, if any."
    )
    partial: bool = Field(
        default=False, description="The score is the share of tests that passed. false: 1 if all did, else 0."
    )
    stop_early: bool = Field(default=True, description="Without `partial`, end at the first test that fails.")
    max_tests: int | None = Field(default=None, ge=1, description="Only the first tests of a row count. null: all.")
    numeric_tolerance: float = Field(
        default=0.0, ge=0, description="Numbers are equal when they differ by this, relative to numbers above 1."
    )
    total_timeout: float = Field(
        default=25.0, gt=0, description="Seconds of all tests of a sample, without the time that it waits for a CPU."
    )
    limits: SandboxLimits = Field(default_factory=SandboxLimits, description="What one test may use.")
    backend: Literal["auto", "bubblewrap", "namespaces", "unsafe"] = Field(
        default="auto", description="How programs are isolated; `auto`: bubblewrap if it works, else namespaces."
    )
    allow_unsafe: bool = Field(
        default=False, description="Run programs WITHOUT isolation where none works. They can read and change files."
    )
    python: str | None = Field(
        default=None, description="Interpreter of the programs. null: this environment's base, standard library only."
    )
    readable: list[str] = Field(default_factory=list, description="Further absolute paths that programs may read.")
    max_parallel: int | None = Field(default=None, ge=1, description="Programs at the same time. null: CPUs.")

    def problems(self) -> list[ConfigProblem]:
        if self.total_timeout >= self.limits.wall_seconds:
            return []
        expected = f"at least limits.wall_seconds = {self.limits.wall_seconds}"
        return [self.problem("total_timeout", expected, "limits.wall_seconds")]


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


# --- what a row says


def parse_tests(tests: Any, *, setup: Any = None, entry_point: Any = None) -> TestSuite:
    """Reads the tests of a row in any of the formats of this module.

    Raises:
        ValueError: it is none of them, there is no test, or its code does not parse.
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
    return suite


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


# --- what the policy said


def extract_code(response: str, where: Literal["fence", "answer", "whole"]) -> str | None:
    """The program in a response, ``None`` where there is none; an unfinished block is none."""
    text = response.rpartition("</think>")[2]
    if where == "answer":
        _, opening, rest = text.rpartition("<answer>")
        inside, closing, _ = rest.partition("</answer>")
        if not opening or not closing:
            return None
        text = inside
        return _last_block(text) or text.strip() or None
    return _last_block(text) if where == "fence" else text.strip() or None


def _last_block(text: str) -> str | None:
    blocks: list[str] = []
    opened: tuple[str, list[str]] | None = None
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if opened is None:
            if mark.startswith("```"):
                opened = (mark[3:].strip().lower(), [])
        elif mark == "```":
            if opened[0] in ("", "py", "python", "python3"):
                blocks.append("".join(opened[1]))
            opened = None
        else:
            opened[1].append(line)
    return blocks[-1] if blocks and blocks[-1].strip() else None


# --- comparison


def same_output(given: str, expected: str, tolerance: float = 0.0) -> bool:
    """Tells whether two outputs have the same lines, white space at their ends and at the ends of lines aside.

    With a tolerance the words of a line are compared, numbers among them as numbers.
    """
    rows, wanted = ([line.strip() for line in text.strip().splitlines()] for text in (given, expected))
    if rows == wanted or tolerance == 0 or len(rows) != len(wanted):
        return rows == wanted
    for row, want in zip(rows, wanted, strict=True):
        words, targets = row.split(), want.split()
        if len(words) != len(targets) or not all(
            _same_word(word, target, tolerance) for word, target in zip(words, targets, strict=True)
        ):
            return False
    return True


def _same_word(given: str, expected: str, tolerance: float) -> bool:
    if given == expected:
        return True
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected):
        return _close(float(given), float(expected), tolerance)
    return False


def _close(given: float, expected: float, tolerance: float) -> bool:
    try:
        return given == expected or abs(given - expected) <= tolerance * max(1.0, abs(expected)) < math.inf
    except OverflowError:  # integers beyond a float's range
        return False


def same_value(given: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Tells whether a returned value equals a JSON value: tuples are lists, keys are texts, ``True`` is not 1."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        return given == expected or (tolerance > 0 and _close(given, expected, tolerance))
    if isinstance(given, list | tuple) and isinstance(expected, list):
        return len(given) == len(expected) and all(
            same_value(mine, theirs, tolerance) for mine, theirs in zip(given, expected, strict=True)
        )
    if isinstance(given, dict) and isinstance(expected, dict):
        texts = {str(key): value for key, value in given.items()}
        return texts.keys() == expected.keys() and all(
            same_value(texts[key], value, tolerance) for key, value in expected.items()
        )
    return type(given) is type(expected) and given == expected


# --- the verifier


class CodeVerifier(Verifier):
    """Runs the program of a response against the row's tests.

    Raises:
        SandboxUnavailableError: this machine cannot isolate programs, and ``allow_unsafe`` is false.
    """

    config_class = CodeConfig
    config: CodeConfig

    def __init__(self, config: CodeConfig) -> None:
        super().__init__(config)
        self._sandbox = Sandbox(
            backend=config.backend,
            allow_unsafe=config.allow_unsafe,
            python=config.python,
            readable=config.readable,
            max_parallel=config.max_parallel,
        )

    async def score(self, sample: Sample) -> Verdict:
        """Score 0 and no answer where the response has no program.

        Raises:
            ValueError: the row's tests are malformed.
            SandboxError: the sandbox failed.
        """
        config = self.config
        suite = self._suite(sample)
        code = extract_code(sample.response, config.extract)
        if code is None:
            return Verdict(score=0.0, correct=False, answer=None, parts={"tests_passed": 0.0})
        total = len(suite.tests)
        if isinstance(suite.tests[0], ProgramTest):
            passed = await self._run_programs(code, suite)
        else:
            passed = await self._run_in_process(code, suite)
        correct = passed == total
        score = passed / total if config.partial else float(correct)
        return Verdict(score=score, correct=correct, answer=code.strip(), parts={"tests_passed": passed / total})

    def _suite(self, sample: Sample) -> TestSuite:
        config, extra = self.config, sample.extra_info
        if config.tests_key is not None and config.tests_key not in extra:
            raise ValueError(f"tests_key: seen {config.tests_key!r}, expected one of the columns {sorted(extra)}")
        tests = sample.ground_truth if config.tests_key is None else extra[config.tests_key]
        suite = parse_tests(tests, setup=extra.get(config.setup_key), entry_point=extra.get(config.entry_point_key))
        return TestSuite(suite.tests[: config.max_tests], suite.setup, suite.entry_point)

    def _stops(self) -> bool:
        return self.config.stop_early and not self.config.partial

    async def _run_programs(self, code: str, suite: TestSuite) -> int:
        """Each test in a run of its own: how many passed."""
        passed, budget, limits = 0, self.config.total_timeout, self.config.limits
        for test in suite.tests:
            assert isinstance(test, ProgramTest)
            if budget <= 0:
                break
            wall = min(limits.wall_seconds, budget)
            run = await self._sandbox.run_program(code, test.stdin, limits.model_copy(update={"wall_seconds": wall}))
            budget -= run.wall_s
            whole = run.exit_code == 0 and not run.timed_out and not run.output_truncated
            if whole and same_output(run.stdout, test.stdout, self.config.numeric_tolerance):
                passed += 1
            elif self._stops():
                break
        return passed

    async def _run_in_process(self, code: str, suite: TestSuite) -> int:
        """All tests in one run, and in another those after a test that ended it: how many passed."""
        passed, index, budget = 0, 0, self.config.total_timeout
        while index < len(suite.tests) and budget > 0:
            rest = suite.tests[index:]
            plan = {
                "setup": suite.setup,
                "entry_point": suite.entry_point,
                "timeout": self.config.limits.wall_seconds,
                "tests": [_as_plan(test) for test in rest],
            }
            lines, run = await self._sandbox.run_tests(code, plan, self._limits_of(len(rest), budget))
            budget -= run.wall_s
            if lines and "missing" in lines[0]:
                raise ValueError(
                    f"tests: they import {lines[0]['missing']!r}, which the programs' Python does not have"
                )
            if not lines or lines[0].get("load", "ended") is not None:
                break
            results = lines[1:]
            passed += sum(self._passes(test, line) for test, line in zip(rest, results, strict=False))
            ended = len(results) < len(rest) and not (results and results[-1].get("gone"))
            index += len(results) + ended
            if self._stops() and passed < index:
                break
        return passed

    def _limits_of(self, tests: int, budget: float) -> SandboxLimits:
        limits = self.config.limits
        wall = min(limits.wall_seconds * tests + _LOAD_SECONDS, budget)
        return limits.model_copy(update={"wall_seconds": wall, "cpu_seconds": limits.cpu_seconds * tests})

    def _passes(self, test: object, line: Mapping[str, Any]) -> bool:
        if isinstance(test, CodeTest):
            return line.get("ok") is True
        assert isinstance(test, CallTest)
        if "value" not in line:
            return False
        try:
            return same_value(decode(line["value"]), test.value, self.config.numeric_tolerance)
        except (ValueError, TypeError, RecursionError):  # an object of the program, which equals nothing
            return False


def _as_plan(test: object) -> dict[str, Any]:
    if isinstance(test, CodeTest):
        return {"code": test.code}
    assert isinstance(test, CallTest)
    return {"call": test.function, "args": test.args}
