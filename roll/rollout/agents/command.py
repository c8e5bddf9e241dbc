"""Runs an agent's command to its end; its processes end with it, and with the process that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll.rollout.agents.task import AgentError
from roll.utils.foreign import MAX_WORDS, clean_text

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_KEPT = 4 * MAX_WORDS
_GRACE_S = 15.0
"""Time that a launcher gets to end what the command has started; more than it takes itself."""


class _Tail(asyncio.Protocol):
    """The end of what a pipe brings."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data = (self.data + data[-_KEPT:])[-_KEPT:]


@dataclass
class Running:
    """A running command."""

    process: subprocess.Popen[bytes]
    ended: asyncio.Future[None]
    status: int
    output: _Tail = field(default_factory=_Tail)

    def end(self) -> None:
        """Notes that the launcher is gone."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def report(self) -> list[str]:
        """The launcher's words, once all that the command has started is gone."""
        await asyncio.shield(self.ended)
        with contextlib.suppress(BlockingIOError):
            return os.read(self.status, 256).decode().split()
        return []

    def last_words(self) -> str:
        """The end of its output, behind a colon."""
        text = clean_text(self.output.data.decode("utf-8", "replace")).strip()
        return f": {text[-MAX_WORDS:]}" if text else ""


@contextlib.asynccontextmanager
async def started(
    argv: Callable[[int, int], list[str]], env: Mapping[str, str], cwd: str, descriptors: tuple[int, ...] = ()
) -> AsyncIterator[Running]:
    """A command, started by a program of this package that watches it; at the end nothing of it is left.

    That program ends everything when its descriptor ``lifeline`` is closed on the other side, and writes to
    ``status`` words of which the last that is a whole number is the exit code.

    Args:
        argv: of the program, by ``lifeline`` and ``status``.
        descriptors: further ones that it is given.

    Raises:
        AgentError: it cannot start in its folder.
    """
    loop = asyncio.get_running_loop()
    (status, status_write), (lifeline, held) = os.pipe(), os.pipe()
    os.set_blocking(status, False)
    with contextlib.ExitStack() as last:
        last.callback(os.close, status)
        let_go = last.enter_context(contextlib.ExitStack())
        let_go.callback(os.close, held)
        try:
            process = subprocess.Popen(
                argv(lifeline, status_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                pass_fds=(lifeline, status_write, *descriptors),
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"agent.cwd: cannot start in {cwd!r}: {error.strerror}") from error
        finally:
            os.close(lifeline)
            os.close(status_write)
        running = Running(process, loop.create_future(), status)
        handle = os.pidfd_open(process.pid)
        last.callback(os.close, handle)
        loop.add_reader(handle, running.end)
        last.callback(loop.remove_reader, handle)
        try:
            assert process.stdout is not None
            transport, _ = await loop.connect_read_pipe(lambda: running.output, process.stdout)
            last.callback(transport.close)
            yield running
        finally:
            let_go.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running.ended), _GRACE_S)
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code and last output."""

    code: int | None
    """Its exit code, negative for a signal; ``None``: what watched it was killed."""
    words: str
    """The end of its output, behind a colon."""

    def __str__(self) -> str:
        if self.code is None:
            return f"its supervisor killed{self.words}"
        return (f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}") + self.words


async def run_supervised(command: Sequence[str], env: Mapping[str, str], cwd: str) -> Ended:
    """Runs a command that may do what this process may."""

    def argv(lifeline: int, status: int) -> list[str]:
        return [sys.executable, "-I", "-S", str(_SUPERVISOR), str(lifeline), str(status), *command]

    async with started(argv, env, cwd) as running:
        report = await running.report()
        return Ended(int(report[0]) if report else None, running.last_words())
