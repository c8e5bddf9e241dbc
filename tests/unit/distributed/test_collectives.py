"""Ranks that do not enter the same collectives are found: planted faults, and weights that leave eight trainers."""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from roll.distributed.cluster.resources import NodeInfo, RoleRequest, plan_placement
from roll.distributed.strategy.training.exchange import ShardLayout, Slice, WeightShard
from roll.distributed.strategy.training.trainer import export, join_group, plan_buckets
from roll.distributed.weights.sender import plan_routes
from tests.support.collectives import Entry, compare, counts, read, recording
from tests.support.ranks import run_ranks
from tests.support.trainers import make_context

INIT = dist.init_process_group


def join(rank: int, world_size: int) -> None:
    INIT("fake", store=FakeStore(), rank=rank, world_size=world_size)


def entered(
    folder: Path, world_size: int, main: Callable[[int], None], join: Callable[[int, int], None] = join
) -> dict[int, list[Entry]]:
    """What the ranks enter, one after the other in this process: nobody waits for anybody."""
    for rank in range(world_size):
        with recording(folder / str(rank)):
            join(rank, world_size)
            try:
                main(rank)
            finally:
                dist.destroy_process_group()
    return {rank: read(folder / str(rank)) for rank in range(world_size)}


def ones(size: int = 4) -> torch.Tensor:
    return torch.ones(size)


def skips(rank: int) -> None:
    if rank != 2:
        dist.all_reduce(ones())
    dist.all_gather_object([None] * 3, rank)


def stops_early(rank: int) -> None:
    for _ in range(2 if rank == 1 else 3):
        dist.all_reduce(ones())


def swaps(rank: int) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[:: -1 if rank == 0 else 1]:
        dist.all_reduce(ones(), op)


def swaps_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("rows", "columns")]
    for group in groups[:: -1 if rank == 1 else 1] if rank < 2 else ():
        dist.broadcast(ones(), 0, group=group)


def branches(rank: int) -> None:
    if rank == 0:
        ops = torch.ops._c10d_functional
        ops.wait_tensor(ops.all_reduce(ones(), "sum", dist.group.WORLD.group_name))
    dist.barrier()


def other_size(rank: int) -> None:
    dist.all_reduce(ones(4 if rank else 5))


def other_shares(rank: int) -> None:
    given = [1, 1, 2] if rank == 0 else [1, 1, 1]
    dist.all_to_all_single(ones(3), ones(sum(given)), [1, 1, 1], given)


def messages(
    rank: int, *, sizes: Sequence[int] = (4, 3), received: Sequence[int] = (4, 3), connect: bool = True
) -> None:
    if connect:
        dist.all_reduce(ones())
    other = {0: (dist.isend, 1, sizes), 1: (dist.irecv, 0, received)}.get(rank)
    if other is not None:
        operation, peer, lengths = other
        dist.batch_isend_irecv([dist.P2POp(operation, ones(size), peer) for size in lengths])


def connects_on_the_host(rank: int) -> None:
    dist.all_gather_object([None] * 3, rank)
    messages(rank, connect=False)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (
            skips,
            ["collective 1 is not the same", "ranks 0, 1: all_reduce of 4 float32 (sum)", "rank 2: all_gather_obj"],
        ),
        (stops_early, ["collective 3 is not entered by rank 1", "ranks 0, 2: all_reduce", "rank 1: has ended"]),
        (swaps, ["collective 1 is not the same", "rank 0: all_reduce of 4 float32 (max)", "ranks 1, 2:", " swaps"]),
        (swaps_groups, ["group rows of ranks 0, 1: its collective 1 is not entered by rank 1", "of group columns of"]),
        (branches, ["rank 0: allreduce_ of 4 float32 at", " branches", "ranks 1, 2: barrier"]),
        (other_size, ["rank 0: all_reduce of 5 float32", "ranks 1, 2: all_reduce of 4 float32"]),
        (other_shares, ["collective 1 is not the same", "rank 0: all_to_all_single of 4"]),
        (lambda rank: messages(rank, received=(4,)), ["message 2 from rank 0 to rank 1", "2 are sent, 1 received"]),
        (lambda rank: messages(rank, sizes=(3, 4)), ["message 1 from rank 0 to rank 1 is not received as it is sent"]),
        (
            lambda rank: messages(rank, connect=False),
            ["batch of messages that 2 of 3 ranks enter", "rank 2: first in no"],
        ),
        (connects_on_the_host, ["batch of messages that 2 of 3 ranks enter"]),
    ],
)
def test_a_planted_fault_is_found_and_told_with_its_place(tmp_path, main, words):
    problem, *_ = compare(entered(tmp_path, 3, main))
    assert [word for word in (*words, "tests/unit/distributed/test_collectives.py:") if word not in problem.text] == []


def test_ranks_that_fit_together_are_left_alone(tmp_path):
    def fits(rank: int) -> None:
        messages(rank)
        given = [[0, 2, 1], [1, 0, 0], [3, 1, 0]]
        taken = [given[other][rank] for other in range(3)]
        dist.all_to_all_single(ones(sum(taken)), ones(sum(given[rank])), taken, given[rank])
        dist.broadcast(ones(), src=1)
        others = dist.new_group([0, 2])
        if rank != 1:
            dist.barrier(others)

    records = entered(tmp_path, 3, fits)
    assert compare(records) == []
    assert counts(records) == {"": {"groups": 2, "collectives": 3 * 3 + 2, "messages": 4}}


def one_ends(rank: int, folder: Path) -> None:
    with recording(folder / str(rank)):
        INIT("gloo", rank=rank, world_size=2)
        with contextlib.suppress(RuntimeError):  # the other is gone
            for _ in range(3 if rank == 0 else 2):
                dist.all_reduce(ones())
        os._exit(0)


@pytest.mark.slow  # the layouts of tests/parity are such processes, too
def test_processes_that_wait_for_each_other_leave_their_records(tmp_path):
    run_ranks(one_ends, 2, tmp_path)
    (problem,) = compare({rank: read(tmp_path / str(rank)) for rank in range(2)})
    assert "collective 3 is not entered by rank 1" in problem.text and "one_ends" in problem.text


def test_ranks_wait_for_each_other_as_long_as_a_call_may_take(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: given.append(args))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    join_group(make_context(tmp_path, "fsdp2_train", timeout=77.0, world_size=2), alone=False)
    assert given == [("gloo", "tcp://127.0.0.1:1", timedelta(seconds=77))]


TP2_DP4, TP4_DP2 = [(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]
FSDP8 = [(rank,) for rank in range(8)]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("holders", "generators", "per_worker", "inside"),
    [
        pytest.param([TP2_DP4], range(8, 16), 1, 2, id="TP2·DP4, generators elsewhere"),
        pytest.param([TP2_DP4], range(8), 2, 6, id="TP2·DP4 beside four vLLM TP2"),
        pytest.param([TP4_DP2], range(8), 4, 5, id="TP4·DP2 beside two vLLM TP4"),
        pytest.param([[(0, 2), (1, 3)], [(4, 6), (5, 7)]], range(8, 16), 1, 4, id="TP2·PP2·DP2, generators elsewhere"),
        pytest.param([FSDP8], range(8, 16), 8, 8, id="FSDP2, generators elsewhere"),
    ],
)
def test_weights_may_travel_between_some_ranks_of_a_group_that_all_have_joined(
    tmp_path, monkeypatch, holders, generators, per_worker, inside, joined
):
    """A trainer of eight GPUs; who has which part of a tensor is given by shards, and of another by stages.

    Without the collective in ``join_group`` the first update hangs wherever some ranks have nothing to give.
    """
    nodes = [NodeInfo(name, "gpu", 8, 8.0) for name in "ab"]
    requests = [RoleRequest("train", tuple(range(8))), RoleRequest("infer", tuple(generators), per_worker)]
    plan = plan_placement(requests, nodes)
    senders = tuple(plan_routes(plan, plan.workers("train"), plan.workers("infer")))

    def piece(name: str, shards: Sequence[tuple[int, ...]]) -> WeightShard:
        def spread(ranks: tuple[int, ...]) -> ShardLayout:
            return ShardLayout((6,), torch.float32, torch.device("cpu"), [Slice((0,), (6,), ranks)], lambda: ones(6))

        return WeightShard([spread(ranks) for ranks in shards], lambda whole: {name: torch.cat(list(whole))})

    planned = plan_buckets([piece(f"stage {number}", shards) for number, shards in enumerate(holders)], 1000)

    def main(rank: int) -> None:
        assert len(list(export(planned, senders, check=False))) == (rank in senders)

    def join_as_a_trainer(rank: int, world_size: int) -> None:
        join_group(make_context(tmp_path, "fsdp2_train").at_rank(rank, world_size), alone=False)

    monkeypatch.setenv("MASTER_ADDR", "unused")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, rank, world_size, **__: join(rank, world_size))
    found = compare(entered(tmp_path, 8, main, join_as_a_trainer if joined else join))
    if joined or inside == 8:
        assert found == []
    else:
        assert f"a batch of messages that {inside} of 8 ranks enter" in found[0].text
