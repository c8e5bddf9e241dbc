"""A sandbox without isolation or start-up, for tables of programs that do no harm: a forked process for each run.

It is forked of a small process, ``python -m`` this module: one that has run other tests takes ten times as long.
"""

import asyncio
import functools
import marshal
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from roll.extras.sandbox import harness
from roll.extras.sandbox.pool import Sandbox, SandboxLimits, SandboxResult
from roll.extras.sandbox.verifier import CodeConfig, CodeVerifier
from roll.rewards import Sample


class ForkedSandbox(Sandbox):
    """Takes the place of ``Sandbox``; outputs are not bounded, and time by the tester's own limit alone."""

    def __init__(self, **_: Any) -> None: ...

    async def _run(
        self, mode: str, source: str, stdin: bytes, limits: SandboxLimits, provided: Mapping[str, str] | None
    ) -> SandboxResult:
        server = _server()
        assert server.stdin and server.stdout
        marshal.dump((mode, source, stdin, limits.output_kb << 10, dict(provided or {})), server.stdin)
        server.stdin.flush()
        code, out = marshal.load(server.stdout)
        return SandboxResult(out.decode(), "", code, False, False, False, None, 0.0)


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """Ends with this process, which is its input."""
    root = Path(__file__).parents[4]
    return subprocess.Popen([sys.executable, "-m", __name__], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _serve() -> None:
    with suppress(EOFError):
        while True:
            mode, source, stdin, max_bytes, provided = marshal.load(sys.stdin.buffer)
            with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
                given.write(stdin)
                given.seek(0)
                if (child := os.fork()) == 0:
                    _become(mode, source, given.fileno(), out.fileno(), max_bytes, provided)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with suppress(ProcessLookupError):  # a program without end would run on; a sandbox ends all in it
                    os.killpg(child, signal.SIGKILL)
                out.seek(0)
                marshal.dump((code, out.read()), sys.stdout.buffer)
            sys.stdout.flush()


def _become(mode: str, source: str, given: int, out: int, max_bytes: int, provided: dict[str, str]) -> None:
    """The child: the streams of a new process, then what runs in the sandbox."""
    os.setpgid(0, 0)
    code = 1
    try:
        for descriptor, target in ((given, 0), (out, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
            os.dup2(descriptor, target)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", newline="\n"), open(2, "w")  # noqa: SIM115
        if mode == "tests":
            harness.run_tests(source, max_bytes, marshal.loads, provided)
        harness.run_program(source, provided)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        pass
    finally:
        sys.stdout.flush()
        os._exit(code)


def scores(cases: Iterable[tuple[Any, ...]], **args: Any) -> list[float]:
    """The scores of (tests, program) and (tests, program, other columns) by the verifier of code on such a sandbox."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roll.extras.sandbox.verifier.Sandbox", ForkedSandbox)
        limits = SandboxLimits(**{"wall_seconds": 3, **args.pop("limits", {})})
        verifier = CodeVerifier(CodeConfig(limits=limits, **args))

    async def run() -> list[float]:
        found = []
        for tests, code, *extra in cases:
            sample = Sample("?", f"```python\n{code}\n```", tests, "code", extra_info=dict(*extra))
            found.append((await verifier.score(sample)).score)
        return found

    return asyncio.run(run())


if __name__ == "__main__":
    _serve()
