"""Stacks of every process of a run: written when a call does not come back, or when somebody asks (SIGUSR1)."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import RpcTimeoutError
from roll.distributed.cluster.recording import own_stacks, stacks_of
from roll.utils.foreign import Fault

logger = logging.getLogger(__name__)

ASKING = signal.SIGUSR1


@contextmanager
def explained(clusters: Mapping[str, Cluster], path: Path) -> Iterator[None]:
    """Within the block, ``path`` gets the stacks of all processes when a call takes too long, or at SIGUSR1.

    Args:
        clusters: by role; may fill up meanwhile.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(ASKING, lambda *_: _aside(clusters, path)) if in_main else None
    try:
        yield
    except RpcTimeoutError as error:
        write_stacks(clusters, path, str(error))
        raise
    finally:
        if in_main:
            signal.signal(ASKING, before)


def _aside(clusters: Mapping[str, Cluster], path: Path) -> None:
    """In a thread, as the main one may hold what this needs."""
    threading.Thread(target=write_stacks, args=(clusters, path, "requested by SIGUSR1"), daemon=True).start()


def write_stacks(clusters: Mapping[str, Cluster], path: Path, why: str) -> None:
    """Appends the stacks of all threads of the driver and of every worker; an error in it is logged."""
    with Fault() as fault:  # Ray may be gone; what is being explained matters more
        workers = [
            (f"{name} rank {rank}", process)
            for name, cluster in clusters.items()
            for rank, process in cluster.whereabouts.items()
        ]
        texts = stacks_of([process for _, process in workers])
        parts = [f"===== {datetime.now():%Y-%m-%d %H:%M:%S} {why}", f"----- driver\n{own_stacks()}"]
        for (name, process), text in zip(workers, texts, strict=True):
            parts.append(f"----- {name}, process {process.pid} on node {process.node_id}\n{text}")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n\n".join(parts) + "\n\n")
        logger.info("what every process was doing: %s", path)
    if fault.error is not None:
        logger.error("the stacks of all processes could not be written", exc_info=fault.error)
