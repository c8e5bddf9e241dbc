"""A role's workers: one Ray process on each seat, called all together, watched, and replaced when one is gone."""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from roll.data.columns import num_bytes
from roll.data.stored import Arrays
from roll.distributed.cluster.errors import (
    NodeLostError,
    PlacementError,
    RowsLostError,
    RpcTimeoutError,
    StoreFullError,
    WorkerDiedError,
)
from roll.distributed.cluster.hangs import Whereabouts, waiting_tasks, write_stacks_on_signal
from roll.distributed.cluster.ray_session import store_state
from roll.distributed.cluster.reaper import MARK
from roll.distributed.cluster.recording import Recording, RecordingOptions
from roll.distributed.cluster.resources import NodeInfo, PlacementPlan, WorkerSlot, nodes_from_resources
from roll.utils.memory import keep_freed_memory, resident_bytes
from roll.utils.progress import WorkClock, advance, raise_if_stalled, waiting
from roll.utils.registry import load_inherited_plugins
from roll.utils.signals import outlive

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.exceptions import RayActorError
    from ray.util.placement_group import PlacementGroup


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
        self.clock = WorkClock()
        write_stacks_on_signal()
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

        return Whereabouts(os.getpid(), ray.get_runtime_context().get_node_id())

    def waiting_tasks(self) -> list[str]:
        """What the tasks of this worker's event loop wait for; nothing without one."""
        return waiting_tasks()

    def take_spans(self) -> list[tuple[float, float]]:
        """From when to when it has worked since the last call, in seconds of the epoch."""
        return self.clock.take_spans()

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


logger = logging.getLogger(__name__)


ACTOR_SHARE = 0.001
"""Ray resource units that one worker claims inside its bundle, which already holds the real amounts."""


def discover_nodes() -> list[NodeInfo]:
    """The live nodes of the connected Ray cluster: the head first, then by address."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(
        key=lambda node: (
            "node:__internal_head__" not in node["Resources"],
            node["NodeManagerAddress"],
            node["NodeID"],
        )
    )
    return nodes_from_resources(
        [(node["NodeID"], node["Resources"].get("GPU", 0.0), node["Resources"].get("CPU", 0.0)) for node in alive]
    )


def lost_nodes() -> set[str]:
    """Ids of the nodes that are gone."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


@dataclass(frozen=True)
class NodeView:
    """View of a process on the node."""

    gpu_ids: tuple[str, ...]
    """The real ids of the bundle's GPUs."""
    num_cores: int
    """CPU cores that the process may run on."""


@dataclass(frozen=True)
class Placement:
    """Reserved devices. Release them with ``remove``."""

    plan: PlacementPlan
    groups: Mapping[int, PlacementGroup]
    """Node index to its placement group; nodes without workers have none."""
    views: Mapping[int, NodeView]

    def actor_options(self, slot: WorkerSlot) -> dict[str, Any]:
        """Ray actor options that put the worker on its seat."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        on_gpu = bool(slot.devices) and self.plan.nodes[slot.node].kind == "gpu"
        return {
            "num_cpus": ACTOR_SHARE,
            "num_gpus": ACTOR_SHARE if on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.groups[slot.node], placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            ),
        }

    def visible_devices(self, slot: WorkerSlot) -> str:
        """CUDA_VISIBLE_DEVICES for the worker: real GPU ids in the order of its mapping, empty without a GPU.

        Ray decides which physical GPUs a bundle gets; the plan's n-th device on a node is the bundle's n-th.
        """
        if self.plan.nodes[slot.node].kind == "cpu":
            return ""
        in_use = self.plan.devices_on(slot.node)
        return ",".join(self.views[slot.node].gpu_ids[in_use.index(device)] for device in slot.devices)

    def environment(self, slot: WorkerSlot) -> dict[str, str]:
        """Environment variables that follow from the worker's seat."""
        return {
            "OMP_NUM_THREADS": str(self.plan.threads(slot, self.views[slot.node].num_cores)),
            "CUDA_VISIBLE_DEVICES": self.visible_devices(slot),
            # Ray would replace the list by the one GPU of which the worker holds a sliver.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            # Workers with an event loop fetch in threads beside it.
            "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
        }

    def remove(self) -> None:
        """Gives the devices back; workers still on them are killed by Ray. Calling it again does nothing."""
        _remove(self.groups)


def create_placement(plan: PlacementPlan, *, timeout: float = 60.0) -> Placement:
    """Reserves the plan's devices and CPUs on the connected Ray cluster.

    Args:
        timeout: seconds to wait for devices that another job holds at the moment.

    Raises:
        PlacementError: a node of the plan does not exist, or its resources did not become free in time.
    """
    import ray

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    used = [index for index in range(len(plan.nodes)) if plan.slots_on(index)]
    missing = [plan.nodes[index].node_id for index in used if plan.nodes[index].node_id not in alive]
    if missing:
        raise PlacementError((f"nodes {', '.join(missing)} of the plan are not in the Ray cluster",))

    deadline = time.monotonic() + timeout
    groups = {index: _reserve(plan, index) for index in used}
    try:
        for index, group in groups.items():
            if not group.wait(math.ceil(max(0.0, deadline - time.monotonic()))):  # Ray drops fractions
                raise PlacementError((_unavailable(plan, index, timeout),))
        views = {index: _view(plan, index, group, deadline) for index, group in groups.items()}
    except BaseException:
        _remove(groups)
        raise
    return Placement(plan, groups, views)


def _bundle(plan: PlacementPlan, node: int) -> dict[str, float]:
    bundle = {"CPU": plan.cpus_on(node)}
    if plan.nodes[node].kind == "gpu" and plan.devices_on(node):
        bundle["GPU"] = float(len(plan.devices_on(node)))
    return {name: amount for name, amount in bundle.items() if amount > 0}


def _reserve(plan: PlacementPlan, node: int) -> PlacementGroup:
    from ray.util.placement_group import placement_group

    on_node = {"ray.io/node-id": plan.nodes[node].node_id}
    return placement_group([_bundle(plan, node)], strategy="STRICT_PACK", bundle_label_selector=[on_node])


def _remove(groups: Mapping[int, PlacementGroup]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    if not ray.is_initialized():  # the cluster is gone, and the groups with it
        return
    for group in groups.values():
        remove_placement_group(group)


def _unavailable(plan: PlacementPlan, node: int, timeout: float) -> str:
    import ray

    has, free = ray.cluster_resources(), ray.available_resources()
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in _bundle(plan, node).items())
    state = ", ".join(f"{has.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("GPU", "CPU"))
    roles = ", ".join(dict.fromkeys(slot.role for slot in plan.slots_on(node)))
    return (
        f"{roles}: {wanted} on node {node} did not become free within {timeout:g} s; the cluster has {state} "
        f"on {len(plan.nodes)} node{'s' * (len(plan.nodes) != 1)}, the rest is held by other jobs"
    )


def _view(plan: PlacementPlan, node: int, group: PlacementGroup, deadline: float) -> NodeView:
    """Looks from inside the bundle; without a GPU on the driver's own node there is no need to start a process."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    info, num_gpus = plan.nodes[node], _bundle(plan, node).get("GPU", 0)
    gpu_ids: list[str] = []
    if not num_gpus and ray.get_runtime_context().get_node_id() == info.node_id:
        cores = _num_cores()
    else:
        probe = ray.remote(_look_around).options(
            num_cpus=ACTOR_SHARE,
            num_gpus=num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        try:
            gpu_ids, cores = ray.get(probe.remote(), timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise PlacementError((f"node {node} ({info.node_id}) did not start a process in time",)) from error
    return NodeView(tuple(gpu_ids), max(1, min(cores, int(info.num_cpus))))


def _look_around() -> tuple[list[str], int]:
    """The GPU ids that Ray assigned to this process, and the cores it may run on."""
    import ray

    return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name)), _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_START_S = 300.0
"""Time until every started process must have answered."""

_NODE_LOOK_S = 2.0
"""Time without an answer of a fresh worker after which its node is looked for, again and again."""

_ALIVE_WAIT_S = 1.0
"""Time that a death may take to be known; Ray reports a killed process within some hundredths of a second."""

NODE_VERDICT_S = 30.0
"""Time in which Ray finds out whether a worker on another node that cannot be reached is dead: it knows of a process at
once, and gives a node up after some missed signs of life."""

_NOTICE_S = 600.0
"""Time without any answer after which the log says whose is missing, again and again."""

_STALLED_S = 5.0
"""Between two looks at whether the run is stalled."""

_ASYNC_CALLS = 2**20
"""Calls that a worker with ``async`` methods runs at the same time. With Ray's own limit of 1,000 the others would wait
for them without a word."""

_INLINE_TYPES = (type(None), bool, int, float, str, os.PathLike)

_residents: dict[str, tuple[str, int]] = {}
"""Ray actor id to (role, rank), dead ones included: names the worker when a third one reports its death."""


class Cluster:
    """The workers of one role.

    A rank is a worker that gets calls. Where its engine has devices of several nodes, a further process on each other
    node has a part of it (``parts``), and all of them start, die and are replaced together.

    Calls go to every rank and come back in rank order. Arguments that are not small values are put into the object
    store once and not once per rank; NumPy arrays arrive there read-only.

    Errors of a call: what the worker's own code raised, with its type and a note of role, rank, call, step and the
    remote traceback; ``WorkerDiedError``; ``RpcTimeoutError``; ``StallError``. The first failure is raised at once,
    while other ranks may still be at work or stuck in a collective.
    """

    current_step: ClassVar[int | None] = None
    """The training step, for the messages of all clusters; the pipeline sets ``Cluster.current_step``."""

    def __init__(
        self,
        name: str,
        worker_cls: type[Worker],
        placement: Placement,
        *,
        init_kwargs: Mapping[str, Any] | None = None,
        system_envs: Mapping[str, str] | None = None,
        rpc_timeout: float | None = None,
        nsight: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            name: the role; ``placement`` must hold a place for it.
            worker_cls: its constructor gets ``role, rank, world_size, env`` and ``init_kwargs``.
            system_envs: environment variables of the workers, set before they import anything. They win over the
                thread count chosen here, never over the device list.
            rpc_timeout: seconds that a call may take; ``None`` waits for ever.
            nsight: options of ``nsys profile`` by rank, for those that run under it.

        Raises:
            KeyError: the role has no place.
        """
        self.name = name
        self.worker_cls = worker_cls
        self.placement = placement
        self.slots = placement.plan.workers(name)
        self.rpc_timeout = rpc_timeout
        self.restarts = [0] * len(self.slots)
        """Number of times that each process was replaced."""
        self.handles: list[ActorHandle] = []
        """Ray actor handles in rank order, then those of further parts; a restart replaces the handle."""
        self.lost: set[int] = set()
        """Ranks that the role goes on without, see ``go_on_without``: calls reach the others."""
        self.whereabouts: dict[int, Whereabouts] = {}
        """The processes, in the order of ``handles``, once they are ready."""
        self._init_kwargs = dict(init_kwargs or {})
        self._system_envs = {key: str(value) for key, value in (system_envs or {}).items()}
        self._nsight = nsight or {}

    @property
    def world_size(self) -> int:
        """Number of ranks, the lost ones included."""
        return len({slot.engine for slot in self.slots})

    @property
    def ranks(self) -> list[int]:
        """Those that calls reach: all but the lost ones."""
        return [rank for rank in range(self.world_size) if rank not in self.lost]

    def parts(self, rank: int) -> list[int]:
        """Places in ``handles`` of the processes of the rank's engine, one per node; the first is the rank's own."""
        return [slot.rank for slot in self.slots if slot.engine == rank]

    @property
    def present(self) -> list[ActorHandle | None]:
        """Handles of the ranks, with ``None`` in the place of each lost one."""
        return [None if rank in self.lost else self.handles[rank] for rank in range(self.world_size)]

    def start(self) -> None:
        """Starts every worker and waits until all have answered."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Starts the processes without waiting, so that several clusters come up side by side."""
        if self.handles:
            raise RuntimeError(f"cluster {self.name} is already started")
        self._init_kwargs = {key: _put_once(value) for key, value in self._init_kwargs.items()}
        self.handles = [self._spawn(place) for place in range(len(self.slots))]

    def wait_ready(self) -> None:
        """Waits until every worker of ``launch`` has answered."""
        refs = [handle.ping.remote() for handle in self.handles]
        ready = self.gather(refs, call="start", ranks=[slot.engine for slot in self.slots], timeout=_START_S)
        self.whereabouts = dict(enumerate(ready))
        logger.info("%s: %d workers are up", self.name, self.world_size)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs the method on every rank with the same arguments and returns the results in rank order."""
        return self.gather(self.submit(method, *args, **kwargs), call=method)

    def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method on one rank."""
        with self._stored(method, args):
            ref = getattr(self._handle(rank), method).remote(*args, **kwargs)
        return self.gather([ref], call=method, ranks=[rank])[0]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[ObjectRef]:
        """Like ``call`` without waiting; pass the references to ``gather``."""
        with self._stored(method, args):
            shared = tuple(_put_once(arg) for arg in args) if self.world_size > 1 else args
        return self.submit_each(method, [shared] * len(self.ranks), **kwargs)

    def submit_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[ObjectRef]:
        """Like ``submit``, but each rank has positional arguments of its own.

        Raises:
            ValueError: not one tuple of arguments per rank.
        """
        if len(per_rank_args) != len(self.ranks):
            raise ValueError(
                f"{self.name}.{method}: {len(per_rank_args)} argument tuples for {len(self.ranks)} workers"
            )
        with self._stored(method, per_rank_args):
            if self.world_size > 1:
                kwargs = {key: _put_once(value) for key, value in kwargs.items()}
            calls = zip(self.ranks, per_rank_args, strict=True)
            return [getattr(self._handle(rank), method).remote(*args, **kwargs) for rank, args in calls]

    @contextmanager
    def _stored(self, call: str, args: Any) -> Iterator[None]:
        """The block places arguments of a call in the object store, which may be full."""
        try:
            yield
        except _store_errors():
            raise StoreFullError(self.name, call, self.current_step, _size_of(args), store_state()) from None

    def gather(
        self,
        refs: Sequence[ObjectRef],
        *,
        call: str,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Waits for submitted calls and returns their results in the order of ``refs``.

        Args:
            ranks: the rank behind each reference; ``None`` for one reference per rank in rank order.
            timeout: seconds, in place of ``rpc_timeout``.
        """
        import ray

        rank_of = dict(zip(refs, self.ranks if ranks is None else ranks, strict=True))
        limit = self.rpc_timeout if timeout is None else timeout
        started = time.monotonic()
        results: dict[ObjectRef, Any] = {}
        pending: list[Any] = list(refs)
        told = 0.0

        def missing(seconds: float) -> RpcTimeoutError:
            ranks = tuple(rank_of[ref] for ref in pending)
            return RpcTimeoutError(self.name, ranks, call, self.current_step, seconds)

        with waiting(lambda: missing(time.monotonic() - started).words):
            while pending:
                waited = time.monotonic() - started
                ends = min(told + _NOTICE_S, limit or math.inf, waited + _STALLED_S)
                ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, ends - waited))
                raise_if_stalled()
                if not ready:
                    waited = time.monotonic() - started
                    if limit is not None and waited >= limit:
                        raise missing(waited)
                    if waited - told >= _NOTICE_S:
                        words, told = missing(waited).words, waited
                        logger.warning(
                            "%s so far; kill -USR1 %d writes what every process is doing", words, os.getpid()
                        )
                    continue
                try:
                    results[ready[0]] = ray.get(ready[0])
                except ray.exceptions.RayError as error:
                    self._raise(error, rank_of[ready[0]], call)
                advance()
        return [results[ref] for ref in refs]

    def result(self, future: Future[Any], *, rank: int, call: str) -> Any:
        """The value of a submitted call that is done, by its reference's ``future()``; raises what ``gather`` does."""
        import ray

        try:
            return future.result()
        except ray.exceptions.RayError as error:
            self._raise(error, rank, call)

    def dead(self) -> dict[int, Whereabouts | None]:
        """The ranks that have lost a process, without the lost ones, and where that was, as far as it is known.

        Of an engine's processes, which end with each other, one on a lost node is told, else one with a further part. A
        busy or hung worker is not dead. Takes at most a second.
        """
        import ray

        if not self.handles:
            return dict.fromkeys(self.ranks)
        refs: dict[Any, tuple[int, int]] = {
            self.handles[place].ping.remote(): (rank, place) for rank in self.ranks for place in self.parts(rank)
        }
        answered, _ = ray.wait([*refs], num_returns=len(refs), timeout=_ALIVE_WAIT_S)
        gone = sorted(refs[ref] for ref in answered if _is_death(ref))
        found = [(rank, self.whereabouts.get(place)) for rank, place in gone]
        lost = lost_nodes() if found else set[str]()
        return dict(sorted(found, key=lambda each: (each[0], each[1] is not None and each[1].node_id in lost)))

    def restart(self, rank: int) -> None:
        """Replaces the rank by a fresh worker in the same place, killing the old one if it still runs.

        So it does with all parts of its engine. Without a device, it starts on another node if its own is gone. The new
        worker has run its constructor and nothing else: set it up again, and its process group too.

        Raises:
            NodeLostError: its node is gone, and its devices with it.
        """
        self._kill(rank)
        for place in self.parts(rank):
            self._replace(place)

    def _kill(self, rank: int) -> None:
        import ray

        for place in self.parts(rank):
            ray.kill(self._handle(place), no_restart=True)

    def _replace(self, place: int) -> None:
        import ray

        self.restarts[place] += 1
        logger.warning("%s rank %d: starting a fresh worker (restart %d)", self.name, place, self.restarts[place])
        deadline = time.monotonic() + _START_S
        self.handles[place] = self._spawn(place)
        ready = [self.handles[place].ping.remote()]
        while time.monotonic() < deadline:
            answered = bool(ray.wait(ready, timeout=_NODE_LOOK_S)[0])
            if answered and not _is_death(ready[0]):
                break
            if self._leave_lost_node(place):
                self.handles[place] = self._spawn(place)
                ready = [self.handles[place].ping.remote()]
            elif answered:
                break
        patience, rank = max(_ALIVE_WAIT_S, deadline - time.monotonic()), self.slots[place].engine
        (self.whereabouts[place],) = self.gather(ready, call="restart", ranks=[rank], timeout=patience)

    def go_on_without(self, error: NodeLostError) -> None:
        """Leaves out a rank whose node is gone from now on.

        Raises:
            NodeLostError: no other rank is left.
        """
        if self.ranks == [error.rank]:
            raise error
        self._kill(error.rank)
        self.lost.add(error.rank)
        logger.warning("%s; %s goes on with %d of %d workers", error, self.name, len(self.ranks), self.world_size)

    def _leave_lost_node(self, place: int) -> bool:
        """Gives a process whose node is gone a seat on a living one; tells whether it has."""
        import ray

        slot, nodes = self.slots[place], self.placement.plan.nodes
        known = {node["NodeID"]: node for node in ray.nodes()}
        living = [index for index in self.placement.groups if known[nodes[index].node_id]["Alive"]]
        if slot.node in living:
            return False
        name = f"node {known[nodes[slot.node].node_id]['NodeManagerHostname']} ({nodes[slot.node].node_id})"
        if slot.devices or not living:
            reason = f"{name} is gone, and this rank's devices {', '.join(map(str, slot.devices))} with it"
            raise NodeLostError(self.name, slot.engine, "restart", self.current_step, reason)
        crowded = Counter(other.node for other in self.slots)
        target = min(living, key=lambda index: crowded[index])
        logger.warning("%s rank %d: %s is gone, it goes to %s", self.name, place, name, nodes[target].node_id)
        self.slots = (*self.slots[:place], replace(slot, node=target), *self.slots[place + 1 :])
        return True

    def rendezvous(self) -> None:
        """Agrees on rank 0's address and a free port there, so that the ranks can form a process group."""
        self.call("set_rendezvous", *self.meeting_place(0))

    def meeting_place(self, rank: int) -> tuple[str, int]:
        """The rank's address, and a free port there."""
        return self.call_rank(rank, "node_ip"), self.call_rank(rank, "free_port")

    def shutdown(self) -> None:
        """Kills every worker. Calling it again does nothing."""
        import ray

        handles, self.handles = self.handles, []
        if not ray.is_initialized():  # the session is over, and the workers with it
            return
        for handle in handles:
            ray.kill(handle, no_restart=True)

    def _handle(self, place: int) -> ActorHandle:
        if not self.handles:
            raise RuntimeError(f"cluster {self.name} is not running: call start() first")
        return self.handles[place]

    def _spawn(self, place: int) -> ActorHandle:
        import ray

        slot = self.slots[place]
        seat = self.placement.environment(slot)
        env = {**seat, **self._system_envs, "CUDA_VISIBLE_DEVICES": seat["CUDA_VISIBLE_DEVICES"]}
        options = {**self.placement.actor_options(slot), "max_restarts": 0, "max_task_retries": 0}
        if inspect.getmembers(self.worker_cls, inspect.iscoroutinefunction):
            options["max_concurrency"] = _ASYNC_CALLS
        runtime_env: dict[str, Any] = {"env_vars": env}
        if place in self._nsight:  # Ray then starts the `python` of the PATH
            path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
            runtime_env = {"env_vars": {"PATH": path, **env}, "nsight": dict(self._nsight[place])}
        actor_cls = ray.remote(self.worker_cls).options(runtime_env=runtime_env, **options)
        handle: Any = actor_cls.remote(self.name, place, self.world_size, env, **self._init_kwargs)
        _residents[handle._actor_id.hex()] = (self.name, slot.engine)
        return handle

    def _raise(self, error: Exception, rank: int, call: str) -> NoReturn:
        """Raises what the caller should see for an error that Ray reports for the rank's call."""
        import ray

        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        if isinstance(cause, ray.exceptions.RayActorError):
            role, dead_rank = _residents.get(cause.actor_id or "", (self.name, rank))
            reason = death_reason(cause)
            own = (role, dead_rank) == (self.name, rank)
            if own and (at := self.whereabouts.get(rank)):
                if isinstance(cause, ray.exceptions.ActorUnavailableError):
                    reason = f"{at} cannot be reached; it, or its node, is gone"
                elif at.node_id in lost_nodes():
                    reason = f"{at} is gone, with its node"
            if own and len(self.parts(rank)) > 1 and (at := self.dead().get(rank)):
                reason = f"{at}, with a part of its engine, is gone"
            raise WorkerDiedError(role, dead_rank, call, self.current_step, reason) from None

        if isinstance(cause, _store_errors()):
            raise StoreFullError(self.name, call, self.current_step, None, store_state()) from None
        cause.add_note(f"in {self.name} rank {rank}, call {call}, step {self.current_step}; traceback there:")
        cause.add_note(_plain(str(error)))
        for dead, at in self._dead_peers(cause).items():
            reason = f"{at or 'its process'} is gone; rank {rank} then failed with {type(cause).__name__}"
            raise WorkerDiedError(self.name, dead, call, self.current_step, reason) from cause
        raise cause from None

    def _dead_peers(self, cause: BaseException) -> dict[int, Whereabouts | None]:
        """As ``dead``: those that may be behind the error of a rank.

        A peer's death reaches the survivors as a broken connection, often before Ray reports the death itself.
        """
        if len(self.slots) == 1:
            return {}
        apart = isinstance(cause, RuntimeError) and len({slot.node for slot in self.slots}) > 1
        deadline = time.monotonic() + (NODE_VERDICT_S if apart else 0.0)
        while not (dead := self.dead()) and time.monotonic() < deadline:
            time.sleep(_ALIVE_WAIT_S)
        return dead


def _store_errors() -> tuple[type[Exception], ...]:
    import ray

    return ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError


def _size_of(value: Any) -> int | None:
    """Bytes of a value on its way; ``None`` for one that plain pickle cannot tell."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        length = len(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return length + sum(buffer.raw().nbytes for buffer in buffers)


def _put_once(value: Any) -> Any:
    """Moves anything but a small value into the object store; Ray hands the workers the value itself."""
    import ray

    return value if isinstance(value, (*_INLINE_TYPES, ray.ObjectRef)) else ray.put(value)


def _is_death(ref: ObjectRef) -> bool:
    import ray

    try:
        ray.get(ref)
    except ray.exceptions.RayActorError:
        return True
    return False


def death_reason(error: RayActorError) -> str:
    """Part of Ray's message that a person needs: a constructor's traceback, or else the process and how it ended."""
    text = _plain(str(error))
    pid = re.search(r"^\s*pid: (\d+)$", text, re.MULTILINE)
    if pid is None:
        return text
    ip = re.search(r"^\s*ip: (\S+)$", text, re.MULTILINE)
    cause = re.search(r"The actor (?:is dead|died) because (.*)", text, re.DOTALL)
    ending = cause[1].partition("Worker exit type: None")[0] if cause else ""
    # A killed process leaves no word; what follows then is a generic list of possible causes.
    ending = ending.partition("Some common causes")[0].strip() or text.splitlines()[-1]
    return f"process {pid[1]}{f' on {ip[1]}' if ip else ''}: {ending}"


def _plain(text: str) -> str:
    """Without terminal colours and empty lines."""
    return "\n".join(line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip())


@dataclass(frozen=True)
class RayBlock:
    """A block of columns (``roll.data.stored``) in Ray's object store."""

    ref: ObjectRef
    node_id: str | None = None
    """Of the node that it was made on, where that matters."""

    fetched_bytes: ClassVar[int] = 0
    """Fetched by this process, until somebody sets it back."""

    @classmethod
    def put(cls, arrays: Arrays) -> RayBlock:
        import ray

        return cls(ray.put(arrays))

    @classmethod
    def fetch(cls, blocks: Sequence[RayBlock]) -> list[Arrays]:
        """Raises ``RowsLostError`` where a block is on a node, or belongs to a process, that is gone."""
        import ray

        try:
            found: list[Arrays] = ray.get([block.ref for block in blocks])
        except (ray.exceptions.ObjectLostError, ray.exceptions.ObjectFetchTimedOutError) as error:
            raise RowsLostError(str(error).splitlines()[0]) from None
        RayBlock.fetched_bytes += sum(num_bytes(values) for arrays in found for values in arrays.values())
        return found


def on_lost_nodes(blocks: Iterable[RayBlock]) -> set[RayBlock]:
    """Those that were made on a node that is gone, even if Ray has forgotten it."""
    import ray

    found = [block for block in blocks if block.node_id is not None]
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if found else set()
    return {block for block in found if block.node_id not in living}
