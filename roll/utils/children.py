"""Child processes that serve one request at a time each, and can be killed with everything that they started.

The parent side is ``ChildPool``, or ``Child`` where each has a part of its own; a module whose ``main`` calls ``serve``
is a child. They speak JSON, one line per message: first what the child shall hold, then a request and its reply at a
time. A child is no sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias, cast

from roll.utils.foreign import describe_fault
from roll.utils.registry import load_inherited_plugins

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for the imports of a child; a user's module may bring torch."""
MAX_REPLY_BYTES = 1 << 20
MAX_ERROR_CHARS = 1000
_STOP_TIMEOUT = 5.0
_PR_SET_PDEATHSIG = 1

Reply: TypeAlias = dict[str, Any]


class ChildError(RuntimeError):
    """A child died, could not be set up, or broke the protocol."""


class ChildDiedError(ChildError):
    """Its process died; ``returncode`` as ``subprocess`` has it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"its process died ({ending(returncode)})")
        self.returncode = returncode


class ChildTimeoutError(ChildError, TimeoutError):
    """A request took too long; its child was killed."""


class ChildPool:
    """Processes of ``python -m module``, each one request at a time, under a hard timeout.

    A child that exceeds the timeout or dies is replaced, with its whole process group; the requests of the others go
    on. Children die with the thread that started them (Linux), so start the pool from a thread that lives as long as
    it.

    Args:
        setup: what every child shall hold; JSON.
        num_processes: children, and requests that are answered at the same time.
    """

    def __init__(
        self,
        module: str,
        setup: object,
        num_processes: int = 1,
        *,
        what: str,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        assert num_processes >= 1, num_processes
        self._what = what
        self._children = [
            Child(module, setup, what=what, max_reply_bytes=max_reply_bytes) for _ in range(num_processes)
        ]
        self._idle: asyncio.LifoQueue[Child] = asyncio.LifoQueue()  # one that runs is found before one to be started
        for child in self._children:
            self._idle.put_nowait(child)
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.pid for child in self._children if child.pid is not None]

    async def start(self) -> None:
        """Starts all children, so that no request waits for their imports; ``ask`` starts those that do not run.

        Raises:
            ChildError: a child could not be started or set up.
        """
        await asyncio.gather(*(child.start() for child in self._children))

    async def ask(self, request: object, timeout: float) -> Reply:
        """Has a request answered by the next free child.

        Args:
            timeout: seconds of the answer itself; waiting for a free child does not count.

        Returns:
            What the child's function returned; its key ``error`` tells what it raised.

        Raises:
            ChildTimeoutError: it took too long.
            ChildError: it killed its process.
        """
        line = encode(request)
        child = await self._idle.get()
        healthy = False
        try:
            if self._closed:
                raise ChildError(f"the {self._what} processes are closed")
            await child.start()
            async with asyncio.timeout(timeout):
                reply = await child.ask(line)
            healthy = True
            return reply
        except TimeoutError as error:
            raise ChildTimeoutError(f"took longer than {timeout:g} s and was killed") from error
        finally:
            # A child that was cancelled in the middle of a request would answer the next one with the last reply.
            if healthy or self._closed:
                self._idle.put_nowait(child)
            else:
                self._replace(child)

    async def close(self) -> None:
        """Kills the children. Requests under way end with a ``ChildError``."""
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))

    def _replace(self, child: Child) -> None:
        child.kill()
        task = asyncio.create_task(self._restart(child))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, child: Child) -> None:
        try:
            await child.start()
        except ChildError as error:
            logger.warning("a %s process was not replaced, the next request tries again: %s", self._what, error)
        finally:
            self._idle.put_nowait(child)


class Child:
    """One process of ``python -m module``, seen from the parent; it can be started again after it died.

    It dies with the thread that started it, see ``ChildPool``. One request at a time.

    Args:
        setup: what it shall hold; JSON.
    """

    def __init__(self, module: str, setup: object, *, what: str, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        self._module = module
        self._setup = encode({"setup": setup, "max_reply_bytes": max_reply_bytes})
        self._what = what
        self._max_reply_bytes = max_reply_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._killed = False
        """Tells whether the process has been killed, also while the system still has it."""

    @property
    def pid(self) -> int | None:
        """Its process id; ``None`` while it does not run."""
        if self._process is None or self._process.returncode is not None or self._killed:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
            ChildError: it died, or did not get ready in ``START_TIMEOUT`` seconds.
        """
        async with self._starting:
            if self.pid is not None:
                return
            await self.stop()
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    self._process = await self._spawn()
                    self._killed = False
                    reply = {"error": "closed"} if self._closed else await self.ask(self._setup)
            except BaseException as error:
                self.kill()
                if isinstance(error, TimeoutError):
                    raise ChildError(f"a {self._what} process was not ready after {START_TIMEOUT:g} s") from error
                raise
            if "error" in reply:
                await self.stop()
                raise ChildError(f"a {self._what} process could not be set up: {reply['error']}")

    async def ask(self, request: bytes) -> Reply:
        """Sends a request and reads the reply.

        Raises:
            ChildError: the process died or broke the protocol.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except ValueError as error:
            raise ChildError(f"its process replied with more than {self._max_reply_bytes} bytes") from error
        if not line.endswith(b"\n"):
            raise ChildDiedError(await process.wait())
        return cast(Reply, json.loads(line))

    def kill(self) -> None:
        """Kills the process and what it started."""
        if self._process is not None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stops the process for good."""
        self._closed = True
        await self.stop()

    async def stop(self) -> None:
        """Kills the process and waits until the system has taken it away."""
        self.kill()
        if self._process is not None:
            # Somebody else may hold the pipe open, and then asyncio waits for the end of the pipe too.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT)
            self._process = None

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # its own process group: Ctrl-C is the parent's affair, and a kill takes all
            limit=self._max_reply_bytes,
        )


def _environment() -> dict[str, str]:
    """The parent's environment, with its import path: a user's module need not be installed."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # A fixed hash seed, since the order of sets reaches SymPy's output, which must be the same in every process.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def ending(returncode: int) -> str:
    """Words for how a process ended; its code as ``subprocess`` has it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"


def encode(message: object) -> bytes:
    """A message as a line."""
    # ASCII escapes keep every string intact, lone surrogates and line breaks included.
    return json.dumps(message).encode() + b"\n"


def serve(build: Callable[[Any], Callable[[Any], Reply]], plain: type[Exception] = ChildError) -> None:
    """The child: builds what answers requests, and lets it do so until the pipe ends.

    Args:
        build: makes the answering function of the setup.
        plain: errors of which the words are told without their type.
    """
    die_with_parent()
    requests, replies = _take_pipes()
    answer: Callable[[Any], Reply] | None = None
    limit = MAX_REPLY_BYTES
    for line in requests:
        try:
            if answer is None:
                load_inherited_plugins()
                first = json.loads(line)
                answer, limit = build(first["setup"]), first["max_reply_bytes"]
                reply: Reply = {"ready": True}
            else:
                reply = answer(json.loads(line))
        # Whatever it raises, sys.exit included, is an answer: it could not tell.
        except (Exception, SystemExit) as error:
            reply = {"error": words_of(error, plain)}
        encoded = encode(reply)
        if len(encoded) > limit:
            encoded = encode({"error": f"a reply of {len(encoded)} bytes, expected at most {limit}"})
        replies.write(encoded)
        replies.flush()


def words_of(error: BaseException, plain: type[Exception] = ChildError) -> str:
    """An error as a reply tells it."""
    return (str(error) if isinstance(error, plain) else describe_fault(error))[:MAX_ERROR_CHARS]


def die_with_parent() -> None:
    """No orphans, no core dumps, and when memory runs out this process goes first."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        # The end of the pipe tells an idle child only; a busy one would go on.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under new numbers; what a child reads and prints goes to /dev/null and to stderr."""
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
