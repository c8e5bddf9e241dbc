"""Clusters on a real local Ray with eight pretended GPUs: places, calls, and every way a worker can fail."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from roll.configs.worker import StrategyArguments, WorkerConfig
from roll.data.batch import Batch
from roll.data.stored import joined
from roll.distributed.cluster.cluster import Cluster, Placement, RayBlock, Worker, create_placement, discover_nodes
from roll.distributed.cluster.errors import (
    PlacementError,
    RowsLostError,
    RpcTimeoutError,
    StallError,
    StoreFullError,
    WorkerDiedError,
)
from roll.distributed.cluster.hangs import StallWatch, explained
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement, pretend_nodes
from roll.distributed.strategy.base import StrategyContext
from roll.pipeline.roles import Replicas, RestartBudget
from roll.pipeline.workers import InferWorker
from tests.support.probes import Meeting, Probe
from tests.support.processes import happens
from tests.support.warm.start import warm_workers

ROLES = [
    RoleRequest("train", (2, 3, 4, 5), 2),
    RoleRequest("infer", (6, 4)),
    RoleRequest("critic", (6,)),
    RoleRequest("env", None, world_size=2),
]


@pytest.fixture(scope="module")
def placement() -> Iterator[Placement]:
    full_disk = {"RAY_local_fs_capacity_threshold": "0.0001"}  # so that no object goes to the disk instead
    options = {"num_cpus": 4, "num_gpus": 8, "object_store_memory": 2**27}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in full_disk.items():
            patch.setenv(name, value)
        stack.enter_context(warm_workers())
        stack.enter_context(ray_session(options, {"EVERYWHERE": "1"}))
        placement = create_placement(plan_placement(ROLES, discover_nodes()))
        yield placement
        placement.remove()


@pytest.fixture(scope="module")
def running(placement: Placement) -> Iterator[dict[str, Cluster]]:
    """Workers of every role, which a test leaves alive: the start of each takes longer than most tests."""
    own = {
        "train": {"OWN": "yes", "CUDA_VISIBLE_DEVICES": "99"},
        "infer": {"OWN": 3},
        "critic": {"OMP_NUM_THREADS": "1"},
    }
    clusters = {role.name: Cluster(role.name, Probe, placement, system_envs=own.get(role.name)) for role in ROLES}
    for cluster in clusters.values():
        cluster.launch()
    for cluster in clusters.values():
        cluster.wait_ready()
    yield clusters
    for cluster in clusters.values():
        cluster.shutdown()


@pytest.fixture(autouse=True)
def no_step() -> Iterator[None]:
    yield
    Cluster.current_step = None


@pytest.fixture
def start(placement: Placement) -> Iterator[Callable[..., Cluster]]:
    started: list[Cluster] = []

    def start(role: str, worker: type[Worker] = Probe, **options: Any) -> Cluster:
        cluster = Cluster(role, worker, placement, **options)
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.shutdown()


def test_overlapping_roles_see_the_same_device_and_their_own_variables(running):
    names = ("CUDA_VISIBLE_DEVICES", "EVERYWHERE", "OWN")
    train, infer, env = (running[role].call("variables", *names) for role in ("train", "infer", "env"))
    # Devices 2 to 6 are reserved; Ray gives them the real ids 0 to 4.
    assert train == [["0,1", "1", "yes"], ["2,3", "1", "yes"]]
    assert infer == [["4", "1", "3"], ["2", "1", "3"]]
    assert env == [["", "1", None]] * 2


def test_torch_gets_the_threads_of_its_share_unless_told_otherwise(running):
    assert running["critic"].call("torch_threads") == [1]
    cores = min(4, len(os.sched_getaffinity(0)))
    assert running["train"].call("variables", "OMP_NUM_THREADS") == [[str(max(1, cores * 2 // 5))]] * 2


def test_a_worker_imports_with_a_calm_collector(running):
    assert running["train"].call("calm") == [True, True]


def test_columns_that_workers_have_stored_are_fetched_when_they_are_read_and_lost_with_the_worker(start):
    cluster = start("env")
    left = cluster.call("leave", 5000)
    columns, (black, white) = [own["tokens_T"] for own, _ in left], [item for _, item in left]
    lengths_B = torch.tensor([5000, 2, 5000])
    batch = Batch(lengths_B, joined(columns, lengths_B, [torch.tensor([2]), torch.tensor([0])]), torch.ones(10_002) > 0)
    pictured = batch.replace(items_I=((white,), (), (black, white)))
    before = RayBlock.fetched_bytes
    batch = ray.get(ray.put(batch))
    assert RayBlock.fetched_bytes == before and batch.select([2]).tokens_T.tolist() == [0] * 5000
    assert 0 < RayBlock.fetched_bytes - before < 100, "equal neighbours travel once, and only what is read"
    assert batch.tokens_T.tolist() == [1] * 5000 + [0] * 2 + [0] * 5000
    assert white.data.min() == 1 and white.data.nbytes > 100_000
    cluster.shutdown()
    end = time.monotonic() + 30
    for lost in (batch, pictured):
        with pytest.raises(RowsLostError, match="rows of this step are lost with the node or the process"):
            while time.monotonic() < end:
                lost.fetched()
                time.sleep(0.2)


def test_roles_apart_work_at_the_same_time(running):
    train, critic = running["train"], running["critic"]
    assert not train.placement.plan.shares_devices("train", "critic")
    refs = train.submit("nap", 1.0), critic.submit("nap", 1.0)
    spans = [*train.gather(refs[0], call="nap"), *critic.gather(refs[1], call="nap")]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


def test_arguments_reach_all_ranks_or_each_its_own(running):
    train = running["train"]
    array = np.arange(10.0)
    assert train.call("add", array, number=1) == [(46.0, False), (47.0, False)]
    refs = train.submit_each("add", [(array, 0), (array * 2, 5)])
    assert [total for total, _ in train.gather(refs, call="add")] == [45.0, 96.0]
    assert train.call_rank(1, "add", array, 0)[0] == 46.0
    with pytest.raises(ValueError, match=r"train.add: 1 argument tuples for 2 workers"):
        train.submit_each("add", [(array, 0)])


def test_an_error_keeps_its_type_and_says_where(running):
    train = running["train"]
    Cluster.current_step = 7
    with pytest.raises(KeyError, match="missing") as caught:
        train.call("fail", "missing")
    assert type(caught.value) is KeyError
    notes = "\n".join(caught.value.__notes__)
    assert "in train rank " in notes
    assert "call fail, step 7" in notes
    assert "raise KeyError(key)" in notes


@pytest.mark.parametrize("returned", [False, True])
def test_a_full_object_store_is_told_with_what_fills_it_and_what_to_set(running, returned):
    Cluster.current_step = 3
    held = [ray.put(np.ones(2**20, np.uint8)) for _ in range(90)]
    with pytest.raises(StoreFullError) as caught:
        if returned:
            running["critic"].call("ones", 2**26)
        else:
            running["critic"].call("add", np.ones(2**26, np.uint8), 0)
    said = str(caught.value)
    what = (
        "critic.ones at step 3: Ray's object store has no room for what it returns"
        if returned
        else ("critic.add at step 3: Ray's object store has no room for its arguments, 64.0 MiB")
    )
    assert what in said and "It holds at most 128 MiB on a node; what is beyond goes to /" in said
    assert "ray_init.object_store_memory_mb higher" in said
    del held
    assert running["critic"].call("add", np.ones(2**24, np.uint8), 0)[0][0] == 2**24, "it goes on when there is room"


def test_an_error_in_the_constructor_is_told(start):
    with pytest.raises(WorkerDiedError, match="no such greeting"):
        start("train", init_kwargs={"greeting": "fail"})


def test_a_hung_call_is_named_and_what_its_worker_does_is_found_out_without_its_help(
    running, caplog, monkeypatch, tmp_path
):
    train, env = running["train"], running["env"]
    train.call("ping")  # done with what it did before
    monkeypatch.setattr(train, "rpc_timeout", 1.0)
    monkeypatch.setattr("roll.distributed.cluster.cluster._NOTICE_S", 0.4)
    Cluster.current_step = 3
    with pytest.raises(RpcTimeoutError) as caught, explained({"train": train, "env": env}, tmp_path / "stacks"):
        train.gather(train.submit_each("nap", [(0.1,), (4.0,)]), call="nap")
    assert str(caught.value) == "train rank 1: nap at step 3 has not returned in 1.0 s (rpc_timeout)"
    assert not train.dead()  # rank 1 is busy, not dead
    assert f"train rank 1: nap at step 3 has not returned in 0.4 s so far; kill -USR1 {os.getpid()}" in caplog.text
    head, driver, *workers = (tmp_path / "stacks").read_text().split("\n----- ")
    assert str(caught.value) in head
    assert driver.startswith("driver\n") and "test_a_hung_call_is_named" in driver
    names = ["train rank 0", "train rank 1", "env rank 0", "env rank 1"]
    assert [text.partition(",")[0] for text in workers] == names
    assert [" in nap\n" in text for text in workers] == [False, True, False, False]
    assert all("most recent call first" in text for text in workers)


def test_a_run_in_which_nothing_moves_is_stopped_with_who_waits_for_whom(running, start, monkeypatch, tmp_path):
    monkeypatch.setattr("roll.distributed.cluster.hangs._ANSWER_S", 2.0)
    train, meeting = running["train"], start("critic", Meeting)
    stopped: list[Exception] = []
    waits = meeting.submit("play", 2)
    with StallWatch(
        {"train": train, "critic": meeting}, tmp_path / "stacks", 2.0, stopped.append, lambda: "train, step 3"
    ):
        train.gather(train.submit("work", 3.0), call="work")
        assert not stopped, "a call that works may take longer"
        with pytest.raises(StallError):
            train.gather(train.submit_each("nap", [(9.0,), (0.0,)]), call="nap")
    first, driver, workers, path = str(stopped[0]).splitlines()
    assert re.fullmatch(r"nothing has moved for \d+ s in train, step 3 \(stall_timeout\)", first)
    assert re.fullmatch(r"the driver waits for: train rank 0: nap has not returned in [\d.]+ s", driver)
    assert re.search(r"train rank 0: nap \(probes.py:\d+\)", workers)
    assert re.search(r"critic rank 0: meet \(probes.py:\d+\): 2 tasks, the first: member 0", workers)
    report = (tmp_path / "stacks").read_text()
    assert path.endswith("stacks") and "2 tasks, the first: member 0" in report and "its child process" not in report
    del waits


def test_a_collective_that_one_rank_does_not_join_is_stopped_with_where_each_rank_is(start, tmp_path):
    train = start("train")
    train.rendezvous()
    train.call("join")
    stopped: list[Exception] = []
    watch = StallWatch({"train": train}, tmp_path / "stacks", 2.0, stopped.append, lambda: "train, step 3")
    with watch, pytest.raises(StallError):
        train.gather(train.submit_each("reduce_after", [(0.0,), (20.0,)]), call="reduce_after")
    _, driver, workers, _ = str(stopped[0]).splitlines()
    assert driver.startswith("the driver waits for: train ranks 0, 1: reduce_after has not returned in")
    own = re.search(
        r"rank 0: reduce_after \(probes.py:(\d+)\); train rank 1: reduce_after \(probes.py:(\d+)\)", workers
    )
    assert own is not None and int(own[1]) == int(own[2]) + 1, workers
    *_, waits, naps = (tmp_path / "stacks").read_text().split("\n----- train rank ")
    assert " in all_reduce\n" in waits and " in all_reduce\n" not in naps


def test_stacks_are_asked_for_by_a_signal_and_of_processes_that_are_gone(start, tmp_path):
    train = start("train")
    path = tmp_path / "stacks"
    with explained({"train": train}, path):
        os.kill(train.whereabouts[0].pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert happens(lambda: path.exists() and path.read_text().endswith("\n\n"), 20)
    _, _, gone, alive = path.read_text().split("\n----- ")
    assert "requested by SIGUSR1" in path.read_text() and "it is gone" in gone and "most recent call first" in alive
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_killed_worker_is_noticed_at_once_and_can_be_replaced(start):
    train = start("train", system_envs={"OWN": "yes"})
    Cluster.current_step = 4
    pids = train.call("pid")
    refs = train.submit("nap", 30.0)
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(pids[1], 9)
    with pytest.raises(WorkerDiedError) as caught:
        train.gather(refs, call="nap")
    assert time.monotonic() - killed < 5
    assert (caught.value.role, caught.value.rank, caught.value.call, caught.value.step) == ("train", 1, "nap", 4)
    assert f"process {pids[1]} " in str(caught.value)
    assert train.dead() == {1: train.whereabouts[1]}

    train.restart(0)  # still napping
    train.restart(1)
    assert train.restarts == [1, 1]
    assert train.call("variables", "CUDA_VISIBLE_DEVICES", "OWN") == [["0,1", "yes"], ["2,3", "yes"]]
    assert not set(pids) & set(train.call("pid"))


@pytest.fixture
def engine(placement: Placement) -> Iterator[Replicas]:
    """One with two processes, on the places of the two workers of a role."""
    cluster = Cluster("infer", InferWorker, placement)
    cluster.slots = tuple(replace(slot, engine=0) for slot in cluster.slots)
    cluster.start()
    offloads: Any = SimpleNamespace(reserve=lambda name: None)
    config: Any = SimpleNamespace(generate_opt_level=1)
    yield Replicas(cluster, cluster, config, offloads, RestartBudget(0), [])
    cluster.shutdown()


def set_up(engine: Replicas) -> list[Any]:
    """Starts the engine, and returns where its processes think that they are."""
    worker = WorkerConfig(strategy_args=StrategyArguments(strategy_name="tests.support.probes:PlacedEngine"))
    engine.begin_setup(StrategyContext(worker, "infer", ""))
    engine._gather_setup(engine._loading)
    return ray.get([handle.shows.remote("place") for handle in engine.cluster.handles])


def test_an_engine_of_two_processes_dies_and_comes_back_as_one(engine):
    cluster = engine.cluster
    (first, other), again = set_up(engine), False
    assert (first[:2], other[:2]) == ((0, 1), (0, 1)), "the seed follows from the rank"
    assert (first[2].number, other[2]) == (0, replace(first[2], number=1))
    for place in (0, 1):
        if again:
            set_up(engine)
        pids, lost = [at.pid for at in cluster.whereabouts.values()], cluster.whereabouts[place]
        refs = cluster.submit("complete", [None])
        assert len(refs) == 1, "nobody calls the other"
        assert not ray.wait(refs, timeout=0.5)[0], "why the engine has failed is not known yet"
        os.kill(lost.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            cluster.gather(refs, call="complete")
        assert caught.value.rank == 0 and f"process {lost.pid} on node {lost.node_id}" in str(caught.value)
        assert cluster.dead() == {0: lost}
        with pytest.raises(WorkerDiedError) as refused:
            engine._replace(caught.value)
        words = f"infer rank 0 died in an update of weights: process {lost.pid} on node {lost.node_id}: max_worker_rest"
        assert str(refused.value).startswith(words)
        cluster.restart(0)
        assert not {*pids} & {at.pid for at in cluster.whereabouts.values()} and not cluster.dead()
        again = True
    assert cluster.restarts == [2, 2]


def test_a_death_is_reported_rather_than_the_broken_connection_it_causes(start):
    train = start("train")
    train.rendezvous()
    assert train.call("join") == [2.0, 2.0]
    pids = train.call("pid")
    refs = train.submit("reduce_for_ever")
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(pids[1], 9)
    with pytest.raises(WorkerDiedError) as caught:
        train.gather(refs, call="train_step")
    assert caught.value.rank == 1
    assert time.monotonic() - killed < 10


def test_a_death_seen_by_another_worker_names_the_dead_one(start, running):
    infer, env = start("infer"), running["env"]
    with pytest.raises(WorkerDiedError) as caught:
        env.call_rank(0, "relay", infer.handles[1])
    assert (caught.value.role, caught.value.rank) == ("infer", 1)


def test_devices_that_are_taken_are_not_given_twice(placement):
    begun = time.monotonic()
    with pytest.raises(
        PlacementError, match=r"other: 1 CPU, 4 GPU on node 0.*1 s; the cluster has 8 GPU \(3 free\)"
    ) as caught:
        other = plan_placement([RoleRequest("other", (0, 1, 2, 3), num_cpus=0.1)], discover_nodes())
        create_placement(other, timeout=1.0)
    assert time.monotonic() - begun < 10
    assert len(caught.value.problems) == 1


def test_plans_for_other_nodes_or_too_many_devices_are_refused_before_anything_starts(placement):
    with pytest.raises(PlacementError, match="pretended-0"):
        create_placement(plan_placement([RoleRequest("role", (0,))], pretend_nodes(1, 8)))
    with pytest.raises(PlacementError, match=r"names device 8, but the cluster has 8 GPUs on 1 node \(ids 0–7\)"):
        plan_placement([RoleRequest("infer", (7, 8))], discover_nodes())


def test_a_cluster_can_be_stopped_twice_and_says_when_it_is_not_running(start):
    critic = start("critic")
    critic.shutdown()
    critic.shutdown()
    assert critic.dead() == {0: None}
    with pytest.raises(RuntimeError, match="critic is not running"):
        critic.call("ping")


def test_a_worker_with_async_methods_runs_any_number_of_calls_at_the_same_time(start):
    """Ray's own limit is 1,000; the others would wait for these, which wait for them."""
    cluster = start("critic", Meeting, rpc_timeout=60.0)
    refs = [cluster.handles[0].meet.remote(1200) for _ in range(1200)]
    assert cluster.gather(refs, call="meet", ranks=[0] * 1200) == [1200] * 1200
