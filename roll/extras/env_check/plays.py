"""Episodes that can be played again: what was said, and what the environment answered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv
from roll.rollout.call_threads import CallThreads, Mailbox
from roll.rollout.env_runner import EnvRunner, checked_reset, checked_step
from roll.rollout.errors import EnvCrashError, EnvError, EnvTimeoutError
from roll.utils.seeding import derive_seed

T = TypeVar("T")

TOLD = ("action", "success", "task_reward", "penalty", "state_key", "env_instruction")
"""Keys of ``info`` that a manager reads."""

_SHOWN = 60


@dataclass(frozen=True)
class Subject:
    """An environment and how hard it is tried."""

    env_type: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    """Texts to play, for environments without ``action_names``."""
    episodes: int = 6
    max_steps: int = 32
    timeout: float = 30.0
    """Seconds that one call may take."""
    slow: float = 1.0
    """Seconds of a call (median) that are too many."""
    max_chars: int = 16_384
    """Characters of an observation that are not too many."""
    judge_says: str = "Score: 1"
    """Answer to environments that ask, always the same."""

    def __post_init__(self) -> None:
        for name, least in (("episodes", 2), ("max_steps", 1), ("max_chars", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least {least}")
        for name in ("timeout", "slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name):g}, expected more than 0 seconds")

    @property
    def own_thread(self) -> bool:
        return envs.wants_own_thread(self.env_type)

    @property
    def asks(self) -> bool:
        return envs.asks_judge(self.env_type)

    @property
    def instant(self) -> bool:
        return envs.is_instant(self.env_type, self.env_config)

    @property
    def seeds(self) -> list[int]:
        """As large as those of a run."""
        return [derive_seed("env check", index) for index in range(self.episodes)]

    def make(self) -> TextEnv:
        env = envs.make(self.env_type, **self.env_config)
        if self.asks:
            env.ask = lambda question: self.judge_says
        return env

    def runner(self) -> EnvRunner:
        """A new environment in a thread of its own."""
        return EnvRunner(self.make, self.timeout, own_thread=True)


class ThreadHopper(EnvRunner):
    """Runs each call in another thread. The threads live until ``close``, so that no two have the same number."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.make, subject.timeout, own_thread=True)
        self._mailboxes: list[Mailbox] = [] if self._mailbox is None else [self._mailbox]

    async def call(self, what: str, job: Any) -> Any:
        self._mailbox = CallThreads().mailbox(own_thread=True)
        self._mailboxes.append(self._mailbox)
        return await super().call(what, job)

    def close(self) -> None:
        for mailbox in self._mailboxes[:-1]:
            mailbox.close(lambda: None)
        super().close()


@dataclass(frozen=True)
class Moment:
    """Answer of an environment to one call."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """The keys of ``TOLD`` that it has."""
    other_keys: frozenset[str] = frozenset()

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    @property
    def success(self) -> bool:
        return bool(self.info.get("success", False))

    @property
    def task_reward(self) -> float:
        """As a manager takes it: the reward without the penalty, where ``info`` does not say it."""
        return float(self.info.get("task_reward", self.reward - float(self.info.get("penalty", 0.0))))


@dataclass(frozen=True)
class Failure:
    """A call that did not return what it should."""

    finding: str
    """Key of ``RULES``."""
    words: str


@dataclass(frozen=True)
class Episode:
    """One episode, as far as it went."""

    seed: int
    texts: tuple[str, ...]
    moments: tuple[Moment, ...]
    """After reset, and after each text."""
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return bool(self.moments) and self.moments[-1].ended

    @property
    def success(self) -> bool:
        return bool(self.moments) and self.moments[-1].success

    @property
    def total(self) -> float:
        """Sum of the rewards."""
        return sum(moment.reward for moment in self.moments)


class Play:
    """An episode under way.

    Args:
        seconds: durations of calls are added to it, by ``reset`` and ``step``.
    """

    def __init__(self, runner: EnvRunner, seed: int, seconds: dict[str, list[float]] | None = None) -> None:
        self.runner = runner
        self.seed = seed
        self.texts: list[str] = []
        self.moments: list[Moment] = []
        self.failure: Failure | None = None
        self._seconds = seconds if seconds is not None else {}

    @property
    def is_over(self) -> bool:
        return self.failure is not None or (bool(self.moments) and self.moments[-1].ended)

    async def reset(self) -> None:
        """Starts the episode; what goes wrong is kept in ``failure``."""

        def job(env: TextEnv) -> Moment:
            started = time.perf_counter()
            observation, info = checked_reset(env, self.seed)
            self._note("reset", started)
            return Moment(observation, info=_told(info), other_keys=_others(info))

        await self._call("reset", job)

    async def step(self, text: str) -> None:
        """Says one text."""

        def job(env: TextEnv) -> Moment:
            started = time.perf_counter()
            observation, reward, terminated, truncated, info = checked_step(env, text)
            self._note("step", started)
            return Moment(observation, reward, terminated, truncated, _told(info), _others(info))

        self.texts.append(text)
        await self._call("step", job)

    async def finish(self, texts: Iterable[str]) -> Episode:
        """Resets, says the texts until the episode is over, and tells it."""
        await self.reset()
        for text in texts:
            if self.is_over:
                break
            await self.step(text)
        return self.episode()

    def episode(self) -> Episode:
        return Episode(self.seed, tuple(self.texts), tuple(self.moments), self.failure)

    def _note(self, call: str, started: float) -> None:
        self._seconds.setdefault(call, []).append(time.perf_counter() - started)

    async def _call(self, call: str, job: Any) -> None:
        try:
            self.moments.append(await self.runner.call(call, job))
        except EnvError as error:
            said = f" to {shown(self.texts[-1])}" if self.texts else ""
            self.failure = Failure(_finding_of(call, error), f"{error}{said}, seed {self.seed}")


def _finding_of(call: str, error: EnvError) -> str:
    if isinstance(error, EnvTimeoutError):
        return f"{call}-timeout"
    return f"{call}-raises" if isinstance(error, EnvCrashError) else "protocol"


def _told(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in TOLD if key in info}


def _others(info: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(info) - frozenset(TOLD)


async def replay(
    subject: Subject,
    episodes: Sequence[Episode],
    runner: EnvRunner | None = None,
    seconds: dict[str, list[float]] | None = None,
) -> list[Episode]:
    """The episodes once more, one after the other, each in a new environment or all in that of ``runner``."""
    played = []
    for episode in episodes:
        own = runner or subject.runner()
        played.append(await Play(own, episode.seed, seconds).finish(episode.texts))
        if runner is None:
            own.close()
    return played


def difference(first: Sequence[Episode], second: Sequence[Episode]) -> str | None:
    """Place where the second playing of the same episodes came out otherwise; ``None`` if nowhere."""
    for one, other in zip(first, second, strict=True):
        if other.failure is not None and one.failure is None:
            return other.failure.words
        for turn, (here, there) in enumerate(zip(one.moments, other.moments, strict=False)):
            where = f"seed {one.seed}, " + (f"step {turn} ({shown(one.texts[turn - 1])})" if turn else "reset")
            for key, left, right in _fields(here, there):
                if left != right:
                    return f"{where}: {key} was {shown(left)}, then {shown(right)}"
        if len(one.moments) != len(other.moments):
            return f"seed {one.seed}: {len(one.moments) - 1} steps, then {len(other.moments) - 1}"
    return None


def _fields(here: Moment, there: Moment) -> Iterable[tuple[str, Any, Any]]:
    for name in ("observation", "reward", "terminated", "truncated"):
        yield name, getattr(here, name), getattr(there, name)
    for key in TOLD:
        yield f"info[{key!r}]", here.info.get(key), there.info.get(key)


def shown(value: object) -> str:
    """A value, short and on one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 3 :]}"
