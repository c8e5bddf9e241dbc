"""Programs against test cases, run in the sandbox.

The tests of a row, from ``data_args.response`` or another column, are one of

- programs: ``[{"input": "1 2", "output": "3"}, …]`` (or ``stdin``, ``stdout``), or ``{"inputs": …, "outputs": …}``;
- calls: ``{"fn_name": "add", "inputs": [[1, 2], …], "outputs": [3, …]}``; ``add`` may be a method of ``Solution``;
- assertions: ``["assert add(1, 2) == 3", …]`` (MBPP), with the set-up code in another column;
- a test function: ``{"test": "def check(candidate): …", "entry_point": "add"}`` (HumanEval);

or a text with the JSON of one of these. Outputs that a program prints, and values that a function returns, are compared
outside the sandbox, so nothing in it knows them. Assertions run inside, in a process beside the program's
(``roll.rewards.sandbox.harness``), which only plain values reach: neither ``os._exit(0)``, nor patched built-ins, nor
an ``__eq__`` that always agrees passes a test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.rewards.code_tests import CallTest, CodeTest, ProgramTest, TestSuite, parse_tests
from roll.rewards.sandbox.harness import decode
from roll.rewards.sandbox.pool import Sandbox, SandboxLimits
from roll.rewards.sandbox.remote import READ_LIMITS, RemoteSandbox, RemoteSandboxConfig
from roll.rewards.types import Sample, Verdict, Verifier

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LOCAL = ("backend", "allow_unsafe", "python", "readable", "max_parallel")
"""Keys of this machine's sandbox alone."""
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
    remote: RemoteSandboxConfig | None = Field(
        default=None,
        description="A sandbox service that runs the programs (SandboxFusion's interface). null: this machine does.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.total_timeout < self.limits.wall_seconds:
            expected = f"at least limits.wall_seconds = {self.limits.wall_seconds}"
            yield self.problem("total_timeout", expected, "limits.wall_seconds")
        if self.remote is not None:
            expected = "no such key with remote: the service decides"
            yield from [self.problem(key, expected, "remote") for key in _LOCAL if key in self.model_fields_set]
            for key in sorted(self.limits.model_fields_set - set(READ_LIMITS)):
                expected = f"no such key with remote: the service decides; it is told {', '.join(READ_LIMITS)}"
                value = getattr(self.limits, key)
                yield ConfigProblem(f"limits.{key}", value, expected, involves=("remote",))


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
        runs = self._run_programs if isinstance(suite.tests[0], ProgramTest) else self._run_in_process
        passed, retries = await runs(code, suite)
        correct = passed == total
        score = passed / total if config.partial else float(correct)
        parts = {"tests_passed": passed / total}
        if config.remote is not None:
            parts["request_retries"] = float(retries)
        return Verdict(score=score, correct=correct, answer=code.strip(), parts=parts)

    async def close(self) -> None:
        """Closes the connections to a service."""
        if isinstance(self._sandbox, RemoteSandbox):
            await self._sandbox.close()

    def _suite(self, sample: Sample) -> TestSuite:
        config, extra = self.config, sample.extra_info
        if config.tests_key is not None and config.tests_key not in extra:
            raise ValueError(f"tests_key: seen {config.tests_key!r}, expected one of the columns {sorted(extra)}")
        tests = sample.ground_truth if config.tests_key is None else extra[config.tests_key]
        suite = parse_tests(tests, setup=extra.get(config.setup_key), entry_point=extra.get(config.entry_point_key))
        return TestSuite(suite.tests[: config.max_tests], suite.setup, suite.entry_point)

    def _stops(self) -> bool:
        return self.config.stop_early and not self.config.partial

    async def _run_programs(self, code: str, suite: TestSuite) -> tuple[int, int]:
        """Each test in a run of its own: how many passed, and new attempts at a service."""
        passed, retries, budget, limits = 0, 0, self.config.total_timeout, self.config.limits
        for test in suite.tests:
            assert isinstance(test, ProgramTest)
            if budget <= 0:
                break
            wall = min(limits.wall_seconds, budget)
            run = await self._sandbox.run_program(code, test.stdin, limits.model_copy(update={"wall_seconds": wall}))
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
        passed, retries, index, budget = 0, 0, 0, self.config.total_timeout
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
            retries += run.attempts - 1
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
        return passed, retries

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
