"""The sandbox of an agent's commands, which can reach one port of this machine and one folder.

It is the code verifier's (``roll.extras.sandbox``, back end ``namespaces``): namespaces of its own, a read-only view
of the system and of python, no capabilities, limits, a filter of system calls. Its network has a loopback device alone.
On that the sandbox listens at the endpoint's port and hands the socket out; what connects there is passed on to the
endpoint, and nothing else can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import marshal
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from roll.configs.agent import AgentSandboxConfig
from roll.extras.sandbox.inner import INSIDE_UID
from roll.extras.sandbox.pool import Sandbox
from roll.extras.sandbox.run import INNER, memory_file, uses_more, view_of
from roll.rollout.agents.command import Ended, Running, started
from roll.rollout.agents.task import AgentError

_HOST = "127.0.0.1"
_OWN_PROCESSES, _OWN_MEMORY = 4, 32 << 20  # of the sandbox, beside the command's
_LOOK_S = 1.0
_LOOKS_AT_FOLDER = 5  # every so many looks are at the folders too
_MAX_FILES = 100_000
_MAX_CONNECTIONS = 64
_FOREVER_S = 1e9
"""The caller of the command watches the episode's time."""


class Cell:
    """Runs commands of one kind in a sandbox.

    Args:
        command: what it names by whole paths may be read.

    Raises:
        SandboxUnavailableError: this machine has no way to isolate a program.
        ValueError: a path of ``readable`` does not exist.
    """

    def __init__(self, config: AgentSandboxConfig, command: Sequence[str]) -> None:
        self._config = config
        named = [part for part in command if os.path.isabs(part) and os.path.exists(part) and part != "/"]
        readable = tuple(dict.fromkeys([*named, *config.readable]))
        Sandbox(backend="namespaces", python=sys.executable, readable=readable)  # raises
        self._view = view_of(sys.executable, readable, True)

    async def run(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, folders: Sequence[str], port: int | None
    ) -> Ended:
        """Runs a command to its end.

        Args:
            env: all of its environment, but for ``HOME`` and ``TMPDIR``.
            folders: what it may write to, beside its own ``/tmp``; at the same paths as here.
            port: of 127.0.0.1, the only address that it reaches; ``None``: there is no network.

        Raises:
            AgentError: it used more than it may, or the sandbox failed.
        """
        for folder in folders:
            await asyncio.to_thread(_give_away, folder)
        with contextlib.ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            job = memory_file(marshal.dumps(self._job(command, env, cwd, folders, port, theirs.fileno()), 2))
            stack.callback(os.close, job)

            def argv(lifeline: int, status: int) -> list[str]:
                options = ["-I", "-S", "-B", "-X", "utf8"]
                return [sys.executable, *options, str(INNER), str(job), str(status), str(lifeline)]

            async with started(argv, env, "/", (job, theirs.fileno())) as running:
                ending = asyncio.ensure_future(running.report())
                guard = asyncio.create_task(self._guard(running, folders, port, ours))
                try:
                    await asyncio.wait({ending, guard}, return_when=asyncio.FIRST_COMPLETED)
                    if not ending.done():
                        guard.result()
                    report = await ending
                finally:
                    guard.cancel()
                    ending.cancel()
                    await asyncio.gather(guard, ending, return_exceptions=True)
        words = running.last_words()
        if "ready" not in report:
            raise AgentError(f"agent.sandbox: the isolation failed{words}")
        return Ended(int(report[1]) if len(report) > 1 else None, words)

    async def _guard(self, running: Running, folders: Sequence[str], port: int | None, channel: socket.socket) -> None:
        """Passes connections on, until it raises for what is more than there may be."""
        limits = self._config
        server = None
        try:
            if port is not None:
                slots = asyncio.Semaphore(_MAX_CONNECTIONS)
                pass_on = functools.partial(_pass_on, port, slots)
                server = await asyncio.start_server(pass_on, sock=await _received(channel))
            for look in itertools.count(1):
                await asyncio.sleep(_LOOK_S)
                if uses_more(running.process.pid, (limits.memory_mb << 20) + _OWN_MEMORY):
                    raise AgentError(f"the command used more than agent.sandbox.memory_mb={limits.memory_mb}")
                if look % _LOOKS_AT_FOLDER == 0 and await asyncio.to_thread(
                    _is_larger, folders, limits.folder_mb << 20
                ):
                    raise AgentError(
                        f"the command wrote more than agent.sandbox.folder_mb={limits.folder_mb}, or more than "
                        f"{_MAX_FILES:,} files"
                    )
        finally:
            if server is not None:
                server.close()

    def _job(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        folders: Sequence[str],
        port: int | None,
        channel: int,
    ) -> dict[str, Any]:
        """The job that ``inner.py`` is given."""
        limits, view = self._config, self._view
        return {
            "mode": "command",
            "command": list(command),
            "environment": {**env, "HOME": "/tmp", "TMPDIR": "/tmp"},
            "max_seconds": _FOREVER_S,
            "view": {
                "binds": view.binds,
                "links": view.links,
                "writable": list(folders),
                "temp_bytes": limits.temp_mb << 20,
                "temp_files": _MAX_FILES,
                "port": port,
                "channel": channel,
            },
            "chdir": cwd,
            "drop_to": None,
            "limits": {
                "CORE": 0,
                "MEMLOCK": 0,
                "MSGQUEUE": 0,
                "CPU": limits.cpu_seconds,
                "DATA": limits.memory_mb << 20,  # and not AS: programs reserve more than they use
                "NPROC": limits.processes + _OWN_PROCESSES,
                "FSIZE": limits.file_mb << 20,
                "NOFILE": limits.open_files,
            },
        }


def _give_away(folder: str) -> None:
    """Lets the sandbox's user write to a folder; where this process is not root, that is its own user."""
    if os.getuid() == 0:
        for path, _, files in os.walk(folder):
            for name in ("", *files):
                os.chown(os.path.join(path, name), INSIDE_UID, INSIDE_UID, follow_symlinks=False)


def _is_larger(folders: Sequence[str], size: int) -> bool:
    """Tells whether folders hold more than so many bytes, or too many files to count."""
    left, files = size, _MAX_FILES
    for folder in folders:
        for path, _, names in os.walk(folder):
            files -= 1 + len(names)
            for name in names:
                with contextlib.suppress(OSError):  # gone in between
                    left -= os.lstat(os.path.join(path, name)).st_blocks * 512
            if min(left, files) < 0:
                return True
    return False


async def _received(channel: socket.socket) -> socket.socket:
    """The socket that the sandbox hands out."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(channel, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(channel)
    return socket.socket(fileno=socket.recv_fds(channel, 1, 1)[1][0])


async def _pass_on(
    port: int, slots: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Connects one that has come with the endpoint."""
    async with slots:
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(_HOST, port)
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
