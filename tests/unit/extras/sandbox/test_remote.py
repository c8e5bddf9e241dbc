"""Programs on a sandbox service: a real HTTP server on loopback that runs them in this library's own sandbox."""

import asyncio
import logging
import re
from contextlib import AbstractContextManager
from typing import Any

import pytest

from roll.configs.parsing import rules_broken, section_problems
from roll.extras.sandbox.pool import Sandbox, SandboxLimits
from roll.extras.sandbox.verifier import CodeConfig, CodeVerifier
from roll.rewards import RewardError, RewardResult, Sample
from roll.rewards.types import SandboxUnavailableError
from tests.support import web
from tests.support.verifiers import score_by
from tests.support.web import Reply, Server, in_json
from tests.unit.extras.sandbox.code_forms import ADD, PRODUCT, PROGRAM, SUBTRACT

CALLS = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(0, 5) == 5"]
PROGRAMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -7", "output": "-2"}]
KEY = "sk-remote-very-secret"


def run(_: str, asked: dict[str, Any]) -> Reply:
    """Speaks SandboxFusion's interface."""
    limits = SandboxLimits(wall_seconds=asked["run_timeout"], memory_mb=asked["memory_limit_MB"])
    done = asyncio.run(Sandbox().run_program(asked["code"], asked["stdin"], limits))
    ended = {"status": "Finished", "return_code": done.exit_code}
    if done.timed_out:
        ended = {"status": "TimeLimitExceeded", "return_code": None}
    result = {**ended, "execution_time": done.wall_s, "stdout": done.stdout, "stderr": done.stderr}
    good = not done.timed_out and done.exit_code == 0
    return in_json(
        {"status": "Success" if good else "Failed", "message": "", "compile_result": None, "run_result": result}
    )


def serving(*faults: Reply) -> AbstractContextManager[Server]:
    """A service that answers the ``faults`` first."""
    try:
        Sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(f"nothing isolates programs here: {error}")
    return web.serving(*faults, run)


def score_all(
    url: str, codes: list[str], tests: object, remote: dict[str, Any] | None = None, wall_seconds: float = 3
) -> list[RewardResult]:
    limits = SandboxLimits(wall_seconds=wall_seconds, memory_mb=256)
    config = CodeConfig(remote={"url": url, "retry_wait": 0.01, **(remote or {})}, limits=limits, partial=True)
    assert not list(rules_broken(config))
    samples = [Sample("?", f"```python\n{code}\n```", tests, "code") for code in codes]
    return score_by(lambda: CodeVerifier(config), samples)


@pytest.mark.parametrize(
    ("good", "bad", "tests"),
    [
        (PROGRAM, PRODUCT, PROGRAMS),
        (ADD, SUBTRACT, CALLS),
        (ADD, SUBTRACT, ASSERTIONS),
        ("print(Counter(sys.stdin.readline().split())['a'])", "print(3)", [{"input": "a b a", "output": "2"}]),
        ("def f(x: List[int]) -> int:\n    return math.floor(sum(x))", "f = max", ["assert f([1, 2]) == 3"]),
    ],
    ids=["programs", "calls", "assertions", "a program without imports", "a function without imports"],
)
def test_programs_score_as_in_the_local_sandbox(good, bad, tests):
    with serving() as service:
        right, wrong = score_all(service.url, [good, bad], tests)
    assert (right.score, right.correct) == (1.0, True)
    assert right.parts == {"tests_passed": 1.0, "request_retries": 0.0}
    assert not wrong.correct and wrong.score < 1
    body = service.bodies[0]
    assert service.paths[0] == "/run_code" and body["language"] == "python"
    assert (body["memory_limit_MB"], body["run_timeout"] <= 8) == (256, True)


FORGERIES = [
    "import os\nos._exit(0)",
    "def add(a, b):\n    import os\n    os._exit(0)",
    "import builtins\nbuiltins.compile = lambda *a, **k: None\ndef add(a, b):\n    return 0",
    "class Yes:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Yes()",
    "import sys, json\nfor n in (1, 2, 3):\n    sys.stdout.write(json.dumps({'ok': True}) + '\\n')",
    "while True:\n    pass",
]


def test_what_did_not_pass_the_tests_scores_nothing_and_a_test_that_takes_too_long_costs_that_test_only():
    slow = "def add(a, b):\n    while a == 1:\n        pass\n    return a + b"
    with serving() as service:
        *forged, half = score_all(service.url, [*FORGERIES, slow], ASSERTIONS, wall_seconds=1)
    assert [(verdict.score, verdict.parts["tests_passed"]) for verdict in forged] == [(0.0, 0.0)] * len(FORGERIES)
    assert half.score == 0.5


ERROR = in_json({"status": "SandboxError", "message": "no pod is free"})


def test_failures_of_the_service_are_tried_again_and_counted():
    with serving(Reply(503, "busy"), Reply(body="<html>"), ERROR) as service:
        [verdict] = score_all(service.url, [PROGRAM], PROGRAMS, {"max_attempts": 4})
    assert verdict.correct and verdict.parts["request_retries"] == 3.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ERROR, r"at http://127.*/run_code: status 'SandboxError': 'no pod is free' \(attempt 2 of 2\)"),
        (in_json({"status": "Success"}), "expected the status of a run as JSON, got"),
        (Reply(404, "not here"), "status 404, expected 200: 'not here'"),
    ],
)
def test_a_service_that_does_not_run_the_program_is_an_error_and_no_zero(fault, message):
    with serving(fault, fault) as service, pytest.raises(RewardError, match=message):
        score_all(service.url, [PROGRAM], PROGRAMS, {"max_attempts": 2})


def test_a_key_is_sent_and_never_told(monkeypatch, caplog):
    monkeypatch.setenv("SANDBOX_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    refused = pytest.raises(RewardError, match="<redacted> is unknown")
    with serving(Reply(401, f"{KEY} is unknown")) as service, refused as caught:
        score_all(service.url, [PROGRAM], PROGRAMS, {"api_key_env": "SANDBOX_KEY"})
    assert [headers["authorization"] for headers in service.headers] == [f"Bearer {KEY}"]
    assert KEY not in str(caught.value) and KEY not in caplog.text
    with pytest.raises(ValueError, match=r"remote\.api_key_env: the environment variable NO_SUCH_KEY is not set"):
        score_all("http://localhost:9", [PROGRAM], PROGRAMS, {"api_key_env": "NO_SUCH_KEY"})


def test_a_silent_service_times_out():
    remote = {"request_timeout": 0.1, "max_attempts": 1}
    late = pytest.raises(RewardError, match=r"no reply within request_timeout = 0\.1 \+ 0\.2 seconds")
    with serving(Reply(delay=2)) as service, late:
        score_all(service.url, [PROGRAM], PROGRAMS, remote, wall_seconds=0.2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"remote": {"url": "sandbox"}}, r"remote.url: got .sandbox., expected http\(s\)://host"),
        ({"remote": {"url": "http://me:secret@host/run_code"}}, "remote.url: got a login in it"),
        ({"backend": "namespaces"}, "backend: got .namespaces., expected no such key with remote"),
        ({"limits": {"cpu_seconds": 3}}, r"limits.cpu_seconds: got 3.0, expected no such key with remote.*gets wall_"),
    ],
)
def test_what_the_service_does_not_read_is_refused(args, message):
    [problem] = section_problems(CodeConfig, {"remote": {"url": "http://host:8080"}, **args})
    assert re.search(message, str(problem)) and "secret" not in str(problem)
