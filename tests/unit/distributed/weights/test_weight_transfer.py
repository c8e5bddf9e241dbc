"""The parts of a weight update: checksums, shared memory, routes, and what a receiver does with what it gets."""

import asyncio
import gc
import inspect
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.distributed.cluster.resources import NodeInfo, RoleRequest, plan_placement
from roll.distributed.weights import sender
from roll.distributed.weights.buckets import (
    BucketOutline,
    UpdateDigest,
    WeightBucket,
    WeightChecksumError,
    WeightMismatchError,
    as_tensor,
    checksum,
    pack_buckets,
    packing_into,
    unpack_bucket,
    verify,
)
from roll.distributed.weights.messages import BucketMessage, Close, Lender, Open, Reply, WeightTransferError
from roll.distributed.weights.receiver import UpdateStream, WeightReceiver
from roll.distributed.weights.segments import (
    SegmentPool,
    SegmentReader,
    SharedMemory,
    allocator_settings,
    open_on_gpu,
    own_copy,
    plain_gpu_memory,
    share_on_gpu,
)
from roll.distributed.weights.sender import Link, Receiver, Route, TransferRequest, TransferResult, plan_routes
from roll.distributed.weights.sync import WeightSync, useless_deltas
from roll.pipeline import workers
from roll.utils.progress import WorkClock
from tests.support.trainers import make_context

SIZES = (0, 16, 4080, 4096, 4112, 3 * 4096, 10_000 * 16)


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_the_checksum_is_the_stated_sum(size):
    data = random_bytes(size)
    words = [int.from_bytes(data[i : i + 8].tobytes(), "little") for i in range(0, size, 8)]
    rows = size // 4096
    expected = size + sum((2 * min(i // 512, rows) + 1) * word for i, word in enumerate(words))
    assert checksum(data) == checksum(torch.from_numpy(data)) == expected % 2**64


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_checksum_sees_every_single_change(size):
    data, dice = random_bytes(size), random.Random(1)
    before = checksum(data)
    for position in {0, size - 1, *(dice.randrange(size) for _ in range(200))}:
        data[position] ^= 1 << dice.randrange(8)
        assert checksum(data) != before
        data[:] = random_bytes(size)
    assert checksum(data) == before


def test_the_checksum_sees_moved_lost_and_stale_blocks():
    data = random_bytes(8 * 4096)
    blocks = data.reshape(8, 4096)
    moved, lost, stale = blocks.copy(), blocks.copy(), blocks.copy()
    moved[[2, 5]] = moved[[5, 2]]
    lost[3] = 0
    stale[7] = random_bytes(4096, seed=1)
    sums = [checksum(array.reshape(-1)) for array in (blocks, moved, lost, stale)]
    sums += [checksum(data[: 7 * 4096]), checksum(np.zeros(32, np.uint8)), checksum(np.zeros(64, np.uint8))]
    assert len(set(sums)) == len(sums)
    with pytest.raises(ValueError, match="17 bytes, expected a multiple of 8"):
        checksum(np.zeros(17, np.uint8))


def tensors(num: int = 6, size: int = 1000, seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"w{i}", torch.randn(size, generator=generator)) for i in range(num)]


def test_a_handle_to_device_memory_is_what_pytorch_rebuilds_a_tensor_from(monkeypatch):
    """CUDA's own part is simulated; that the arguments come back in their places is not."""
    from torch.multiprocessing import reductions

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    flat = {"tensor_cls": Tensor, "tensor_size": torch.Size([64]), "tensor_stride": (1,), "dtype": torch.uint8}
    sent = {name: name.encode() for name in names} | flat
    sent |= {"storage_cls": torch.storage.TypedStorage, "requires_grad": False, "storage_device": 3}
    monkeypatch.setattr(reductions, "reduce_tensor", lambda data: (None, tuple(sent.values())))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: arguments)
    handle = share_on_gpu(torch.empty(64, dtype=torch.uint8))
    assert all(isinstance(part, (int, bytes, bool)) for part in handle), "plain, for any message format"
    opened: Any = open_on_gpu(handle, 1)
    assert dict(zip(names, opened, strict=True)) == sent | {"storage_device": 1}


def packed_into(pool, named, **options):
    with packing_into(pool.allocate):
        return list(pack_buckets(named, 4096, **options))


def segment_of(pool, size, readers=None, **options):
    """One of the pool's, handed over to readers if there are any."""
    segment = pool.find(pool.allocate(size, **options))
    if readers is not None:
        pool.hand_over(segment, readers)
    return segment


def test_packing_without_a_place_for_it_takes_private_memory():
    pool = SegmentPool()
    (inside,), (outside,) = packed_into(pool, tensors(1)), pack_buckets(tensors(1), 4096)
    assert pool.find(inside.data) is not None and pool.find(outside.data) is None
    assert inside.checksum == outside.checksum


def test_segments_are_used_again_once_every_reader_has_let_go():
    pool, readers = SegmentPool(), {"a": SegmentReader(), "b": SegmentReader()}
    first = segment_of(pool, 64, readers, at_least=8192)
    assert len(first.array) == 8192
    first.array[:64] = 7
    views = {name: reader.read(first.place, 64) for name, reader in readers.items()}
    slices = {name: as_tensor(view)[8:16] for name, view in views.items()}
    views.clear()
    gc.collect()
    assert [reader.take_released() for reader in readers.values()] == [(), ()], "a tensor still refers to the data"
    assert segment_of(pool, 64, at_least=8192) is not first
    for name in ("a", "b"):
        assert slices.pop(name).tolist() == [7] * 8
        gc.collect()
        pool.release(readers[name].take_released(), name)
    assert segment_of(pool, 64) is first
    assert len(pool.ids) == 2


def test_segments_that_were_never_released_are_used_again_once_their_reader_says_that_it_has_none():
    pool, reader = SegmentPool(), SegmentReader()
    held, lost, abandoned = (segment_of(pool, 100, readers) for readers in (["it", "another"], ["it"], None))
    held.array[:100] = 3
    view = reader.read(held.place, 100)
    assert reader.holding == (held.id,)
    pool.abandon_unwritten()
    pool.reclaim({"it": reader.holding})
    assert (held.readers, lost.readers, abandoned.readers) == ({"it", "another"}, set(), set())
    assert view.tolist() == [3] * 100
    del view
    gc.collect()
    assert reader.holding == () and reader.take_released() == (held.id,)
    pool.reclaim({"it": ()})
    assert held.readers == {"another"}, "who was not asked keeps what it has"
    assert not reader.read(lost.place, 0).size


def test_the_smallest_segment_that_fits_is_taken_and_little_stays_after_an_update():
    pool, full = SegmentPool(), SegmentPool()
    for segment in [segment_of(pool, size) for size in (3 * 4096, 4096, 2 * 4096)]:
        pool.hand_over(segment, [])
    assert [len(segment_of(pool, size).array) for size in (4096, 4097, 4096)] == [4096, 2 * 4096, 3 * 4096]
    for segment in [segment_of(full, 1000) for _ in range(6)]:
        full.hand_over(segment, [])
    full.trim(4, 5000)
    assert len(full.ids) == 5
    full.trim(2, 10)
    assert len(full.ids) == 2


def test_another_process_reads_a_segment_and_a_killed_writer_leaves_no_file():
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    script = """
import os, sys
from roll.distributed.weights.segments import SegmentPool
pool = SegmentPool()
array = pool.allocate(1 << 20)
array[:] = 5
segment = pool.find(array)
print(segment.id, segment.path, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""
    writer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name, path = writer.stdout.readline().split()
    view = SegmentReader().read(SharedMemory(name, path), 1 << 20)
    assert view[:: 1 << 10].tolist() == [5] * 1024 and not view.flags.writeable
    writer.communicate("\n")
    assert view[-1] == 5
    assert not before or not [entry for entry in set(os.listdir("/dev/shm")) - before if "roll" in entry]


LINKS = {
    "ipc 0": Link(Route.CUDA_IPC, 0),
    "ipc 1": Link(Route.CUDA_IPC, 1),
    "broadcast": Link(Route.COLLECTIVE, 0),
    "gloo": Link(Route.COLLECTIVE, None),
    "shared": Link(Route.SHARED_MEMORY, None),
}


def placed(kind, trainer, generator, per_worker=1, nodes=2, per_node=2):
    """The plan with its trainers and its generators; one without devices has one worker."""
    roles = ("actor_train", trainer, 1), ("actor_infer", generator, per_worker)
    requests = [RoleRequest(name, devices, each, world_size=None if devices else 1) for name, devices, each in roles]
    plan = plan_placement(requests, [NodeInfo(str(i), kind, per_node, float(per_node)) for i in range(nodes)])
    return plan, plan.workers("actor_train"), plan.workers("actor_infer")


@pytest.mark.parametrize(
    ("kind", "num_nodes", "trainer", "generator", "per_worker", "expected"),
    [
        # The route follows from the places.
        ("cpu", 2, (0,), (1, 2), 1, {0: {0: "shared", 1: "gloo"}}),
        ("cpu", 2, None, (0, 2), 1, {0: {0: "shared", 1: "gloo"}}),
        ("gpu", 2, (0,), (0, 1, 2, 3), 1, {0: {0: "ipc 0", 1: "broadcast", 2: "broadcast", 3: "broadcast"}}),
        ("gpu", 2, (1,), (0, 1, 2, 3), 2, {0: {0: "ipc 1", 1: "broadcast"}}),
        ("gpu", 2, (0, 1), (2, 3), 2, {0: {0: "broadcast"}}),
        ("gpu", 2, (0,), None, 1, {0: {0: "gloo"}}),
        ("gpu", 2, (0, 2), None, 1, {0: {0: "shared"}}),
        # Each trainer serves the generator on its own GPU, in whatever order they are counted.
        ("gpu", 1, (0, 1), (0, 1), 1, {0: {0: "ipc 0"}, 1: {1: "ipc 0"}}),
        ("gpu", 1, (1, 0), (0, 1), 1, {1: {0: "ipc 0"}, 0: {1: "ipc 0"}}),
        # One of those on its devices serves a generator that is split over several.
        ("gpu", 1, (1, 0), (0, 1), 2, {0: {0: "ipc 1"}}),
        # One per node serves what has other GPUs there.
        ("gpu", 2, (0, 2), (1, 3), 1, {0: {0: "broadcast"}, 1: {1: "broadcast"}}),
        ("gpu", 1, (0, 1), (2, 3), 1, {0: {0: "broadcast", 1: "broadcast"}}),
        ("gpu", 1, (0, 1), (1, 2), 1, {1: {0: "ipc 0"}, 0: {1: "broadcast"}}),
        # What has no trainer on its node is left to one that sends already.
        ("gpu", 2, (0, 1), (1, 2, 3), 1, {1: {0: "ipc 0", 1: "broadcast", 2: "broadcast"}}),
        ("gpu", 2, (0, 1), (2, 3), 1, {0: {0: "broadcast", 1: "broadcast"}}),
        # Without GPUs a node is one place.
        ("cpu", 1, (0, 1), (0, 1), 1, {0: {0: "shared", 1: "shared"}}),
        ("cpu", 2, (0, 1, 2, 3), (1, 2), 1, {0: {0: "shared"}, 2: {1: "shared"}}),
        ("cpu", 2, (2, 3), (0, 2), 1, {0: {0: "gloo", 1: "shared"}}),
    ],
)
def test_the_nearest_trainer_serves_a_generator(kind, num_nodes, trainer, generator, per_worker, expected):
    routes = plan_routes(*placed(kind, trainer, generator, per_worker, num_nodes, 4 // num_nodes))
    assert routes == {sender: {r: LINKS[word] for r, word in links.items()} for sender, links in expected.items()}


def test_with_deltas_what_is_on_no_gpu_of_a_trainer_gets_its_weights_through_host_memory():
    plan, trainers, generators = placed("gpu", (0,), (0, 1, 2))
    assert useless_deltas(plan, trainers, generators, torch.bfloat16) == ""
    assert "are sent in float32" in useless_deltas(plan, trainers, generators, torch.float32)
    assert "on nodes with a trainer" in useless_deltas(plan, trainers, generators[:2], torch.bfloat16)
    routes = plan_routes(plan, trainers, generators, deltas=True)
    assert routes == {0: {rank: LINKS[word] for rank, word in enumerate(("ipc 0", "shared", "gloo"))}}


class Engine:
    """Keeps what it is given, in copies or by going on with the buckets, and can be told to go wrong."""

    def __init__(self, fail_at: int = -1, stop_at: int = -1, copies: bool = True) -> None:
        self.fail_at, self.stop_at, self.copies = fail_at, stop_at, copies
        self.weights, self.version, self.error = {}, -1, None

    async def load(self, payload, buckets, version):
        number, weights = 0, {}
        try:
            async for bucket in buckets:
                if number == self.fail_at:
                    raise KeyError("no such layer")
                if number == self.stop_at:
                    return
                weights |= {name: tensor.clone() if self.copies else tensor for name, tensor in unpack_bucket(bucket)}
                number += 1
        except BaseException as error:
            self.error = error
            raise
        self.weights, self.version = weights, version


class Sender:
    """Does by hand what ``WeightSender`` does over Ray."""

    def __init__(self, engine: Engine) -> None:
        self.pool = SegmentPool()
        self.receiver = WeightReceiver(engine.load, "127.0.0.1")

    async def ask(self, message: Open | BucketMessage | Close) -> Reply:
        reply = await asyncio.wait_for(self.receiver.handle(message, LINKS["shared"]), 20)
        self.pool.release(reply.released, "it")
        return reply

    async def open(self, version: int) -> None:
        self.digest, self.number = UpdateDigest(), 0
        reply = await self.ask(Open("weights", version, self.pool.ids))
        self.pool.abandon_unwritten()
        self.pool.reclaim({"it": reply.holding})
        self.known = reply.outlines

    def parcel(self, bucket: WeightBucket) -> BucketMessage:
        segment = self.pool.find(bucket.data)
        self.pool.hand_over(segment, ["it"])
        self.digest.add(bucket)
        self.number += 1
        key = bucket.outline.key
        outline = None if key in self.known else bucket.outline
        return BucketMessage(self.number - 1, key, outline, bucket.checksum, segment.place)

    async def send(self, bucket: WeightBucket) -> None:
        await self.ask(self.parcel(bucket))

    async def send_all(self, version: int, named: list[tuple[str, Tensor]]) -> str | None:
        await self.open(version)
        with packing_into(self.pool.allocate):
            for bucket in pack_buckets(named, 4096):
                await self.send(bucket)
        return (await self.ask(Close(self.number))).digest


async def test_an_update_arrives_whole_in_few_segments():
    sender = Sender(engine := Engine())
    for version in range(3):
        named = tensors(30, seed=version)
        assert await sender.send_all(version, named) == sender.digest.hex()
        assert engine.version == version
        assert list(engine.weights) == [name for name, _ in named]
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in named)
        assert len(sender.pool.ids) <= 4, "more buckets under way than a pipeline needs"


async def test_an_engine_that_lives_in_the_buckets_makes_the_sender_alternate_between_two_sets():
    sender = Sender(engine := Engine(copies=False))
    sets = []
    for version in range(4):
        named = tensors(10, seed=version)
        assert await sender.send_all(version, named) == sender.digest.hex()
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in named)
        sets.append(set(sender.receiver._segments.holding))
    assert sets[0] == sets[2] and sets[1] == sets[3] and not sets[0] & sets[1]
    assert len(sender.pool.ids) == 20


async def test_buckets_that_come_out_of_order_are_loaded_in_order():
    sender = Sender(engine := Engine())
    await sender.open(0)
    parcels = [sender.parcel(bucket) for bucket in packed_into(sender.pool, tensors(5))]
    closing = asyncio.ensure_future(sender.ask(Close(len(parcels))))
    await asyncio.gather(*map(sender.ask, reversed(parcels)))
    assert (await closing).digest == sender.digest.hex()
    assert list(engine.weights) == [name for name, _ in tensors(5)]


async def test_what_is_behind_a_refused_bucket_is_refused_too():
    sender = Sender(engine := Engine())
    await sender.open(0)
    first, second, third, *_ = map(sender.parcel, packed_into(sender.pool, tensors()))
    damaged = replace(second, checksum=second.checksum ^ 1)
    outcomes = await asyncio.gather(*map(sender.ask, (third, damaged, first)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, WeightChecksumError, Reply]
    assert "an earlier bucket of this update was refused" in str(outcomes[0])
    assert engine.version == -1
    assert await sender.send_all(1, tensors(seed=1)) == sender.digest.hex()


async def test_outlines_are_told_once():
    sender = Sender(engine := Engine())
    assert await sender.send_all(0, tensors(8)) and sender.known == ()
    assert await sender.send_all(1, tensors(8, seed=1)) and len(sender.known) == 8
    assert await sender.send_all(2, [("other", torch.ones(3)), *tensors(7)]) == sender.digest.hex()
    assert list(engine.weights) == ["other", *(f"w{i}" for i in range(7))]
    await sender.open(3)
    (bucket,) = packed_into(sender.pool, [("new", torch.ones(1))])
    sender.known = (bucket.outline.key,)
    with pytest.raises(RuntimeError, match="a bucket without its outline"):
        await sender.send(bucket)


async def test_damage_is_not_found_where_nobody_looks_for_it():
    sender = Sender(engine := Engine())
    await sender.open(0)
    (bucket,) = packed_into(sender.pool, tensors(1), check=False)
    bucket.data[9] ^= 1
    await sender.send(bucket)
    await sender.ask(Close(1))
    assert engine.version == 0


def test_digests_tell_a_lost_a_swapped_and_a_renamed_bucket():
    buckets = list(pack_buckets(tensors(4), 4096))
    renamed = [replace(buckets[0], outline=replace(buckets[0].outline, names=("other",))), *buckets[1:]]
    digests = set()
    for sequence in (buckets, buckets[:-1], [buckets[1], buckets[0], *buckets[2:]], renamed):
        digest = UpdateDigest()
        for bucket in sequence:
            digest.add(bucket)
        digests.add(digest.hex())
    assert len(digests) == 4


async def test_a_damaged_bucket_reaches_neither_the_engine_nor_the_next_update():
    sender = Sender(engine := Engine())
    assert await sender.send_all(0, tensors())
    await sender.open(1)
    first, second, *_ = packed_into(sender.pool, tensors(seed=1))
    await sender.send(first)
    second.data[9] ^= 1
    with pytest.raises(WeightChecksumError, match=r"1 tensors \(w1 …\)"):
        await sender.send(second)
    assert isinstance(engine.error, WeightChecksumError), "the engine is told"
    assert engine.version == 0
    assert await sender.send_all(2, tensors(seed=2)) == sender.digest.hex()
    assert engine.version == 2


@pytest.mark.parametrize(
    ("engine", "error", "match"),
    [
        (Engine(fail_at=2), KeyError, "no such layer"),
        (Engine(stop_at=1), RuntimeError, "stopped reading before the last bucket"),
    ],
)
async def test_an_engine_that_fails_or_stops_early_is_reported_and_not_waited_for(engine, error, match):
    sender = Sender(engine)
    with pytest.raises(error, match=match):
        await sender.send_all(0, tensors())
    engine.fail_at = engine.stop_at = -1
    assert await sender.send_all(1, tensors()) == sender.digest.hex()


async def test_an_update_that_was_never_closed_is_given_up_at_the_next():
    sender = Sender(engine := Engine())
    await sender.open(0)
    await sender.send(packed_into(sender.pool, tensors())[0])
    await asyncio.sleep(0)
    assert await sender.send_all(1, tensors(seed=1)) == sender.digest.hex()
    assert engine.version == 1
    assert isinstance(engine.error, asyncio.CancelledError)


def test_what_was_checked_once_is_not_checked_again(monkeypatch):
    (bucket,) = pack_buckets(tensors(1), 1 << 20)
    verify(bucket)
    spoiled = replace(bucket, checksum=bucket.checksum + 1)
    with pytest.raises(WeightChecksumError):
        list(unpack_bucket(spoiled))
    assert len(list(unpack_bucket(replace(spoiled, checked=True)))) == 1


class RecordingTrainer:
    """Stands in for a trainer's workers: notes what it is asked to send, and says that it has arrived."""

    rpc_timeout = None

    def __init__(self, plan, slots) -> None:
        self.placement, self.slots = SimpleNamespace(plan=plan), slots
        self.sent, self.checked, self.deltas = [], [], []
        self.refused = 0
        """Deltas that are still to be refused."""

    def call(self, method, order):
        receivers = {sender: [each.rank for each in served] for sender, served in order.receivers.items()}
        self.sent.append((method, order.payload, order.version, receivers[0], order.keeper))
        self.checked.append(order.check)
        self.deltas.append(order.deltas)
        assert receivers.keys() == {0}
        if order.deltas and self.refused:
            self.refused -= 1
            raise WeightTransferError(order.role, 1, order.payload, order.version, "WeightChecksumError")
        return [TransferResult("d", dict.fromkeys(receivers[0], "d"), {}, 0, 1.0, 30, 70), None]

    def call_rank(self, rank, method, order):
        assert rank == 0
        return self.call(method, order)[0]


def recorded_sync(num_nodes: int = 1, **options: bool) -> tuple[WeightSync, RecordingTrainer]:
    plan, trainers, generators = placed("cpu", (0,), (0, 1), nodes=num_nodes, per_node=2 // num_nodes)
    trainer = RecordingTrainer(plan, trainers)
    generator = SimpleNamespace(name="actor_infer", ranks=[0, 1], slots=generators, handles=[None, None])
    return WeightSync(trainer, generator, bucket_bytes=1 << 20, **options), trainer


@pytest.mark.parametrize("trains_between", [False, True])
def test_a_replaced_generator_gets_what_was_sent_last_also_of_a_trainer_that_moves_on(trains_between):
    updates, trainer = recorded_sync(trains_between=trains_between)
    updates.restore(1)
    assert trainer.sent == [], "before the first update it keeps what it has loaded"
    updates.sync(3)
    updates.restore(1)
    again, keeper = ("resend_weights", 0) if trains_between else ("send_weights", None)
    assert trainer.sent == [("send_weights", "weights", 3, [0, 1], keeper), (again, "weights", 3, [1], None)]


@pytest.mark.parametrize(
    ("options", "checked"),
    [
        ({}, [True, False, False, True, False]),
        ({"adapter_only": True}, [True, True, False, False, True, True, False]),  # the base, the adapter, ...
        ({"check": True}, [True] * 5),
    ],
)
def test_the_first_update_of_every_generator_is_checked(options, checked):
    updates, trainer = recorded_sync(**options)
    for version in range(3):
        updates.sync(version)
    updates.restore(1)
    updates.sync(3)
    assert trainer.checked == checked


def test_deltas_are_kept_and_checked_where_a_generator_is_elsewhere_and_a_refused_one_is_sent_as_a_whole(caplog):
    updates, trainer = recorded_sync(deltas=True)
    updates.sync(0)
    updates.sync(1)
    assert trainer.checked == [True, False] and trainer.sent[1][-1] is None, "all are on the trainer's node"
    updates, trainer = recorded_sync(num_nodes=2, deltas=True)
    for trainer.refused, version in enumerate((0, 1)):
        updates.sync(version)
    updates.restore(0)
    updates.restore(1)
    told = [(receivers, keeper) for *_, receivers, keeper in trainer.sent]
    assert told == [([0, 1], 0), ([0, 1], 0), ([0, 1], 0), ([0], None), ([1], 0)]
    assert trainer.checked == [True] * 5 and trainer.deltas == [True, True, False, False, True]
    assert "actor_infer rank 1 did not accept weights of version 1: WeightChecksumError. The weights are" in caplog.text
    assert updates.take_metrics() == {"weight_update/sent_gb": 120e-9, "weight_update/sent_share": 0.3}
    assert updates.take_metrics() == {}


@pytest.mark.parametrize("trains_between", [False, True])
def test_with_lora_the_base_goes_once_to_each_generator_and_then_the_adapter_alone(trains_between):
    updates, trainer = recorded_sync(adapter_only=True, trains_between=trains_between)
    updates.sync(0)
    updates.sync(1)
    updates.restore(1)
    updates.sync(2)
    again, keeper = ("resend_weights", 0) if trains_between else ("send_weights", None)
    assert trainer.sent == [
        ("send_weights", "weights", 0, [0, 1], None),
        ("send_weights", "adapter", 0, [0, 1], keeper),
        ("send_weights", "adapter", 1, [0, 1], keeper),
        ("send_weights", "weights", 1, [1], None),
        (again, "adapter", 1, [1], None),
        ("send_weights", "adapter", 2, [0, 1], keeper),
    ]


def test_what_lies_in_shared_memory_is_lent_where_it_lies_until_all_have_given_it_back():
    pool, lender, reader = SegmentPool(), Lender(), SegmentReader()
    (bucket,) = packed_into(pool, tensors(1))
    segment = pool.find(bucket.data)
    pool.hand_over(segment, ["the worker"])
    received = replace(bucket, data=reader.read(segment.place, len(bucket.data)), place=segment.place)
    assert lender.lend(received, ["0", "1"]) == segment.place and lender.segments == [segment.id]
    del received
    lender.take_back([segment.id], "0")
    assert reader.take_released() == (), "another still reads it"
    lender.take_back([segment.id], "1")
    assert reader.take_released() == (segment.id,)


def test_what_no_other_process_could_map_is_copied_into_memory_that_is_used_again():
    lender, places = Lender(), set()
    for value in range(3):
        (bucket,) = pack_buckets([("w", torch.full((100,), float(value)))], 4096)
        place = lender.lend(bucket, ["it"])
        places.add(place)
        seen = as_tensor(SegmentReader().read(place, len(bucket.data)))[:400].view(torch.float32)
        assert seen.tolist() == [float(value)] * 100
        lender.take_back(lender.segments, "it")
        lender.end(1)
        assert lender.segments == []
    assert len(places) == 1


SHAPES = {"a": (2, 3), "b": (4,), "c": (5, 1)}


def on_host(shapes=SHAPES):
    return list(pack_buckets([(name, torch.ones(shape)) for name, shape in shapes.items()], 64))


def on_device(shapes=SHAPES):
    """As they come through CUDA IPC or nccl, on a device that every machine has."""
    data = torch.empty(64, dtype=torch.uint8, device="meta")
    outlines = [BucketOutline((name,), ("float32",), (shape,)) for name, shape in shapes.items()]
    return [WeightBucket(outline, data, 0, checked=True) for outline in outlines]


async def emptying(buckets):
    """Buckets leave their list as they are asked for."""
    while buckets:
        yield buckets.pop(0)


@pytest.fixture
def stream():
    def check(tensors):
        if tensors.keys() != SHAPES.keys():
            raise WeightMismatchError("other names")
        return {name: f"engine.{name}" for name in tensors}

    return UpdateStream(check)


async def test_the_first_update_is_checked_as_a_whole_and_later_ones_are_loaded_as_they_come(stream):
    for _ in range(2):  # through host memory, always
        buckets, names = await stream.open(emptying(left := on_host()))
        assert not left and names == {name: f"engine.{name}" for name in SHAPES}
        assert [bucket.outline.names async for bucket in buckets] == [("a",), ("b",), ("c",)]
    buckets, names = await stream.open(emptying(left := on_device()))
    assert len(left) == 2 and names["c"] == "engine.c"
    for number, name in enumerate(SHAPES, 1):
        assert (await anext(buckets)).outline.names == (name,)
        assert len(left) == 3 - number, "none is asked for before it can be loaded"
    assert await anext(buckets, None) is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (2, 3), "b": (5,)}, r"b has shape \(5,\), expected \(4,\)"),
        ({"a": (2, 3), "x": (4,)}, r"x has shape \(4,\), expected None"),
        ({"a": (2, 3), "c": (5, 1)}, "missing b, which the first update had"),
        ({"a": (2, 3), "b": (4,), "c": (5, 1), "d": (1,)}, "d has shape"),
    ],
)
async def test_an_update_from_a_device_that_is_not_like_the_first_is_refused(stream, shapes, message):
    await stream.open(emptying(on_host()))
    with pytest.raises(WeightMismatchError, match=message):
        buckets, _ = await stream.open(emptying(on_device(shapes)))
        async for _ in buckets:
            pass


async def test_a_first_update_that_is_refused_or_damaged_teaches_nothing(stream):
    with pytest.raises(WeightMismatchError, match="other names"):
        await stream.open(emptying(on_host({"a": (1,)})))
    damaged = on_host()
    damaged[1].data[0] ^= 1
    with pytest.raises(WeightChecksumError):
        await stream.open(emptying(damaged))
    _, names = await stream.open(emptying(on_host()))
    assert names.keys() == SHAPES.keys()


# ---- a trainer's worker keeps what it has sent, for replaced generators and deltas; Ray's calls stay in this process

NUM_BUCKETS, BUCKET_BYTES = 6, 4096


class Model:
    """What a strategy exports: as many buckets as tensors."""

    def __init__(self) -> None:
        self.weights = [torch.full((BUCKET_BYTES // 4,), float(n)) for n in range(NUM_BUCKETS)]

    def setup(self) -> None:
        pass

    def export_weights(self, bucket_bytes, ranks, *, check):
        return pack_buckets([(f"w{n}", weight) for n, weight in enumerate(self.weights)], bucket_bytes, check=check)


class Generator:
    """Stands in for a generating worker's actor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, copies: bool) -> None:
        self._loop, self.engine = loop, Engine(copies=copies)
        self._receiver = WeightReceiver(self.engine.load, "127.0.0.1")
        self.receive_weights = SimpleNamespace(remote=self._receive)
        self._actor_id = SimpleNamespace(hex=lambda: str(id(self)))

    def _receive(self, message, link):
        return asyncio.run_coroutine_threadsafe(self._receiver.handle(message, link), self._loop)


@pytest.fixture
def loop(monkeypatch):
    """Of the generators; meanwhile the sender's Ray is ``concurrent.futures``, and holds no objects."""

    def ready(refs, num_returns, timeout):
        return list(wait(refs, timeout, FIRST_COMPLETED).done)[:num_returns], None

    def put(value):
        raise AssertionError("a bucket goes into the object store, which has no room for a model")

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    monkeypatch.setattr(sender.ray, "wait", ready)
    monkeypatch.setattr(sender.ray, "get", lambda ref: ref.result())
    monkeypatch.setattr(sender.ray, "put", put)
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def worker(tmp_path, monkeypatch):
    worker = object.__new__(workers.TrainWorker)
    worker.clock = WorkClock()
    monkeypatch.setattr(workers, "make_strategy", lambda context: Model())
    monkeypatch.setattr(workers, "freeze_startup_objects", lambda: None)
    worker.setup(make_context(tmp_path, "fsdp2_train"))
    return worker


def order(version: int, generators: dict[int, tuple[Generator, Route]], **options) -> TransferRequest:
    receivers = [Receiver("infer", r, Link(route, None), each) for r, (each, route) in generators.items()]
    return TransferRequest("weights", version, {0: tuple(receivers)}, BUCKET_BYTES, 20.0, **options)


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_trainer_keeps_for_a_replaced_generator_stays_in_memory_that_it_shares(loop, worker, copies):
    model = worker.strategy
    generators = {rank: (Generator(loop, copies), Route.SHARED_MEMORY) for rank in range(2)}
    sizes = []
    for version in range(3):
        model.weights = [weight + 10.0 for weight in model.weights]
        expected = [float(weight[0]) for weight in model.weights]
        worker.send_weights(order(version, generators, check=False, keeper=0))
        model.weights = [weight + 5.0 for weight in model.weights]  # a step of training
        generators[0] = Generator(loop, copies), Route.SHARED_MEMORY
        worker.resend_weights(order(version, {0: generators[0]}, check=False))
        for generator, _ in generators.values():
            assert [float(tensor.unique()) for tensor in generator.engine.weights.values()] == expected
        sizes.append(len(worker._sender._pool.ids))
    assert sizes[-1] <= 2 * NUM_BUCKETS, "one set of buckets, or two that take turns where engines live in them"
    worker.send_weights(order(3, generators, check=False))
    with pytest.raises(KeyError):
        worker.resend_weights(order(3, {0: generators[0]}, check=False))


@pytest.mark.parametrize("copies", [True, False])
def test_generators_elsewhere_get_what_changes_of_the_bytes_that_they_have_and_else_all(loop, worker, copies):
    model, total, far = worker.strategy, NUM_BUCKETS * BUCKET_BYTES, Route.COLLECTIVE
    generators = {rank: (Generator(loop, copies), route) for rank, route in enumerate((Route.SHARED_MEMORY, far, far))}
    version = 0

    def send(*ranks: int, resend: bool = False) -> tuple[int, int]:
        nonlocal version
        version += 1
        to = {rank: generators[rank] for rank in ranks or generators}
        deltas = any(route is far for _, route in to.values())
        sending = order(version, to, check=True, keeper=0 if deltas and not resend else None, deltas=deltas)
        result = (worker.resend_weights if resend else worker.send_weights)(sending)
        assert set(result.received.values()) == {result.digest}
        for rank in to:
            for weight, expected in zip(generators[rank][0].engine.weights.values(), model.weights, strict=True):
                assert torch.equal(weight.view(torch.int32), expected.view(torch.int32))
        assert len(worker._sender._pool.ids) <= 2 * NUM_BUCKETS + 2
        return result.broadcast_bytes, result.saved_bytes

    def learn() -> None:
        model.weights = [weight.clone() for weight in model.weights]
        model.weights[2][[3, 700, 701]] = torch.tensor([-0.0, float("nan"), 1e-40])
        model.weights[4][version] += 1.0

    assert send() == (total, 0)
    learn()
    changes = 5 * (3 + 2 + 1)  # 4 bytes and a step of each changed element, and of two on the way to the second
    assert send() == (changes, total - changes)
    assert send() == (0, total), "nothing changes"
    model.weights[5] = torch.randn(BUCKET_BYTES // 4)
    assert send() == (BUCKET_BYTES, total - BUCKET_BYTES), "all of a bucket changes"
    generators[2] = Generator(loop, copies), far
    assert send(2, resend=True) == (total, 0), "a new one has nothing"
    learn()
    assert send()[0] < 100
    generators[1] = Generator(loop, copies), far
    assert send(1) == (total, 0)
    learn()
    assert send()[0] < 100
    send(0)
    assert send() == (total, 0), "the trainer has forgotten what the others have"
    _, held = generators[1][0]._receiver._kept
    bucket = dict(enumerate(held.values()))[4]
    held[bucket.outline.key] = replace(bucket, data=bucket.data ^ 1)
    learn()
    with pytest.raises(WeightChecksumError):
        send()
    learn()
    assert send() == (total, 0), "after a refused update"
    learn()
    assert send()[0] < 100


def test_memory_for_cuda_ipc_lies_in_no_expandable_segment():
    """On a CPU the settings are parsed and kept as on a GPU; here they are those of a user."""
    settings, seen = torch._C._accelerator_getAllocatorSettings(), []

    class Watched(Tensor):
        def clone(self, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(torch._C._accelerator_getAllocatorSettings())
            return Tensor(3)

    try:
        for given in ("expandable_segments:True,max_split_size_mb:512", "max_split_size_mb:512"):
            torch._C._accelerator_setAllocatorSettings(given)
            own_copy(torch.empty(3).as_subclass(Watched))
            with pytest.raises(KeyError), plain_gpu_memory():
                raise KeyError
            assert torch._C._accelerator_getAllocatorSettings() == given
        assert seen == ["expandable_segments:False,max_split_size_mb:512", "max_split_size_mb:512"]
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def test_settings_that_pytorch_does_not_tell_are_those_of_the_environment(monkeypatch):
    """PyTorch 2.11 takes settings of its allocator, but has no function that returns them."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_settings() == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert allocator_settings() == "expandable_segments:True"
