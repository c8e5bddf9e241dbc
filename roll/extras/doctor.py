"""``roll doctor``: checks what a run needs of this machine (packages, memory, limits, ports, disk, GPUs, services).

The machines of a Ray cluster are checked likewise and compared; the findings are a page or JSON.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import roll
from roll import __version__
from roll.preflight.inputs import ask_hub, hub_endpoint, hub_is_off
from roll.tracking.redact import redact
from roll.utils.foreign import Fault

Level = Literal["ok", "warning", "error"]
"""``error``: a run fails, or cannot save. ``warning``: it is slower, or fails in some configurations."""
WIDTH = 110


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    name: str
    got: str
    fix: str = ""
    """Advice on what to do, where the level is not ``ok``."""
    node: str = ""
    """Machine of a cluster; empty for this one."""


Check: TypeAlias = Callable[[], Iterable[Finding]]


def judged(name: str, got: str, *, error: bool = False, warning: bool = False, fix: str = "") -> Finding:
    """A finding whose level is the worst that holds; the fix is dropped where nothing is wrong."""
    level: Level = "error" if error else "warning" if warning else "ok"
    return Finding(level, name, got, fix if level != "ok" else "")


def examine(name: str, check: Check) -> list[Finding]:
    """Runs a check; one that fails itself is a warning, so that the others are still heard."""
    with Fault() as fault:  # of drivers and libraries
        return list(check())
    got = f"could not be checked: {type(fault.error).__name__}: {fault.error}"
    return [Finding("warning", name, got, "Look at it by hand.")]


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where there is an error, else 0."""
    return int(any(finding.level == "error" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """All findings, machine-readable, with a line end."""
    content = {"healthy": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def page(findings: Sequence[Finding]) -> str:
    """A line per finding, its fix below it, machines one after the other, and a last line that counts."""
    wide = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    node = ""
    for finding in findings:
        if finding.node != node:
            node = finding.node
            lines += ["", f"node {node}"]
        lines += _wrapped(f"{finding.level:<8} {finding.name:<{wide}}  ", finding.got)
        lines += _wrapped(" " * (9 + wide + 2) + "fix: ", finding.fix) if finding.fix else []
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "ok")}
    told = f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok"
    return "\n".join([*lines, "", told]) + "\n"


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]


def machine_findings(output_dir: Path, more: Mapping[str, Check] | None = None) -> list[Finding]:
    """Findings on the machine that this process runs on.

    Args:
        more: further checks by name.
    """
    checks: dict[str, Check] = {
        "packages": check_packages,
        "gpus": check_accelerators,
        "limits": check_limits,
        "disk": partial(check_disk, output_dir),
        "sandbox": check_sandbox,
        **(more or {}),
    }
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for found in pool.map(examine, checks, checks.values()) for finding in found]


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
    got = f"{usable / GIB:.1f} GiB{limited}; {min(free, usable) / GIB:.1f} GiB available"
    fix = "Stop what uses it, or raise the container's limit; roll plan estimates what a configuration needs."
    yield judged("memory", got, error=usable < GIB, warning=min(free, usable) < 4 * GIB, fix=fix)


def check_cores(cgroup: Path) -> Iterator[Finding]:
    own, share = cores(), cgroup_cores(cgroup)
    got = f"{own}" if share is None else f"{own}, the control group can use {share:g} at a time"
    fix = f"ray_init.num_cpus={max(1, int(share or own))}: Ray counts {own} and would start threads for all of them."
    yield judged("cores", got, warning=share is not None and share < own, fix=fix)


def judge_shm(total: int, free: int, memory: int) -> Finding:
    """Shared memory, through which Ray's objects and weights travel. Arguments in bytes."""
    good = min(GOOD_SHM, max(LEAST_SHM, memory // GOOD_SHM_SHARE))
    got = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free (expected {good / GIB:.1f} GiB)"
    fix = f"docker run --shm-size={-(-good // GIB)}g …; in Kubernetes an emptyDir of medium Memory at /dev/shm."
    return judged("/dev/shm", got, error=free < LEAST_SHM, warning=free < good, fix=fix)


def judge_files(limit: int) -> Finding:
    """Open files: Ray and the environments hold a socket each."""
    return _judge_limit("ulimit -n", limit, LEAST_FILES, GOOD_FILES, "ulimit -n 65536")


def judge_processes(limit: int) -> Finding:
    """Processes and threads of the user."""
    return _judge_limit("ulimit -u", limit, LEAST_PROCESSES, GOOD_PROCESSES, f"ulimit -u {GOOD_PROCESSES}")


def _judge_limit(name: str, limit: int, least: int, good: int, fix: str) -> Finding:
    unlimited = limit == resource.RLIM_INFINITY
    got = f"{'unlimited' if unlimited else limit} (expected {good})"
    return judged(name, got, error=not unlimited and limit < least, warning=not unlimited and limit < good, fix=fix)


def judge_locked(limit: int, *, rdma: bool) -> Finding:
    """Locked memory, which RDMA registers its buffers in."""
    needed = " (InfiniBand or RoCE is present: expected unlimited)" if rdma else " (only RDMA needs more)"
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
            fix = "Widen net.ipv4.ip_local_port_range, or stop the programs that hold so many sockets."
            yield Finding("error", "ports", f"fewer than {SOCKETS} can be bound on loopback: {error}", fix)
            return
    taken = [port for port in RAY_PORTS if not _can_bind(port)]
    if taken:
        options = ", ".join(f"{RAY_PORTS[port]} (not {port})" for port in taken)
        got = f"{', '.join(map(str, taken))} taken, which a Ray head would use here"
        yield Finding("warning", "ports", got, f"If a cluster's head is to run on this machine: {options}.")
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


PROBE_BYTES, PROBE_SECONDS = 32 * 2**20, 1.0
"""Most that is written to find the speed, and how long at most."""
LEAST_ROOM, GOOD_ROOM = GIB, 20 * GIB
SLOW = 50e6
"""Bytes per second below which checkpoints take longer than steps."""


def check_disk(folder: Path) -> Iterator[Finding]:
    """Writes a file of at most 32 MiB beside where the output will be, and removes it.

    Args:
        folder: ``output_dir``; where it is not there yet, its nearest parent is tried.
    """
    place = folder.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    room = shutil.disk_usage(place).free
    got = f"{room / GIB:.1f} GiB free in {place} (expected {GOOD_ROOM // GIB} GiB)"
    fix = "output_dir or checkpoint_config.output_dir on a larger disk; max_ckpt_to_keep=2"
    yield judged("disk room", got, error=room < LEAST_ROOM, warning=room < GOOD_ROOM, fix=fix)
    try:
        speed = write_speed(place)
    except OSError as error:
        yield Finding("error", "disk", f"cannot write in {place}: {error.strerror}", "output_dir=<your folder>")
        return
    fix = "checkpoint_config.output_dir on a faster disk, or async_save=true"
    yield judged("disk speed", f"{speed / 1e6:.0f} MB/s written in {place}", warning=speed < SLOW, fix=fix)


def write_speed(folder: Path) -> float:
    """Bytes per second of a file that is written and forced to the disk.

    Raises:
        OSError: it cannot be written.
    """
    data, written = os.urandom(4 * 2**20), 0
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        while written < PROBE_BYTES and (not written or time.perf_counter() - start < PROBE_SECONDS):
            written += file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return written / (time.perf_counter() - start)


_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")


def check_accelerators() -> Iterator[Finding]:
    """Checks what PyTorch and the driver say, and whether they agree."""
    import torch

    drivers = driver_lines()
    count = torch.cuda.device_count()
    build = f"PyTorch {torch.__version__}, built for {_built_for()}"
    if not count:
        got = f"PyTorch sees none, the driver lists {len(drivers)}; {build}" if drivers else f"none; {build}"
        fix = "Install the PyTorch of this driver's CUDA (pytorch.org/get-started), or unset CUDA_VISIBLE_DEVICES."
        yield judged("gpus", f"{got}; devices are CPU slots", error=bool(drivers), fix=fix)
        return
    names = [torch.cuda.get_device_name(device) for device in range(count)]
    yield Finding("ok", "gpus", f"{count}: {', '.join(sorted(set(names)))}; {build}")
    if drivers:
        yield Finding("ok", "driver", drivers[0].rpartition(",")[2].strip())
    fix = "Give a run GPUs of one kind: ranks wait for the slowest."
    yield judged("kinds of gpus", str(len(set(names))), warning=len(set(names)) > 1, fix=fix)
    yield from _check_memory(count)
    if not torch.distributed.is_nccl_available():
        fix = "Install a PyTorch with NCCL; without it, several GPUs cannot exchange weights and gradients."
        yield judged("nccl", "not in this PyTorch", error=count > 1, warning=True, fix=fix)
    else:
        yield Finding("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("warning", "bf16", "not in hardware", "actor_train.model_args.dtype=fp32, and so for every role")


def driver_lines() -> list[str]:
    """Name and driver version of every GPU that the driver lists; none without ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        told = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in told.splitlines() if line.strip()]


def _check_memory(count: int) -> Iterator[Finding]:
    from torch import cuda

    shares = [cuda.mem_get_info(device) for device in range(count)]
    busy = [str(device) for device, (free, total) in enumerate(shares) if free < 0.9 * total]
    got = f"{min(free for free, _ in shares) / GIB:.1f} of {shares[0][1] / GIB:.1f} GiB free at least"
    fix = f"End the other processes on GPU {', '.join(busy)} (nvidia-smi), or exclude it with CUDA_VISIBLE_DEVICES."
    yield judged("gpu memory", got, warning=bool(busy), fix=fix)


def _built_for() -> str:
    from torch import version

    return f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPUs alone"


DISTRIBUTION = "roll-rl"
PROJECT = Path(roll.__file__).parents[1] / "pyproject.toml"
TESTED = [PROJECT.with_name("constraints") / name for name in ("cpu.txt", "newest.txt")]
"""Versions that the tests run with, where this is a checkout: those of ``make test`` and of ``make test-newest``."""
_PIN = re.compile(r"([\w.-]+)==([\w.+!-]+)")


def check_packages() -> Iterator[Finding]:
    """Python, the packages that every run needs, and of those of extras the ones that are there."""
    python, requirements = stated()
    yield from check_python(platform.python_version(), python)
    yield from check_requirements(requirements, installed_versions(each.name for each in requirements))
    if pins := [path.read_text(encoding="utf-8") for path in TESTED if path.is_file()]:
        yield compare_tested(pins, requirements)


def stated() -> tuple[str, list[Requirement]]:
    """``requires-python`` and the requirements, of the installed distribution or else of the checkout.

    Raises:
        FileNotFoundError: it is neither.
    """
    try:
        told = importlib.metadata.metadata(DISTRIBUTION)
        return told["Requires-Python"] or "", list(map(Requirement, told.get_all("Requires-Dist") or ()))
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], list(map(Requirement, project["dependencies"]))


def check_python(version: str, wanted: str) -> Iterator[Finding]:
    """The interpreter against ``requires-python``."""
    right = SpecifierSet(wanted).contains(version, prereleases=True)
    fix = f"Create the environment with a Python {wanted}."
    yield judged("python", f"{version} (expected {wanted})", error=not right, fix=fix)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by name, of the packages that are there."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_requirements(requirements: list[Requirement], versions: dict[str, str]) -> Iterator[Finding]:
    """A finding for each that is wrong, and one that counts the right ones."""
    right = []
    for requirement in requirements:
        name, optional = requirement.name, "extra" in str(requirement.marker or "")
        if requirement.marker is not None and not optional and not requirement.marker.evaluate():
            continue
        version, wanted = versions.get(name), str(requirement.specifier)
        fix = f"pip install '{name}{wanted}'"
        if version is None:
            if not optional:
                yield Finding("error", name, f"not installed (expected {wanted or 'any version'})", fix)
        elif requirement.specifier.contains(version, prereleases=True):
            right.append(f"{name} {version}")
        else:
            yield judged(name, f"{version} (expected {wanted})", error=not optional, warning=True, fix=fix)
    shown = [text for text in right if text.split()[0] in ("torch", "ray", "transformers")]
    yield Finding("ok", "packages", f"{len(right)} of the required versions: {', '.join(shown)}, …")


def compare_tested(files: Sequence[str], requirements: list[Requirement]) -> Finding:
    """Compares the packages that are asked for with the versions that the tests run with, by file of constraints."""
    tested: dict[str, list[str]] = {}
    for name, version in itertools.chain.from_iterable(map(_PIN.findall, files)):
        tested.setdefault(name.lower().replace("_", "-"), []).append(version.partition("+")[0])
    others = [
        f"{name} {version} (tested: {', '.join(dict.fromkeys(tested[name]))})"
        for name, version in sorted(installed_versions(each.name for each in requirements).items())
        if name in tested and version.partition("+")[0] not in tested[name]
    ]
    return Finding("ok", "tested", f"not tested: {', '.join(others)}" if others else "all of them, in these versions")


HUB_SECONDS = 3.0


def check_hub() -> Iterator[Finding]:
    """Checks whether the Hugging Face hub answers; a token is told of, never shown."""
    if hub_is_off():
        yield Finding("ok", "hub", "HF_HUB_OFFLINE is set: models must be folders of this machine or in its cache")
        return
    from huggingface_hub import get_token

    host = urlsplit(hub_endpoint()).hostname or "the hub"
    status = ask_hub("models?limit=1", HUB_SECONDS)
    token = "with a token" if get_token() else "without a token"
    answer = f"answers {status}" if status else f"no answer within {HUB_SECONDS:g} s"
    fix = "Set HTTPS_PROXY or HF_ENDPOINT; or download models elsewhere and set HF_HUB_OFFLINE=1."
    yield judged("hub", f"{host}: {answer}, {token}", warning=status != 200, fix=fix)


def check_sandbox() -> Iterator[Finding]:
    """Checks whether programs of a policy can be isolated, which rewards and tools that run code need."""
    from roll.extras.sandbox.pool import Sandbox
    from roll.rewards.types import SandboxUnavailableError

    try:
        backend = Sandbox().backend
    except SandboxUnavailableError as error:
        fix = (
            "Install bubblewrap, or permit user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container "
            "--security-opt seccomp=unconfined); needed only by rewards, tools and agents that run programs."
        )
        yield Finding("warning", "sandbox", str(error).removeprefix("sandbox: ").partition(". Expected")[0], fix)
        return
    yield Finding("ok", "sandbox", f"programs are isolated by {backend}")


def check_chat_template(model: str, trusts: bool = False) -> Iterator[Finding]:
    """Checks what the chat template of a model does to conversations that grow.

    Args:
        model: folder, or a name on the hub.
        trusts: whether Python files that come with it may run.
    """
    from roll.agentic.tools.dialects import parsers
    from roll.data.template_check import check_template
    from roll.models.tokenizer import load_tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = load_tokenizer(model, alone=True, trust_remote_code=trusts)
        report = check_template(tokenizer, "native", parsers())
    except (OSError, ValueError) as error:
        yield Finding("error", "template", f"{model}: {str(error).splitlines()[0]}", "roll doctor --model FOLDER")
        return
    for problem in report.problems:
        yield Finding("warning", f"template {problem.name}", problem.text, f"roll template check {model} shows more.")
    yield Finding("ok", "template", f"{model}: tool dialect {report.dialect or 'unknown'}")


def doctor(
    address: str | None, model: str | None, output_dir: Path, *, json: bool = False, trusts: bool = False
) -> int:
    """Examines this machine, and what is asked for beside it; writes what was found.

    Args:
        address: of a running Ray cluster whose machines are examined too.
        model: folder or hub name whose chat template is tried.
        json: machine-readable.
        trusts: whether Python files that come with the model may run.

    Returns:
        1 where something would make a run fail, else 0.
    """
    checks: dict[str, Check] = {"hub": check_hub}
    if model is not None:
        checks["template"] = partial(check_chat_template, model, trusts)
    findings = machine_findings(output_dir, checks)
    if address is not None:
        findings += examine("cluster", partial(check_cluster, address, output_dir))
    findings = [Finding(**redact(asdict(finding))) for finding in findings]
    sys.stdout.write(as_json(findings) if json else page(findings))
    return exit_code(findings)


COMPARED = ("torch", "ray", "transformers", "numpy")
SKEW_S, LARGE_SKEW_S = 1.0, 30.0
"""Seconds between two clocks that confuse metrics, and that break time limits and logins."""
PATIENCE_S = 60.0
"""For a worker process to start on a machine and examine it."""
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report of a machine on itself."""

    node: str
    versions: dict[str, str]
    clock_s: float
    """Seconds by which its clock is ahead of the driver's."""
    uncertainty_s: float
    """Half of the round trip that found it out."""
    findings: list[Finding]


def own_versions() -> dict[str, str]:
    """Versions that the processes of a run must agree on."""
    own = {"roll": __version__, "python": platform.python_version()}
    return own | dict.fromkeys(COMPARED, "none") | installed_versions(COMPARED)


class Examiner:
    """Runs on a machine of the cluster and checks it."""

    def clock(self) -> float:
        return time.time()

    def examine(self, output_dir: str) -> tuple[str, dict[str, str], list[Finding]]:
        return socket.gethostname(), own_versions(), machine_findings(Path(output_dir))


def check_cluster(address: str, output_dir: Path) -> Iterator[Finding]:
    """Joins a running cluster, examines its machines side by side, and leaves.

    Args:
        address: ``host:port``, or ``auto``.
    """
    from roll.distributed.cluster.errors import RaySessionError
    from roll.distributed.cluster.ray_session import ray_session

    try:
        with ray_session({"address": address}):
            yield from _examine_nodes(output_dir)
    except RaySessionError as error:
        yield Finding("error", "cluster", str(error), "ray start --head on the first machine; ray status shows it.")


def _examine_nodes(output_dir: Path) -> Iterator[Finding]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    remote: Any = ray.remote(num_cpus=0)(Examiner)
    examiners = {
        node["NodeID"]: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    }
    pending = {name: examiner.examine.remote(str(output_dir)) for name, examiner in examiners.items()}
    reports: list[NodeReport] = []
    for node in nodes:
        name, where = node["NodeID"], node["NodeManagerHostname"]
        with Fault() as fault:  # of Ray, or of what is installed there
            host, versions, findings = ray.get(pending[name], timeout=PATIENCE_S)
            ahead, doubt = _clock(examiners[name], ray)
        if (error := fault.error) is not None:
            got = f"{where}: {type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[-1]}"
            fix = "Install the same environment, roll included, at the same place on every machine."
            yield Finding("error", "cluster", got, fix)
            continue
        own = [replace(finding, node=f"{host} ({name[:8]})") for finding in findings]
        reports.append(NodeReport(host, versions, ahead, doubt, own))
    yield Finding("ok", "cluster", f"{len(reports)} of {len(nodes)} machines checked")
    yield from compare(own_versions(), reports)
    yield from (finding for report in reports for finding in report.findings)


def _clock(examiner: Any, ray: Any) -> tuple[float, float]:
    """Offset of a clock and its uncertainty, from the shortest of some round trips (Cristian 1989), in seconds."""
    trips = []
    for _ in range(_ROUNDS):
        start = time.time()
        there = ray.get(examiner.clock.remote(), timeout=PATIENCE_S)
        end = time.time()
        trips.append((end - start, there - (start + end) / 2))
    trip, ahead = min(trips)
    return ahead, trip / 2


def compare(driver: dict[str, str], reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Versions and clocks of the machines against the driver's."""
    for report in reports:
        others = {name: got for name, got in report.versions.items() if got != driver.get(name)}
        told = ", ".join(f"{name} {got} (driver: {driver.get(name)})" for name, got in others.items())
        strict = any(name in others for name in ("roll", "ray", "python"))
        fix = "Install the same versions on every machine: objects travel between them pickled."
        yield judged(f"versions on {report.node}", told or "the driver's", error=strict, warning=bool(others), fix=fix)
        skew = abs(report.clock_s)
        got = f"{report.clock_s:+.3f} s against the driver's (± {report.uncertainty_s:.3f} s)"
        certain = skew - report.uncertainty_s
        fix = "Let chrony or systemd-timesyncd set the clocks of all machines."
        yield judged(f"clock of {report.node}", got, error=certain > LARGE_SKEW_S, warning=certain > SKEW_S, fix=fix)
