"""Waiting for what other processes and threads do, their end among it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def happens(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    """The condition holds within that time."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(held)


def ended(pid: int) -> bool:
    """It is not there, or a zombie that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def gone(*pids: int, seconds: float = 10.0) -> bool:
    """They have ended within that time."""
    return happens(lambda: all(map(ended, pids)), seconds)
