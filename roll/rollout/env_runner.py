"""Runs one environment in threads, unless it is instant, so that a slow or hung one delays no other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.agentic.env.base import StepResult, TextEnv
from roll.rewards.types import RewardError
from roll.rollout.call_threads import CallThreads, CallTimeoutError
from roll.rollout.env_protocol import checked_frame, checked_reset, checked_step
from roll.rollout.errors import EnvCrashError, EnvError, EnvTimeoutError, as_runtime_error
from roll.rollout.judge_worker import Asking
from roll.rollout.types import Frame
from roll.utils.foreign import describe_error

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class OneAtATime:
    """Lets one call at a time into several environments. Others wait in the event loop, where no time limit counts."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    inside: threading.Lock = field(default_factory=threading.Lock)
    """Held in the thread of a call, which may go on when nobody waits for it any more."""


class EnvRunner:
    """Owns one ``TextEnv``; its calls run one at a time, in any of ``threads``.

    Args:
        make: builds the environment, as part of the first call.
        timeout: seconds that one call may take.
        lock: shared with others where the environment class is not thread-safe (``use_thread_lock``).
        instant: every call runs in the caller's event loop instead, unwatched (see ``TextEnv.instant``).
        own_thread: every call runs in the same thread (see ``TextEnv.own_thread``).
        threads: those of other environments too; its own if not given.
        asking: becomes ``TextEnv.ask``; what it raises is a failure of the call in which it did.
    """

    def __init__(
        self,
        make: Callable[[], TextEnv],
        timeout: float,
        lock: OneAtATime | None = None,
        *,
        instant: bool = False,
        own_thread: bool = False,
        threads: CallThreads | None = None,
        asking: Asking | None = None,
    ) -> None:
        self._make = make
        self._asking = asking
        self._timeout = timeout
        self._lock = lock
        self._env: TextEnv | None = None
        self._mailbox = None if instant else (threads or CallThreads()).mailbox(own_thread=own_thread)

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Resets the environment, see ``checked_reset``."""
        return await self.call("reset", lambda env: checked_reset(env, seed))

    async def step(self, text: str) -> StepResult:
        """Steps the environment, see ``checked_step``."""
        return await self.call("step", lambda env: checked_step(env, text))

    async def render(self) -> Frame | None:
        """Shows the state to a person, see ``checked_frame``."""
        return await self.call("render", checked_frame)

    async def call(self, what: str, job: Callable[[TextEnv], T]) -> T:
        """Runs ``job`` on the environment; the first call builds it.

        Raises:
            EnvTimeoutError: it did not return in time; its thread ends as soon as it runs Python code again.
            EnvCrashError: it raised, or asked what the judge could not answer.
            EnvError: the job found what it got wrong.
            Exception: the judge is not there.
        """
        if self._asking is not None:
            self._asking.listen()
        try:
            async with self._lock.turn if self._lock is not None else contextlib.nullcontext():
                if self._mailbox is None:
                    return await self._here(job)
                return await self._mailbox.run(what, lambda: self._work(job), self._timeout)
        except EnvError:
            raise
        except CallTimeoutError as error:
            raise EnvTimeoutError(f"environment {what} took longer than step_timeout={self._timeout:g}s") from error
        except Exception as error:  # a user's environment may raise anything
            if self._asking is not None and (failure := self._asking.failure) is not None:
                if not isinstance(failure, RewardError):
                    raise failure from error
                raise EnvCrashError(f"environment {what} asked the judge: {failure}") from error
            raise EnvCrashError(f"environment {what} raised {describe_error(error)}") from error

    def close(self) -> None:
        """Closes the environment once its calls have returned; a thread of its own ends then."""
        if self._mailbox is not None:
            self._mailbox.close(self._end)
            return
        try:
            self._end()
        except BaseException as error:  # nobody waits for it, and it must not end the caller's loop
            logger.warning("environment close raised %s", describe_error(error))

    def _end(self) -> None:
        if self._env is not None:
            self._env.close()

    def _work(self, job: Callable[[TextEnv], T]) -> T:
        with self._lock.inside if self._lock is not None else contextlib.nullcontext():
            if self._env is None:
                self._env = self._make()
                if self._asking is not None:
                    self._env.ask = self._asking
            done = job(self._env)
            if self._asking is not None and self._asking.failure is not None:
                raise self._asking.failure  # which the environment has caught
            return done

    async def _here(self, job: Callable[[TextEnv], T]) -> T:
        await asyncio.sleep(0)  # whatever else is due comes in between the calls of many environments
        try:
            return self._work(job)
        except Exception:
            raise
        except BaseException as error:  # it must not end the caller's loop
            raise as_runtime_error(error) from error
