"""An engine in a separate process, with its own interpreter, called over a pair of sockets.

Some engines want a process to themselves: they install signal handlers, kill every child of the process they are in
when they stop, and need other versions of packages than the rest of a run. Here they may. When such an engine dies,
whatever the cause, its end of the connection closes, and every call that waits fails.

``EngineProcess`` is the caller's side, ``EngineServer`` the engine's. Messages are pickles of plain data, which never
leave the two processes. This file imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

STOP_WAIT_S = 20.0
"""Time that an engine may take to end by itself before its processes are killed."""


class EngineStoppedError(RuntimeError):
    """The engine failed or was shut down; ``__cause__`` holds the failure."""


class EngineCallError(RuntimeError):
    """A call failed inside the engine's process; the engine continues."""


class EngineProcess:
    """Starts the process and calls it. Every method may be called from any thread.

    Args:
        command: starts the process; the number of its end of the sockets is appended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self._name = name
        self._socket, theirs = socket.socketpair()
        with theirs:
            # In a session of its own: an interrupt from the terminal stops the run, and the run stops the engine.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._out = self._socket.makefile("wb")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._stopped: str | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Calls a coroutine of the served object with plain data.

        Returns:
            Its result, also plain data. It raises ``ValueError`` if the call did, ``EngineCallError`` for any other
            error of the call, and ``EngineStoppedError`` if the engine dies or is shut down first.

        Raises:
            EngineStoppedError: the engine died or was shut down.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._stopped is not None:
                raise EngineStoppedError(self._stopped)
            number = next(self._numbers)
            self._waiting[number] = future
            with contextlib.suppress(OSError):  # it is gone: the reader fails the future
                pickle.dump((number, method, args), self._out)
                self._out.flush()
        return future

    def close(self, why: str = "was shut down") -> None:
        """Stops the engine with all its processes; calls that wait fail with ``EngineStoppedError``."""
        self._stop(f"{self._name} {why}")
        self._reader.join()

    def _read(self) -> None:
        last_words = None
        # An engine that dies while it answers leaves a part of a pickle.
        gone = contextlib.suppress(EOFError, OSError, pickle.UnpicklingError)
        with self._socket.makefile("rb") as answers, gone:
            while True:
                number, succeeded, result = pickle.load(answers)
                if number is None:
                    last_words = result
                    continue
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(result) if succeeded else future.set_exception(_error(*result))
        code = self._end()
        self._stop(f"{self._name} died: {last_words or f'exit code {code}; its own log says why'}")
        self._socket.close()

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = self._stopped or reason
            waiting, self._waiting = list(self._waiting.values()), {}
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # both ends read an end of file
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStoppedError(self._stopped))

    def _end(self) -> int:
        """Waits until the process ends, kills what is left of its session, and returns its exit code."""
        deadline = time.monotonic() + STOP_WAIT_S
        # Not reaped yet, its number stays its own, and the kill can hit nobody else.
        while time.monotonic() < deadline and not os.waitid(
            os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def _error(kind: str, message: str, trace: str) -> Exception:
    error = ValueError(message) if kind == "ValueError" else EngineCallError(f"{kind}: {message}")
    error.add_note(f"in the engine's process:\n{trace}")
    return error


class EngineServer:
    """The engine's side: calls the coroutines of ``target`` until the other side closes the connection."""

    def __init__(self, file_descriptor: int) -> None:
        self._socket = socket.socket(fileno=file_descriptor)
        self._out = self._socket.makefile("wb")

    def say(self, last_words: str) -> None:
        """Tells why the engine is about to die."""
        self._send(None, True, last_words)

    async def serve(self, target: object) -> None:
        loop, closed, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

        def start(number: int, method: str, args: tuple[Any, ...]) -> None:
            task = loop.create_task(self._answer(number, getattr(target, method), args))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def read() -> None:
            # A caller that dies while it calls leaves a part of a pickle.
            gone = contextlib.suppress(EOFError, OSError, pickle.UnpicklingError)
            with self._socket.makefile("rb") as calls, gone:
                while True:
                    loop.call_soon_threadsafe(start, *pickle.load(calls))
            with contextlib.suppress(RuntimeError):  # the loop is closed: it ended before
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, name="calls", daemon=True).start()
        await closed.wait()

    async def _answer(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = await function(*args)
        except Exception as error:  # raised again where the call came from
            self._send(number, False, (type(error).__name__, str(error), traceback.format_exc()))
        else:
            self._send(number, True, result)

    def _send(self, number: int | None, succeeded: bool, result: Any) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more
            pickle.dump((number, succeeded, result), self._out)
            self._out.flush()
