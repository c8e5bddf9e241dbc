"""One run of the sandbox: what the program sees, the process tree that it starts in, and its output until it ends."""

from __future__ import annotations

import asyncio
import functools
import marshal
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import CodeType
from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.rewards.types import RewardError


def uses_more(root: int, allowed: int) -> bool:
    """Tells whether a process and its descendants use more than that many bytes together."""
    pids = _tree(root)
    # The exact figure takes milliseconds; what is resident counts shared pages more than once.
    return sum(map(_resident, pids)) > allowed and sum(map(_proportional, pids)) > allowed


def _tree(root: int) -> list[int]:
    """A process and its descendants; a process of another namespace has its number of this one."""
    found = [root]
    for pid in found:  # grows meanwhile
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory, those that it shares with others too."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(pid: int) -> int:
    """Bytes of a process that no file holds; a page that n processes share counts 1/n for each.

    Where only root may see that, a shared page counts for each of them.
    """
    sizes: dict[str, int] = {}
    for name in ("smaps_rollup", "status"):
        with suppress(OSError):
            lines = (line.split() for line in Path(f"/proc/{pid}/{name}").read_text().splitlines())
            sizes = {words[0]: int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}
        if sizes:
            break
    return sum(sizes.get(f"{name}:", 0) for name in ("Pss_Anon", "Pss_Shmem", "RssShmem"))


Backend = Literal["bubblewrap", "namespaces", "unsafe"]

INNER = Path(__file__).with_name("inner.py")
"""The program that isolates itself."""
_HARNESS = Path(__file__).with_name("harness.py")

_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
_OWN_PROCESSES = 4  # of the sandbox, beside the program's: launcher, init, tester, candidate
_OWN_MEMORY = 32 << 20  # of these, beside the program's
_MEMORY_SECONDS = 0.05  # between two looks at a run's memory
_START = 30.0  # seconds that the start may take on a busy machine; no part of the run's time
_GRACE = 5.0  # seconds that the kernel gets to end what was killed


class SandboxError(RewardError):
    """The sandbox itself failed; nothing is known about the program."""


class SandboxLimits(Config):
    """Resources that one run may use."""

    wall_seconds: float = Field(default=10.0, gt=0, description="Time of the program until it is killed.")
    cpu_seconds: float = Field(default=10.0, gt=0, description="CPU time of each process, rounded up.")
    memory_mb: int = Field(
        default=512, ge=64, description="Memory of all processes together, and address space of each."
    )
    processes: int = Field(default=4, ge=1, description="Processes and threads of the program at the same time.")
    file_mb: int = Field(default=16, ge=0, description="Size of one file.")
    temp_mb: int = Field(default=64, ge=1, description="Size of the temporary folder, which is kept in memory.")
    files: int = Field(default=1024, ge=16, description="Files in the temporary folder (not with bubblewrap).")
    open_files: int = Field(default=64, ge=16, description="Open files of each process.")
    output_kb: int = Field(default=1024, ge=1, description="Output, and error output, after which the run is killed.")


@dataclass(frozen=True)
class SandboxResult:
    """The result of a run."""

    stdout: str
    """Undecodable bytes are replaced."""
    stderr: str
    exit_code: int
    """As a shell says it: 128 + n for a program that signal n killed. The program chooses it, so it proves nothing."""
    timed_out: bool
    """Killed at ``wall_seconds``."""
    output_truncated: bool
    """Killed because it wrote more than ``output_kb``."""
    memory_exceeded: bool
    """Killed because its processes together used more than ``memory_mb``."""
    cpu_s: float | None
    """CPU seconds of its processes, the interpreter's start not included; ``None`` where the run was killed."""
    wall_s: float
    attempts: int = 1
    """Requests to a service that it took."""


class _Output(asyncio.Protocol):
    """Collects what a pipe brings, up to a bound."""

    def __init__(self, max_bytes: int, overflow: Callable[[], None]) -> None:
        self.data = bytearray()
        self.truncated = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._max_bytes = max_bytes
        self._overflow = overflow

    def data_received(self, data: bytes) -> None:
        room = self._max_bytes - len(self.data)
        self.data += data[:room]
        if len(data) > room:
            self.truncated = True
            self._overflow()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class View:
    """Interpreter and packages that programs see."""

    python: str
    packages: bool
    """Tells whether the interpreter sees its installed packages."""
    binds: tuple[str, ...]
    """Paths, read-only."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links, with their targets."""


@functools.lru_cache(maxsize=16)
def view_of(python: str, readable: tuple[str, ...], packages: bool) -> View:
    links = tuple((path, os.readlink(path)) for path in _SYSTEM_FOLDERS if os.path.islink(path))
    binds = [path for path in _SYSTEM_FOLDERS if os.path.isdir(path) and not os.path.islink(path)]
    binds += [path for path in (*_DEVICES, "/etc/ld.so.cache") if os.path.exists(path)]
    roots = {os.path.dirname(os.path.dirname(path)) for path in (python, os.path.realpath(python))}
    if python == getattr(sys, "_base_executable", None):
        roots |= {sys.base_prefix, sys.base_exec_prefix}
    folders = [f"{root}/{name}" for root in sorted(roots) for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    for path in [*folders, *readable]:
        if os.path.exists(path) and not any(
            path == known or path.startswith(f"{known}/") for known in [*binds, "/bin"]
        ):
            binds.append(path)
    return View(python, packages, tuple(binds), links)


@dataclass
class Run:
    process: subprocess.Popen[bytes]
    status: int
    """Read end: ``ready`` once the isolation stands, then the exit code and CPU seconds if the program ended."""
    lifeline: int
    """The run ends when this is closed."""

    def let_go(self) -> None:
        """Asks the run to end."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def end(self) -> None:
        """Waits until the run has ended; kills what is slow to."""
        self.let_go()
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def report(self) -> list[str]:
        """The words of ``status``, once the run has ended."""
        with suppress(BlockingIOError):
            return os.read(self.status, 256).decode().split()
        return []


@functools.cache
def harness() -> str:
    """The text that runs a source or its tests in the sandbox."""
    return _HARNESS.read_text(encoding="utf-8")


@functools.cache
def _compiled() -> CodeType:
    return compile(harness(), "harness.py", "exec", dont_inherit=True)


def memory_file(data: bytes) -> int:
    """An open file with this content that nobody can change."""
    import fcntl

    descriptor = os.memfd_create("roll-sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _user_tasks() -> int:
    """Threads of this user, which count against its limit on processes where it has no user namespace."""
    tasks = 0
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                tasks += len(os.listdir(f"{entry.path}/task"))
    return tasks


def _resource_limits(limits: SandboxLimits, others: int) -> dict[str, int]:
    return {
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "CPU": ceil(limits.cpu_seconds),
        "AS": limits.memory_mb << 20,
        "NPROC": limits.processes + _OWN_PROCESSES + others,
        "FSIZE": limits.file_mb << 20,
        "NOFILE": limits.open_files,
    }


def _bubblewrap(view: View, limits: SandboxLimits) -> list[str]:
    command = [
        "bwrap",
        "--die-with-parent",
        "--as-pid-1",
        "--new-session",
        "--cap-drop",
        "ALL",
        "--hostname",
        "sandbox",
    ]
    command += [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    if os.getuid() == 0:  # the inside changes to a user that the limit on processes holds for
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--perms", "1777", "--size", str(limits.temp_mb << 20), "--tmpfs", "/tmp"]
    for path, target in view.links:
        command += ["--symlink", target, path]
    parents = {str(parent) for path in view.binds for parent in Path(path).parents} - {"/", *view.binds}
    for path in sorted(parents):  # else bubblewrap makes them for their owner only
        if not any(path.startswith(f"{bind}/") for bind in view.binds):
            command += ["--perms", "0755", "--dir", path]
    for path in view.binds:
        command += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    command += ["--ro-bind", str(INNER), "/inner.py"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


@contextmanager
def started(
    backend: Backend,
    view: View,
    mode: str,
    source: str,
    stdin: bytes,
    limits: SandboxLimits,
    provided: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Starts one run; at the end nothing of it is left.

    Args:
        provided: names that the program may use without importing them, with their modules.
    """
    folder = tempfile.mkdtemp(prefix="roll-sandbox-") if backend == "unsafe" else None
    root = {"binds": view.binds, "links": view.links, "temp_bytes": limits.temp_mb << 20, "temp_files": limits.files}
    # Processes count per user: a number of its own for each run of bubblewrap as root.
    drop_to = random.SystemRandom().randrange(10**9, 2 * 10**9) if backend == "bubblewrap" and not os.getuid() else None
    job = {
        "mode": mode,
        "compiled": None if view.packages else _compiled(),  # another interpreter may be of another version
        "harness": harness() if view.packages else "",
        "provided": dict(provided or {}),
        "source": source,
        "max_bytes": limits.output_kb << 10,
        "max_seconds": limits.wall_seconds + _GRACE,
        "view": root if backend == "namespaces" else None,
        "chdir": folder or "/tmp",
        "drop_to": drop_to,
        "limits": _resource_limits(limits, _user_tasks() if backend == "unsafe" else 0),
    }
    (status_read, status_write), (lifeline, held) = os.pipe(), os.pipe()
    os.set_blocking(status_read, False)
    job_file, input_file = memory_file(marshal.dumps(job, 2)), memory_file(stdin)
    prefix = _bubblewrap(view, limits) if backend == "bubblewrap" else []
    options = ["-I", "-B", "-X", "utf8", *(() if view.packages else ("-S",))]
    inner = "/inner.py" if backend == "bubblewrap" else str(INNER)
    run = None
    try:
        try:
            process = subprocess.Popen(
                [*prefix, view.python, *options, inner, str(job_file), str(status_write), str(lifeline)],
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT if folder is None else _ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                cwd="/",
                pass_fds=(job_file, status_write, lifeline),
                start_new_session=True,
            )
        finally:
            for descriptor in (status_write, lifeline, job_file, input_file):
                os.close(descriptor)
        run = Run(process, status_read, held)
        yield run
    finally:
        if run is None:
            os.close(held)
        else:
            run.end()
            for pipe in (run.process.stdout, run.process.stderr):
                assert pipe is not None
                pipe.close()
        os.close(status_read)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


async def watch(run: Run, limits: SandboxLimits) -> SandboxResult:
    """Collects the output until the program ends, writes too much or takes too long."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()
    stop: asyncio.Future[None] = loop.create_future()

    def finish(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    handle = os.pidfd_open(run.process.pid)

    def exited() -> None:
        loop.remove_reader(handle)
        finish(ended)
        finish(stop)

    def reported() -> None:
        loop.remove_reader(run.status)
        finish(ready)

    loop.add_reader(handle, exited)
    loop.add_reader(run.status, reported)
    outputs, transports = [], []
    try:
        for pipe in (run.process.stdout, run.process.stderr):
            transport, output = await loop.connect_read_pipe(
                lambda: _Output(limits.output_kb << 10, lambda: finish(stop)), pipe
            )
            transports.append(transport)
            outputs.append(output)
        await asyncio.wait({ready, stop}, timeout=_START, return_when=asyncio.FIRST_COMPLETED)
        started = time.monotonic()
        memory_exceeded = False
        if ready.done():
            memory_exceeded = await _watch_memory(run.process.pid, limits, stop, started + limits.wall_seconds)
        wall_s = time.monotonic() - started
        timed_out = not stop.done() and not memory_exceeded
        run.let_go()
        # The pipes end when the last process of the run is gone.
        await asyncio.wait({ended, *(output.closed for output in outputs)}, timeout=_GRACE)
        run.end()
    finally:
        loop.remove_reader(run.status)
        loop.remove_reader(handle)
        os.close(handle)
        for transport in transports:
            transport.close()
    stdout, stderr = outputs
    report = run.report()
    if not report:
        why = f"it took more than {_START} s" if timed_out else stderr.text().strip()[-500:]
        raise SandboxError(f"sandbox: the isolation failed: {why or f'exit code {run.process.returncode}'}")
    code, cpu_s = (int(report[1]), float(report[2])) if len(report) == 3 else (128 + signal.SIGKILL, None)
    return SandboxResult(
        stdout=stdout.text(),
        stderr=stderr.text(),
        exit_code=code,
        timed_out=timed_out,
        output_truncated=stdout.truncated or stderr.truncated,
        memory_exceeded=memory_exceeded,
        cpu_s=cpu_s,
        wall_s=wall_s,
    )


async def _watch_memory(root: int, limits: SandboxLimits, stop: asyncio.Future[None], deadline: float) -> bool:
    """Waits for ``stop`` or the deadline; true at once where the processes use more memory than they may.

    The limit on address space holds for each process, so one that shares mappings with its children, or hands them on
    and unmaps its own, would get a multiple.
    """
    allowed = (limits.memory_mb << 20) + _OWN_MEMORY
    while not stop.done() and (left := deadline - time.monotonic()) > 0:
        await asyncio.wait({stop}, timeout=min(left, _MEMORY_SECONDS))
        if uses_more(root, allowed):
            return True
    return False
