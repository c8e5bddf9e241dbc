"""Python's and numpy's random numbers, which a process has once, as if each environment had its own."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

_PATIENCE_S = 10.0
"""With an environment that does not come back; then others go on without it."""


class _Turns:
    """Lets one environment at a time draw from the random numbers of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        lock = self._lock
        while not lock.acquire(timeout=_PATIENCE_S):
            if self._lock is lock:
                self._lock = threading.Lock()
            lock = self._lock
        try:
            yield
        finally:
            lock.release()


_TURNS = _Turns()


class OwnRandom:
    """The state of an environment's random numbers between its calls; at first that of seed 0."""

    def __init__(self) -> None:
        self._python = random.Random(0).getstate()
        self._numpy: Any = np.random.RandomState(0).get_state()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Has the process draw this environment's numbers; calls of others wait."""
        with _TURNS.take():
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
