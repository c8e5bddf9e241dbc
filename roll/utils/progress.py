"""How much work a process has done, as a number that others on its node can read, and what it waits for.

Only that it grows has a meaning: by tokens, micro-batches, steps of environments, tensors and bytes that were read.
Its clock tells when it worked and when it waited.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_NAME = "roll-progress"
_MOVED = 2**24
"""Bytes that count as one piece of work."""
_count: memoryview | None = None


def advance() -> None:
    """Notes that something was done; costs less than a microsecond."""
    global _count
    if _count is None:
        _count = _shared_number()
    _count[0] += 1


def _shared_number() -> memoryview:
    """In a file without a folder, which others find among this process's open files; private where there are none."""
    if not hasattr(os, "memfd_create"):
        return memoryview(bytearray(8)).cast("Q")
    file = os.memfd_create(_NAME)
    os.ftruncate(file, 8)
    return memoryview(mmap.mmap(file, 8)).cast("Q")


def work_of(pids: Iterable[int], *, with_children: bool = True) -> list[int]:
    """The number of each process of this node, its descendants' added; 0 of one that is gone or has done nothing.

    What a process reads and writes counts too, such as a model that it downloads.
    """
    each = ([pid, *(descendants(pid) if with_children else ())] for pid in pids)
    return [sum(_read(one) + _moved(one) for one in processes) for processes in each]


def descendants(pid: int) -> list[int]:
    """The processes that a process of this node has started, and theirs."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    found += [child, *descendants(child)]
    except OSError:  # gone, or a system that does not tell
        pass
    return found


def open_file(pid: int, name: str) -> str | None:
    """Path of a process's open file without a folder that has this name."""
    folder = f"/proc/{pid}/fd"
    try:
        for number in os.listdir(folder):
            path = f"{folder}/{number}"
            if f"memfd:{name} " in _target(path):
                return path
    except OSError:  # the process is gone, or somebody else's
        pass
    return None


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed by now
        return ""


def _read(pid: int) -> int:
    path = open_file(pid, _NAME)
    if path is None:
        return 0
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0


def _moved(pid: int) -> int:
    """Bytes that a process has read and written, in units that no idle process comes to soon."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            figures = dict(line.split(": ") for line in file)
        return sum(int(figures[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")) // _MOVED
    except OSError:  # gone, or somebody else's
        return 0


_GAP_S, _MOST_SPANS = 0.005, 200
"""Pauses below this are no pauses; with more spans, twice as long ones are none either."""


class WorkClock:
    """Sums up the seconds without work, and keeps from when to when there was some; pieces of work may overlap.

    For one thread or event loop.

    Args:
        now: seconds of a clock that never goes back.
        wall: seconds of the epoch, which clocks of other machines share.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._now, self._wall = now, wall
        self._under_way = 0
        self._idle_s = 0.0
        """Up to ``_idle_since``."""
        self._idle_since = now()
        self._begun = 0.0
        self._spans: list[tuple[float, float]] = []
        self._gap_s = _GAP_S

    @contextmanager
    def work(self) -> Iterator[None]:
        """Something is under way for as long as the block takes."""
        if not self._under_way:
            self._idle_s += self._now() - self._idle_since
            self._begun = self._wall()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle_since = self._now()
                self._note(self._begun, self._wall())

    def take_idle_s(self) -> float:
        """Idle seconds since the last call, or since the start."""
        now = self._now()
        idle_s = self._idle_s + (0.0 if self._under_way else now - self._idle_since)
        self._idle_s, self._idle_since = 0.0, now
        return idle_s

    def take_spans(self) -> list[tuple[float, float]]:
        """Begin and end of the work since the last call, that under way included."""
        if self._under_way:
            now = self._wall()
            self._note(self._begun, now)
            self._begun = now
        spans, self._spans, self._gap_s = self._spans, [], _GAP_S
        return spans

    def _note(self, begin: float, end: float) -> None:
        self._spans.append((begin, end))
        if len(self._spans) > 1 and begin - self._spans[-2][1] < self._gap_s:
            self._spans[-2:] = _joined(self._spans[-2:], self._gap_s)
        while len(self._spans) > _MOST_SPANS:
            self._gap_s *= 2
            self._spans = _joined(self._spans, self._gap_s)


def _joined(spans: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Spans in order, without pauses shorter than ``gap`` between them."""
    found: list[tuple[float, float]] = []
    for begin, end in spans:
        if found and begin - found[-1][1] < gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


_waits: dict[int, Callable[[], str]] = {}
"""By thread."""
_errors: list[Exception] = []
"""For those who wait in vain."""


@contextmanager
def waiting(words: Callable[[], str]) -> Iterator[None]:
    """Within the block, this thread of the driver waits for what the words say."""
    thread = threading.get_ident()
    before = _waits.get(thread)
    _waits[thread] = words
    try:
        yield
    finally:
        if before is None:
            del _waits[thread]
        else:
            _waits[thread] = before


def what_waits() -> list[str]:
    """What the threads of this process wait for, in words."""
    return [words() for words in list(_waits.values())]


def end_waits(error: Exception) -> None:
    """Has ``raise_if_stalled`` raise this: nothing moves."""
    _errors.append(error)


def raise_if_stalled() -> None:
    """Raises what ``end_waits`` was given, once: afterwards the run may save what it has."""
    if _errors:
        raise _errors.pop()
