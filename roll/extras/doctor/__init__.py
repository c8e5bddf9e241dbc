"""The command ``roll doctor``: checks each machine of a Ray cluster, compares them, and prints a page or JSON."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from roll import __version__
from roll.extras.doctor import machine
from roll.extras.doctor.machine import (
    Check,
    Finding,
    as_json,
    examine,
    exit_code,
    installed_versions,
    judged,
    machine_findings,
    page,
)
from roll.tracking.redact import redact
from roll.utils.foreign import Fault


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
    checks: dict[str, Check] = {"hub": machine.check_hub}
    if model is not None:
        checks["template"] = partial(machine.check_chat_template, model, trusts)
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
