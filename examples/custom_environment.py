"""An environment of one's own, in ten lines: guess a number, told "higher" or "lower" after each try.

A configuration reaches it by its path, ``env_type: custom_environment:GuessNumber`` (this folder is on the import path
of ``start_agentic_pipeline.py`` and of its workers), or by a name that was registered before the run:
``python examples/custom_environment.py --config_name … custom_envs.<Tag>.env_type=guess_number``.
See ``docs/environments.md``.
"""

import sys
from typing import Any

from roll.agentic.env import TextEnv, register
from roll.pipeline.cli import main


class GuessNumber(TextEnv):
    env_instruction = "Find a number from 1 to 9. Answer with your guess alone."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1, 10))
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = action.strip() if action.strip() in tuple("123456789") else None
        hint = "Not a number." if guess is None else "Higher." if int(guess) < self.number else "Lower."
        solved, penalty = guess == str(self.number), 0.0 if guess else -0.1
        self.number = 0 if solved else self.number  # rewarded only once
        return hint, solved + penalty, solved, False, {"action": guess, "success": solved, "penalty": penalty}


if __name__ == "__main__":
    register("guess_number", "custom_environment:GuessNumber")
    sys.exit(main())
