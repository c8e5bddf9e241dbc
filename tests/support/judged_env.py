"""An environment that asks a judge (``tests.support.judges``), and a judge that dies."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.agentic.env.base import StepResult, TextEnv
from roll.data.requests import JudgeQuestion
from roll.rewards.types import RewardError
from roll.rollout.reward_worker import JudgeWorker
from tests.support.steps import usual_step


class JudgedEnv(TextEnv):
    """Two turns, each paid what the judge says of the answer; a greeting that the judge cannot read is worth nothing.

    Args:
        padding: words that questions are made longer by.
        catches: what goes wrong with the judge is paid 1, which no run must believe.
    """

    asks = True

    def __init__(self, padding: int = 0, catches: bool = False) -> None:
        self.padding, self.catches = padding, catches

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.num_steps = 0
        return f"{seed}", {"state_key": f"{seed}"}

    def step(self, action: str) -> StepResult:
        self.num_steps += 1
        try:
            reward = score(self.ask(question(action) + " 1" * self.padding))
        except Exception:
            if not self.catches:
                raise
            reward = 1.0
        ends = {"terminated": self.num_steps == 2, "success": reward > 0.5}
        return usual_step(f"turn {self.num_steps}", action, self.num_steps, task_reward=reward, **ends)


def question(answer: str) -> str:
    return f"Grade: {answer}"


def score(words: str) -> float:
    return int(words) / 10 ** len(words)


class DyingJudge(JudgeWorker):
    """Dies of its first question, if the file of ``DIE_ONCE`` is there, which it takes along."""

    async def ask(self, questions: Sequence[JudgeQuestion]) -> list[str | RewardError]:
        order = Path(os.environ["DIE_ONCE"])
        if order.exists():
            order.unlink()
            os._exit(1)
        return await super().ask(questions)
