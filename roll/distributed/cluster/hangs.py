"""Explains a run in which nothing moves: stacks of all processes, what they wait for, and the watch that notices it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import re
import signal
import tempfile
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from roll.distributed.cluster.errors import RpcTimeoutError, StallError
from roll.utils.foreign import Fault
from roll.utils.progress import descendants, end_waits, open_file, what_waits, work_of

if TYPE_CHECKING:
    from roll.distributed.cluster.cluster import Cluster

logger = logging.getLogger(__name__)

ASKING = signal.SIGUSR1
"""The driver's signal for ``write_report``."""
_SIGNAL = signal.SIGUSR2
_NAME = "roll-stacks"
_WRITING_S = 2.0
"""Until a process has surely written its stacks."""
_NODE_S = 30.0
"""Until another node has answered."""
_ANSWER_S = 3.0
"""Until a worker whose event loop is free has answered."""
_STOPPING_S = 60.0
"""Until a run that nothing moves in has stopped."""
_LOOKS = 20
"""Looks at the work within ``stall_timeout``."""
_ASKERS = ("finished_groups", "poll", "_poll", "_collect")
"""Functions that wait for something to do, which explains nothing."""
_SHOWN = 4
"""Most places that a message names."""

T = TypeVar("T")


# --- processes


@dataclass(frozen=True)
class Whereabouts:
    """A process that writes its stacks down."""

    pid: int
    node_id: str

    def __str__(self) -> str:
        return f"process {self.pid} on node {self.node_id}"


def write_stacks_on_signal() -> None:
    """Has this process write its stacks, whenever it is asked, to a file that is found among its open ones."""
    if hasattr(os, "memfd_create"):  # other systems have no such files
        faulthandler.register(_SIGNAL, file=os.memfd_create(_NAME), all_threads=True)


def stacks_of(processes: Sequence[Whereabouts]) -> list[str]:
    """The stacks of all threads of each process and of those it started, wherever it is, or why there are none."""
    return _on_nodes(processes, _ask, lambda why: why)


def _on_nodes(
    processes: Sequence[Whereabouts],
    job: Callable[[list[int]], list[T]],
    failed: Callable[[str], T],
    over: threading.Event | None = None,
) -> list[T]:
    """Results of a function of process ids that runs on the node of each process.

    Args:
        job: gets the process ids of one node, gives a result for each.
        failed: makes the result of a process whose node does not answer within 30 seconds, from the reason.
        over: gives up the nodes that have not answered, within a second of being set.
    """
    if not processes:  # before the first worker is up, there may be no Ray
        return []
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found: dict[Whereabouts, T] = {}
    here = ray.get_runtime_context().get_node_id()
    asked = {}
    for node_id in dict.fromkeys(process.node_id for process in processes):
        there = [process for process in processes if process.node_id == node_id]
        pids = [process.pid for process in there]
        if node_id == here:
            found |= dict(zip(there, job(pids), strict=True))
            continue
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[ray.remote(job).options(num_cpus=0, scheduling_strategy=place).remote(pids)] = there
    ready: list[Any] = []
    late, deadline = list(asked), time.monotonic() + _NODE_S
    while late and time.monotonic() < deadline and not (over and over.is_set()):
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=1.0)
    for ref in ready:
        try:
            found |= dict(zip(asked[ref], ray.get(ref), strict=True))
        except ray.exceptions.RayError as error:
            found |= dict.fromkeys(asked[ref], failed(f"its node: {error}"))
    for ref in late:
        found |= dict.fromkeys(asked[ref], failed(f"its node gave no answer in {_NODE_S:g} s"))
    return [found[process] for process in processes]


def own_stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _ask(pids: Iterable[int]) -> list[str]:
    """The stacks of processes on this node."""
    return ["\n\n".join(_with_children(pid)) for pid in pids]


def _with_children(pid: int) -> Iterator[str]:
    yield _written(pid)
    for child in descendants(pid):
        yield f"its child process {child}, {_command(child)}:\n{_written(child)}"


def _written(pid: int) -> str:
    path = open_file(pid, _NAME)
    try:
        if path is None:
            return _state(pid)
        before = size = os.stat(path).st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _WRITING_S
        grown = False
        while time.monotonic() < deadline and not (grown and os.stat(path).st_size == size):
            size = os.stat(path).st_size
            grown = size > before
            time.sleep(0.05)
        with open(path, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace") or f"nothing was written in {_WRITING_S:g} s"
    except (FileNotFoundError, ProcessLookupError):
        return "it is gone"
    except OSError as error:
        return str(error)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words[:120] or Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return "gone"


def _state(pid: int) -> str:
    """What the system says of a process that does not write its stacks."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"^State:\s*(.*)$", status.read_text(encoding="utf-8") if status.exists() else "", re.MULTILINE)
    return "it is gone" if found is None or found[1].startswith("Z") else f"it writes no stacks; state {found[1]}"


# --- what waits for what


def waiting_tasks() -> list[str]:
    """Where in our code the tasks of the running event loop wait: how many, and the first of those with a name."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop
        return []
    places: defaultdict[str, list[str]] = defaultdict(list)
    coroutines = {task.get_coro(): task.get_name() for task in tasks}
    others = {each: "Task-" for each in _begun_elsewhere() if each not in coroutines}
    current = asyncio.current_task()
    for coroutine, name in (coroutines | others).items():
        if current is not None and coroutine is current.get_coro():
            continue
        place = _place_of(coroutine)
        if place and place.partition(" ")[0] not in _ASKERS:
            places[place].append(name)
    lines = []
    for place, names in sorted(places.items(), key=lambda entry: -len(entry[1])):
        named = sorted((name for name in names if not name.startswith("Task-")), key=_natural)
        first = f", the first: {named[0]}" if named else ""
        lines.append(f"{place}: {len(names)} {'tasks' if len(names) > 1 else 'task'}{first}")
    return sorted(lines, key=lambda line: ", the first:" not in line)


def _begun_elsewhere() -> list[Any]:
    """Suspended coroutines that no other one of Python's awaits, such as an actor's methods: Ray's own are compiled."""
    kinds = (types.CoroutineType, types.AsyncGeneratorType)
    found = [each for each in gc.get_objects() if isinstance(each, kinds)]
    awaited = {id(getattr(each, "cr_await", None) or getattr(each, "ag_await", None)) for each in found}
    suspended = [each for each in found if getattr(each, "cr_suspended", False)]
    return [each for each in suspended if id(each) not in awaited]


def _place_of(coroutine: Any) -> str | None:
    """The innermost of our functions that a coroutine is in."""
    place = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and (found := _ours(frame.f_code.co_filename)):
            place = f"{frame.f_code.co_name} ({found}:{frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return place


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def place_in(stacks: str) -> str | None:
    """The innermost of our functions that the oldest thread with any is in."""
    for thread in reversed(re.split(r"^(?=Thread|Current thread)", stacks, flags=re.MULTILINE)):
        for path, line, name in _FRAME.findall(thread):
            if (file := _ours(path)) and file != Path(__file__).name:
                if name in _ASKERS:
                    break
                return f"{name} ({file}:{line})"
    return None


def _ours(path: str) -> str | None:
    """Name of a file of this library or of the user's; ``None`` for other packages and the interpreter's."""
    inside = re.search(r"site-packages/(?!roll/)|lib/python3|^<", path)
    return None if inside else Path(path).name


# --- the report


def write_report(clusters: Mapping[str, Cluster], path: Path, why: str) -> str:
    """Appends what every process does to a file; an error in it is logged.

    Returns:
        What the driver waits for and where the workers are, in two lines.
    """
    told = ""
    with Fault() as fault:  # Ray may be gone; what is being explained matters more
        workers = [
            (f"{name} rank {rank}", process)
            for name, cluster in clusters.items()
            for rank, process in cluster.whereabouts.items()
        ]
        waits = "; ".join(what_waits()) or "nothing that it can name"
        texts = stacks_of([process for _, process in workers])
        tasks = _tasks_of(clusters)
        parts = [
            f"===== {datetime.now():%Y-%m-%d %H:%M:%S} {why}",
            f"----- driver\n{own_stacks()}",
        ]
        places: defaultdict[str, list[str]] = defaultdict(list)
        for (name, process), text in zip(workers, texts, strict=True):
            lines = "".join(f"{line}\n" for line in tasks.get(name, []))
            parts.append(f"----- {name}, {process}\n{lines}{text}")
            if place := next(iter(tasks.get(name, [])), place_in(text)):
                places[place].append(name)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n\n".join(parts) + "\n\n")
        logger.info("what every process was doing: %s", path)
        told = f"the driver waits for: {waits}\n{_shown(places)}"
    if fault.error is not None:
        logger.error("the stacks of all processes could not be written", exc_info=fault.error)
    return told


def _shown(places: Mapping[str, Sequence[str]]) -> str:
    entries = [f"{_ranks(names)}: {place}" for place, names in list(places.items())[:_SHOWN]]
    more = [f"{len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
    return "workers are in: " + ("; ".join([*entries, *more]) or "no code of ours")


def _ranks(names: Sequence[str]) -> str:
    """``actor_train rank 0, rank 1`` of the full names of workers."""
    by_role: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        role, _, rank = name.partition(" rank ")
        by_role[role].append(rank)
    return ", ".join(f"{role} {'rank' if len(r) == 1 else 'ranks'} {', '.join(r)}" for role, r in by_role.items())


def _tasks_of(clusters: Mapping[str, Cluster]) -> dict[str, list[str]]:
    """``waiting_tasks`` of each worker that answers: its event loop is free, or it has nothing to do."""
    import ray

    asked: dict[Any, str] = {
        handle.waiting_tasks.remote(): f"{name} rank {rank}"
        for name, cluster in clusters.items()
        for rank, handle in enumerate(cluster.handles)
        if rank in cluster.whereabouts
    }
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    found = {}
    for ref in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            found[asked[ref]] = ray.get(ref)
    return found


@contextmanager
def explained(clusters: Mapping[str, Cluster], path: Path) -> Iterator[None]:
    """Within the block, a report is written when a call takes too long, or at SIGUSR1.

    Args:
        clusters: by role; may fill up meanwhile.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(ASKING, lambda *_: _aside(clusters, path)) if in_main else None
    try:
        yield
    except RpcTimeoutError as error:
        write_report(clusters, path, str(error))
        raise
    finally:
        if in_main:
            signal.signal(ASKING, before)


def _aside(clusters: Mapping[str, Cluster], path: Path) -> None:
    """In a thread, as the main one may hold what this needs."""
    threading.Thread(target=write_report, args=(clusters, path, "requested by SIGUSR1"), daemon=True).start()


class StallWatch:
    """Stops a run in which no process has done any work for a while; a context manager.

    Work is what processes count (``roll.utils.progress``): a call may take as long as it likes while they do.

    Args:
        clusters: by role; may fill up meanwhile.
        path: of the report.
        timeout: seconds without work; ``None`` watches nothing.
        stop: gets the ``StallError``; called in a thread. The process ends if the run hangs as it stops, too.
        where: phase and step, in words.
    """

    def __init__(
        self,
        clusters: Mapping[str, Cluster],
        path: Path,
        timeout: float | None,
        stop: Callable[[Exception], None],
        where: Callable[[], str],
    ) -> None:
        self._clusters = clusters
        self._path = path
        self._timeout = timeout
        self._stop = stop
        self._where = where
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StallWatch:
        if self._timeout is not None and hasattr(os, "memfd_create"):
            self._thread = threading.Thread(target=self._watch, args=(self._timeout,), name="stall watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(_NODE_S)  # a thread that uses Ray when it is shut down may end the process on the spot

    def _watch(self, timeout: float) -> None:
        period = min(timeout / _LOOKS, 60.0)
        last, quiet, stopping, before = self._work(), 0.0, False, time.monotonic()
        while not self._over.wait(period):
            now = time.monotonic()
            quiet, before = quiet + min(now - before, 2 * period), now  # this process may have been suspended
            work = self._work()
            if work != last:
                last, quiet = work, 0.0
            elif quiet >= (max(timeout, _STOPPING_S) if stopping else timeout):
                why = f"nothing has moved for {quiet:.0f} s in {self._where()} (stall_timeout)"
                told = write_report(self._clusters, self._path, why)
                error = StallError(f"{why}\n{told}\nstacks of all processes: {self._path}")
                if stopping:
                    logger.critical("the run hangs while it stops: %s", error)
                    os._exit(1)
                end_waits(error)  # where a stop is put off until a call is over
                self._stop(error)
                stopping, quiet = True, 0.0

    def _work(self) -> dict[Whereabouts | None, int]:
        """By process, the driver's under ``None``."""
        processes = [process for cluster in list(self._clusters.values()) for process in cluster.whereabouts.values()]
        found: dict[Whereabouts | None, int] = {}
        with Fault():  # a node or Ray itself may be gone, which others find out
            found = dict(zip(processes, _on_nodes(processes, work_of, lambda _: 0, self._over), strict=True))
        found[None] = work_of([os.getpid()], with_children=False)[0]
        return found
