"""Failures of an episode: it is retried, then dropped and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from roll.utils.foreign import describe_error


class EnvError(RuntimeError):
    """An environment failed; the instance must not be used again."""


class EnvTimeoutError(EnvError):
    """A call took longer than ``step_timeout``."""


class EnvCrashError(EnvError):
    """A call raised; the cause is chained."""


class EnvProtocolError(EnvError):
    """A call returned something that violates the ``TextEnv`` protocol."""


class ReplayError(ValueError):
    """Something differs from the recorded run."""


class PromptTooLongError(EnvError):
    """The first prompt of an episode does not fit: nothing could be sampled."""


def as_runtime_error(error: BaseException) -> RuntimeError:
    """An error that no event loop takes for its own."""
    return RuntimeError(describe_error(error))


@contextmanager
def contained() -> Iterator[None]:
    """Around a user's code in the event loop: it can neither end the loop nor cancel its caller.

    Raises:
        RuntimeError: in place of an exit, and of a cancellation that nobody has asked for.
    """
    try:
        yield
    except (SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        raise as_runtime_error(error) from error
