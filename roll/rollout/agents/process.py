"""An agent program that is a command, started anew for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.configs.agent import AgentConfig
from roll.rollout.agents.task import AgentError, AgentExitError, AgentTask
from roll.rollout.errors import MAX_WORDS, clean_text

MAX_ANSWER = 4_000_000
"""Bytes of an answer that a program writes."""

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
_KEPT = 4 * MAX_WORDS
_GRACE_S = 15.0
"""Time that a supervisor gets to end what the command has started; more than it takes itself."""


class ProcessProgram:
    """Starts ``agent.command`` (an ``AgentProgram``).

    The command finds ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` (and Anthropic's), the task as JSON in the file
    ``ROLL_TASK``, and may write its answer to the file ``ROLL_ANSWER``. Exit code 0 is an episode; any other is a
    failure. Whatever it has started is killed when it ends or is ended.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._command = [_absolute(part) for part in config.command]
        self._env = _environment() | dict(config.env)
        self._cwd = config.cwd

    async def run(self, task: AgentTask) -> str | None:
        """See ``AgentProgram``."""
        folder = Path(tempfile.mkdtemp(prefix="roll-agent-"))
        try:
            answer, work = folder / "answer", folder / "work"
            work.mkdir()
            (folder / "task.json").write_text(json.dumps(task.public()), encoding="utf-8")
            env = self._env | {
                "OPENAI_BASE_URL": task.base_url,
                "OPENAI_API_KEY": task.api_key,
                "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": task.api_key,
                "ROLL_TASK": str(folder / "task.json"),
                "ROLL_ANSWER": str(answer),
            }
            async with _started(self._command, env, self._cwd or str(work)) as running:
                code = await running.exit_code()
            if code != 0:
                said = running.last_words().replace(task.api_key, "***")
                raise AgentExitError(f"{self._command[0]} ended with {_ending(code)}{said}")
            return _read_answer(answer)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _Tail(asyncio.Protocol):
    """The end of what a pipe brings."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data = (self.data + data[-_KEPT:])[-_KEPT:]


@dataclass
class _Running:
    """A command under way."""

    process: subprocess.Popen[bytes]
    ended: asyncio.Future[None]
    status: int
    output: _Tail

    def end(self) -> None:
        """Notes that the supervisor is gone."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def exit_code(self) -> int | None:
        """Of the command, once all that it has started is gone; ``None``: its supervisor was killed."""
        await asyncio.shield(self.ended)
        with contextlib.suppress(BlockingIOError, ValueError):
            return int(os.read(self.status, 16))
        return None

    def last_words(self) -> str:
        """The end of its output."""
        text = clean_text(self.output.data.decode("utf-8", "replace")).strip()
        return f": {text[-MAX_WORDS:]}" if text else ""


@contextlib.asynccontextmanager
async def _started(command: Sequence[str], env: Mapping[str, str], cwd: str) -> AsyncIterator[_Running]:
    """A command; at the end nothing of it is left."""
    loop = asyncio.get_running_loop()
    (status, status_write), (lifeline, held) = os.pipe(), os.pipe()
    os.set_blocking(status, False)
    handle: int | None = None
    transport: asyncio.BaseTransport | None = None
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(lifeline), str(status_write), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                pass_fds=(lifeline, status_write),
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"agent.cwd: cannot start in {cwd!r}: {error.strerror}") from error
        finally:
            os.close(lifeline)
            os.close(status_write)
        running = _Running(process, loop.create_future(), status, _Tail())
        handle = os.pidfd_open(process.pid)
        loop.add_reader(handle, running.end)
        try:
            assert process.stdout is not None
            transport, _ = await loop.connect_read_pipe(lambda: running.output, process.stdout)
            yield running
        finally:
            os.close(held)
            held = -1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running.ended), _GRACE_S)
            process.kill()
            process.wait()
    finally:
        if handle is not None:
            loop.remove_reader(handle)
            os.close(handle)
        if transport is not None:
            transport.close()
        if held >= 0:
            os.close(held)
        os.close(status)


def _absolute(part: str) -> str:
    """A file's path that another folder does not change."""
    return os.path.abspath(part) if "/" in part and not os.path.isabs(part) and os.path.exists(part) else part


def _environment() -> dict[str, str]:
    """What a command may know of this process's environment, its own ``python`` first in the path."""
    kept = {key: value for key, value in os.environ.items() if key in _INHERITED or key.startswith("LC_")}
    return kept | {"PATH": os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", os.defpath)])}


def _ending(code: int | None) -> str:
    if code is None:
        return "its supervisor killed"
    return f"exit code {code}" if code > 0 else f"signal {-code}"


def _read_answer(path: Path) -> str | None:
    """The answer that the program wrote, if it did."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"ROLL_ANSWER cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        text = file.read(MAX_ANSWER + 1)
    if len(text) > MAX_ANSWER:
        raise AgentError(f"ROLL_ANSWER has more than {MAX_ANSWER:,} bytes")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AgentError(f"ROLL_ANSWER is no UTF-8: {error}") from error
