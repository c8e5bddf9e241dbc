"""The process that waits with everything imported: forks of it start at once (``sitecustomize.py`` asks for them)."""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tests.support.warm.sitecustomize import DECISIVE, SCRIPTS, SOCKET, decisive

IMPORTED = [
    "aiohttp.web",
    "jsonschema",
    "requests",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "roll.configs.loader",
    "roll.data.renderer",
    "roll.distributed.strategy.fsdp2.strategy",
    "roll.models.sampling",
    "roll.pipeline.cli",
    "roll.pipeline.workers",
]
"""What takes time; not Ray, which reads its environment when it is imported."""
OF_RAY = [
    "ray._private.runtime_env.agent.runtime_env_agent",
    "ray._private.workers.default_worker",
    "ray.dashboard.agent",
]
"""What Ray's workers and agents import, too."""

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def _waiting_process() -> dict[str, str]:
    """Starts it; it ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    path = Path(folder.name) / "socket"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    _kept.extend((process, folder))
    return {SOCKET: str(path), DECISIVE: json.dumps(decisive(environment))}


_kept: list[object] = []


def warm_environment(*, scripts: bool = False) -> dict[str, str]:
    """Variables with which Ray workers, and the scripts of ``examples`` if asked for, start as forks.

    Outside Linux they start as usual.
    """
    usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if sys.platform != "linux":
        return usual
    folder = str(Path(__file__).parent)
    return usual | _waiting_process() | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", SCRIPTS: "1" if scripts else ""}


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Ray workers of sessions that begin in the block are forks."""
    import pytest  # not in the process that waits

    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm_environment().items():
            patch.setenv(name, value)
        yield


def wait(path: Path) -> None:
    """Imports all but Ray, and forks for whoever connects until standard input is closed."""
    from roll.utils.start import quick_start

    quick_start()
    for name in IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    fork_for_clients(path, functools.partial(print, "ready", flush=True))


def import_ray(job: str, path: Path, events: selectors.BaseSelector) -> None:
    """Has a process wait that has imported Ray for a job, too; returns as soon as it does."""
    its_path = path.with_name(f"{path.name}-{job}")
    if its_path.exists():
        return
    until_ready, ready = os.pipe()
    if os.fork() == 0:
        os.close(until_ready)
        leave(events)
        # Ray reads these once. Which raylet is a fork's own is the business of the process that stands for it.
        os.environ |= {
            "RAY_JOB_ID": job,
            "RAY_RAYLET_PID": str(os.getpid()),
            "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # of agents alone, all of which have it
        }
        for name in OF_RAY:
            importlib.import_module(name)
        fork_for_clients(its_path, functools.partial(os.close, ready))
        os._exit(0)
    os.close(ready)
    os.read(until_ready, 1)
    os.close(until_ready)


def fork_for_clients(path: Path, ready: Callable[[], None]) -> None:
    """Forks for whoever connects, until standard input is closed; a fork whose client is gone is killed."""
    gc.collect()
    gc.freeze()  # forks share what is there, as long as they do not look through it for garbage
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # whoever finds it can connect
    ready()
    events = selectors.DefaultSelector()
    events.register(0, selectors.EVENT_READ)
    events.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj not in events.get_map():
                continue  # gone with its fork, a moment ago
            if key.fileobj == 0:
                return
            if key.fileobj is listener:
                client, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
                request = json.loads(message)
                if job := request.get("job"):
                    with client:
                        import_ray(job, path, events)
                        client.send(b"ready")
                    continue
                if (fork := os.fork()) == 0:
                    client.close()
                    become(request, descriptors, events)
                for descriptor in descriptors:
                    os.close(descriptor)
                with contextlib.suppress(OSError):  # it is gone already, which the next event says
                    client.send(str(fork).encode())
                events.register(os.pidfd_open(fork), selectors.EVENT_READ, (fork, client))
                events.register(client, selectors.EVENT_READ, (fork, client))
                continue
            fork, client = key.data
            if key.fileobj is client:  # it sends nothing, so it is gone
                events.unregister(client)
                os.kill(fork, signal.SIGKILL)
                continue
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            for watched in (client, key.fd):
                with contextlib.suppress(KeyError):
                    events.unregister(watched)
            with contextlib.suppress(OSError):
                client.send(str(status).encode())
            client.close()
            os.close(key.fd)


def leave(events: selectors.BaseSelector) -> None:
    """Lets go of what the process that waits has open, and ends with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setsid()
    watched: list[Any] = [key.fileobj for key in events.get_map().values() if key.fileobj != 0]
    events.close()
    for one in watched:
        os.close(one) if isinstance(one, int) else one.close()


def become(request: dict[str, Any], descriptors: list[int], events: selectors.BaseSelector) -> NoReturn:
    """Runs a script as a new process would, and ends."""
    leave(events)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [entry for entry in sys.path if entry not in own and entry != os.getcwd()]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    sys.modules["numpy"].random.seed()
    if ray := sys.modules.get("ray._raylet"):
        ray.Config.initialize("")  # reads all else again
    sys.argv = list(request["arguments"])
    sys.orig_argv = [sys.executable, *sys.argv]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = dict.fromkeys([str(Path(sys.argv[0]).resolve().parent), *given, *installed])
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)


if __name__ == "__main__":
    wait(Path(sys.argv[1]))
