"""The process that waits with everything imported: forks of it start at once (``sitecustomize.py`` asks for them)."""

import contextlib
import ctypes
import functools
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tests.support.warm.sitecustomize import DECISIVE, SCRIPTS, SOCKET, decisive

IMPORTED = [
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
    """Forks for whoever connects, until standard input is closed; a fork whose client is gone is killed."""
    from roll.utils.start import quick_start

    quick_start()
    for name in IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(64)
    print("ready", flush=True)
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
                request, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
                if (fork := os.fork()) == 0:
                    client.close()
                    become(json.loads(request), descriptors, events)
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


def become(request: dict[str, Any], descriptors: list[int], events: selectors.BaseSelector) -> NoReturn:
    """Runs a script as a new process would, and ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the process that waits
    os.setsid()
    watched = [key.fileobj for key in events.get_map().values() if key.fileobj != 0]
    events.close()
    for one in watched:
        os.close(one) if isinstance(one, int) else one.close()
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
    sys.argv = list(request["arguments"])
    sys.orig_argv = [sys.executable, *sys.argv]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = dict.fromkeys([str(Path(sys.argv[0]).resolve().parent), *given, *installed])
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)


if __name__ == "__main__":
    wait(Path(sys.argv[1]))
