"""Stacks of the threads of every worker, found out without their help: for calls that do not come back.

A worker that hangs in a collective or waits for a lock answers no call, yet a signal handler in C still writes down its
threads' stacks (``faulthandler``), into memory that others on its node read.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_SIGNAL = signal.SIGUSR2
_NAME = "roll-stacks"
_WRITING_S = 2.0
"""Until a process has surely written them."""
_NODE_S = 30.0
"""Until another node has answered."""


@dataclass(frozen=True)
class Whereabouts:
    """A process that writes its stacks down."""

    pid: int
    node_id: str
    stacks: int | None
    """Number of the file that it writes them to; ``None``: this system has no such files."""


def write_stacks_on_signal() -> int | None:
    """Has this process write its stacks whenever it is asked; see ``Whereabouts.stacks``."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create(_NAME)
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    return file


def stacks_of(processes: Sequence[Whereabouts]) -> list[str]:
    """The stacks of all threads of each process, wherever it is, or why there are none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found: dict[Whereabouts, str] = {}
    here = ray.get_runtime_context().get_node_id()
    asked = {}
    for node_id in dict.fromkeys(process.node_id for process in processes):
        there = [process for process in processes if process.node_id == node_id]
        if node_id == here:
            found |= dict(zip(there, _ask(there), strict=True))
            continue
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[ray.remote(_ask).options(num_cpus=0, scheduling_strategy=place).remote(there)] = there
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_S) if asked else ([], [])
    for ref in ready:
        try:
            found |= dict(zip(asked[ref], ray.get(ref), strict=True))
        except ray.exceptions.RayError as error:
            found |= dict.fromkeys(asked[ref], f"its node: {error}")
    for ref in late:
        found |= dict.fromkeys(asked[ref], f"its node gave no answer in {_NODE_S:g} s")
    return [found[process] for process in processes]


def own_stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _ask(processes: Iterable[Whereabouts]) -> list[str]:
    """Those of processes on this node."""
    return ["".join(_written(process)) for process in processes]


def _written(process: Whereabouts) -> Iterator[str]:
    path = f"/proc/{process.pid}/fd/{process.stacks}"
    try:
        if _NAME not in os.readlink(path):  # the number belongs to another process by now
            raise ProcessLookupError("its process is gone")
        before = size = os.stat(path).st_size
        os.kill(process.pid, _SIGNAL)
        deadline = time.monotonic() + _WRITING_S
        grown = False
        while time.monotonic() < deadline and not (grown and os.stat(path).st_size == size):
            size = os.stat(path).st_size
            grown = size > before
            time.sleep(0.05)
        with open(path, "rb") as file:
            file.seek(before)
            yield file.read().decode(errors="replace") or f"nothing was written in {_WRITING_S:g} s"
    except OSError as error:
        yield str(error)
