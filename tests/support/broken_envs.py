"""A zoo of environments, each broken in one way, for the check of environments. ``Safe`` is what they all would be."""

import itertools
import os
import random
import sqlite3
import sys
import threading
import time
from typing import Any

from roll.agentic.env.base import StepLimit, StepResult, TextEnv, stable_hash
from roll.agentic.env.game import ActionParser
from tests.support.steps import usual_step

DIGITS = tuple("12345678")


class Safe(TextEnv):
    """A safe that opens at a digit; a wrong one is answered with higher or lower."""

    env_instruction = "Open the safe. Answer with a digit from 1 to 8, like this: <answer>4</answer>"
    action_names = DIGITS

    def __init__(self) -> None:
        self._parser = ActionParser(DIGITS)
        self._limit = StepLimit(4)
        self.secret, self.tried = "1", 0

    def draw(self, seed: int | None) -> str:
        return DIGITS[self.np_random.integers(len(DIGITS))]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret, self.tried = self.draw(seed), 0
        self._limit.start()
        return "Locked.", {"state_key": self.key("Locked."), "success": False}

    def step(self, action: str) -> StepResult:
        is_last = self._limit.count()
        digit = self._parser.parse(action)
        self.tried += 1
        success = digit == self.secret
        if success or is_last:
            self._limit.stop()
        told = "Open." if success else "No digit." if digit is None else "Higher." if digit < self.secret else "Lower."
        observation = f"{told} {self.tried}"
        ends = {"terminated": success, "truncated": is_last and not success, "success": success}
        pays = {"task_reward": float(success), "penalty": -0.1 if digit is None else 0.0}
        return usual_step(observation, digit, self.key(observation), action_is_effective=success, **ends, **pays)

    def key(self, observation: str) -> str:
        return stable_hash(f"{self.secret} {observation}".encode())

    def expert_actions(self) -> list[str]:
        return [self.secret]


class NeedsKey(Safe):
    def __init__(self) -> None:
        super().__init__()
        raise FileNotFoundError("the key is not there")


class FaultyReset(Safe):
    def reset(self, **kwargs: Any) -> Any:
        raise OSError("the safe is at another place")


class HangingReset(Safe):
    def reset(self, **kwargs: Any) -> Any:
        threading.Event().wait()


class HangingStep(Safe):
    """Waits for more of a text that has more than a thousand tags."""

    def step(self, action: str) -> StepResult:
        if action.count("<answer>") > 1000:
            threading.Event().wait()
        return super().step(action)


class FragileStep(Safe):
    def step(self, action: str) -> StepResult:
        int(action) if action.isdigit() else None  # Python reads numbers of up to 4300 digits
        return super().step(action)


class Fatal(Safe):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self._end = {"exit": lambda: sys.exit(7), "_exit": lambda: os._exit(7), "abort": os.abort}[fault]

    def step(self, action: str) -> StepResult:
        return self._end()


class Changed(Safe):
    """A safe whose steps have another observation, reward or information."""

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        new = self.changed(action, reward, terminated or truncated, dict(info))
        new = {"observation": observation, "reward": reward, "info": info} | new
        return new["observation"], new["reward"], terminated, truncated, new["info"]

    def changed(self, action: str, reward: float, done: bool, info: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class TextReward(Changed):
    def changed(self, action, reward, done, info):
        return {"reward": f"{reward}"}


class Unseeded(Safe):
    """Another digit each time, where chance would now and then bring the same."""

    digits = itertools.cycle(DIGITS)

    def draw(self, seed: int | None) -> str:
        return next(self.digits)


class HashSeeded(Safe):
    def draw(self, seed: int | None) -> str:
        return DIGITS[hash(f"{seed}") % len(DIGITS)]


class Leaky(Safe):
    """Forgets the tries of an episode only when it is solved."""

    tries_before = 0

    def reset(self, **kwargs: Any) -> Any:
        before = 0 if self.tried and self._solved else self.tried
        answer = super().reset(**kwargs)
        self.tried, self._solved = before, False
        return answer

    def step(self, action: str) -> StepResult:
        answer = super().step(action)
        self._solved = answer[2]
        return answer

    _solved = False


class GlobalRandom(Safe):
    """Seeds Python's global generator in reset and draws from it in step."""

    def draw(self, seed: int | None) -> str:
        random.seed(seed)
        return super().draw(seed)

    def step(self, action: str) -> StepResult:
        self.secret = random.choice(DIGITS)
        return super().step(action)


class Scratch(Safe):
    """Lays the text aside in the module while it thinks."""

    pad: list[str] = []  # noqa: RUF012 (shared on purpose)

    def step(self, action: str) -> StepResult:
        self.pad[:] = [action]
        time.sleep(0.005)
        return super().step(self.pad[0])


class Database(Safe):
    """SQLite's connections work in the thread that made them."""

    def draw(self, seed: int | None) -> str:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("CREATE TABLE safes (secret TEXT)")
        return super().draw(seed)

    def step(self, action: str) -> StepResult:
        self.connection.execute("SELECT secret FROM safes")
        return super().step(action)


class PaidFailure(Changed):
    """Pays for the end of an episode, however it came."""

    def changed(self, action, reward, done, info):
        return {"reward": float(done), "info": info | {"task_reward": float(done), "penalty": 0.0}}


class Generous(Changed):
    def changed(self, action, reward, done, info):
        return {"reward": 1.0, "info": info | {"task_reward": 1.0, "penalty": 0.0}}


class Rich(Changed):
    def changed(self, action, reward, done, info):
        rich = {name: 1e6 * info[name] for name in ("task_reward", "penalty")}
        return {"reward": 1e6 * reward, "info": info | rich}


class WrongSum(Changed):
    """Counts the penalty twice."""

    def changed(self, action, reward, done, info):
        return {"reward": reward + info["penalty"]}


class Reward4Format(Changed):
    """Pays a valid answer by a penalty that is none."""

    def changed(self, action, reward, done, info):
        extra = 0.1 if info["action"] else 0.0
        return {"reward": reward + extra, "info": info | {"penalty": info["penalty"] + extra}}


class Gullible(Safe):
    """Believes who says that it is open."""

    def step(self, action: str) -> StepResult:
        return super().step(f"<answer>{self.secret}</answer>" if "solved" in action.casefold() else action)


class Applauding(Changed):
    """Calls it a success when nothing was said at all."""

    def changed(self, action, reward, done, info):
        return {"info": info | {"success": info["success"] or not action.strip()}}


class Unending(Safe):
    """Pays again and again."""

    def step(self, action: str) -> StepResult:
        if not self._limit._running:
            self._limit.start()
        return super().step(action)


class Misspelt(Changed):
    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return observation, {"state_key": info["state_key"]}

    def changed(self, action, reward, done, info):
        return {"info": info | {"succes": info.pop("success")}}


class SeedBlind(Safe):
    def draw(self, seed: int | None) -> str:
        return "5"


class Deaf(Safe):
    """Understands only digits in brackets, though it names its actions."""

    def step(self, action: str) -> StepResult:
        bare = action.strip("[]") if action.startswith("[") else ""
        return super().step(f"<answer>{bare}</answer>")


class WrongExpert(Safe):
    def expert_actions(self) -> list[str]:
        return [f"<answer>{self.secret}</answer>"]


class Talkative(Safe):
    def step(self, action: str) -> StepResult:
        observation, *rest = super().step(action)
        return observation + " blah" * 5000, *rest  # type: ignore[return-value]


class Colourful(Safe):
    def step(self, action: str) -> StepResult:
        observation, *rest = super().step(action)
        return f"\x1b[32m{observation}\x1b[0m", *rest  # type: ignore[return-value]


class Sleepy(Safe):
    instant = True

    def step(self, action: str) -> StepResult:
        time.sleep(0.02)
        return super().step(action)


class Sluggish(Safe):
    def step(self, action: str) -> StepResult:
        time.sleep(0.03)
        return super().step(action)


class BadPicture(Safe):
    def render(self) -> Any:
        return [[0.5, 0.5], [0.5, 0.5]]


class CuriousPicture(Safe):
    """Changes what it shows."""

    def render(self) -> str:
        self.tried += 1
        return f"{self.tried} tries"
