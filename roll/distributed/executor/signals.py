"""Ctrl-C and SIGTERM as an exception, so that a run can save and leave with the right exit code."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

_SAME_PRESS_S = 1.0
"""``timeout`` and some shells deliver one signal twice, to the process and to its group."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. ``exit_code`` is 130 after SIGINT and 143 after SIGTERM."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.exit_code - 128).name}"


@contextmanager
def graceful_signals() -> Iterator[None]:
    """Raises once in the main thread at the first SIGINT or SIGTERM; a second one ends the process at once.

    Inside the block catch ``KeyboardInterrupt`` (Ray replaces our exception by a plain one when the signal arrives
    during a Ray call); what leaves the block is always an ``Interrupted``. Outside the main thread, where Python
    cannot handle signals, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        logger.debug("not in the main thread: signals keep their handlers")
        yield
        return

    exit_code = 0
    first = 0.0

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        nonlocal exit_code, first
        if not exit_code:
            exit_code, first = 128 + signum, time.monotonic()
            raise Interrupted(exit_code)
        if time.monotonic() - first > _SAME_PRESS_S:
            os._exit(128 + signum)

    previous = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted) or not exit_code:
            raise
        raise Interrupted(exit_code) from error
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
