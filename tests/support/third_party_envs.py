"""A module of gymnasium environments as other packages ship them: importing it registers them."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text


class Corridor(gymnasium.Env[int, int]):
    """Five cells; action 1 walks right, 0 left, and the last cell pays 1."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    observation_space = Discrete(5)
    action_space = Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.cell = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = 0
        return self.cell, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.cell = min(4, max(0, self.cell + (1 if action else -1)))
        return self.cell, float(self.cell == 4), self.cell == 4, False, {}

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return "".join("P" if cell == self.cell else "_" for cell in range(5))
        picture = np.full((20, 100, 3), 240, dtype=np.uint8)
        picture[:, 20 * self.cell : 20 * self.cell + 20] = (200, 30, 30)
        return picture


gymnasium.register("Corridor-v0", Corridor)


class Jug(gymnasium.Env[dict[str, Any], int]):
    """A jug of three litres; action 1 fills in a litre, 0 pours one out, and the third pays 2.

    What is seen is a dictionary of a number and an array.
    """

    observation_space = Dict({"level": Discrete(4), "jar": Box(0, 9, (2,), np.int64)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.level = min(3, max(0, self.level + (1 if action else -1)))
        return self._seen(), 2.0 * (self.level == 3), self.level == 3, False, {}

    def _seen(self) -> dict[str, Any]:
        return {"level": self.level, "jar": np.array([2, 3])}


class Echo(gymnasium.Env[str, str]):
    """Pays for the words that it says: texts in and out."""

    observation_space = Text(20, charset="say it")
    action_space = Text(20, charset="it")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say it", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, float(action == "it"), action == "it", False, {}


gymnasium.register("Jug-v0", Jug)
gymnasium.register("Echo-v0", Echo)
