"""How a Ray session begins and ends, seen from outside: each test runs a driver in a process of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll.distributed.cluster.errors import RaySessionError
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.reaper import marked_processes
from tests.integration.conftest import ROOT, done
from tests.support.processes import happens

LOCAL_DRIVER = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
import ray
from roll.distributed.cluster.cluster import Cluster, Worker, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.utils.signals import Interrupted, SignalGuard

class Sleeper(Worker):
    def nap(self, shared):
        print("words of a worker", flush=True)
        self.lock = multiprocessing.get_context("spawn").Lock()  # a named semaphore, with a process that removes it
        subprocess.Popen(["sleep", "300"])  # a child that nobody waits for
        shared.write_text("sem." + self.lock._semlock.name[1:])
        time.sleep(300)

def slow_once(*args, init=ray.init, **options):
    ray.init = init
    raise Exception("The current node timed out during startup.")

def run(guard):
    options = {"num_cpus": 2, "object_store_memory": 2**27}
    if sys.argv[1] == "raise":
        ray.init = slow_once
    logs = pathlib.Path(sys.argv[2])
    with ray_session(options, log_dir=logs, on_daemon_death=guard.stop_for) as session, guard.named():
        assert not session.joined and session.address.startswith("127.0.0.1:"), session
        placement = create_placement(plan_placement([RoleRequest("train", (1,))], discover_nodes()))
        cluster = Cluster("train", Sleeper, placement)
        cluster.start()
        shared = logs.with_name("shared")
        ref = cluster.submit("nap", shared)
        while not (shared.exists() and shared.read_text()):
            time.sleep(0.1)
        print("ready", ray._private.worker._global_node.get_temp_dir_path(), flush=True)
        if sys.argv[1] == "raise":
            raise ValueError("on purpose")
        try:
            cluster.gather(ref, call="nap")
        except KeyboardInterrupt:
            print("workers dead:", cluster.dead(), flush=True)
            raise

try:
    with SignalGuard() as guard:
        run(guard)
except Interrupted as stop:
    sys.exit(stop.exit_code)
"""

JOINING_DRIVER = """
import os, sys, time
import ray
from ray.cluster_utils import Cluster as Machines
from ray.exceptions import RayActorError
from roll.distributed.cluster.cluster import Worker, discover_nodes
from roll.distributed.cluster.errors import NodeLostError, WorkerDiedError
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest
from tests.support.clusters import launched

class Sees(Worker):
    def seen(self):
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    def work(self):
        time.sleep(300)

def lose_a_node(machines, clusters, ids, places):
    lost = next(place for place in places if place != ids[0])
    work = clusters["train"].submit("work")
    machines.remove_node(next(node for node in machines.list_all_nodes() if node.node_id == lost), allow_graceful=False)
    try:
        clusters["train"].gather(work, call="work")
    except WorkerDiedError as error:
        assert (error.role, error.rank) == ("train", ids.index(lost)) and lost in error.reason, error
        try:
            clusters["train"].restart(error.rank)
        except WorkerDiedError as end:
            assert lost in end.reason and "devices" in end.reason, end
    for role, first in (("wide", 1), ("turned", 2)):
        engines, ends = clusters[role], ids.index(lost)
        assert [(rank, at.node_id) for rank, at in engines.dead().items()] == [(0, lost)], engines.dead()
        try:
            engines.restart(0)
        except NodeLostError as end:
            assert end.rank == 0 and lost in end.reason and f"devices {2 * ends}" in end.reason, end
            engines.go_on_without(end)
        else:
            raise AssertionError(role)
        assert engines.call("seen") == [(ids[0], "0,1")] and not engines.dead()
        kept = engines.handles[0 if first != ends else 2]
        try:
            ray.get(kept.ping.remote(), timeout=30)
        except RayActorError:
            continue
        raise AssertionError("the rest of an engine that is given up is ended")
    assert len(clusters["env"].dead()) == places.count(lost)
    for rank in [rank for rank, place in enumerate(places) if place == lost]:
        clusters["env"].restart(rank)
    assert lost not in {place for place, _ in clusters["env"].call("seen")}

machines = Machines()
quick = {"health_check_period_ms": 1000}  # a lost node is known after five of these
for head in ({"_system_config": quick}, {}, {}):
    machines.add_node(num_cpus=1, num_gpus=2, object_store_memory=2**27, include_dashboard=False, **head)
os.environ["RAY_ADDRESS"] = machines.address
roles = [
    RoleRequest("train", (0, 1, 2, 3, 4, 5), 2),
    RoleRequest("infer", (3,)),
    RoleRequest("wide", (2, 4, 0, 1), 2, spans_nodes=True),
    RoleRequest("turned", (4, 2, 0, 1), 2, spans_nodes=True),
    RoleRequest("env", None, world_size=3),
]
with ray_session() as session:
    assert session.joined, session
    nodes = discover_nodes()
    assert [(node.kind, node.num_devices) for node in nodes] == [("gpu", 2)] * 3, nodes
    ids = [node.node_id for node in nodes]
    with launched({role: Sees for role in roles}) as started:
        clusters = {cluster.name: cluster for cluster in started}
        for cluster in started:
            cluster.wait_ready()
        assert clusters["train"].call("seen") == [(node_id, "0,1") for node_id in ids]
        assert clusters["infer"].call("seen") == [(ids[1], "1")]
        places = [ids[slot.node] for slot in clusters["env"].placement.plan.workers("env")]
        assert len(set(places)) > 1
        assert clusters["env"].call("seen") == [(node_id, "") for node_id in places]
        lose_a_node(machines, clusters, ids, places)
with ray_session({"address": machines.address}) as session:
    assert session.joined and len(discover_nodes()) == 2, "the joined cluster must survive the first session"
    with ray_session() as inner:
        assert inner.joined
    assert ray.is_initialized(), "an inner session must not end the outer one"
machines.shutdown()
print("three nodes are fine")
"""


def start_driver(tmp_path: Path, mode: str) -> tuple[subprocess.Popen[str], str]:
    """Starts the local driver in a process group of its own; returns it and its Ray folder once its worker is busy."""
    script = tmp_path / "driver.py"
    script.write_text(LOCAL_DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script), mode, str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    assert driver.stdout is not None
    seen = ""
    for line in driver.stdout:
        seen += line
        if line.startswith("ready"):
            assert ("Ray did not come up within 30 s" in seen) == (mode == "raise"), "it tries once more if need be"
            return driver, line.split()[1]
    raise AssertionError(f"the driver did not come up:\n{seen}")


def assert_nothing_stays(tmp_path: Path, folder: str, seconds: float = 15.0) -> None:
    happens(lambda: not marked_processes(folder) and not os.path.exists(folder), seconds)
    names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in marked_processes(folder)]
    assert not names
    assert not os.path.exists(folder)
    assert (tmp_path / "shared").read_text() not in os.listdir("/dev/shm")


def test_a_local_cluster_is_gone_after_an_exception_and_keeps_the_logs(tmp_path):
    driver, folder = start_driver(tmp_path, "raise")
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert "ValueError: on purpose" in output
    assert_nothing_stays(tmp_path, folder)
    assert any("words of a worker" in path.read_text() for path in (tmp_path / "logs").iterdir())


def test_a_local_cluster_listens_on_loopback_only_and_follows_a_killed_driver(tmp_path):
    driver, folder = start_driver(tmp_path, "wait")
    members = marked_processes(folder)
    assert len(members) >= 4  # gcs, raylet, its agent, the worker and its child
    commands = [command for pid in members if (command := command_line(pid))]
    spared = ("monitor.py", "dashboard.py", "ray::IDLE")  # processes of Ray's that would only delay the start of a run
    assert not [command for command in commands if any(name in command for name in spared)], commands
    addresses = listening_addresses(members)
    assert addresses
    assert not [address for address in addresses if not address.endswith("127.0.0.1")], addresses
    time.sleep(6)  # what is shared is looked for every five seconds
    driver.kill()
    driver.wait()
    assert_nothing_stays(tmp_path, folder)


@pytest.mark.slow  # test_pipeline_faults.py has Ctrl-C to all processes of a run on a cluster of its own
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_all_processes_leaves_the_workers_for_saving_and_nothing_afterwards(tmp_path, number, exit_code):
    driver, folder = start_driver(tmp_path, "wait")
    time.sleep(0.3)
    if number == signal.SIGTERM:  # as schedulers do that know the cgroup; the sleeper obeys
        for process in psutil.Process(driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        time.sleep(1.0)
        driver.send_signal(number)
    else:
        os.killpg(driver.pid, number)  # as a terminal does
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == exit_code, output
    assert "workers dead: {}" in output
    assert_nothing_stays(tmp_path, folder)


@pytest.mark.parametrize(
    ("daemon", "words"), [pytest.param("gcs_server", "head", marks=pytest.mark.slow), ("raylet", "node")]
)
def test_the_death_of_a_daemon_ends_the_block_soon_and_is_named(tmp_path, daemon, words):
    driver, folder = start_driver(tmp_path, "wait")
    victims = [
        pid
        for pid in marked_processes(folder)
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(daemon.encode())
    ]
    os.kill(victims[0], signal.SIGKILL)
    output, _ = driver.communicate(timeout=30)
    if daemon == "raylet":  # takes the worker along, whose semaphore nobody may have seen yet
        Path("/dev/shm", (tmp_path / "shared").read_text()).unlink(missing_ok=True)
    assert driver.returncode == 1, output
    assert f"RaySessionError: Ray's {words} process ({daemon}) ended" in output
    assert_nothing_stays(tmp_path, folder)


@pytest.mark.slow
def test_a_running_three_node_cluster_is_joined_used_with_a_node_lost_and_left_running(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(JOINING_DRIVER)
    assert "three nodes are fine" in done(sys.executable, script, timeout=200, env={"PYTHONPATH": str(ROOT)})[0]


def test_an_address_where_nothing_answers_is_an_error_within_seconds():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RaySessionError, match=re.escape(address)), ray_session({"address": address}):
            pass


def command_line(pid: int) -> str:
    """Its words, or the title that it gave itself; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def listening_addresses(pids: list[int]) -> set[str]:
    """Addresses on which these processes accept connections."""
    connections = (each for pid in pids for each in psutil.Process(pid).net_connections("tcp"))
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
