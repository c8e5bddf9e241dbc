"""The background thread that steps a ``ContinuousBatching`` and answers asyncio callers.

Everything that touches the model runs on this thread, between two steps: so weights never change within one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from roll.data.requests import Completion, FinishReason
from roll.distributed.strategy.generation.requests import EngineStoppedError
from roll.distributed.strategy.hf_infer.continuous_batching import ContinuousBatching
from roll.distributed.strategy.hf_infer.running_sequence import RunningSequence

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Owns the thread. All methods may be called from any thread."""

    def __init__(self, batching: ContinuousBatching, name: str) -> None:
        self._batching = batching
        self._wake = threading.Condition()
        self._arrivals: list[tuple[RunningSequence, asyncio.Future[Completion]]] = []
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._waited_for: dict[RunningSequence, asyncio.Future[Completion]] = {}
        """Sequences in the engine; written by its thread only."""
        self.halted = False
        """No step starts; changed between two steps."""
        self._closing: str | None = None
        """Reason why the engine is to end."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, sequence: RunningSequence) -> asyncio.Future[Completion]:
        """Queues a sequence; call it on the event loop that will await the future.

        Raises:
            EngineStoppedError: the engine failed earlier, or was shut down.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._check_alive()
            self._arrivals.append((sequence, future))
            self._wake.notify()
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` on the engine thread between two steps; its exception goes to the future only.

        Raises:
            EngineStoppedError: as ``submit``.
        """
        future: Future[T] = Future()
        with self._wake:
            self._check_alive()
            self._commands.append((function, future))
            self._wake.notify()
        return future

    def end(self, sequence: RunningSequence | None) -> Future[None]:
        """Ends a sequence with what it has; does nothing when it is not in flight (it may just have finished)."""

        def apply() -> None:
            if sequence is not None and sequence in self._waited_for:
                self._batching.remove(sequence)
                self._answer([(sequence, sequence.completion(FinishReason.ABORT))])

        return self.call(apply)

    def halt(self) -> Future[None]:
        """Starts no step until ``go_on``; the future is done when the step in progress is."""
        return self.call(lambda: setattr(self, "halted", True))

    def go_on(self) -> Future[None]:
        return self.call(lambda: setattr(self, "halted", False))

    def close(self, why: str = "was shut down") -> None:
        """Stops the thread after its step; requests in flight fail with ``EngineStoppedError``."""
        with self._wake:
            self._closing = self._closing or why
            self._wake.notify()
        self._thread.join()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"the generation engine failed earlier: {_describe(self._failure)}") from (
                self._failure
            )
        if self._closing:
            raise EngineStoppedError(f"the generation engine {self._closing}")

    def _run(self) -> None:
        try:
            while self._collect():
                if self._batching.has_work and not self.halted:
                    done = [(s, s.completion(reason)) for s, reason in self._batching.step()]
                    self._answer(done)
        except Exception as error:  # whatever it was, the callers learn it: nobody may wait forever
            logger.exception("the generation engine failed; %d requests fail with it", len(self._waited_for))
            self._fail(error)
        else:
            self._fail(None)

    def _collect(self) -> bool:
        """Waits for work, takes in what arrived and runs the commands; False when it is time to stop."""
        with self._wake:
            while not (
                self._closing or self._arrivals or self._commands or (self._batching.has_work and not self.halted)
            ):
                self._wake.wait()
            if self._closing:
                return False
            arrivals, self._arrivals = self._arrivals, []
            commands, self._commands = self._commands, []
        for sequence, waiting in arrivals:
            self._waited_for[sequence] = waiting
            self._batching.add(sequence)
        for function, future in commands:
            _execute(function, future)
        return True

    def _answer(self, finished: Sequence[tuple[RunningSequence, Completion]]) -> None:
        """Hands completions to their event loops, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]]
        by_loop = defaultdict(list)
        for sequence, completion in finished:
            future = self._waited_for.pop(sequence)
            by_loop[future.get_loop()].append((future, completion))
        for loop, answers in by_loop.items():
            _call_soon(loop, _resolve, answers)

    def _fail(self, cause: BaseException | None) -> None:
        """Fails everything in flight; ``cause`` None means an orderly shutdown."""
        with self._wake:
            self._closing, self._failure = self._closing or "was shut down", cause
            waiting = [*self._waited_for.values(), *(future for _, future in self._arrivals)]
            commands = self._commands
            self._waited_for, self._arrivals, self._commands = {}, [], []
        what = f"the generation engine {f'failed: {_describe(cause)}' if cause else self._closing}"

        def error() -> EngineStoppedError:  # one each: a shared exception would collect every caller's traceback
            failure = EngineStoppedError(what)
            failure.__cause__ = cause
            return failure

        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(error())
        for one in waiting:
            _call_soon(one.get_loop(), _reject, one, error())


def _execute(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # its caller was cancelled
    try:
        result = function()
    except Exception as error:  # raised where the result is waited for
        future.set_exception(error)
    else:
        future.set_result(result)


def _resolve(answers: Sequence[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, completion in answers:
        if not future.done():  # its caller may have been cancelled
            future.set_result(completion)


def _reject(future: asyncio.Future[Completion], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # The callers' event loop is gone, so nobody waits for the answer.


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
