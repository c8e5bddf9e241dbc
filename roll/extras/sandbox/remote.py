"""A client for sandbox services with the HTTP interface of SandboxFusion.

One program is one request: ``{code, stdin, language, compile_timeout, run_timeout, memory_limit_MB}``; the answer has a
``status`` and the ``run_result`` (https://bytedance.github.io/SandboxFusion). The outputs that a program should print
and the values that a function should return stay here, as with the local sandbox. Assertions run on the service in a
process beside the program's, but of the same user, so how far a program can get at them is the service's affair.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
from pydantic import Field

from roll.extras.sandbox.run import SandboxLimits, SandboxResult, harness
from roll.rewards.endpoint import Endpoint, RemoteConfig, TransientError, read_key
from roll.rewards.types import RewardError

READ_LIMITS = ("wall_seconds", "memory_mb", "output_kb")
"""Keys of ``SandboxLimits`` that such a service understands or its client sees to."""


class RemoteSandboxConfig(RemoteConfig):
    """``args.remote`` of the verifier ``code``: a sandbox service."""

    url: str = Field(
        description="Address of the service, such as http://10.0.0.5:8080/run_code; /run_code is added if there is no "
        "path."
    )


class RemoteSandbox:
    """A sandbox service instead of ``Sandbox``. Serves one event loop.

    Raises:
        ValueError: the key's environment variable is unset or no possible key.
    """

    def __init__(self, config: RemoteSandboxConfig) -> None:
        url = httpx.URL(config.url)
        url = url if url.path.strip("/") else url.copy_with(path="/run_code")
        self._endpoint = Endpoint(url, "sandbox", config, read_key(config.api_key_env, "remote.api_key_env"))

    async def run_program(
        self,
        source: str,
        stdin: str = "",
        limits: SandboxLimits | None = None,
        provided: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Runs a Python program with ``stdin`` as its input; ``limits`` beyond ``READ_LIMITS`` are the service's.

        Raises:
            RewardError: the service did not run it, in every attempt.
        """
        limits = limits or SandboxLimits()
        body = {
            "language": "python",
            "code": _imports(provided or {}, source) + source,
            "stdin": stdin,
            "compile_timeout": limits.wall_seconds,
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": limits.memory_mb,
        }
        started = time.monotonic()
        run, attempts = await self._endpoint.ask(body, self._read, more_s=limits.wall_seconds)
        return _result(run, limits, attempts, time.monotonic() - started)

    async def run_tests(
        self,
        source: str,
        plan: dict[str, Any],
        limits: SandboxLimits | None = None,
        provided: Mapping[str, str] | None = None,
    ) -> tuple[list[dict[str, Any]], SandboxResult]:
        """Runs tests of a program in a process of their own; arguments and returned values as ``Sandbox.run_tests``.

        Raises:
            RewardError: the service did not run them, in every attempt, or said what no tester says.
        """
        limits = limits or SandboxLimits()
        arguments = f"{source!r}, {limits.output_kb << 10}, json.loads, {dict(provided or {})!r}"
        tester = f"{harness()}\nimport json\nrun_tests({arguments})\n"
        result = await self.run_program(tester, json.dumps(plan), limits)
        try:
            return [json.loads(line) for line in result.stdout.split("\n")[:-1]], result
        except ValueError as error:
            seen = self._endpoint.shorten(result.stdout)
            raise RewardError(f"{self._endpoint.shown}: expected the tester's lines, got {seen}") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._endpoint.close()

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        """Reads what the service says of the run."""
        try:
            answer = response.json()
            status = answer["status"]
            run = answer.get("run_result") or answer.get("compile_result") or {}
            known = status in ("Success", "Failed") and run["status"] in ("Finished", "TimeLimitExceeded", "Error")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            shown = self._endpoint.shorten(response.text)
            raise TransientError(f"expected the status of a run as JSON, got {shown}") from error
        if not known or (run["status"] == "Error" and run.get("return_code") is None):  # it did not come to run it
            said = self._endpoint.shorten(str(answer.get("message") or run.get("stderr") or ""))
            raise TransientError(f"status {self._endpoint.shorten(str(status))}: {said}")
        return dict(run)


def _imports(provided: Mapping[str, str], source: str) -> str:
    """Lines before a program that import what it uses without importing it."""
    if "from __future__" in source:  # which must stand first
        return ""
    found = sorted((module, name) for name, module in provided.items() if module != "harness")
    return "".join(f"from {module} import {name}\n" if module else f"import {name}\n" for module, name in found)


def _result(run: dict[str, Any], limits: SandboxLimits, attempts: int, waited_s: float) -> SandboxResult:
    stdout, stderr, most = str(run.get("stdout") or ""), str(run.get("stderr") or ""), limits.output_kb << 10
    spent, code = run.get("execution_time"), run.get("return_code")
    timed_out = run["status"] == "TimeLimitExceeded"
    return SandboxResult(
        stdout=stdout[:most],
        stderr=stderr[:most],
        exit_code=code if isinstance(code, int) else int(timed_out),
        timed_out=timed_out,
        output_truncated=len(stdout) > most,
        memory_exceeded=False,  # such a service does not say
        cpu_s=None,
        wall_s=float(spent) if isinstance(spent, int | float) else min(waited_s, limits.wall_seconds),
        attempts=attempts,
    )
