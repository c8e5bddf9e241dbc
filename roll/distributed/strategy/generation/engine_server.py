"""The engine's side of ``engine_process.py``. It imports nothing but the standard library.

Messages are pickles of plain data, which never leave the two processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any


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
