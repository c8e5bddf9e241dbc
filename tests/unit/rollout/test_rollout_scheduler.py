"""Which groups there are, and how they are collected from workers that die, hang and dawdle, on a local Ray."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from roll.data.columns import Item
from roll.distributed.cluster.cluster import Cluster, RayBlock, create_placement, discover_nodes
from roll.distributed.cluster.errors import RpcTimeoutError, WorkerDiedError
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.rollout.admission import Admission
from roll.rollout.plans import GroupPlan, GroupSpec
from roll.rollout.router import EngineUnavailableError
from roll.rollout.schedule import Schedule, StepDraws
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, RolloutGroup
from roll.rollout.workers import FlatGroups, GroupWorker
from tests.support.processes import happens
from tests.support.rollouts import make_trajectory, make_turn
from tests.support.warm.start import warm_workers

PLAN = GroupPlan(tags=("A", "B"), slots_per_tag=(2, 1), group_size=4, redundancy=1, seed=7, name="train")


class ScriptedPlayer(GroupWorker):
    """Plays a group by noting it in the folder and obeying the file ``<order>-<group_id>`` there, once."""

    def __init__(self, role: str, rank: int, world_size: int, env: dict[str, str], folder: str = "") -> None:
        super().__init__(role, rank, world_size, env)
        self.folder = Path(folder)
        self.playing = 0

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        self.playing += 1
        self.note(f"play {spec.group_id} {self.rank} {self.playing}")
        try:
            await self.obey(spec.group_id)
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.note(f"cancelled {spec.group_id} {self.rank} {self.playing}")
            raise
        finally:
            self.playing -= 1
        return RolloutGroup(spec.group_id, spec.tag, (), spec.group_size, (repr(spec),))

    async def obey(self, group_id: int) -> None:
        for path in list(self.folder.glob(f"*-{group_id}")):
            path.unlink()
            order = path.name.partition("-")[0]
            if order == "die":
                os._exit(1)
            elif order == "engine":
                raise EngineUnavailableError("engine worker 0 died")
            elif order == "fail":
                raise ValueError("no such level")
            elif order == "hang":
                await asyncio.sleep(60)

    def busy(self) -> int:
        return self.playing

    def note(self, line: str) -> None:
        with (self.folder / "notes").open("a") as file:
            file.write(line + "\n")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = str(tmp_path_factory.mktemp("orders"))
    with warm_workers(), ray_session({"num_cpus": 2, "object_store_memory": 2**27}):
        placement = create_placement(plan_placement([RoleRequest("envs", None, world_size=2)], discover_nodes()))
        cluster = Cluster("envs", ScriptedPlayer, placement, init_kwargs={"folder": folder})
        cluster.start()
        cluster.folder = Path(folder)  # type: ignore[attr-defined]
        yield cluster
        cluster.shutdown()
        placement.remove()


@pytest.fixture
def folder(started: Cluster) -> Path:
    folder: Path = started.folder  # type: ignore[attr-defined]
    # What the test before has given up may still be on its way.
    assert happens(lambda: not started.dead() and not sum(started.call("busy") + started.call("busy")))
    for path in folder.iterdir():
        path.unlink()
    return folder


@pytest.fixture
def errors() -> list[BaseException]:
    """What schedulers have recovered from."""
    return []


@pytest.fixture
def scheduler(started: Cluster, folder: Path, errors: list[BaseException]) -> Iterator[Callable[..., RolloutScheduler]]:
    made: list[RolloutScheduler] = []

    def recover(error: BaseException) -> None:
        errors.append(error)
        for rank in started.dead():
            started.restart(rank)

    def make(**options: Any) -> RolloutScheduler:
        made.append(RolloutScheduler(PLAN, started, **{"recover": recover, "rpc_timeout": 30.0, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def notes(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def started_ids(folder: Path) -> list[int]:
    return sorted(int(note[1]) for note in notes(folder) if note[0] == "play")


def ids(groups: Iterable[RolloutGroup]) -> list[int]:
    return [group.group_id for group in groups]


def test_a_group_id_decides_tag_and_seed():
    specs = [PLAN.spec(group_id) for group_id in range(300)]
    assert [spec.tag for spec in specs[:6]] == ["A", "A", "B", "A", "A", "B"]
    assert {(spec.group_size, spec.redundancy, spec.greedy) for spec in specs} == {(4, 1, False)}
    assert len({spec.env_seed for spec in specs}) == 300
    assert [PLAN.spec(group_id) for group_id in range(300)] == specs
    plans = PLAN, replace(PLAN, name="val"), replace(PLAN, seed=8)
    assert len({plan.spec(group_id).env_seed for plan in plans for group_id in range(300)}) == 900
    greedy = replace(PLAN, greedy=True)
    assert [greedy.spec(n).env_seed for n in range(9)] == [PLAN.spec(n).env_seed for n in range(9)]
    assert greedy.spec(0).greedy
    weighted = replace(PLAN, weights=(1.0, 3.0))
    tags = [weighted.spec(group_id).tag for group_id in range(200)]
    assert all(abs(tags[:n].count("A") - n / 4) < 1 for n in range(201))
    assert tags == [replace(weighted).spec(group_id).tag for group_id in range(200)]
    assert [weighted.spec(n).env_seed for n in range(9)] == [PLAN.spec(n).env_seed for n in range(9)]


def test_groups_come_in_order_from_all_workers_and_never_too_many_at_once(scheduler, folder):
    arrived: list[int] = []
    groups = scheduler().collect(12, first=10, on_group=lambda group: arrived.append(group.group_id))
    assert ids(groups) == list(range(10, 22))
    assert [group.errors for group in groups] == [(repr(PLAN.spec(n)),) for n in range(10, 22)]
    assert sorted(arrived) == list(range(10, 22))
    played = notes(folder)
    assert {rank for _, _, rank, _ in played} == {"0", "1"}
    # Three slots over two workers: at most two groups at one of them.
    assert max(int(playing) for *_, playing in played) <= 2


def test_no_more_groups_run_than_are_allowed(scheduler, folder):
    assert ids(scheduler(max_running=1).collect(4)) == [0, 1, 2, 3]
    assert [note[3] for note in notes(folder)] == ["1"] * 4
    assert ids(scheduler(max_running=99).collect(6)) == list(range(6)), "the plan has three slots"


def test_groups_of_a_dead_worker_are_played_again(scheduler, folder, errors):
    for order in ("die-2", "die-5"):
        (folder / order).touch()
    groups = scheduler().collect(9)
    assert [group.errors for group in groups] == [(repr(PLAN.spec(n)),) for n in range(9)]
    assert {type(error) for error in errors} == {WorkerDiedError}
    assert len(errors) <= 2  # one recovery when both died at once
    assert {error.role for error in errors} == {"envs"}
    assert {error.call for error in errors} <= {f"run_group({n})" for n in range(9)}
    assert min(started_ids(folder).count(number) for number in (2, 5)) >= 2


def test_what_cannot_be_recovered_ends_the_rollout_and_a_hung_group_is_named(scheduler, folder, monkeypatch):
    monkeypatch.setattr(Cluster, "current_step", None)  # whatever ran here before

    def give_up(error: BaseException) -> None:
        raise error

    (folder / "engine-1").touch()
    with pytest.raises(EngineUnavailableError):
        scheduler(recover=give_up).collect(3)
    (folder / "fail-1").touch()
    with pytest.raises(ValueError, match="no such level"):
        scheduler().collect(3)
    (folder / "hang-2").touch()
    with pytest.raises(RpcTimeoutError, match=r"envs rank \d: run_group\(2\) has not returned in [12]\.\d s"):
        scheduler(rpc_timeout=1.0).collect(3)


def test_a_tick_may_stop_the_rollout(scheduler, folder):
    def stop() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 4:
            raise KeyboardInterrupt

    (folder / "hang-0").touch()
    ticks: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        scheduler(on_tick=stop).collect(3)
    # Two groups arrive, then nothing does, and the ticks go on.
    assert 0.9 < ticks[3] - ticks[2] < 5


@pytest.mark.parametrize("order", ["", "die-3", "engine-4"])
def test_a_rejected_group_is_replaced_by_that_of_the_next_id_whatever_happens(scheduler, folder, order):
    if order:
        (folder / order).touch()
    arrived: list[RolloutGroup] = []
    admission = Admission(5)
    collected = scheduler().take(admission, 1, arrived.append, accept=lambda group: group.group_id not in (0, 3, 6, 8))
    assert ids(collected.groups) == [1, 2, 4, 5, 7]
    assert ids(collected.rejected) == [0, 3, 6]
    assert not admission.running and not admission.again and not admission.ready
    assert sorted(ids(arrived)) == [1, 2, 4, 5, 7], "progress counts what was accepted"
    assert set(started_ids(folder)) == set(range(8)), "nothing was started in vain"


def test_a_step_takes_what_a_search_has_found_when_it_is_over(scheduler, folder):
    admission = Admission(3)
    options: Any = {"accept": lambda group: group.group_id == 4, "max_batches": 3}
    collected = scheduler().take(admission, 1, **options)
    assert ids(collected.groups) == [4] and ids(collected.rejected) == [0, 1, 2, 3, 5, 6]
    assert started_ids(folder) == list(range(7)), "2 batches, and one group more for the one that was found"
    admission.commit()
    assert ids(scheduler().take(admission, 2, **options).groups) == [] and admission.next_draw == 10, "one batch"
    assert admission.counts() == {"trained": 1, "settled": 9, "waiting": 0}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_search_that_finds_nothing_may_go_on_to_its_end(scheduler, folder, goes_on):
    asked: list[int] = []

    def ask(rejected: Iterable[RolloutGroup]) -> bool:
        asked.append(len(list(rejected)))
        return goes_on

    collected = scheduler().take(Admission(2), 1, accept=lambda group: False, max_batches=4, goes_on=ask)
    assert (collected.groups, len(collected.rejected)) == ([], 8 if goes_on else 4) and asked == [4]


def test_the_bound_of_a_search_itself_is_still_enough(scheduler):
    collected = scheduler().take(Admission(3), 1, accept=lambda group: group.group_id >= 3, max_batches=2)
    assert ids(collected.groups) == [3, 4, 5] and ids(collected.rejected) == [0, 1, 2]
    assert ids(scheduler().take(Admission(3), 1, max_batches=1).groups) == [0, 1, 2]


def test_with_extra_groups_every_id_is_accepted_rejected_or_given_back(scheduler, folder):
    (folder / "hang-1").touch()
    admission, collecting = Admission(4, ahead=2, window=6), scheduler()
    started_at = time.monotonic()
    collected = collecting.take(admission, 1, accept=lambda group: group.group_id != 2, max_batches=5)
    assert time.monotonic() - started_at < 20, "others make up for the one that hangs"
    accepted, rejected = ids(collected.groups), ids(collected.rejected)
    assert len(accepted) == 4 and accepted == sorted(accepted) and rejected == [2] and 1 in admission.again
    assert sorted([*accepted, *rejected, *admission.again, *admission.ready]) == list(range(admission.next_draw))
    assert happens(lambda: ["cancelled", "1"] in [note[:2] for note in notes(folder)])
    admission.commit()
    again = set(admission.again)
    assert set(ids(collecting.take(admission, 2).groups)) >= again, "they come first"


def test_extra_groups_do_not_stretch_the_cap(scheduler, folder):
    collected = scheduler().take(Admission(4, ahead=3, window=7), 1, accept=lambda group: False, max_batches=1)
    assert (ids(collected.groups), ids(collected.rejected)) == ([], [0, 1, 2, 3])
    assert started_ids(folder) == list(range(4))


def test_with_a_lag_groups_are_played_beside_training_and_not_too_many(scheduler, folder):
    admission, collecting = Admission(3, ahead=3), scheduler(beside=True)
    for step in range(1, 5):
        groups = collecting.take(admission, step, accept=lambda group: group.group_id != 4).groups
        assert ids(groups) == [n for n in range(20) if n != 4][3 * step - 3 : 3 * step]
        assert happens(lambda step=step: len(collecting.groups) == 3)  # type: ignore[misc]
        assert started_ids(folder) == list(range(3 * (step + 1) + (step > 0))), "and none beyond the lag"
        admission.commit()


def test_a_stop_before_rollouts_beside_have_begun_leaves_nothing_to_wait_until(scheduler, monkeypatch):
    begin, collecting = threading.Thread.start, scheduler(beside=True)

    def stopped(thread: threading.Thread) -> None:
        if thread.name == "rollouts":
            raise KeyboardInterrupt
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", stopped)
    with pytest.raises(KeyboardInterrupt):
        collecting.take(Admission(3, ahead=3), 1)
    collecting.close()
    assert collecting._beside is None


@pytest.mark.parametrize("order", ["die-4", "engine-5"])
def test_what_is_lost_beside_training_is_played_again_with_the_next_batch(scheduler, folder, errors, order):
    (folder / order).touch()
    admission, collecting = Admission(3, ahead=3), scheduler(beside=True)
    assert ids(collecting.take(admission, 1).groups) == [0, 1, 2]
    assert happens(lambda: collecting._failure is not None)
    assert errors == []
    admission.commit()
    assert ids(collecting.take(admission, 2).groups) == [3, 4, 5]
    assert len(errors) == 1


def test_rollouts_go_on_beside_training_after_a_loss_that_a_batch_had_not_to_wait_until(scheduler, folder):
    admission, collecting = Admission(3, ahead=6), scheduler(beside=True)
    collecting.take(admission, 1)
    assert happens(lambda: len(collecting.groups) == 6)
    (folder / "engine-9").touch()
    admission.commit()
    assert ids(collecting.take(admission, 2).groups) == [3, 4, 5]
    assert happens(lambda: collecting._failure is not None)
    admission.commit()
    assert ids(collecting.take(admission, 3).groups) == [6, 7, 8]
    assert happens(lambda: sorted(collecting.groups) == [9, 10, 11, 12, 13, 14])


def test_groups_of_another_configuration_are_played_again_after_a_resume(scheduler, folder):
    """Of the finished groups that a checkpoint holds, some have another size, tag or no baseline by now."""
    admission = Admission(4)
    admission.load_state_dict(
        {"next_draw": 5, "trained": 0, "settled": 2, "again": [], "ready": [0, 1, 2]}, keeps_groups=True
    )
    tags = [PLAN.tag(draw) for draw in range(5)]
    found = [RolloutGroup(0, tags[0], (), 4), RolloutGroup(1, tags[1], (), 2), RolloutGroup(2, "C", (), 4)]
    rejected = [RolloutGroup(3, tags[3], (), 4), RolloutGroup(4, "C", (), 4)]
    collecting = scheduler(beside=True)
    collecting.restore(admission, Collected(found, rejected))
    assert admission.ready == {0} and sorted(admission.again) == [1, 2, 4]
    collected = collecting.take(admission, 1)
    collecting.close()
    assert [(group.group_id, group.tag) for group in collected.groups] == [(n, tags[n]) for n in (0, 1, 2, 4)]
    assert collected.rejected == rejected[:1]
    assert started_ids(folder) == [1, 2, 4]
    assert collecting.commit(admission) == {"trained": 4, "settled": 1, "waiting": 0}


def test_groups_that_wait_are_played_again_where_their_node_is_gone(scheduler, folder):
    picture = Item(np.ones((2, 2, 3), dtype=np.uint8))
    turn = make_turn([1, 2], [3])
    episodes = (make_trajectory([each], history=True) for each in (turn, turn, replace(turn, items=(picture,))))
    here, lost = (RayBlock(ray.put({}), node) for node in (ray.nodes()[0]["NodeID"], "one that was here once"))
    there, gone, unseen = FlatGroups.of([RolloutGroup(n, "A", (episode,)) for n, episode in enumerate(episodes)])
    for group, block in ((there, here), (gone, lost), (unseen, here)):
        vars(group.trajectories[0])["final_observation"].block = block
    vars(next(unseen.items))["data"].block = lost
    collecting, admission = scheduler(), Admission(3)
    admission.open(1)
    for group in (there, gone, unseen):
        admission.finish(admission.start())
        collecting.groups[group.group_id] = group
    taken = collecting.take(admission, 1).groups
    assert taken[0] is there and taken[1].errors and taken[2].errors
    assert sorted(line[:2] for line in notes(folder)) == [["play", "1"], ["play", "2"]]


def test_a_resumed_run_goes_on_with_another_filter(scheduler, folder):
    """What was turned down before a resume stays so, and is no reason to give up again."""
    admission = Admission(2)
    first = scheduler(beside=True)
    first.take(admission, 1, accept=lambda group: False, max_batches=2)
    first.halt()
    state, finished = admission.state_dict(keeps_groups=True), first.finished(admission)
    admission.load_state_dict(state, keeps_groups=True)
    second = scheduler(beside=True)
    second.restore(admission, finished)
    collected = second.take(admission, 1, max_batches=2)
    assert ids(collected.groups) == [4, 5] and ids(collected.rejected) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settled", "words"), [(1, "rejected in the recorded run and is not here"), (9, "is rejected here")]
)
def test_a_repetition_with_other_rewards_says_so(scheduler, settled, words):
    steps = {1: StepDraws(frozenset({0, 2}), frozenset({settled}))}
    repeating = scheduler(beside=True, replay=Schedule(frozenset(), steps, {draw: {} for draw in range(10)}))
    with pytest.raises(ValueError, match=words):
        repeating.take(Admission(2, ahead=8), 1, accept=lambda group: group.group_id != 2 or settled == 1)


def test_what_fails_beside_training_is_raised_by_the_next_batch(scheduler, folder):
    admission, collecting = Admission(3, ahead=3), scheduler(beside=True)
    collecting.take(admission, 1)
    admission.commit()
    assert happens(lambda: len(collecting.groups) == 3)
    (folder / "fail-6").touch()
    collecting.take(admission, 2)  # what it takes was there
    assert happens(lambda: collecting._failure is not None)
    admission.commit()
    with pytest.raises(ValueError, match="no such level"):
        collecting.take(admission, 3)
