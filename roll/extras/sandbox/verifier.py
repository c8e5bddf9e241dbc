"""Programs against test cases, run in the sandbox.

The tests of a row, from ``data_args.response`` or another column, are inputs and outputs of a program, calls of a
function, or code that asserts, in the forms of public datasets (``roll.extras.sandbox.code_tests``). Outputs that a
program prints, and values that a function returns, are compared outside the sandbox, so nothing in it knows them. Code
runs inside, in a process beside the program's (``roll.extras.sandbox.harness``), which only plain values reach: neither
``os._exit(0)``, nor patched built-ins, nor an ``__eq__`` that always agrees passes a test. Which program of a response
is tried is said in ``roll.extras.sandbox.code_blocks``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.extras.sandbox.code_blocks import extract_code
from roll.extras.sandbox.code_names import PROGRAM_MODULES, provided
from roll.extras.sandbox.code_tests import CallTest, CodeTest, ProgramTest, TestSuite, parse_tests
from roll.extras.sandbox.harness import decode, encode
from roll.extras.sandbox.pool import Sandbox, SandboxLimits
from roll.extras.sandbox.remote import READ_LIMITS, RemoteSandbox, RemoteSandboxConfig
from roll.rewards.answers import check_plain
from roll.rewards.types import RewardResult, Sample, Verifier

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LOCAL = ("backend", "allow_unsafe", "python", "readable", "max_parallel")
"""Keys of this machine's sandbox alone."""
_LOAD_SECONDS = 2.0  # beside the tests' own time: reading them
_JSON_BYTES = 8  # of a character, with the marks of its type


class CodeConfig(Config):
    """Keys of ``args`` for ``name: code``."""

    extract: Literal["fence", "answer", "whole"] = Field(
        default="fence",
        description="Where the program is: the last block of code that defines what the tests call, or that reads the "
        "input (docs/rewards.md), in the response or in its last `<answer>…</answer>`; or the whole response. "
        "Text before `</think>` never counts.",
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
        default=0.0, ge=0, description="Largest difference of equal numbers; relative for numbers above 1."
    )
    total_timeout: float = Field(
        default=25.0, gt=0, description="Seconds for all tests of a sample, not counting the wait for a CPU."
    )
    limits: SandboxLimits = Field(default_factory=SandboxLimits, description="Limits of one test.")
    backend: Literal["auto", "bubblewrap", "namespaces", "unsafe"] = Field(
        default="auto", description="How programs are isolated; `auto`: bubblewrap if it works, else namespaces."
    )
    allow_unsafe: bool = Field(
        default=False, description="Run programs WITHOUT isolation if none works. They can read and change files."
    )
    python: str | None = Field(
        default=None, description="Interpreter of the programs. null: this environment's base, standard library only."
    )
    readable: list[str] = Field(default_factory=list, description="Further absolute paths that programs can read.")
    max_parallel: int | None = Field(
        default=None, ge=1, description="Programs at the same time. null: the number of CPUs."
    )
    remote: RemoteSandboxConfig | None = Field(
        default=None,
        description="A sandbox service that runs the programs (SandboxFusion's interface). null: this machine.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.total_timeout < self.limits.wall_seconds:
            expected = f"at least limits.wall_seconds = {self.limits.wall_seconds}"
            yield self.problem("total_timeout", expected, "limits.wall_seconds")
        if self.remote is not None:
            expected = "no such key with remote: the service decides"
            yield from [self.problem(key, expected, "remote") for key in _LOCAL if key in self.model_fields_set]
            for key in sorted(self.limits.model_fields_set - set(READ_LIMITS)):
                expected = f"no such key with remote: the service decides; it gets {', '.join(READ_LIMITS)}"
                value = getattr(self.limits, key)
                yield ConfigProblem(f"limits.{key}", value, expected, involves=("remote",))


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
    """Tells whether a returned value equals an expected one: tuples are lists, keys are texts, ``True`` is not 1.

    Floats that are no whole numbers agree to nine digits, whatever the order of their sums.
    """
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        return given == expected or _near(given, expected) or (tolerance > 0 and _close(given, expected, tolerance))
    if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(
            same_value(mine, theirs, tolerance) for mine, theirs in zip(given, expected, strict=True)
        )
    if isinstance(given, dict) and isinstance(expected, dict):
        mine, theirs = ({str(key): value for key, value in one.items()} for one in (given, expected))
        return mine.keys() == theirs.keys() and all(
            same_value(mine[key], value, tolerance) for key, value in theirs.items()
        )
    return type(given) is type(expected) and given == expected


def _near(given: float, expected: float) -> bool:
    whole = all(isinstance(number, int) or number.is_integer() for number in (given, expected))
    return not whole and math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12)


# --- the verifier


class CodeVerifier(Verifier):
    """Runs the program of a response against the row's tests.

    Raises:
        SandboxUnavailableError: this machine cannot isolate programs, and ``allow_unsafe`` is false.
        ValueError: the variable with the key of a service is not set.
    """

    config_class = CodeConfig
    config: CodeConfig
    best = 1.0

    def __init__(self, config: CodeConfig) -> None:
        super().__init__(config)
        self._sandbox: Sandbox | RemoteSandbox
        if config.remote is not None:
            self._sandbox = RemoteSandbox(config.remote)
            return
        self._sandbox = Sandbox(
            backend=config.backend,
            allow_unsafe=config.allow_unsafe,
            python=config.python,
            readable=config.readable,
            max_parallel=config.max_parallel,
        )

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        """Reads the tests of a row.

        Raises:
            ValueError: they are malformed.
        """
        assert isinstance(config, CodeConfig)
        check_plain(sample.ground_truth if config.tests_key is None else sample.extra_info.get(config.tests_key))
        _suite(config, sample)

    async def score(self, sample: Sample) -> RewardResult:
        """Score 0 and no answer where the response has no program.

        Raises:
            ValueError: the row's tests are malformed.
            SandboxError: the sandbox failed.
        """
        config = self.config
        suite = _suite(config, sample)
        code = extract_code(sample.response, config.extract, suite.asked, finished=not sample.truncated)
        if code is None:
            return RewardResult(score=0.0, correct=False, answer=None, parts={"tests_passed": 0.0})
        total = len(suite.tests)
        runs = self._run_programs if isinstance(suite.tests[0], ProgramTest) else self._run_in_process
        passed, retries = await runs(code, suite)
        correct = passed == total
        score = passed / total if config.partial else float(correct)
        parts = {"tests_passed": passed / total}
        if config.remote is not None:
            parts["request_retries"] = float(retries)
        return RewardResult(score=score, correct=correct, answer=code.strip(), parts=parts)

    async def close(self) -> None:
        """Closes the connections to a service."""
        if isinstance(self._sandbox, RemoteSandbox):
            await self._sandbox.close()

    def _stops(self) -> bool:
        return self.config.stop_early and not self.config.partial

    async def _run_programs(self, code: str, suite: TestSuite) -> tuple[int, int]:
        """Each test in a run of its own: how many passed, and new attempts at a service."""
        passed, retries, budget, limits = 0, 0, self.config.total_timeout, self.config.limits
        names = provided(code)
        for test in suite.tests:
            assert isinstance(test, ProgramTest)
            if budget <= 0:
                break
            more = {"wall_seconds": min(limits.wall_seconds, budget), "output_kb": self._output_kb(test.stdout)}
            run = await self._sandbox.run_program(code, test.stdin, limits.model_copy(update=more), names)
            budget -= run.wall_s
            retries += run.attempts - 1
            whole = run.exit_code == 0 and not run.timed_out and not run.output_truncated
            if whole and same_output(run.stdout, test.stdout, self.config.numeric_tolerance):
                passed += 1
            elif self._stops():
                break
        return passed, retries

    async def _run_in_process(self, code: str, suite: TestSuite) -> tuple[int, int]:
        """All tests in one run, and in another those after a test that ended it; returns as ``_run_programs``."""
        retries, index, budget = 0, 0, self.config.total_timeout
        passed: list[tuple[bool, bool]] = []
        while index < len(suite.tests) and budget > 0:
            rest = suite.tests[index:]
            run_tests = self._sandbox.run_tests
            lines, run = await run_tests(code, self._plan(suite, rest), self._limits_of(rest, budget), provided(code))
            budget -= run.wall_s
            retries += run.attempts - 1
            if lines and "missing" in lines[0]:
                raise ValueError(
                    f"tests: they import {lines[0]['missing']!r}, which the programs' Python does not have"
                )
            if not lines or lines[0].get("load", "ended") is not None:
                break
            results = lines[1:]
            if unsendable := next((line["unsendable"] for line in results if "unsendable" in line), None):
                raise ValueError(f"tests: they give the program {unsendable}, which cannot leave their process")
            passed += [self._passes(test, line, suite.wrapped) for test, line in zip(rest, results, strict=False)]
            ended = len(results) < len(rest) and not (results and results[-1].get("gone"))
            index += len(results) + ended
            if self._stops() and _most(passed) < index:
                break
        return _most(passed), retries

    def _plan(self, suite: TestSuite, tests: Sequence[object]) -> dict[str, Any]:
        """What the tester is told, see ``Sandbox.run_tests``."""
        names = suite.names
        calls = any(isinstance(test, CallTest) for test in tests)
        return {
            "setup": names.setup if names else "",
            "timeout": self.config.limits.wall_seconds,
            "tests": [_as_plan(test) for test in tests],
            "asked": sorted(names.asked) if names and not calls else [],
            "program": names.program if names else {},
            "python": names.python if names else {},
            "imports": list(names.imports) if names else [],
            "program_modules": sorted(PROGRAM_MODULES) if names else [],
        }

    def _limits_of(self, tests: Sequence[object], budget: float) -> SandboxLimits:
        limits = self.config.limits
        wall = min(limits.wall_seconds * len(tests) + _LOAD_SECONDS, budget)
        more = {"wall_seconds": wall, "cpu_seconds": limits.cpu_seconds * len(tests)}
        return limits.model_copy(update={**more, "output_kb": self._output_kb(*map(repr, tests))})

    def _output_kb(self, *texts: str) -> int:
        """``limits.output_kb``, and more where the tests themselves are larger: room for them in JSON."""
        return max(self.config.limits.output_kb, _JSON_BYTES * sum(map(len, texts)) >> 10)

    def _passes(self, test: object, line: Mapping[str, Any], wrapped: bool) -> tuple[bool, bool]:
        """Whether a test is passed, and whether it is where its value stands in a list of its own."""
        if isinstance(test, CodeTest):
            return (line.get("ok") is True,) * 2
        assert isinstance(test, CallTest)
        if "value" not in line:
            return False, False
        try:
            given, tolerance = decode(line["value"]), self.config.numeric_tolerance
            plain = same_value(given, test.value, tolerance)
            return plain, same_value(given, test.value[0], tolerance) if wrapped else plain
        except (ValueError, TypeError, RecursionError, OverflowError):  # an object of the program equals nothing
            return False, False


def _most(passed: Sequence[tuple[bool, bool]]) -> int:
    """Tests that are passed, read in the one way or all in the other."""
    return max(sum(plain for plain, _ in passed), sum(alone for _, alone in passed))


def _suite(config: CodeConfig, sample: Sample) -> TestSuite:
    extra = sample.extra_info
    if config.tests_key is not None and config.tests_key not in extra:
        raise ValueError(f"tests_key: got {config.tests_key!r}, expected one of the columns {sorted(extra)}")
    tests = sample.ground_truth if config.tests_key is None else extra[config.tests_key]
    suite = parse_tests(
        tests,
        setup=extra.get(config.setup_key),
        entry_point=extra.get(config.entry_point_key),
        metadata=extra.get("metadata"),
    )
    return replace(suite, tests=suite.tests[: config.max_tests])


def _as_plan(test: object) -> dict[str, Any]:
    if isinstance(test, CodeTest):
        return {"code": test.code}
    assert isinstance(test, CallTest)
    kwargs = {name: encode(value) for name, value in test.kwargs.items()}
    return {"call": test.function, "args": [encode(value) for value in test.args], "kwargs": kwargs}
