"""Requests to stop (Ctrl-C, SIGTERM, a closed terminal, a failure in another thread) as an exception, held back
while the state of the run could not be saved."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a run to stop."""

_SAME_PRESS_S = 1.0
"""``timeout`` and some shells deliver one signal twice, to the process and to its group."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. ``exit_code`` is 130 after SIGINT, 143 after SIGTERM and 129 after SIGHUP."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.exit_code - 128).name}"


class SignalGuard:
    """Raises ``Interrupted`` in the main thread at the first signal of ``STOPPING``; a second ends the process.

    Use as a context manager. Outside the main thread, where Python cannot handle signals, it changes nothing.
    """

    def __init__(self) -> None:
        self._exit_code = 0
        self._failure: Exception | None = None
        self._first = 0.0
        self._deferred = 0
        self._raised = False
        self._previous: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def __enter__(self) -> SignalGuard:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._on_signal)
                for number in STOPPING
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._name(error)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Within the block too, a KeyboardInterrupt becomes the reason to stop, as at the end of the guard."""
        try:
            yield
        except KeyboardInterrupt as error:
            self._name(error)
            raise

    def _name(self, error: BaseException | None) -> None:
        # A handler may only raise KeyboardInterrupts: during one of Ray's calls, Ray ignores anything else, and makes a
        # plain one of ours.
        if isinstance(error, KeyboardInterrupt) and self._failure is not None:
            raise self._failure from error
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted) and self._exit_code:
            raise Interrupted(self._exit_code) from error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block a signal is only noted; ``Interrupted`` is raised when the outermost block ends well."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        self.check()

    def check(self) -> None:
        """Raises ``Interrupted`` if a signal has been noted and may be acted on."""
        if self._exit_code and not self._raised and not self._deferred:
            self._raised = True
            raise Interrupted(self._exit_code)

    def stop_for(self, failure: Exception) -> None:
        """Stops the main thread as SIGTERM does, and raises ``failure`` from the block; to be called in any thread.

        Where it was asked to stop before, that goes on: it is no second press.
        """
        if self._exit_code:
            return
        self._failure = failure
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._exit_code:
            self._exit_code, self._first = 128 + number, time.monotonic()
            self.check()
        elif time.monotonic() - self._first > _SAME_PRESS_S:
            os._exit(128 + number)


def outlive(*numbers: signal.Signals) -> None:
    """Makes signals do nothing to this process, from whichever thread; programs that it starts still obey them.

    ``signal.signal`` works in the main thread alone, where Ray runs no constructor of a worker with ``async`` methods.
    The handler is a C function without effect: ``SIG_IGN`` would be inherited by child processes.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in numbers:
        libc.signal(number, ctypes.cast(libc.abs, ctypes.c_void_p))
