"""The state of the random number generators as JSON: no pickle, so a checkpoint runs nothing when it is read."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from roll.tracking.files import to_plain


def rng_state() -> dict[str, Any]:
    """The state of Python's and numpy's global generators, and of torch's where torch is loaded."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": to_plain(np.random.get_state(legacy=False)),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii")
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Sets what ``rng_state`` saved."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        saved = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8).copy()
        torch.set_rng_state(torch.from_numpy(saved))
