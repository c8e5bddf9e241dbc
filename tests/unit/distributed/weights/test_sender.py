"""A trainer's worker keeps what it has sent, for replaced generators and deltas; Ray's calls stay in this process."""

import asyncio
import threading
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from roll.distributed.weights import sender
from roll.distributed.weights.buckets import WeightChecksumError, pack_buckets, unpack_bucket
from roll.distributed.weights.receiver import WeightReceiver
from roll.distributed.weights.sender import Link, Receiver, Route, TransferRequest
from roll.pipeline import workers
from roll.utils.progress import WorkClock
from tests.support.trainers import make_context

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
    """Stands in for a generating worker's actor; its engine copies what it loads, or goes on with the buckets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, copies: bool) -> None:
        self._loop, self._copies, self.weights = loop, copies, {}
        self._receiver = WeightReceiver(self._load, "127.0.0.1")
        self.receive_weights = SimpleNamespace(remote=self._receive)
        self._actor_id = SimpleNamespace(hex=lambda: str(id(self)))

    def _receive(self, message, link):
        return asyncio.run_coroutine_threadsafe(self._receiver.handle(message, link), self._loop)

    async def _load(self, payload, buckets, version):
        new = {}
        async for bucket in buckets:
            new |= {name: tensor.clone() if self._copies else tensor for name, tensor in unpack_bucket(bucket)}
        self.weights = new


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
            assert [float(tensor.unique()) for tensor in generator.weights.values()] == expected
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
            for weight, expected in zip(generators[rank][0].weights.values(), model.weights, strict=True):
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
