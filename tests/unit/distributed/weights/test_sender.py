"""A trainer's worker keeps what it has sent for a generator that is replaced; Ray's calls stay in this process."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.distributed.weights import sender
from roll.distributed.weights.buckets import pack_buckets, unpack_bucket
from roll.distributed.weights.receiver import WeightReceiver
from roll.distributed.weights.sender import Link, Receiver, Route, TransferRequest
from roll.pipeline import workers
from roll.utils.progress import WorkClock
from tests.support.trainers import make_context

NUM_BUCKETS, BUCKET_BYTES = 6, 4096


class Model:
    """What a strategy exports: as many buckets as tensors."""

    value = 0.0

    def setup(self) -> None:
        pass

    def export_weights(self, bucket_bytes: int, ranks: Sequence[int], *, check: bool) -> Iterator[Any]:
        named = [(f"w{n}", torch.full((bucket_bytes // 4,), self.value + n)) for n in range(NUM_BUCKETS)]
        return pack_buckets(named, bucket_bytes, check=check)


class Generator:
    """Stands in for a generating worker's actor; its engine copies what it loads, or goes on with the buckets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, copies: bool) -> None:
        self._loop, self._copies = loop, copies
        self._receiver = WeightReceiver(self._load, "127.0.0.1")
        self.weights: dict[str, Tensor] = {}
        self.receive_weights = SimpleNamespace(remote=self._receive)
        self._actor_id = SimpleNamespace(hex=lambda: str(id(self)))

    def _receive(self, message: Any, link: Link) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._receiver.handle(message, link), self._loop)

    async def _load(self, payload: str, buckets: Any, version: int) -> None:
        new = {}
        async for bucket in buckets:
            new |= {name: tensor.clone() if self._copies else tensor for name, tensor in unpack_bucket(bucket)}
        self.weights = new

    def values(self) -> list[float]:
        return [float(tensor.unique()) for tensor in self.weights.values()]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """Of the generators; meanwhile the sender's Ray is ``concurrent.futures``, and holds no objects."""

    def ready(refs: list[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Future[Any]], None]:
        return list(wait(refs, timeout, FIRST_COMPLETED).done)[:num_returns], None

    def put(value: object) -> None:
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


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_trainer_keeps_for_a_replaced_generator_stays_in_memory_that_it_shares(
    loop, tmp_path, monkeypatch, copies
):
    model, generators = Model(), [Generator(loop, copies) for _ in range(2)]
    worker: Any = object.__new__(workers.TrainWorker)
    worker.clock = WorkClock()
    monkeypatch.setattr(workers, "make_strategy", lambda context: model)
    monkeypatch.setattr(workers, "freeze_startup_objects", lambda: None)
    worker.setup(make_context(tmp_path, "fsdp2_train"))

    def order(version: int, *ranks: int, keeper: int | None = 0) -> TransferRequest:
        link = Link(Route.SHARED_MEMORY, None)
        receivers = {0: tuple(Receiver("infer", rank, link, generators[rank]) for rank in ranks)}
        return TransferRequest("weights", version, receivers, BUCKET_BYTES, 20.0, check=False, keeper=keeper)

    sizes = []
    for version in range(3):
        model.value = 10.0 * version
        worker.send_weights(order(version, 0, 1))
        model.value += 5.0  # a step of training
        generators[0] = Generator(loop, copies)
        worker.resend_weights(order(version, 0, keeper=None))
        for generator in generators:
            assert generator.values() == [10.0 * version + number for number in range(NUM_BUCKETS)]
        sizes.append(len(worker._sender._pool.ids))
    assert sizes[-1] <= 2 * NUM_BUCKETS, "one set of buckets, or two that take turns where engines live in them"
    worker.send_weights(order(3, 0, 1, keeper=None))
    with pytest.raises(KeyError):
        worker.resend_weights(order(3, 0, keeper=None))
