"""The state of the random number generators as JSON: no pickle, so a checkpoint runs nothing when it is read."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def rng_state(generators: Mapping[str, np.random.Generator] | None = None) -> dict[str, Any]:
    """The state of Python's and numpy's global generators, of the named ones, and of torch's where torch is loaded."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": _listed(np.random.get_state(legacy=False)),
        "generators": {name: _listed(rng.bit_generator.state) for name, rng in (generators or {}).items()},
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii")
    return state


def restore_rng_state(state: Mapping[str, Any], generators: Mapping[str, np.random.Generator] | None = None) -> None:
    """Sets what ``rng_state`` saved, the generators given by name in place.

    Raises:
        KeyError: a named generator has no saved state.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    for name, rng in (generators or {}).items():
        if name not in state["generators"]:
            raise KeyError(f"random generator {name!r}: no saved state; saved are {sorted(state['generators'])}")
        rng.bit_generator.state = state["generators"][name]
    if "torch" in state:
        import torch

        saved = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8).copy()
        torch.set_rng_state(torch.from_numpy(saved))


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value
