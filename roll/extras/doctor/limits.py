"""Memory, cores, limits of the shell and ports: of this process, container limits included."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from roll.extras.doctor.findings import Finding, judged

GIB = 2**30
LEAST_SHM, GOOD_SHM_SHARE, GOOD_SHM = GIB // 4, 8, 8 * GIB
"""A local Ray cluster takes an eighth of the memory for objects, between 256 MiB and 8 GiB."""
LEAST_FILES, GOOD_FILES = 1024, 8192
LEAST_PROCESSES, GOOD_PROCESSES = 1024, 8192
RAY_PORTS = {6379: "ray start --port", 8265: "ray start --dashboard-port", 10001: "ray start --ray-client-server-port"}
SOCKETS = 64
"""Ports that a run with a few dozen workers opens on a machine."""
_CGROUP = Path("/sys/fs/cgroup")


def check_limits() -> Iterator[Finding]:
    """All of them."""
    yield from check_memory(Path("/proc/meminfo"), _CGROUP)
    yield from check_cores(_CGROUP)
    shm = Path("/dev/shm")
    if shm.is_dir():
        yield judge_shm(shutil.disk_usage(shm).total, shutil.disk_usage(shm).free, memory_bytes())
    yield judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield judge_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    yield judge_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=Path("/sys/class/infiniband").is_dir())
    yield from check_ports()


def memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Memory that the processes of this container may use together; of the machine, where there is no limit."""
    total = _meminfo(meminfo).get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = cgroup_memory(cgroup)
    return total if limit is None else min(total, limit)


def cgroup_memory(cgroup: Path = _CGROUP) -> int | None:
    """The control group's limit in bytes (version 2, else 1)."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _text(cgroup / name)
        if text.isdecimal() and int(text) < 2**60:
            return int(text)
    return None


def cgroup_cores(cgroup: Path = _CGROUP) -> float | None:
    """The control group's share of the machine, in cores (version 2, else 1)."""
    quota, _, period = _text(cgroup / "cpu.max").partition(" ")
    if not period:
        quota, period = _text(cgroup / "cpu/cpu.cfs_quota_us"), _text(cgroup / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_memory(meminfo: Path, cgroup: Path) -> Iterator[Finding]:
    known, limit = _meminfo(meminfo), cgroup_memory(cgroup)
    usable = memory_bytes(meminfo, cgroup)
    free = known.get("MemAvailable", usable)
    limited = "" if limit is None or limit >= known.get("MemTotal", limit) else ", the control group's limit"
    seen = f"{usable / GIB:.1f} GiB{limited}; {min(free, usable) / GIB:.1f} GiB available"
    fix = "End what fills it, or raise the container's limit; roll plan says what a configuration takes."
    yield judged("memory", seen, error=usable < GIB, warning=min(free, usable) < 4 * GIB, fix=fix)


def check_cores(cgroup: Path) -> Iterator[Finding]:
    own, share = cores(), cgroup_cores(cgroup)
    seen = f"{own}" if share is None else f"{own}, of which the control group may use {share:g} at a time"
    fix = f"ray_init.num_cpus={max(1, int(share or own))}: Ray counts {own} and would start threads for all of them."
    yield judged("cores", seen, warning=share is not None and share < own, fix=fix)


def judge_shm(total: int, free: int, memory: int) -> Finding:
    """Shared memory, through which Ray's objects and weights travel. Arguments in bytes."""
    good = min(GOOD_SHM, max(LEAST_SHM, memory // GOOD_SHM_SHARE))
    seen = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free (expected {good / GIB:.1f} GiB)"
    fix = f"docker run --shm-size={-(-good // GIB)}g …; in Kubernetes an emptyDir of medium Memory at /dev/shm."
    return judged("/dev/shm", seen, error=free < LEAST_SHM, warning=free < good, fix=fix)


def judge_files(limit: int) -> Finding:
    """Open files: Ray and the environments hold a socket each."""
    return _judge_limit("ulimit -n", limit, LEAST_FILES, GOOD_FILES, "ulimit -n 65536")


def judge_processes(limit: int) -> Finding:
    """Processes and threads of the user."""
    return _judge_limit("ulimit -u", limit, LEAST_PROCESSES, GOOD_PROCESSES, f"ulimit -u {GOOD_PROCESSES}")


def _judge_limit(name: str, limit: int, least: int, good: int, fix: str) -> Finding:
    unlimited = limit == resource.RLIM_INFINITY
    seen = f"{'unlimited' if unlimited else limit} (expected {good})"
    return judged(name, seen, error=not unlimited and limit < least, warning=not unlimited and limit < good, fix=fix)


def judge_locked(limit: int, *, rdma: bool) -> Finding:
    """Locked memory, which RDMA registers its buffers in."""
    needed = " (InfiniBand or RoCE is there: expected unlimited)" if rdma else " (only RDMA needs more)"
    fix = "ulimit -l unlimited; in a container --ulimit memlock=-1"
    bounded = limit != resource.RLIM_INFINITY
    shown = "unlimited" if not bounded else f"{limit // 1024} KiB"
    return judged("ulimit -l", shown + needed, warning=rdma and bounded, fix=fix)


def check_ports() -> Iterator[Finding]:
    """Ports of loopback: enough of them, and those that a Ray head takes unless told otherwise."""
    with ExitStack() as stack:
        try:
            for _ in range(SOCKETS):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as error:
            fix = "Widen net.ipv4.ip_local_port_range, or end what holds so many sockets."
            yield Finding("error", "ports", f"fewer than {SOCKETS} can be bound on loopback: {error}", fix)
            return
    taken = [port for port in RAY_PORTS if not _can_bind(port)]
    if taken:
        options = ", ".join(f"{RAY_PORTS[port]} (not {port})" for port in taken)
        seen = f"{', '.join(map(str, taken))} taken, which a Ray head would use here"
        yield Finding("warning", "ports", seen, f"If a cluster's head is to run on this machine: {options}.")
    else:
        yield Finding("ok", "ports", f"{SOCKETS} at once on loopback; Ray's own are free")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _meminfo(path: Path) -> dict[str, int]:
    """Entries in bytes."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 2 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
