"""Runs untrusted Python programs where they can do no harm.

``Sandbox.run_program`` runs a program as if from a terminal, ``Sandbox.run_tests`` runs tests of a program that cannot
see them. Each run is one new process tree with:

- no network; namespaces of its own for users, processes, mounts, IPC, host name and cgroups;
- a read-only view of the interpreter and the system's libraries, an empty ``/tmp`` in memory, of bounded size, and
  nothing else: no home folder, no ``/etc``, ``/proc``, ``/sys`` or ``/run``;
- limits of CPU time, memory, processes, files and output, and a wall-clock limit from outside;
- an empty environment, no capabilities, no new privileges, a filter of system calls.

Text goes in as data: source and input lie in sealed memory files, never in a command line. Nothing is written to the
machine's disks. What remains: the kernel itself is shared, and a program may use its share of the CPU.

Back ends, in the order of ``auto``: ``bubblewrap`` (the program ``bwrap``), ``namespaces`` (our own use of the same
kernel features; Linux 5.14 or newer), ``unsafe`` (limits and the filter only; asked for by ``allow_unsafe``).
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import marshal
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from threading import Timer
from typing import Any, Literal

from roll.extras.sandbox.run import (
    Backend,
    Run,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    View,
    started,
    view_of,
    watch,
)
from roll.rewards.types import SandboxUnavailableError
from roll.utils.threads import turn

__all__ = ["Sandbox", "SandboxError", "SandboxLimits", "SandboxResult"]

logger = logging.getLogger(__name__)


class Sandbox:
    """A way to run programs, chosen once for this machine.

    Args:
        backend: one back end, or ``auto`` for the first that works.
        allow_unsafe: permits the back end ``unsafe`` where no other works.
        python: interpreter of the programs; ``None`` is the one that this environment is based on, without packages.
        readable: further paths that programs may read.
        max_parallel: runs at the same time, further ones wait; ``None`` is the number of CPUs.

    Raises:
        SandboxUnavailableError: no back end works.
        ValueError: ``python`` or a path of ``readable`` does not exist.
    """

    def __init__(
        self,
        *,
        backend: Backend | Literal["auto"] = "auto",
        allow_unsafe: bool = False,
        python: str | None = None,
        readable: Sequence[str] = (),
        max_parallel: int | None = None,
    ) -> None:
        chosen = python or getattr(sys, "_base_executable", None) or sys.executable
        for path in (chosen, *readable):
            if not os.path.isabs(path) or not os.path.exists(path):
                raise ValueError(f"got {path!r}, expected an absolute path that exists")
        self._view = view_of(chosen, tuple(readable), python is not None)
        self._slots = asyncio.Semaphore(max_parallel or len(os.sched_getaffinity(0)))
        self.backend: Backend = self._choose(backend, allow_unsafe)

    # --- choice of a back end

    def _choose(self, wanted: Backend | Literal["auto"], allow_unsafe: bool) -> Backend:
        candidates: tuple[Backend, ...] = ("bubblewrap", "namespaces") if wanted == "auto" else (wanted,)
        if wanted == "unsafe" and not allow_unsafe:
            raise SandboxUnavailableError("sandbox: got the backend unsafe, expected allow_unsafe: true with it")
        if allow_unsafe and "unsafe" not in candidates:
            candidates = (*candidates, "unsafe")
        reasons: dict[str, str] = {}
        for candidate in candidates:
            reason = _probe(candidate, self._view)
            if reason is None:
                if candidate == "unsafe":
                    logger.warning("sandbox: programs run WITHOUT isolation (allow_unsafe); %s", _words(reasons))
                return candidate
            reasons[candidate] = reason
        raise SandboxUnavailableError(
            f"sandbox: found no way to isolate a program: {_words(reasons)}. Expected bubblewrap (bwrap), or a kernel "
            "and container that permit user namespaces; allow_unsafe: true runs programs without isolation"
        )

    # --- runs

    async def run_program(
        self,
        source: str,
        stdin: str = "",
        limits: SandboxLimits | None = None,
        provided: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Runs a Python program with ``stdin`` as its input.

        Args:
            provided: names that the program may use without importing them, with their modules.

        Raises:
            SandboxError: the isolation could not be set up.
        """
        data = stdin.encode("utf-8", "surrogatepass")
        return await self._run("program", source, data, limits or SandboxLimits(), provided)

    async def run_tests(
        self,
        source: str,
        plan: dict[str, Any],
        limits: SandboxLimits | None = None,
        provided: Mapping[str, str] | None = None,
    ) -> tuple[list[dict[str, Any]], SandboxResult]:
        """Runs tests of a program in a process of their own; the program cannot see them or their results.

        Args:
            source: the program, loaded as a module named ``solution``.
            plan: ``setup`` (code before the tests), ``timeout`` (seconds of one test), ``tests``: each ``{"code": …}``
                or ``{"call": name, "args": […], "kwargs": {…}}`` with encoded values, and what names in code mean:
                ``program``, ``python`` and ``imports`` as in ``code_names.Names``, ``asked`` (names, one of which the
                program must define), and ``program_modules``, under which code imports the program.
            provided: as for ``run_program``.

        Returns:
            What the tester said, and the run. First ``{"missing": module that the tests import}`` or ``{"load": error
            or None}``, then one of ``{"ok": true}``, ``{"value": encoded}`` and ``{"error": text}`` for each test that
            ended. A test that timed out ends the run without a line, and one in which the program's process ended
            ends it with ``"gone": true``.

        Raises:
            SandboxError: the isolation could not be set up.
        """
        result = await self._run("tests", source, marshal.dumps(plan, 2), limits or SandboxLimits(), provided)
        lines = result.stdout.split("\n")[:-1]
        return [json.loads(line) for line in lines], result

    async def _run(
        self, mode: str, source: str, stdin: bytes, limits: SandboxLimits, provided: Mapping[str, str] | None
    ) -> SandboxResult:
        async with turn(self._slots):
            with started(self.backend, self._view, mode, source, stdin, limits, provided) as run:
                return await watch(run, limits)


def _words(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


# --- what works here

_PROBE = """
import os, sys
sentinel = sys.stdin.read()
children = 0
try:
    while children < 64:
        if os.fork() == 0:
            import time
            time.sleep(60)
        children += 1
except OSError:
    pass
print(os.path.exists(sentinel), os.path.exists("/proc/self"), children < 64)
"""


@functools.lru_cache(maxsize=16)
def _probe(backend: Backend, view: View) -> str | None:
    """Reason why a back end does not isolate here, ``None`` if it does: it runs a program that tries three things."""
    if sys.platform != "linux":
        return f"got the platform {sys.platform}, expected linux"
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with tempfile.NamedTemporaryFile(prefix="roll-sandbox-probe-") as sentinel:
        source = "print('works')" if backend == "unsafe" else _PROBE
        expected = b"works\n" if backend == "unsafe" else b"False False True\n"
        with started(backend, view, "program", source, sentinel.name.encode(), SandboxLimits()) as run:
            timer = _kill_later(run)
            try:
                stdout, stderr = run.process.communicate()
            finally:
                timer.cancel()
    if stdout == expected:
        return None
    return (stderr.decode("utf-8", "replace").strip().splitlines() or [f"got {stdout!r}, expected {expected!r}"])[-1]


def _kill_later(run: Run) -> Timer:
    timer = Timer(20.0, run.let_go)
    timer.daemon = True
    timer.start()
    return timer
