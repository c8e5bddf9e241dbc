"""Shared by adapters: separate random numbers for each environment, and observations as text."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from roll.utils.registry import Registry, UnknownNameError

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


Renderer = Callable[[Any], str]
"""``observation -> text``."""


def _values(observation: Any) -> str:
    """Numbers in reading order; ``name: numbers`` a line for a dictionary."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_values(value)}" for key, value in observation.items())
    if isinstance(observation, tuple | list):
        return " ".join(_values(value) for value in observation)
    if isinstance(observation, np.ndarray) and observation.ndim:
        return (" " if observation.ndim == 1 else "\n").join(_values(part) for part in observation)
    if isinstance(observation, np.ndarray | np.generic):
        observation = observation.item()
    return f"{observation:.4g}" if isinstance(observation, float) else str(observation)


RENDERERS: Registry[Renderer] = Registry("renderer")
RENDERERS.register("values", _values)


def find_renderer(name: str) -> Renderer:
    """The function that ``name`` stands for, its texts checked: a registered one, or ``module:function``, or
    ``folder/file.py:function``.

    Raises:
        UnknownNameError: there is none, or it is no function.
    """
    found = RENDERERS.get(name)
    if not callable(found):
        raise UnknownNameError(f"renderer {name!r} is {found!r}, expected a function, observation to text")
    render = cast("Callable[[Any], object]", found)

    def checked(observation: Any) -> str:
        text = render(observation)
        if not isinstance(text, str):
            raise TypeError(f"renderer {name} returned {text!r:.80} ({type(text).__name__}), expected text")
        return text

    return checked
