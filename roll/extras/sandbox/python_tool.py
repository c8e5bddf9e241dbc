"""A Python interpreter for the policy, in the sandbox that runs programs of the code verifier."""

from __future__ import annotations

import functools
from typing import Any

from roll.agentic.tools.tool import Tool, ToolError, ToolSchema
from roll.extras.sandbox.pool import Sandbox
from roll.extras.sandbox.run import SandboxLimits


class PythonTool(Tool):
    """Runs a program and answers with what it prints. Each run is a process of its own and keeps nothing.

    Args:
        allow_unsafe: permits runs without isolation where the machine offers none.
        readable: further paths that programs may read.
        limits: see ``SandboxLimits``.

    Raises:
        SandboxUnavailableError: no way to isolate a program works here.
    """

    schema = ToolSchema(
        "python",
        "Runs a Python program and returns what it prints. Variables do not outlive the call.",
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; print what you want to see."}},
            "required": ["code"],
        },
    )

    def __init__(self, allow_unsafe: bool = False, readable: tuple[str, ...] = (), **limits: Any) -> None:
        self._limits = SandboxLimits(**limits)
        self._settings = (allow_unsafe, tuple(readable))

    @functools.cached_property
    def _sandbox(self) -> Sandbox:
        allow_unsafe, readable = self._settings
        return Sandbox(allow_unsafe=allow_unsafe, readable=readable)

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ToolError(f"code: got {code!r}, expected the text of a program")
        result = await self._sandbox.run_program(code, limits=self._limits)
        parts = [result.stdout.rstrip()]
        if result.timed_out:
            parts.append(f"(killed after {self._limits.wall_seconds:g} s)")
        elif result.memory_exceeded:
            parts.append(f"(killed: it used more than {self._limits.memory_mb} MB)")
        elif result.output_truncated:
            parts.append(f"(killed: it printed more than {self._limits.output_kb} kB)")
        elif result.exit_code:
            parts.append(f"{result.stderr.strip()}\n(exit code {result.exit_code})")
        return "\n".join(part for part in parts if part) or "(it printed nothing)"
