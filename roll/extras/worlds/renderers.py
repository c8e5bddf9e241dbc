"""From another library's observation to text: the numbers in it, or a function that the user names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from roll.utils.registry import Registry, UnknownNameError

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
