"""The reward client against real reward workers on a local Ray, with a verifier that does what the answer says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
import ray

from roll.configs.rewards import RewardConfig
from roll.distributed.cluster.ray_session import ray_session
from roll.rewards.types import RewardError, Sample, Verdict, Verifier
from roll.rollout.reward_worker import RewardWorker, WorkerClient
from roll.rollout.router import EngineUnavailableError


class Obedient(Verifier):
    """The answer is a number, the score, or an order."""

    async def score(self, sample: Sample) -> Verdict:
        if sample.response == "fail":
            raise ArithmeticError("no such number")
        if sample.response == "die":
            os._exit(1)
        if sample.response == "wait":
            await asyncio.sleep(60)
        return Verdict(float(sample.response), True, sample.response)


class CountingWorker(RewardWorker):
    """Counts the calls and the answers that reach it."""

    calls = 0
    answers = 0
    broken = False

    async def score(self, samples: Sequence[Sample]) -> list[Verdict | RewardError]:
        self.calls += 1
        self.answers += len(samples)
        if self.broken:
            raise ZeroDivisionError
        return await super().score(samples)

    async def break_down(self) -> None:
        self.broken = True

    async def take_counts(self) -> tuple[int, int]:
        counts = self.calls, self.answers
        self.calls = self.answers = 0
        return counts


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session({"num_cpus": 4, "object_store_memory": 2**27}):
        yield


def start_worker() -> Any:
    actor_cls: Any = ray.remote(CountingWorker).options(num_cpus=0.1)
    worker = actor_cls.remote("reward_numbers", 0, 1, {})
    config = RewardConfig.model_validate(
        {"tag_included": ["a"], "verifiers": [{"name": f"{__name__}:Obedient"}], "retries": 0}
    )
    ray.get(worker.setup.remote("numbers", config), timeout=60)
    return worker


@pytest.fixture(scope="module")
def workers(session: None) -> list[Any]:
    return [start_worker(), start_worker()]


def client_of(workers: list[Any]) -> WorkerClient[Sample, Verdict]:
    return WorkerClient("the rewards 'numbers'", workers, "score")


def sample(response: str) -> Sample:
    return Sample("?", response, None, "a")


def within(seconds: float, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), seconds))


def counts(workers: list[Any]) -> list[tuple[int, int]]:
    taken: list[tuple[int, int]] = ray.get([worker.take_counts.remote() for worker in workers])
    return taken


def test_answers_of_one_tick_travel_in_one_call_to_each_worker_and_find_their_way_back(workers: list[Any]) -> None:
    async def work() -> list[Verdict]:
        client = client_of(workers)
        return await asyncio.gather(*(client.send(sample(str(n))) for n in range(101)))

    counts(workers)
    verdicts = within(30, work)
    assert [verdict.score for verdict in verdicts] == list(range(101))
    assert [verdict.parts for verdict in verdicts] == [{"Obedient/score": float(n)} for n in range(101)]
    assert counts(workers) == [(1, 51), (1, 50)]


def test_an_answer_goes_to_the_worker_with_the_fewest_in_flight(workers: list[Any]) -> None:
    async def work() -> None:
        client = client_of(workers)
        waiting = [asyncio.create_task(client.send(sample("wait"))) for _ in range(3)]
        await asyncio.sleep(0.01)
        for _ in range(4):  # one worker has two that wait, the other one
            await client.send(sample("1"))
        for task in waiting:
            task.cancel()

    counts(workers)
    within(30, work)
    assert counts(workers) == [(1, 2), (5, 5)]


def test_an_answer_that_cannot_be_judged_fails_alone(workers: list[Any]) -> None:
    async def work() -> list[Verdict | BaseException]:
        client = client_of(workers)
        responses = ("1", "fail", "2", "nan", "inf", "3")
        return await asyncio.gather(*(client.send(sample(text)) for text in responses), return_exceptions=True)

    one, failed, two, nan, infinite, three = within(30, work)
    assert [verdict.score for verdict in (one, two, three)] == [1, 2, 3]
    for error, reason in ((failed, "ArithmeticError: no such number"), (nan, "score: got nan"), (infinite, "inf")):
        assert type(error) is RewardError and reason in str(error), error
        assert str(error).startswith("rewards.numbers: Obedient failed after 1 attempt: ")


def test_an_answer_that_was_given_up_before_it_left_is_not_sent(workers: list[Any]) -> None:
    async def work() -> None:
        client = client_of(workers)
        gone, stays = (asyncio.create_task(client.send(sample(text))) for text in "12")
        await asyncio.sleep(0)
        gone.cancel()
        assert (await stays).score == 2

    counts(workers)
    within(30, work)
    assert sum(answers for _, answers in counts(workers)) == 1


def test_a_cancelled_caller_does_not_disturb_the_others(workers: list[Any]) -> None:
    async def work() -> None:
        client = client_of(workers)
        gone, stays, late = (asyncio.create_task(client.send(sample(text))) for text in "456")
        await asyncio.sleep(0.001)
        gone.cancel()
        assert [(await task).score for task in (stays, late)] == [5, 6]
        while any(client._in_flight):
            await asyncio.sleep(0.01)

    within(30, work)


def test_what_breaks_a_worker_reaches_all_who_wait_for_it(session: None) -> None:
    broken = start_worker()
    ray.get(broken.break_down.remote())

    async def work() -> list[Any]:
        client = client_of([broken])
        outcomes = await asyncio.gather(*(client.send(sample("1")) for _ in range(3)), return_exceptions=True)
        assert client._in_flight == [0]
        return outcomes

    assert all(isinstance(error, ZeroDivisionError) for error in within(30, work))


def test_a_dead_worker_is_an_engine_that_can_be_brought_back(session: None) -> None:
    doomed = start_worker()

    async def work() -> list[Any]:
        client = client_of([doomed])
        scores = [client.send(sample(text)) for text in ("wait", "die", "1")]
        first = await asyncio.gather(*scores, return_exceptions=True)
        return [*first, *await asyncio.gather(client.send(sample("1")), return_exceptions=True)]

    errors = within(30, work)
    assert len(errors) == 4
    for error in errors:
        assert type(error) is EngineUnavailableError
        assert str(error).startswith("worker 0 of the rewards 'numbers' died: ")
