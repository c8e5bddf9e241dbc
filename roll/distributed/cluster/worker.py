"""The base class of all workers: one process, started by Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from roll.distributed.cluster.reaper import MARK
from roll.distributed.cluster.recording import Recording, RecordingOptions, Whereabouts, write_stacks_on_signal
from roll.utils.memory import keep_freed_memory, resident_bytes
from roll.utils.registry import load_inherited_plugins
from roll.utils.signals import outlive


class Worker:
    """One rank of a role. Subclasses add the role's methods; a subclass with ``async`` methods runs in an event loop.

    Heavy work (loading a model) belongs in a method that the cluster calls, not in ``__init__``: Ray reports what a
    constructor raised as text only, while an error of a method keeps its type.
    """

    def __init__(self, role: str, rank: int, world_size: int, env: Mapping[str, str]) -> None:
        """Args:
        env: variables of this process; they were set before it imported anything, and are set again here because
            Ray adjusts some of them in between.
        """
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self._recording: Recording | None = None
        self._stacks = write_stacks_on_signal()
        os.environ.update(env)
        load_inherited_plugins()
        keep_freed_memory()
        if MARK in os.environ:
            # Whoever stops a whole cgroup asks this process too, which the driver still needs to save the run. It ends
            # with its Ray session.
            outlive(signal.SIGTERM, signal.SIGHUP)

    def __repr__(self) -> str:
        """Ray prefixes the worker's log lines with this."""
        return f"{self.role}[{self.rank}]"

    def ping(self) -> Whereabouts:
        """Answers once the worker is up and its queue has come to this call."""
        import ray

        return Whereabouts(os.getpid(), ray.get_runtime_context().get_node_id(), self._stacks)

    def start_recording(self, options: RecordingOptions) -> None:
        """Records what PyTorch does from now on; what was under way is given up."""
        self._recording = Recording(options)

    def stop_recording(self, stem: Path) -> list[Path]:
        """Writes what was recorded, see ``Recording.stop``; nothing, if this process has taken a dead one's place."""
        recording, self._recording = self._recording, None
        return [] if recording is None else recording.stop(stem)

    def node_ip(self) -> str:
        """The address at which the other nodes reach this one."""
        import ray

        return ray.util.get_node_ip_address()

    def free_port(self) -> int:
        """A TCP port that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def set_rendezvous(self, addr: str, port: int) -> None:
        """Sets what ``torch.distributed.init_process_group`` reads from the environment.

        LOCAL_RANK is 0 everywhere: a worker sees only its own devices.
        """
        os.environ.update(
            MASTER_ADDR=addr,
            MASTER_PORT=str(port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
        )
        if addr.startswith("127."):  # gloo would listen on the address that the host's name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

    def memory_gb(self) -> dict[str, float]:
        """Memory of this process, in GiB: of its GPUs, ``allocated_gb`` by itself and ``device_gb`` by anybody.

        Where it has used no GPU, ``resident_gb`` in host memory.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():  # asking would otherwise take memory itself
            devices = range(torch.cuda.device_count())
            free_and_total = [torch.cuda.mem_get_info(device) for device in devices]
            return {
                "allocated_gb": sum(torch.cuda.memory_allocated(device) for device in devices) / 2**30,
                "device_gb": sum(total - free for free, total in free_and_total) / 2**30,
            }
        resident = resident_bytes()
        return {} if resident is None else {"resident_gb": resident / 2**30}
