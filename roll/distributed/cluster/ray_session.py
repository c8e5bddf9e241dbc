"""Ray for the duration of a run: joins and leaves a running cluster, or starts and stops a local one."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.distributed.cluster.errors import RaySessionError
from roll.distributed.cluster.reaper import MARK, Reaper
from roll.utils.foreign import environment, replaced

logger = logging.getLogger(__name__)

_STARTED_TOO_SLOWLY = (
    "timed out during startup",  # the node does not register
    "Timed out waiting for file",  # the head does not say at which port it listens
    "Failed to start GCS",  # the head does not answer there
    "Failed to connect to GCS",  # or no longer
)
"""In the messages of the plain exceptions that ``ray.init`` raises."""


def started_too_slowly(error: BaseException) -> bool:
    """Tells whether ``ray.init`` failed because its processes took too long, which a second try may mend."""
    return any(words in str(error) for words in _STARTED_TOO_SLOWLY)


def patience(seconds: float) -> AbstractContextManager[None]:
    """Lets Ray's node take so long to register with its head; Ray itself gives up after 30 s."""
    from ray._private import services

    ask = services.get_node
    deadline = time.monotonic() + seconds

    def ask_until(*args: Any, **options: Any) -> Any:
        while True:
            try:
                return ask(*args, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return replaced(services, get_node=ask_until)


def bare_node() -> AbstractContextManager[None]:
    """Leaves out what Ray starts beside its head and node and this library does not use.

    The autoscaler's monitor, the reader of log files (whose output nobody asks for) and the dashboard's server, for
    whose start ``ray.init`` waits, are a Python process each: they would take seconds from the start of a run.
    """
    from ray._private.node import Node

    def start_api_server(node: Any, **options: Any) -> None:
        node._webui_url = ""  # what Ray notes of a server without a page

    def start_nothing(node: Any) -> None:
        pass

    return replaced(
        Node, start_api_server=start_api_server, start_log_monitor=start_nothing, start_monitor=start_nothing
    )


_CONNECT_TIMEOUT_S = 10.0
_START_TIMEOUTS_S = (30.0, 180.0)
"""Times that a local cluster may take to come up, at the first try and at the second."""
_WATCH_S = 0.5
_LOOPBACK = "127.0.0.1"
_OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "object_store_memory")
"""Arguments that a cluster which is joined has settled already; Ray would refuse them."""


@dataclass(frozen=True)
class RaySession:
    """The connection of this process to Ray."""

    address: str
    """``host:port`` of the cluster's head."""
    joined: bool
    """True for a cluster that was there before and will stay."""


@contextmanager
def ray_session(
    ray_init: Mapping[str, Any] | None = None,
    system_envs: Mapping[str, str] | None = None,
    *,
    log_dir: Path | None = None,
    on_daemon_death: Callable[[RaySessionError], None] | None = None,
) -> Iterator[RaySession]:
    """Connects this process to Ray.

    A cluster is joined when ``ray_init["address"]`` or else RAY_ADDRESS names one (``auto`` finds the one on this
    machine), or when this process is connected already. Otherwise, or with the address ``local``, a cluster of this
    machine alone is started, which listens on loopback only and ends with the block, however it is left; should this
    process be killed, Ray's processes follow it. SIGTERM and SIGHUP do not reach them, so that a run can still save
    when its whole process group or cgroup is asked to stop.

    Args:
        ray_init: arguments of ``ray.init``; the sizes of a new cluster are left out when one is joined.
        log_dir: where the workers' output is kept when a local cluster ends; ``None`` drops it.
        on_daemon_death: called, in a thread of its own, when a daemon of a local cluster is gone before the block ends.

    Raises:
        RaySessionError: nothing answers at the address, or a local cluster did not come up.
    """
    import ray

    options = dict(ray_init or {})
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local"
    options["runtime_env"] = _runtime_env(options.get("runtime_env") or {}, system_envs or {})
    options.setdefault("log_to_driver", False)
    options.setdefault("logging_level", logging.ERROR)
    if ray.is_initialized():
        yield RaySession(ray.get_runtime_context().gcs_address, joined=True)
        return
    local = address == "local"
    # When one rank fails, its peers' errors stay uncollected; Ray would print each of them once more.
    cluster = _local_cluster(options, log_dir, on_daemon_death) if local else _joined_cluster(address, options)
    with environment({"RAY_IGNORE_UNHANDLED_ERRORS": "1"}), cluster:
        yield RaySession(ray.get_runtime_context().gcs_address, joined=not local)


@contextmanager
def _joined_cluster(address: str, options: Mapping[str, Any]) -> Iterator[None]:
    import ray

    _check_reachable(address)
    options = {key: value for key, value in options.items() if key not in _OF_A_NEW_CLUSTER}
    own_side = _loopback_only() if _listens_on_loopback_alone(address) else nullcontext()
    try:
        with _own_sigterm(), own_side:
            ray.init(address=address, **options)
    except ConnectionError as error:
        raise RaySessionError(f"no Ray cluster found at {address!r} (ray_init.address or RAY_ADDRESS)") from error
    logger.info("joined the Ray cluster at %s", address)
    try:
        yield
    finally:
        ray.shutdown()  # only disconnects: the cluster is not ours


@contextmanager
def _local_cluster(
    options: Mapping[str, Any], log_dir: Path | None, on_daemon_death: Callable[[RaySessionError], None] | None
) -> Iterator[None]:
    import ray

    temp_dir, reaper = _start_daemons(options)
    logger.info("started a local Ray cluster in %s", temp_dir)
    over = threading.Event()
    if on_daemon_death is not None:
        threading.Thread(target=_watch_daemons, args=(on_daemon_death, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        try:
            reaper.look()
            complete = not dead_daemons()
            if complete:
                ray.shutdown()
            if log_dir is not None:
                _keep_worker_logs(temp_dir, log_dir)
            if not complete:
                reaper.finish()  # what is left of Ray would wait for its head for a minute
                ray.shutdown()
        finally:
            reaper.finish()
            shutil.rmtree(temp_dir, ignore_errors=True)  # this process may have written to it after the reaper's end


def _start_daemons(options: Mapping[str, Any]) -> tuple[Path, Reaper]:
    """Starts Ray's processes; once more, with more time, where a busy machine was too slow for them.

    Returns:
        The session's folder, and who clears it up.

    Raises:
        RaySessionError: they did not come up.
    """
    import ray

    # Ray puts Unix sockets below this folder, and their paths may hold 107 characters.
    short = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    last: BaseException | None = None
    for seconds in _START_TIMEOUTS_S:
        temp_dir = Path(tempfile.mkdtemp(prefix="roll-", dir=short))
        defaults = {
            "include_dashboard": False,
            "object_store_memory": _object_store_bytes(),
            "_temp_dir": str(temp_dir),
            "_node_ip_address": _LOOPBACK,
            "_system_config": {
                # Ray gives workers niceness 15; on a busy machine they then starve and miss their start-up deadline.
                "worker_niceness": 0,
                # It would start idle workers that no role can use: each has an environment of its own.
                "prestart_worker_first_driver": False,
            },
        }
        settings = {**defaults, **options}
        marks = {
            MARK: str(temp_dir),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_server_port_wait_time_s": str(math.ceil(seconds)),
        }
        reaper = Reaper(temp_dir)
        try:
            with (
                _own_sigterm(),
                _loopback_only(),
                environment(marks),
                _unstoppable_children(),
                patience(seconds),
                nullcontext() if settings["include_dashboard"] or settings["log_to_driver"] else bare_node(),
            ):
                ray.init(address="local", **settings)
            _shut_down_by_kill()
            return temp_dir, reaper
        except BaseException as error:
            ray.shutdown()
            reaper.finish()
            if not started_too_slowly(error):
                raise
            last = error
            logger.warning("Ray did not come up within %.0f s", seconds)
    raise RaySessionError(
        f"no local Ray cluster came up within {_START_TIMEOUTS_S[-1]:.0f} s, at the second try; expected its head and "
        "node to answer: is the machine overloaded or short of memory?"
    ) from last


@contextmanager
def _unstoppable_children() -> Iterator[None]:
    """Whatever is started within the block, and by that in turn, does not see the signals that ask a run to stop."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _shut_down_by_kill() -> None:
    """Makes ``ray.shutdown`` kill its daemons at once: it would wait a second for each to obey a SIGTERM."""
    for process in _daemons().values():
        setattr(process, "terminate", process.kill)  # noqa: B010 (a method of one object)


def _daemons() -> dict[str, subprocess.Popen[bytes]]:
    """The processes of the local cluster's head and node, by name."""
    import ray

    node = ray._private.worker._global_node
    return {name: infos[0].process for name, infos in node.all_processes.items()} if node is not None else {}


def dead_daemons() -> list[str]:
    """Daemons of a local cluster that no run can do without and that have ended; calls of Ray may then not return."""
    return [name for name, process in _daemons().items() if name in _VITAL and process.poll() is not None]


_VITAL = {"gcs_server": "head", "raylet": "node"}


def _watch_daemons(tell: Callable[[RaySessionError], None], over: threading.Event) -> None:
    vital = [process for name, process in _daemons().items() if name in _VITAL]
    while not over.wait(_WATCH_S):
        if {None, *map(subprocess.Popen.poll, vital)} != {None}:
            words = " and ".join(f"{_VITAL[name]} process ({name})" for name in dead_daemons())
            tell(RaySessionError(f"Ray's {words} ended: killed, or out of memory; expected it to outlive the run"))
            return


def _runtime_env(given: Mapping[str, Any], system_envs: Mapping[str, str]) -> dict[str, Any]:
    """Environment variables of every worker, with the driver's import path so that a checkout's code is found.

    And what a worker does before it imports anything else.
    """
    variables = {"PYTHONPATH": _import_path(), **system_envs, **given.get("env_vars", {})}
    quick = {"worker_process_setup_hook": "roll.utils.start.quick_start"}
    return {**quick, **given, "env_vars": {key: str(value) for key, value in variables.items()}}


def _import_path() -> str:
    """The driver's ``sys.path`` without the standard library and installed packages, which a worker finds by itself."""
    installed = {"site-packages", "dist-packages"}
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    folders = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    kept = [path for path in folders if path.is_dir() and not path.is_relative_to(stdlib)]
    return os.pathsep.join(str(path) for path in kept if not installed & set(path.parts))


def _check_reachable(address: str) -> None:
    """Ray itself would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise RaySessionError(
            f"no Ray cluster answers at {address} (ray_init.address or RAY_ADDRESS): {error}"
        ) from error


def _listens_on_loopback_alone(address: str) -> bool:
    """Tells whether the cluster, which answers at this loopback address, does not at this machine's public one.

    Ray would take the public one in its place and wait for minutes.
    """
    import ray

    host, _, port = address.rpartition(":")
    if not port.isdigit() or not (host.startswith("127.") or host == "localhost"):
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=1.0).close()
    except OSError:
        return True
    return False


def store_state() -> str:
    """How much the object stores hold at most, and what is left of the disk that takes the rest, in a sentence."""
    import ray

    with suppress(Exception):  # words for an error, which must not become another one
        sizes = [node["Resources"].get("object_store_memory", 0.0) / 2**20 for node in ray.nodes() if node["Alive"]]
        node: Any = ray._private.worker._global_node
        folder = node.get_session_dir_path()
        disk = shutil.disk_usage(folder)
        return (
            f"It holds at most {min(sizes):,.0f} MiB on a node; what is beyond goes to {folder}, where "
            f"{disk.free / 2**20:,.0f} of {disk.total / 2**20:,.0f} MiB are free."
        )
    return ""


def _object_store_bytes() -> int:
    """An eighth of the memory, between 256 MiB and 8 GiB; Ray's 30 % would leave too little on a small machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(memory // 8, 256 * 2**20), 8 * 2**30)


def _loopback_only() -> AbstractContextManager[None]:
    """Makes Ray take 127.0.0.1 as it does on macOS; on Linux it would turn it into the machine's public address."""
    from ray._private import ray_constants

    return replaced(ray_constants, ENABLE_RAY_CLUSTER=False)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps the program's SIGTERM handler, which ``ray.init`` would replace; where there is none, Ray's own is good."""
    import ray._private.utils as ray_utils

    previous = signal.getsignal(signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or previous in (None, signal.SIG_DFL):
        yield
        return
    # Ray's C++ core installs a handler too, one that aborts: ours has to be set anew, not merely kept.
    with replaced(ray_utils, set_sigterm_handler=lambda handler: signal.signal(signal.SIGTERM, previous)):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)


def _keep_worker_logs(temp_dir: Path, log_dir: Path) -> None:
    """Copies what workers wrote to standard output and error, empty files left out."""
    written = [path for path in temp_dir.glob("session_2*/logs/worker-*") if path.stat().st_size]
    if written:
        log_dir.mkdir(parents=True, exist_ok=True)
    for path in written:
        shutil.copy2(path, log_dir / path.name)
