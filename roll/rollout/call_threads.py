"""Threads for the calls of many environments: few for quick calls, one for each slow call.

Calls wait in one line, and a thread takes them from its head, one after the other. Threads are added

- for each call of an environment whose last two calls of that kind were not quick, at once,
- as long as the calls that end are not quick on average and the line is not empty, as many as are in calls,
- for each call that keeps its thread for longer than ``PATIENCE_S``, two,

so that slow and hanging calls hold up the others for some hundredths of a second at most. What takes longer than its
time limit is given up with its thread.

The line, its threads and what runs in them change under one lock. Answers reach the event loop many at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from roll.rollout.errors import as_runtime_error
from roll.utils.foreign import describe_error

logger = logging.getLogger(__name__)

QUICK_S = 0.001
"""A call that takes longer is worth a thread, which costs some tenths of that."""

PATIENCE_S = 0.02
"""A call that takes longer is not waited for. Several times the 5 ms for which Python keeps a thread from running."""

_LOOK_S = PATIENCE_S / 2
_IDLE_S = 10.0
"""A thread that finds nothing to do for so long ends."""

T = TypeVar("T")


class CallTimeoutError(Exception):
    """A call took longer than its time limit."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call of one environment, from the event loop to a thread and back."""

    mailbox: Mailbox
    kind: str
    work: Callable[[], Any]
    timeout: float
    future: asyncio.Future[Any] | None
    """``None``: nobody waits for the answer, and the environment has no further call."""
    thread: int | None = None
    """The one in which it runs or ran."""
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None
    is_inside: bool = False
    """Its thread is at its work, and may be ended."""
    is_done: bool = False
    given_up: bool = False
    """At most one of the two."""
    result: Any = None
    error: BaseException | None = None

    def begin(self) -> None:
        self.thread, self.started = threading.get_ident(), time.monotonic()

    def run(self, lock: threading.Lock) -> None:
        """Does the work. What ends it early, however late it comes, ends nothing else in the thread."""
        begun = over = False
        while not over:
            try:
                if not begun:
                    with lock:
                        begun, self.is_inside = True, not self.given_up
                    if self.is_inside:
                        self._work()
                with lock:
                    over, self.is_inside = True, False
                if self.given_up:
                    _end_soon(threading.get_ident(), None)  # it may still be on its way
            except SystemExit:
                continue

    def _work(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # handed to the caller, whatever it is
            self.error = error
            if self.future is None:
                logger.warning("environment %s raised %s", self.kind, describe_error(error))

    def answer(self) -> None:
        """Hands the result to the caller, in its event loop."""
        if self.timer is not None:
            self.timer.cancel()
        future, error = self.future, self.error
        if future is None or future.done():  # the caller has given up
            return
        if error is None:
            future.set_result(self.result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # a future does not take StopIteration, and the others would end the caller's loop or cancel its task
            future.set_exception(as_runtime_error(error))


class Mailbox:
    """The calls of one environment: one at a time, in their order. ``CallThreads.mailbox`` makes it."""

    def __init__(self, threads: CallThreads, own_thread: bool) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self.in_line = False
        """It stands in the line, or a thread of the line is at one of its calls."""
        self.own_thread = own_thread
        """A thread serves it alone."""
        self._seconds: dict[str, tuple[float, float]] = {}
        """Of the last two calls of each kind."""
        self._threads = threads

    async def run(self, kind: str, work: Callable[[], T], timeout: float, *, ends_with_caller: bool = False) -> T:
        """Runs ``work`` in a thread.

        Args:
            kind: calls of one kind are expected to take about as long as the last of them.
            timeout: seconds that it may take from its beginning; with a thread of its own, from now on.
            ends_with_caller: when the caller is cancelled, the call is given up as if it had taken too long.

        Raises:
            CallTimeoutError: it took longer; its thread ends as soon as it runs Python code again.
            Exception: what it raised; a ``RuntimeError`` in place of what would end the event loop.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _Call(self, kind, work, timeout, future)
        self._threads.submit(call)
        try:
            return await future
        except asyncio.CancelledError:
            if ends_with_caller:
                self._threads.give_up(call)
            raise

    def close(self, work: Callable[[], Any]) -> None:
        """Runs ``work`` when all calls are done, as the last one. It may be called in any thread."""
        self._threads.submit_last(_Call(self, "close", work, 0.0, None))

    def note(self, kind: str, seconds: float) -> None:
        """A call took so long. One alone says little: Python may have kept its thread from running."""
        self._seconds[kind] = (seconds, self._seconds.get(kind, (0.0, 0.0))[0])

    def is_slow(self, kind: str) -> bool:
        """A call of that kind will not be quick."""
        return min(self._seconds.get(kind, (0.0, 0.0))) > QUICK_S


class CallThreads:
    """The line and its threads, for the environments of one event loop at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[Mailbox] = deque()
        self._quick: set[_Call] = set()
        """Calls in threads of the line that have not taken ``PATIENCE_S``, as far as is known."""
        self._num_free = 0
        """Threads of the line that are awake and in no other call."""
        self._num_idle = 0
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Each entry wakes one idle thread."""
        self._num_open = 0
        """Environments that are not closed."""
        self._num_done, self._seconds = 0, 0.0
        """Calls that ended since the last look, and what they took together."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._answers: deque[_Call] = deque()
        self._is_told = False
        """The loop has been told of answers and has not fetched them."""

    def mailbox(self, *, own_thread: bool = False) -> Mailbox:
        """The calls of one more environment; ``own_thread``: they run in one thread, which runs no others."""
        mailbox = Mailbox(self, own_thread)
        with self._lock:
            self._num_open += 1
        if own_thread:
            threading.Thread(target=self._serve_alone, args=(mailbox,), name="env", daemon=True).start()
        return mailbox

    def submit(self, call: _Call) -> None:
        """Takes a call of the running event loop."""
        loop, mailbox = asyncio.get_running_loop(), call.mailbox
        if loop is not self._loop:  # the one before has ended
            self._loop, self._watch, self._is_told = loop, None, False
        with self._lock:
            mailbox.calls.put(call)
            if mailbox.own_thread:
                call.timer = loop.call_later(call.timeout, self.give_up, call)
                return
            self._enqueue(mailbox, is_slow=mailbox.is_slow(call.kind))
        if self._watch is None:
            self._watch = loop.call_later(_LOOK_S, self._look)

    def submit_last(self, call: _Call) -> None:
        """Takes an environment's last call."""
        with self._lock:
            self._num_open -= 1
            call.mailbox.calls.put(call)
            if not call.mailbox.own_thread:
                self._enqueue(call.mailbox)
            if not self._num_open:
                self._wake_idle(self._num_idle)  # they end

    def _enqueue(self, mailbox: Mailbox, *, is_slow: bool = False) -> None:
        if mailbox.in_line:
            return
        mailbox.in_line = True
        self._line.append(mailbox)
        if is_slow or not self._num_free:
            self._add_threads(1)

    def _add_threads(self, number: int) -> None:
        """Puts more threads to the line, idle ones first."""
        num_idle = min(number, self._num_idle)
        self._wake_idle(num_idle)
        for _ in range(number - num_idle):
            try:
                threading.Thread(target=self._serve_line, name="envs", daemon=True).start()
            except RuntimeError as error:  # there can be no more of them: the line waits for those that are there
                logger.warning("no further thread for environments: %s", error)
                return
            self._num_free += 1

    def _wake_idle(self, number: int) -> None:
        self._num_idle -= number
        self._num_free += number
        for _ in range(number):
            self._wake.put(None)

    def _serve_line(self) -> None:
        """Serves the line, on one of its threads."""
        call: _Call | None = None
        while True:
            with self._lock:
                done = call
                if done is not None and not self._finish(done):
                    hung = done.mailbox  # it keeps the thread
                    break
                call = self._next()
                is_over = call is None and not self._num_open
                if call is None:
                    self._num_free -= 1
                    self._num_idle += not is_over
            if done is not None:
                self._tell(done)
            if call is not None:
                call.run(self._lock)
            elif is_over or not self._is_woken():
                return
        self._serve_alone(hung)

    def _next(self) -> _Call | None:
        while self._line:
            mailbox = self._line.popleft()
            call = mailbox.calls.get_nowait()
            if not call.given_up:
                call.begin()
                self._quick.add(call)
                return call
            self._go_on(mailbox)
        return None

    def _finish(self, call: _Call) -> bool:
        """The next call of its environment may come; False if this one has been given up."""
        if call.given_up:
            return False
        call.is_done = True
        if call in self._quick:
            self._quick.discard(call)
        else:
            self._num_free += 1
        mailbox, seconds = call.mailbox, time.monotonic() - call.started
        self._num_done += 1
        self._seconds += seconds
        mailbox.note(call.kind, seconds)
        self._go_on(mailbox)
        return True

    def _go_on(self, mailbox: Mailbox) -> None:
        """Lets the next call of an environment stand in the line."""
        mailbox.in_line = False
        if not mailbox.calls.empty():
            self._enqueue(mailbox)

    def _is_woken(self) -> bool:
        """Waits; False when the thread is to end."""
        try:
            self._wake.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                try:
                    self._wake.get_nowait()  # it came in between
                except queue.Empty:
                    self._num_idle -= 1
                    return False
        return True

    def _serve_alone(self, mailbox: Mailbox) -> None:
        """Serves one environment, on a thread of its own."""
        call: _Call | None = None
        while call is None or call.future is not None:
            call = mailbox.calls.get()
            with self._lock:
                if call.given_up:
                    continue
                call.begin()
            call.run(self._lock)
            with self._lock:
                call.is_done = not call.given_up
            if call.is_done:
                self._tell(call)

    def _look(self) -> None:
        """Adds threads where they are missing, in the event loop."""
        loop, now = cast(asyncio.AbstractEventLoop, self._loop), time.monotonic()
        with self._lock:
            long = [call for call in self._quick if now - call.started > PATIENCE_S]
            self._quick.difference_update(long)
            self._num_free -= len(long)
            for call in long:
                if call.future is not None and call.future.get_loop() is loop:
                    call.timer = loop.call_later(call.timeout - (now - call.started), self.give_up, call)
            number = 2 * len(long)
            if self._seconds > QUICK_S * self._num_done:
                number += len(self._quick)
            self._num_done, self._seconds = 0, 0.0
            if self._line and (number or not self._num_free):
                self._add_threads(min(len(self._line), max(1, number)))
            goes_on = bool(self._quick or self._line)
        self._watch = loop.call_later(_LOOK_S, self._look) if goes_on else None

    def give_up(self, call: _Call) -> None:
        """The call has taken too long, or nobody waits for it; in the event loop."""
        with self._lock:
            if call.is_done:
                return
            call.given_up = True
            if call.thread is not None:
                call.mailbox.own_thread = True
                if call.is_inside:
                    _end_soon(call.thread)
        if call.future is not None and not call.future.done():
            call.future.set_exception(CallTimeoutError())

    def _tell(self, call: _Call) -> None:
        """Lets the event loop fetch the answer."""
        if call.future is None:
            return
        self._answers.append(call)
        if not self._is_told:
            self._is_told = True
            try:
                call.future.get_loop().call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._is_told = False

    def _answer(self) -> None:
        self._is_told = False
        while self._answers:
            call = self._answers.popleft()
            if call.future is not None and call.future.get_loop() is self._loop:
                call.answer()


def _end_soon(thread: int, error: type[BaseException] | None = SystemExit) -> None:
    """Raises ``error`` in the thread: a busy loop would slow every other environment down for ever.

    Args:
        error: ``None``: what was to be raised there is not.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
