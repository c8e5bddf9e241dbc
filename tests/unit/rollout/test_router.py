"""The generation client against real engine workers on a local Ray, with an engine that does what its prompts say."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray

from roll.configs.rewards import RewardConfig
from roll.configs.worker import StrategyArguments, WorkerConfig
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.strategy.base import StrategyContext
from roll.pipeline.workers import InferWorker
from roll.rewards.types import RewardError, RewardResult, Sample, Verifier
from roll.rollout.reward_worker import RewardWorker, WorkerClient
from roll.rollout.router import EngineUnavailableError, GenerationClient, GenerationError, own_order
from tests.support.warm.start import warm_workers

pytestmark = pytest.mark.timeout(60, func_only=True)

SAY, WAIT, FAIL, FAIL_ODDLY = range(4)
"""First token of a prompt: what the engine does with it."""


class OddError(Exception):
    """Goes into a pickle and does not come out again: its constructor wants two arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class ScriptedEngine:
    """Answers with the prompt reversed."""

    def __init__(self, context: StrategyContext) -> None:
        self.aborted: dict[str, asyncio.Event] = {}
        self.running = 0
        self.most = 0

    def setup(self) -> None: ...

    def shutdown(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"running": self.running, "most": self.most, "aborted": sum(e.is_set() for e in self.aborted.values())}

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._answer(request)
        finally:
            self.running -= 1

    async def _answer(self, request: GenerateRequest) -> Completion:
        order, number = request.prompt_ids[:2].tolist()
        ids, reason = request.prompt_ids[::-1], FinishReason.STOP
        if order == WAIT:
            await self.aborted.setdefault(request.request_id, asyncio.Event()).wait()
            reason = FinishReason.ABORT
        elif order == FAIL:
            raise KeyError(number)
        elif order == FAIL_ODDLY:
            raise OddError(number, "odd")
        await asyncio.sleep(0.001 * (number % 7))  # answers come out of order
        return Completion(request.request_id, ids, np.zeros(len(ids), np.float32), reason, np.full(len(ids), 5))

    async def abort(self, request_id: str) -> None:
        if request_id in self.aborted:  # others may be done, as far as an engine knows
            self.aborted[request_id].set()


class Noting:
    """A worker that notes the calls that reach it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.notes: list[Any] = []

    async def take_notes(self) -> list[Any]:
        notes, self.notes = self.notes, []
        return notes


class NotingInferWorker(Noting, InferWorker):
    async def submit(self, client_id: str, requests: Sequence[GenerateRequest]) -> None:
        self.notes.append("submit")
        await super().submit(client_id, requests)

    async def poll(self, client_id: str) -> Any:
        self.notes.append("poll")
        return await super().poll(client_id)

    async def stats(self) -> dict[str, float]:
        return self.strategy.stats()  # type: ignore[attr-defined, no-any-return]


class BrokenInferWorker(InferWorker):
    async def poll(self, client_id: str) -> Any:
        raise ZeroDivisionError


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with warm_workers(), ray_session({"num_cpus": 4, "object_store_memory": 2**27}):
        yield


def start(worker_cls: type, role: str, *setup: Any) -> Any:
    actor_cls: Any = ray.remote(worker_cls).options(num_cpus=0.1)
    worker = actor_cls.remote(role, 0, 1, {})
    ray.get(worker.setup.remote(*setup), timeout=60)
    return worker


def taken_notes(workers: list[Any]) -> list[list[Any]]:
    notes: list[list[Any]] = ray.get([worker.take_notes.remote() for worker in workers])
    return notes


def start_engine(worker_cls: type = NotingInferWorker, *, continuous: bool = True) -> Any:
    config = WorkerConfig(strategy_args=StrategyArguments(strategy_name=f"{__name__}:ScriptedEngine"))
    return start(worker_cls, "infer", StrategyContext(config, "infer", ""), continuous)


@pytest.fixture(scope="module")
def engines(session: None) -> list[Any]:
    return [start_engine(), start_engine()]


async def running_at(engines: Sequence[Any]) -> list[float]:
    return [(await engine.stats.remote())["running"] for engine in engines]


async def until_running(engines: Sequence[Any], numbers: list[float]) -> None:
    """Waits until the engines have so many requests."""
    while await running_at(engines) != numbers:
        await asyncio.sleep(0.01)


def request(order: int, number: int) -> GenerateRequest:
    return GenerateRequest("same", np.array([order, number], dtype=np.int64))


async def test_many_requests_travel_in_few_calls_and_each_answer_finds_its_caller(engines):
    taken_notes(engines)
    client = GenerationClient(engines)
    completions = await asyncio.gather(*(client.generate(request(SAY, number)) for number in range(400)))
    assert [completion.token_ids.tolist() for completion in completions] == [[number, SAY] for number in range(400)]
    # Ids repeat between episodes of different groups; on the wire they do not, and the caller gets its own back.
    assert {completion.request_id for completion in completions} == {"same"}
    assert {completion.weight_version for completion in completions} == {5}
    notes = taken_notes(engines)
    assert [each.count("submit") for each in notes] == [1, 1]
    assert all(each.count("poll") < 40 for each in notes)


async def test_requests_go_to_the_engine_with_the_fewest_in_flight(engines):
    client = GenerationClient(engines)
    waiting = [asyncio.create_task(client.generate(request(WAIT, 0))) for _ in range(10)]
    while sum(running := await running_at(engines)) < 10:
        await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert running == [5, 5]


@pytest.mark.parametrize(
    ("clients", "workers", "each"), [(64, 1024, 256), (64, 1024, 3), (2, 3, 1), (5, 2, 4), (1, 2, 3)]
)
def test_clients_that_know_nothing_of_each_other_use_all_workers_alike(clients, workers, each):
    load = [0] * workers
    for number in range(clients):
        for worker in itertools.islice(itertools.cycle(own_order(workers, (number, clients))), each):
            load[worker] += 1
    mean = clients * each / workers
    assert max(load) <= math.ceil(mean) + 1
    assert min(load) >= math.floor(mean) - 1


async def test_a_caller_who_leaves_at_once_leaves_no_request_behind(engines):
    client = GenerationClient(engines)
    for _ in range(100):
        task = asyncio.create_task(client.generate(request(WAIT, 0)))
        for _ in range(3):  # it is on its way now
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await client.generate(request(SAY, 1))  # calls arrive in their order: all have been sent by now
    await until_running(engines, [0, 0])


async def test_clients_of_one_engine_do_not_meet_and_episodes_that_ask_turn_after_turn_share_the_line(engines):
    async def episode(client: GenerationClient, number: int) -> list[int]:
        return [int((await client.generate(request(SAY, 10 * number + turn))).token_ids[0]) for turn in range(5)]

    clients = [GenerationClient(engines[:1]) for _ in range(3)]
    told = await asyncio.gather(*(episode(clients[number % 3], number) for number in range(20)))
    assert told == [[10 * number + turn for turn in range(5)] for number in range(20)]


async def test_an_error_of_the_engine_reaches_its_caller_and_no_other(engines):
    client = GenerationClient(engines[:1])
    orders = [SAY, FAIL, SAY, FAIL_ODDLY, SAY]
    calls = [client.generate(request(order, number)) for number, order in enumerate(orders)]
    first, second, third, fourth, fifth = await asyncio.gather(*calls, return_exceptions=True)
    assert [completion.token_ids[0] for completion in (first, third, fifth)] == [0, 2, 4]
    assert (type(second), str(second)) == (GenerationError, "infer[0] could not generate: KeyError: 1")
    assert "raise KeyError(number)" in second.__notes__[0]
    assert (type(fourth), str(fourth)) == (GenerationError, "infer[0] could not generate: OddError: 3: odd")


async def test_a_line_that_breaks_leaves_nobody_waiting():
    engine = start_engine(BrokenInferWorker)
    client = GenerationClient([engine])
    waiting = [asyncio.create_task(client.generate(request(WAIT, n))) for n in range(3)]
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert len(errors) == 3 and all(isinstance(error, ZeroDivisionError) for error in errors)
    ray.kill(engine)


async def test_cancelling_a_caller_aborts_its_request(engines):
    client = GenerationClient(engines[:1])
    before = (await engines[0].stats.remote())["aborted"]
    waiting = asyncio.create_task(client.generate(request(WAIT, 0)))
    await until_running(engines, [1, 0])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until_running(engines, [0, 0])
    assert (await engines[0].stats.remote())["aborted"] == before + 1
    late = await client.generate(request(SAY, 8))
    assert late.token_ids[0] == 8, "the aborted request's late answer disturbs nobody"


async def test_a_request_given_up_in_the_tick_it_was_made_is_never_sent(engines):
    client = GenerationClient(engines[:1])
    kept = asyncio.create_task(client.generate(request(SAY, 3)))
    dropped = asyncio.create_task(client.generate(request(WAIT, 0)))
    asyncio.get_running_loop().call_soon(dropped.cancel)
    with pytest.raises(asyncio.CancelledError):
        await dropped
    assert (await kept).token_ids[0] == 3
    await until_running(engines, [0, 0])  # the engine counts the answered request until its call has ended


async def test_a_dead_engine_fails_what_it_held_and_nothing_else(engines):
    dying = start_engine()
    client = GenerationClient([engines[0], dying])
    calls = [client.generate(request(order, n)) for n, order in enumerate([SAY, WAIT, SAY, WAIT])]
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.3)
    started = time.monotonic()
    ray.kill(dying)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - started < 5
    assert [type(result) for result in results] == [Completion, EngineUnavailableError] * 2
    assert "engine worker 1 died" in str(results[1])
    client = GenerationClient([dying, dying])
    again = await asyncio.gather(*(client.generate(request(SAY, n)) for n in range(3)), return_exceptions=True)
    assert [type(result) for result in again] == [EngineUnavailableError] * 3


async def test_without_continuous_batching_a_new_batch_waits_for_the_one_before():
    """``generate_opt_level: 0``."""
    engine = start_engine(continuous=False)
    client = GenerationClient([engine])
    first = [asyncio.create_task(client.generate(request(WAIT, 6))) for _ in range(3)]
    await until_running([engine], [3])
    second = [asyncio.create_task(client.generate(request(SAY, 5))) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert await running_at([engine]) == [3]
    second.pop().cancel()  # given up while it waits: it is never begun
    for task in first:
        task.cancel()
    assert [int(completion.token_ids[0]) for completion in await asyncio.gather(*second)] == [5] * 3
    assert ray.get(engine.stats.remote()) == {"running": 0, "most": 3, "aborted": 3}
    ray.kill(engine)


class Obedient(Verifier):
    """The answer is a number, the score, or an order."""

    async def score(self, sample: Sample) -> RewardResult:
        if sample.response == "fail":
            raise ArithmeticError("no such number")
        if sample.response == "die":
            os._exit(1)
        if sample.response == "wait":
            await asyncio.sleep(60)
        return RewardResult(float(sample.response), True, sample.response)


class NotingRewardWorker(Noting, RewardWorker):
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult | RewardError]:
        self.notes.append(len(samples))
        return await super().score(samples)


class BrokenRewardWorker(RewardWorker):
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult | RewardError]:
        raise ZeroDivisionError


def start_worker(worker_cls: type = NotingRewardWorker) -> Any:
    verifiers = [{"name": f"{__name__}:Obedient"}]
    config = RewardConfig.model_validate({"tag_included": ["a"], "verifiers": verifiers, "retries": 0})
    return start(worker_cls, "reward_numbers", "numbers", config)


@pytest.fixture(scope="module")
def workers(session: None) -> list[Any]:
    return [start_worker(), start_worker()]


def client_of(workers: list[Any]) -> WorkerClient[Sample, RewardResult]:
    return WorkerClient("the rewards 'numbers'", workers, "score")


def sample(response: str) -> Sample:
    return Sample("?", response, None, "a")


async def test_answers_of_one_tick_travel_in_one_call_to_each_worker_and_find_their_way_back(workers):
    taken_notes(workers)
    client = client_of(workers)
    verdicts = await asyncio.gather(*(client.send(sample(str(n))) for n in range(101)))
    assert [verdict.score for verdict in verdicts] == list(range(101))
    assert [verdict.parts for verdict in verdicts] == [{"Obedient/score": float(n)} for n in range(101)]
    assert taken_notes(workers) == [[51], [50]]


async def test_an_answer_goes_to_the_worker_with_the_fewest_in_flight(workers):
    taken_notes(workers)
    client = client_of(workers)
    waiting = [asyncio.create_task(client.send(sample("wait"))) for _ in range(3)]
    await asyncio.sleep(0.01)
    for _ in range(4):  # one worker has two that wait, the other one
        await client.send(sample("1"))
    for task in waiting:
        task.cancel()
    assert taken_notes(workers) == [[2], [1] * 5]


async def test_an_answer_that_cannot_be_judged_fails_alone(workers):
    client = client_of(workers)
    sent = [client.send(sample(text)) for text in ("1", "fail", "2", "nan", "inf", "3")]
    one, failed, two, nan, infinite, three = await asyncio.gather(*sent, return_exceptions=True)
    assert [verdict.score for verdict in (one, two, three)] == [1, 2, 3]
    for error, reason in ((failed, "ArithmeticError: no such number"), (nan, "score: got nan"), (infinite, "inf")):
        assert type(error) is RewardError and reason in str(error), error
        assert str(error).startswith("rewards.numbers: Obedient failed after 1 attempt: ")


async def test_an_answer_that_was_given_up_before_it_left_is_not_sent(workers):
    taken_notes(workers)
    client = client_of(workers)
    gone, stays = (asyncio.create_task(client.send(sample(text))) for text in "12")
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).score == 2
    assert sum(map(sum, taken_notes(workers))) == 1


async def test_a_cancelled_caller_does_not_disturb_the_others(workers):
    client = client_of(workers)
    gone, stays, late = (asyncio.create_task(client.send(sample(text))) for text in "456")
    await asyncio.sleep(0.001)
    gone.cancel()
    assert [(await task).score for task in (stays, late)] == [5, 6]
    while any(client._in_flight):
        await asyncio.sleep(0.01)


async def test_what_breaks_a_worker_reaches_all_who_wait_for_it(session):
    client = client_of([start_worker(BrokenRewardWorker)])
    outcomes = await asyncio.gather(*(client.send(sample("1")) for _ in range(3)), return_exceptions=True)
    assert client._in_flight == [0]
    assert all(isinstance(error, ZeroDivisionError) for error in outcomes)


async def test_a_dead_worker_is_an_engine_that_can_be_brought_back(session):
    client = client_of([start_worker()])
    scores = [client.send(sample(text)) for text in ("wait", "die", "1")]
    first = await asyncio.gather(*scores, return_exceptions=True)
    errors = [*first, *await asyncio.gather(client.send(sample("1")), return_exceptions=True)]
    assert len(errors) == 4
    for error in errors:
        assert type(error) is EngineUnavailableError
        assert str(error).startswith("worker 0 of the rewards 'numbers' died: ")
