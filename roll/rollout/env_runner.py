"""Runs one environment, in a thread of its own unless it is instant, so that a slow or hung one delays no other."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from roll.agentic.env.base import StepResult, TextEnv
from roll.rollout.env_protocol import checked_frame, checked_reset, checked_step
from roll.rollout.errors import EnvCrashError, EnvError, EnvTimeoutError, describe_error
from roll.rollout.types import Frame

T = TypeVar("T")
Job = tuple[Callable[[TextEnv], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class EnvRunner:
    """Owns one ``TextEnv``; every call runs in the same thread, as environments expect.

    Args:
        make: builds the environment (in the thread).
        timeout: seconds that one call may take.
        lock: held during each call when the environment class is not thread-safe (``use_thread_lock``).
        instant: every call runs in the caller's event loop instead, unwatched (see ``TextEnv.instant``).
    """

    def __init__(
        self,
        make: Callable[[], TextEnv],
        timeout: float,
        lock: threading.Lock | None = None,
        *,
        instant: bool = False,
    ) -> None:
        self._make = make
        self._timeout = timeout
        self._lock = lock
        self._env: TextEnv | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not instant:
            self._thread = threading.Thread(target=self._serve, name="env", daemon=True)
            self._thread.start()

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
        """Runs ``job`` in the environment's thread; the first call builds the environment there.

        Raises:
            EnvTimeoutError: it did not return in time; its thread ends as soon as it runs Python code again.
            EnvCrashError: it raised.
            EnvError: the job found what it got wrong.
        """
        try:
            return await (self._here(job) if self._thread is None else self._in_thread(self._thread, what, job))
        except EnvError:
            raise
        except Exception as error:
            raise EnvCrashError(f"environment {what} raised {describe_error(error)}") from error

    def close(self) -> None:
        """Ends the thread once it is idle."""
        if self._thread is not None:
            self._jobs.put(None)
        elif self._env is not None:
            self._env.close()

    def _work(self, job: Callable[[TextEnv], T]) -> T:
        with self._lock or contextlib.nullcontext():
            if self._env is None:
                self._env = self._make()
            return job(self._env)

    async def _here(self, job: Callable[[TextEnv], T]) -> T:
        await asyncio.sleep(0)  # whatever else is due comes in between the calls of many environments
        try:
            return self._work(job)
        except Exception:
            raise
        except BaseException as error:  # it must not end the caller's loop
            raise _told(error) from error

    async def _in_thread(self, thread: threading.Thread, what: str, job: Callable[[TextEnv], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((job, loop, future))
        try:
            return await asyncio.wait_for(future, self._timeout)
        except Exception as error:
            if not future.cancelled():
                raise
            _abandon(thread)
            raise EnvTimeoutError(f"environment {what} took longer than step_timeout={self._timeout:g}s") from error

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future = job
            result: Any = None
            error: BaseException | None = None
            try:
                result = self._work(work)
            except BaseException as raised:  # handed to the caller, whatever it is
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future, result, error)
        if self._env is not None:
            self._env.close()


def _abandon(thread: threading.Thread) -> None:
    """Raises SystemExit in the thread: a busy loop would slow every other environment down for ever."""
    identifier = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(SystemExit))


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller has given up
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future does not take StopIteration, and the others would end the caller's loop or cancel its task
        future.set_exception(_told(error))


def _told(error: BaseException) -> RuntimeError:
    return RuntimeError(f"the environment raised {describe_error(error)}")
