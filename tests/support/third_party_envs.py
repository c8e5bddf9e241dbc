"""A module of gymnasium environments as other packages ship them: importing it registers ``Corridor-v0``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete


class Corridor(gymnasium.Env[int, int]):
    """Five cells; action 1 walks right, 0 left, and the last cell pays 1."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    observation_space = Discrete(5)
    action_space = Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.cell = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
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
